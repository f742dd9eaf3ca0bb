"""The parts of `whence lm`: data, tasks, configuration, evaluation, lag views."""

import math
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from lm_settings import text_file, tiny
from whence.analysis.lm_results import SCRATCH, SLIDING
from whence.experiments import LMConfig, run_lm
from whence.experiments.lm import evaluation, lag_views
from whence.experiments.lm.config import read_config
from whence.experiments.lm.data import prepared
from whence.experiments.lm.learned_table import learned_table, toeplitz_of
from whence.experiments.lm.source import IGNORED, Examples
from whence.experiments.lm.tasks import ASK, FILLER, TASKS, Task
from whence.experiments.lm.tokens import StoredTokenizer, read_texts
from whence.experiments.lm.training import new_model


def quiet(what: str, share: float) -> None:
    pass


def source_of(config: LMConfig, folder: Path) -> Any:
    return prepared(config, folder)


# Data


def test_the_tokenizer_gives_the_text_back_and_is_trained_once(tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    data = text_file(tmp_path)
    source = source_of(tiny(data), tmp_path / "out")
    path = tmp_path / "out" / "tokenizer.json"
    tokenizer = Tokenizer.from_str(StoredTokenizer.load(path).tokenizer)
    texts = read_texts(str(data), None)
    assert tokenizer.decode(source.train.tolist()) == texts.train
    assert tokenizer.decode(source.valid.tolist()) == texts.valid
    assert texts.train + texts.valid == data.read_text(encoding="utf-8")
    assert source.vocab_size == 300 > max(source.train.max(), source.valid.max())
    written = path.stat().st_mtime_ns
    again = source_of(tiny(data), tmp_path / "out")
    assert path.stat().st_mtime_ns == written
    torch.testing.assert_close(again.train, source.train)


def test_another_text_for_validation_leaves_the_first_whole(tmp_path: Path) -> None:
    data, valid = text_file(tmp_path), tmp_path / "valid.txt"
    valid.write_text("a key and a query, and where they are\n" * 30, encoding="utf-8")
    texts = read_texts(str(data), str(valid))
    assert texts.train == data.read_text(encoding="utf-8")
    assert texts.valid == valid.read_text(encoding="utf-8")


def test_a_run_sees_every_block_once_a_turn_in_an_order_of_its_own(tmp_path: Path) -> None:
    source = source_of(tiny(text_file(tmp_path)), tmp_path / "out")
    n = source.n_blocks
    blocks = [tuple(row.tolist()) for row in source.train[: n * 16].view(n, 16)]
    orders = []
    for seed in (0, 1):
        for turn in (0, 1):
            rows = [source.example(seed, turn * n + i)["input_ids"] for i in range(n)]
            seen = [tuple(row.tolist()) for row in rows]
            assert Counter(seen) == Counter(blocks)
            orders.append(seen)
    assert len({tuple(order) for order in orders}) == 4
    examples = Examples(source, seed=1, n=7)
    assert len(examples) == 7
    for i in (6, 0, 3):  # in any order, from any process
        torch.testing.assert_close(examples[i], source.example(1, i))


def test_masked_blocks_are_berts_recipe_and_the_same_each_time(tmp_path: Path) -> None:
    source = source_of(tiny(text_file(tmp_path), objective="masked"), tmp_path / "out")
    plain = source_of(tiny(text_file(tmp_path)), tmp_path / "plain")
    count, masked, kept = 0, 0, 0
    for i in range(200):
        example, original = source.example(0, i), plain.example(0, i)["input_ids"]
        torch.testing.assert_close(example, source.example(0, i))
        chosen = example["labels"] != IGNORED
        assert chosen.any()
        torch.testing.assert_close(example["labels"][chosen], original[chosen])
        torch.testing.assert_close(example["input_ids"][~chosen], original[~chosen])
        count += int(chosen.sum())
        masked += int((example["input_ids"] == source.corpus.mask).sum())
        kept += int((example["input_ids"][chosen] == original[chosen]).sum())
    assert 0.13 < count / (200 * 16) < 0.22
    assert 0.75 < masked / count < 0.85
    assert 0.05 < kept / count < 0.15


# Tasks


def solved(name: str, ids: list[int], t: int, distance: int) -> int:
    """What output t must say, from the tokens up to t alone, by hand."""
    if name == "back":
        return ids[t - distance]
    ask = ids.index(ASK)
    if name == "recall":
        pairs = dict(pairwise(ids[:ask]))
        return pairs[ids[t]]
    question = [token for token in ids[:ask] if token != FILLER]
    return question[t - ask] if name == "copy" else question[::-1][t - ask]


@pytest.mark.parametrize("name", TASKS)
@pytest.mark.parametrize("length", [16, 17, 64, 301])
def test_a_task_can_be_solved_from_what_comes_before(name: str, length: int) -> None:
    task = Task(name, distance=5, train_length=length, eval_tokens=3 * length)
    batches = task.scored(length, sliding=False, tokens=2 * length)
    assert batches is not None
    rows = [(i, t) for batch in batches for i, t in zip(batch.ids, batch.targets, strict=True)]
    assert len(rows) == 3
    assert task.scored(length, sliding=True, tokens=length) is None
    for ids, targets in rows:
        assert len(ids) == len(targets) == length
        assert int(ids.max()) < task.vocab_size
        places = (targets != IGNORED).nonzero()[:, 0].tolist()
        assert len(places) >= 3
        for t in places:
            assert solved(name, ids.tolist(), t, 5) == int(targets[t])
    example = task.example(0, 0)  # for a causal model, which shifts its labels
    shifted = example["labels"][1:]
    for t in (shifted != IGNORED).nonzero()[:, 0].tolist():
        assert solved(name, example["input_ids"].tolist(), t, 5) == int(shifted[t])


def test_training_sequences_of_a_task_are_fresh_and_none_is_tested_on() -> None:
    task = Task("copy", distance=1, train_length=32, eval_tokens=320)
    trained = {tuple(task.example(s, i)["input_ids"].tolist()) for s in (0, 1) for i in range(50)}
    assert len(trained) == 100
    batches = task.scored(32, sliding=False, tokens=64)
    assert batches is not None
    tested = {tuple(row.tolist()) for batch in batches for row in batch.ids}
    assert len(tested) == 10
    assert not tested & trained


def test_a_short_run_learns_the_token_before_and_keeps_it_at_twice_the_length(
    tmp_path: Path,
) -> None:
    quick = {"steps": 60, "batch": 16, "learning_rates": (2e-2,), "log_every": 20, "save_every": 60}
    config = tiny(None, ("shaw:clip=2",), task="back", distance=1, **quick)
    found = run_lm(config, tmp_path / "out").jobs[0]
    accuracy = [found.loss(n).accuracy for n in (16, 32)]  # type: ignore[union-attr]
    assert min(accuracy) > 0.9  # type: ignore[type-var]
    assert found.loss(16, SLIDING) is None


# Evaluation


def test_losses_are_those_of_the_model_itself_window_by_window(tmp_path: Path) -> None:
    config = tiny(text_file(tmp_path), ("shaw",), eval_lengths=(16, 32), eval_tokens=128)
    source = source_of(config, tmp_path / "out")
    model = new_model(config, "shaw", 3, source.vocab_size).eval()
    found = evaluation.losses(model, source, config, torch.device("cpu"), say=quiet)
    assert [(x.length, x.how) for x in found] == [
        (n, how) for n in (16, 32) for how in (SCRATCH, SLIDING)
    ]
    tokens = source.valid.long()

    @torch.no_grad()
    def window(start: int, n: int) -> torch.Tensor:
        logits = model(tokens[start : start + n][None]).logits[0]
        return F.cross_entropy(logits, tokens[start + 1 : start + n + 1], reduction="none")

    for x in found:
        n = x.length
        if x.how == SCRATCH:
            parts = [window(start, n) for start in range(0, 128, n)]
        else:
            parts = [window(0, n)]
            parts += [window(start, n)[n // 2 :] for start in range(n // 2, 128 - n + 1, n // 2)]
        every = torch.cat(parts)
        assert x.tokens == len(every) == 128  # the same tokens each time, each once
        torch.testing.assert_close(x.loss, float(every.mean()), rtol=1e-5, atol=1e-5)
        if x.how == SCRATCH:
            by_place = torch.stack(parts).mean(dim=0)
            stop = int(2 * x.position[0]) + 1  # a stretch from 0 on has its mean in its middle
            assert stop * len(parts) >= 16  # an eighth of the tokens at least
            torch.testing.assert_close(
                float(x.by_position[0]), float(by_place[:stop].mean()), rtol=1e-4, atol=1e-4
            )
            assert n // 2 < x.position[-1] < n


def test_masked_losses_are_those_of_the_masked_tokens(tmp_path: Path) -> None:
    config = tiny(text_file(tmp_path), ("rope",), objective="masked", eval_tokens=64)
    source = source_of(config, tmp_path / "out")
    model = new_model(config, "rope", 0, source.vocab_size).eval()
    found = evaluation.losses(model, source, config, torch.device("cpu"), say=quiet)
    assert [x.how for x in found] == [SCRATCH, SCRATCH]
    batches = source.scored(16, sliding=False, tokens=1000)
    assert batches is not None
    (batch,) = batches
    with torch.no_grad():
        expected = model(batch.ids, labels=batch.targets).loss
    torch.testing.assert_close(found[0].loss, float(expected), rtol=1e-5, atol=1e-5)
    assert found[0].tokens == int((batch.targets != IGNORED).sum())


def test_a_table_of_positions_has_no_loss_beyond_it_and_says_why(tmp_path: Path) -> None:
    config = tiny(text_file(tmp_path))
    source = source_of(config, tmp_path / "out")
    model = new_model(config, "learned+tisa", 0, source.vocab_size)
    found = evaluation.losses(model, source, config, torch.device("cpu"), say=quiet)
    assert [x.loss is None for x in found] == [False, False, True, True]
    assert found[2].why_not == "learned+tisa knows 16 positions"


def test_a_loss_that_is_not_finite_is_none_and_says_why(tmp_path: Path) -> None:
    """NaN has no place in a ranking, nor in JSON."""
    config = tiny(text_file(tmp_path))
    source = source_of(config, tmp_path / "out")
    model = new_model(config, "tisa", 0, source.vocab_size)
    with torch.no_grad():
        model.model.stack.norm.weight[0] = float("nan")
    found = evaluation.losses(model, source, config, torch.device("cpu"), say=quiet)
    assert [(x.loss, x.accuracy, x.tokens) for x in found] == [(None, None, 0)] * 4
    assert found[0].why_not == "the loss of tisa at length 16 is nan"


# What is looked at


def test_lag_views_are_the_methods_own_curves_and_the_models_own_weights(tmp_path: Path) -> None:
    config = tiny(text_file(tmp_path))
    source = source_of(config, tmp_path / "out")
    first, last = (new_model(config, "tisa", seed, source.vocab_size).eval() for seed in (0, 1))
    views = lag_views.stated(first, last, config.train_length)
    assert [view.layer for view in views] == [0, 1]
    method = last.model.stack.position.layer(1)
    pos = torch.arange(15)
    bias = method.score_term(torch.zeros(1, 2, 15, 16), pos, pos).to_dense(pos, pos)[0, :, 7]
    torch.testing.assert_close(views[1].lag.tolist(), [float(lag) for lag in range(-7, 8)])
    torch.testing.assert_close(torch.from_numpy(views[1].after[:, :8]), bias[:, :8].detach())
    assert np.isnan(views[1].after[:, 8:]).all()  # a causal model never sees them
    seen = lag_views.attention(first, last, source, torch.device("cpu"))
    ids = source.sample(4)
    with torch.no_grad():
        weights = torch.stack(last(ids, output_attentions=True).attentions)  # l b h q k
    for place, lag in enumerate(range(-15, 1)):
        expected = weights.diagonal(lag, dim1=-2, dim2=-1).mean(dim=(1, -1))
        found = torch.stack([torch.from_numpy(view.after[:, place]) for view in seen])
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(
    ("method", "layers"),
    [("rope", 2), ("t5", 1), ("learned", 1), ("nope", 0), ("floater", 2), ("shaw", 2)],
)
def test_stated_curves_are_of_each_layer_that_has_its_own(
    method: str, layers: int, tmp_path: Path
) -> None:
    config = tiny(None, task="copy")
    model = new_model(config, method, 0, 66).eval()
    assert len(lag_views.stated(model, model, 16)) == layers


def test_the_table_that_is_traced_is_the_learned_one() -> None:
    config = tiny(None, task="copy")
    model = new_model(config, "learned+tisa", 0, 66)
    table = learned_table(model, 16)
    expected = model.model.stack.position.shared["learned"].table.detach().double()
    torch.testing.assert_close(torch.from_numpy(table), expected)
    assert learned_table(new_model(config, "sinusoidal", 0, 66), 16) is None
    assert learned_table(new_model(config, "tisa", 0, 66), 16) is None
    place = np.arange(16.0)[:, None] * np.linspace(0.1, 1.0, 8)
    waves = np.concatenate([np.sin(place), np.cos(place)], axis=1)
    found = toeplitz_of(waves)
    assert math.isclose(found.r2, 1.0, abs_tol=1e-9)
    assert math.isclose(found.r2_off_diagonal, 1.0, abs_tol=1e-9)
    assert found.null_r2_off_diagonal is not None
    assert found.null_r2 is not None
    assert found.null_r2_off_diagonal < 0.5 < found.null_r2  # equal norms: the diagonal is constant


def test_a_model_begins_the_same_for_a_seed_whatever_its_method() -> None:
    config = tiny(None, task="copy")
    a, b, c = (new_model(config, "nope", seed, 66).state_dict() for seed in (0, 0, 1))
    torch.testing.assert_close(a, b)
    assert not torch.equal(a["lm_head.weight"], c["lm_head.weight"])


# Configuration


def test_flags_win_over_a_file_and_the_file_over_the_defaults(tmp_path: Path) -> None:
    path = tmp_path / "lm.toml"
    path.write_text('methods = ["tisa"]\ndata = "a.txt"\nsteps = 7\nlearning_rates = [1]\n')
    read = read_config(path, {"steps": 9, "seeds": None})
    assert (read.methods, read.steps, read.seeds, read.learning_rates) == (("tisa",), 9, 1, (1.0,))
    assert LMConfig.from_json(read.to_json()).plain() == read.plain()
    assert read.eval_lengths == (128, 256, 512)
    given = {"train_length": 64}
    assert read_config(path, given).eval_lengths == (64, 128, 256)
    assert read_config(path, {**given, "eval_lengths": (64,)}).eval_lengths == (64,)


@pytest.mark.parametrize(
    ("toml", "message"),
    [
        ("step = 3", "Unknown option in .* 'step'. Did you mean 'steps'"),
        ("steps = 'many'", "steps must be of type int, got 'many'"),
        ("steps = true", "steps must be of type int, got True"),
        ("eval_lengths = 128", "eval_lengths must be a list, got 128"),
        ("steps = ", "is not TOML"),
        ("task = 'sort'", "Unknown task 'sort'"),
        ("objective = 'mask'", "Unknown objective 'mask'. Did you mean 'masked'"),
        ("task = 'copy'", "the task 'copy' makes its own data: leave out 'a.txt', or the task"),
        ("eval_lengths = [64]", "must hold train_length = 128"),
        ("save_every = 25", "save_every must be a multiple of log_every"),
        ("accumulate = 3", "batch must be a multiple of accumulate, got 16 and 3"),
        ("d_model = 90", "d_model must be a multiple of n_heads, got 90 and 4"),
        ("dropout = 1.0", "dropout must be in"),
        (
            "learning_rates = [1e-3, 0.0]",
            "learning_rates must be above 0 and finite, got 0.001, 0.0",
        ),
        ("learning_rates = []", "give one learning rate or more"),
        ("learning_rates = [1e-3, 1e-3]", "name each learning rate once, got 0.001, 0.001"),
        (
            "learning_rates = [1e-3, 2e-3]\ntuning_tokens = 127",
            "tuning_tokens must be at least train_length = 128",
        ),
        ("seeds = 0", "seeds must be at least 1, got 0"),
        ("methods = []", "one method or more"),
        ("methods = ['tisa', 'rope', 'tisa']", "name each method once, got tisa several times"),
    ],
)
def test_a_wrong_option_is_one_sentence(toml: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "lm.toml"
    path.write_text(toml)
    given = {"data": "a.txt"} | ({} if "methods" in toml else {"methods": ("tisa",)})
    with pytest.raises(ValueError, match=message):
        read_config(path, given)


def test_without_methods_or_with_a_masked_task_nothing_begins() -> None:
    with pytest.raises(ValueError, match=r"no text to train on: give data \(--data\)"):
        read_config(None, {"methods": ("tisa",)})
    with pytest.raises(ValueError, match="name the methods to compare"):
        read_config(None, {})
    with pytest.raises(ValueError, match="'copy' is for the causal objective"):
        tiny(None, task="copy", objective="masked")
    with pytest.raises(ValueError, match="distance below train_length, got 16 and 16"):
        Task("back", distance=16, train_length=16, eval_tokens=16)


def test_what_would_fail_in_a_job_is_refused_before_the_folder_is_claimed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the folder would be that of an experiment that cannot run, and refuse the right one."""
    config, out = tiny(text_file(tmp_path)), tmp_path / "out"
    wrong = [
        (replace(config, methods=("tisa", "cope"), objective="masked"), "causal attention alone"),
        (replace(config, fsdp=True), "--fsdp is for GPUs"),
    ]
    for one, message in wrong:
        with pytest.raises(ValueError, match=message):
            run_lm(one, out)
    with monkeypatch.context() as patch:
        patch.setattr("whence.experiments.lm.training.processes", lambda: (0, 3))
        with pytest.raises(ValueError, match="processes times accumulate, got 4 for 3"):
            run_lm(config, out)
    assert not out.exists()
