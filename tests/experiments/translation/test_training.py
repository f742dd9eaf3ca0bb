"""A translation job: averaged weights, smoothed loss, going on after an end, and what it refuses."""

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from parallel_text import tiny_translation, write_parallel
from processes import free_port, run_two
from whence.analysis.translation_results import Translation
from whence.experiments.progress import OutOfTimeError
from whence.experiments.translation import job as jobs
from whence.experiments.translation.averaging import WeightAverage
from whence.experiments.translation.batches import TokenBatches
from whence.experiments.translation.bootstrap import compared, drawn_bleu
from whence.experiments.translation.config import both_sides
from whence.experiments.translation.data import prepared
from whence.experiments.translation.loss import smoothed_loss
from whence.experiments.translation.model import new_model, positional_parameters
from whence.experiments.translation.scoring import scored, statistics
from whence.experiments.translation.sweep import run_translation
from whence.models import WhenceForConditionalGeneration


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_parallel(tmp_path_factory.mktemp("text"))


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> dict[int, dict[str, torch.Tensor]]:
    """The weights after every step of a run."""
    found: dict[int, dict[str, torch.Tensor]] = {}
    whole = WeightAverage.on_step_end

    def noted(self: Any, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        whole(self, args, state, control, **kwargs)
        weights = kwargs["model"].named_parameters()
        found[state.global_step] = {name: p.detach().clone() for name, p in weights}

    monkeypatch.setattr(WeightAverage, "on_step_end", noted)
    return found


def test_a_run_that_is_ended_again_and_again_tests_the_mean_of_the_last_weights(
    data: Path,
    tmp_path: Path,
    seen: dict[int, dict[str, torch.Tensor]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Out of time at each step, and killed between training and result."""
    options: dict[str, Any] = {"steps": 4, "average": 2, "average_every": 2, "save_every": 1}
    config = tiny_translation(data, positions=("shaw:clip=2",), dropout=0.1, **options)
    (whole,) = run_translation(config, tmp_path / "whole").jobs
    assert sorted(seen) == [1, 2, 3, 4]
    (kept,) = (tmp_path / "whole").glob("jobs/*/model")
    model = WhenceForConditionalGeneration.from_pretrained(kept)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter, (seen[2][name] + seen[4][name]) / 2)

    def killed(*given: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(jobs, "tested", killed)
    for _ in range(3):
        with pytest.raises(OutOfTimeError):
            run_translation(config, tmp_path / "ended", deadline=time.monotonic())
    with pytest.raises(KeyboardInterrupt):
        run_translation(config, tmp_path / "ended", deadline=time.monotonic())
    monkeypatch.undo()
    monkeypatch.setattr("whence.experiments.translation.training.TranslationTrainer", None)
    (found,) = run_translation(config, tmp_path / "ended").jobs  # nothing is trained again
    assert found.valid_loss == whole.valid_loss
    np.testing.assert_array_equal(found.train_loss, whole.train_loss)
    assert [x.translations for x in found.scores] == [x.translations for x in whole.scores]
    assert not list((tmp_path / "ended").glob("jobs/*/checkpoints"))


def test_the_loss_is_the_smoothed_cross_entropy() -> None:
    logits, labels = torch.randn(2, 3, 5), torch.tensor([[1, 4, -100], [0, -100, -100]])
    chances = logits.log_softmax(dim=-1)
    wanted = sum(
        -0.9 * chances[row, place, label] - 0.1 * chances[row, place].mean()
        for row, place, label in ((0, 0, 1), (0, 1, 4), (1, 0, 0))
    )
    torch.testing.assert_close(smoothed_loss(logits, labels, 0.1), wanted)


def test_every_token_of_a_step_counts_the_same_in_whichever_batch_it_stands(
    data: Path, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"positions": ("nope",), "dropout": 0.0, "steps": 1, "average": 1}
    config = tiny_translation(data, tokens=200, accumulate=3, keep_models=False, **options)
    (found,) = run_translation(config, tmp_path / "out").jobs
    text = prepared(config, tmp_path / "out")
    model = new_model(config, "nope", seed=0, vocab_size=text.bpe.vocab_size)
    batches = TokenBatches(text.source, text.target, tokens=200, seed=0, n=3)
    total, tokens = 0.0, []
    for one in (batches[place] for place in range(3)):
        labels = one.pop("labels")
        logits = model(**one, use_cache=False).logits.detach()
        total += float(smoothed_loss(logits, labels, 0.1))
        tokens.append(int((labels >= 0).sum()))
    assert len(set(tokens)) > 1
    np.testing.assert_allclose(found.train_loss, total / sum(tokens), rtol=1e-5)


@pytest.mark.slow
def test_two_processes_have_the_numbers_of_one_with_two_batches_a_step(
    data: Path, tmp_path: Path
) -> None:
    if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
        pytest.skip("needs torch.distributed with gloo")
    changes: dict[str, Any] = {"positions": ("shaw:clip=2",), "dropout": 0.0, "keep_models": False}
    one = tiny_translation(data, accumulate=2, **changes)
    (alone,) = run_translation(one, tmp_path / "one").jobs
    fields = one.plain() | {"accumulate": 1}
    lines = [f"{key} = {json.dumps(x)}" for key, x in fields.items() if x != {}]
    (tmp_path / "two.toml").write_text("\n".join(lines), encoding="utf-8")
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    command = ("-m", "whence", "translate", "--config", "two.toml", "--out", "two")
    ends = run_two(*command, folder=tmp_path, **meeting)
    for end in ends:
        assert end.returncode == 0, end.stderr[-3000:]
    assert ends[1].stdout == ""  # the first one alone speaks
    (both,) = Translation.load(tmp_path / "two" / "translation.json").jobs
    np.testing.assert_allclose(both.train_loss, alone.train_loss, atol=1e-4)
    np.testing.assert_allclose(both.valid_loss, alone.valid_loss, atol=1e-4)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("local_ray")
def test_a_sweep_on_ray_gives_the_numbers_of_one_process(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(data.parent)  # data is named from the folder it began in
    rates = (1e-3, 2e-3)
    config = tiny_translation(Path(data.name), positions=("shaw:clip=2",), learning_rates=rates)
    said: list[str] = []
    parallel = run_translation(
        config, tmp_path / "ray", ray="local", say=lambda what, share: said.append(what)
    )
    alone = run_translation(config, tmp_path / "one")
    total = len(alone.jobs)
    assert said[1:] == [f"{n + 1} of {total} jobs done" for n in range(total)]
    for ours, theirs in zip(parallel.jobs, alone.jobs, strict=True):
        assert (ours.position, ours.learning_rate) == (theirs.position, theirs.learning_rate)
        assert ours.valid_loss == theirs.valid_loss
        np.testing.assert_array_equal(ours.train_loss, theirs.train_loss)
        assert [x.translations for x in ours.scores] == [x.translations for x in theirs.scores]


def test_positions_reach_encoder_and_decoder(data: Path) -> None:
    config = tiny_translation(data)
    assert both_sides("shaw:clip=2/nope") == ("shaw:clip=2", "nope")
    model = new_model(config, "shaw:clip=2/sinusoidal", seed=0, vocab_size=20)
    assert model.config.position == "shaw:clip=2"
    assert model.model.decoder.position.arguments["spec"] == "sinusoidal"
    assert positional_parameters(model) == 2 * 5 * 8  # keys and values, five lags, of the encoder
    both = new_model(config, "sinusoidal+shaw:clip=2", seed=0, vocab_size=20)
    assert positional_parameters(both) == 2 * 2 * 5 * 8
    keys = new_model(config, "shaw:clip=2,values=false", seed=0, vocab_size=20)
    assert positional_parameters(keys) == 2 * 5 * 8
    for position in ("shaw/", "a/b/c", ""):
        with pytest.raises(ValueError, match="one for the encoder and one for the decoder"):
            both_sides(position)


def test_embeddings_begin_at_the_size_of_sinusoids(data: Path) -> None:
    """Else a sinusoidal baseline is a straw man."""
    model = new_model(tiny_translation(data, d_model=64), "sinusoidal", seed=0, vocab_size=200)
    ids = torch.arange(200)[None]
    x = model.model.encoder.embed_tokens(ids) * 64**0.5
    assert 0.9 < float(x.detach().std()) < 1.1
    assert model.lm_head.weight is model.model.encoder.embed_tokens.weight


def test_the_interval_is_sacrebleus_paired_bootstrap() -> None:
    from sacrebleu.metrics import BLEU
    from sacrebleu.significance import PairedTest

    draw = np.random.default_rng(0)
    words = np.asarray(
        ["a", "the", "man", "woman", "dog", "cat", "runs", "sleeps", "in", "on", "house", "street"]
    )
    said = [" ".join(draw.choice(words, 9)) for _ in range(40)]

    def worse(share: float) -> list[str]:
        return [
            " ".join(w if draw.random() > share else str(draw.choice(words)) for w in text.split())
            for text in said
        ]

    ours, base = worse(0.2), worse(0.35)
    draws = [drawn_bleu(statistics(x, said)) for x in (ours, base)]
    mean, low, high, p = compared([draws[0]], [draws[1]])
    test = PairedTest(
        [("base", base), ("ours", ours)], {"BLEU": BLEU()}, [said], "bs", n_samples=1000
    )
    first, second = test()[1]["BLEU"]
    np.testing.assert_allclose(draws[0][0], second.score)
    np.testing.assert_allclose(mean, second.score - first.score)
    assert low < mean < high
    assert abs(p - second.p_value) < 0.02  # both draw a thousand times, not the same
    np.testing.assert_allclose(draws[1][1:].mean(), first.mean, rtol=0.02)
    assert scored(ours, said)["bleu"] == second.score
