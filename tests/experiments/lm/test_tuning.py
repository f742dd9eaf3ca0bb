"""Several learning rates: which one a method gets, by what, and that runs go on as they began."""

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from lm_jobs import job as made
from lm_jobs import results
from lm_settings import assert_same_numbers, flags, same, text_file, tiny
from whence.analysis.lm_results import Job, Language, Tuning
from whence.cli.root import app
from whence.experiments import LMConfig, best_rate, run_lm, run_one
from whence.experiments.lm.config import read_config
from whence.experiments.lm.data import prepared
from whence.experiments.lm.evaluation import tuning_loss
from whence.experiments.lm.source import IGNORED
from whence.experiments.lm.tasks import Task
from whence.experiments.lm.training import new_model
from whence.experiments.progress import OutOfTimeError
from whence.report.lm_report import LM_REPORT

BAD, GOOD = 1e-7, 1e-2


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)  # sums of two threads come out in another order


def tuned(folder: Path, methods: tuple[str, ...] = ("tisa",), **more: Any) -> LMConfig:
    given = {"learning_rates": (BAD, GOOD), "tuning_tokens": 70, "seeds": 2, "steps": 6} | more
    return tiny(text_file(folder), methods, **given)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[LMConfig, Path, Language]:
    """Two methods, two rates and two seeds, run without a break; not to be changed."""
    folder = tmp_path_factory.mktemp("tuned")
    torch.set_num_threads(1)
    config = tuned(folder, ("tisa", "nope"))
    return config, folder / "out", run_lm(config, folder / "out")


def test_a_rate_that_is_clearly_bad_is_not_chosen_and_the_other_seeds_run_at_the_best(
    whole: tuple[LMConfig, Path, Language],
) -> None:
    config, out, found = whole
    chosen = [(job.method, job.seed, job.learning_rate) for job in found.jobs]
    assert chosen == [(m, seed, GOOD) for m in config.methods for seed in (0, 1)]
    assert [(x.method, x.learning_rate) for x in found.tuning] == [
        (m, rate) for m in config.methods for rate in (BAD, GOOD)
    ]
    losses = [x.loss for x in found.tuning]
    assert losses[1] < losses[0]  # type: ignore[operator]
    assert found.jobs[0].tuning_loss == losses[1]
    assert found.jobs[1].tuning_loss is None
    folders = {path.name for path in (out / "jobs").iterdir()}
    assert folders == {
        f"{m}.rate-{rate}.seed-{seed}"
        for m in config.methods
        for rate, seed in ((BAD, 0), (GOOD, 0), (GOOD, 1))
    }
    again = Language.load(out / "lm.json")
    assert again.to_json() == found.to_json()
    table = LM_REPORT.formatted(found, "markdown")
    assert "| loss at 32 | rate |" in table
    assert "| 0.01 |" in table
    assert "learning rates 1e-07, 0.01 which gave it the smallest loss with the first seed" in table


def test_the_run_of_a_rate_among_several_is_that_of_the_rate_alone(
    whole: tuple[LMConfig, Path, Language], tmp_path: Path
) -> None:
    config, _, found = whole
    alone = run_lm(replace(config, learning_rates=(GOOD,), methods=("tisa",)), tmp_path / "out")
    assert {path.name for path in (tmp_path / "out" / "jobs").iterdir()} == {
        "tisa.seed-0",
        "tisa.seed-1",
    }
    assert alone.tuning == ()
    assert [job.learning_rate for job in alone.jobs] == [GOOD, GOOD]
    for ours, theirs in zip(alone.jobs, found.jobs[:2], strict=True):
        assert_same_numbers(ours, theirs)


def test_one_run_is_at_the_rate_named_or_at_the_best_once_that_is_known(
    whole: tuple[LMConfig, Path, Language], tmp_path: Path
) -> None:
    config, out, _ = whole
    assert run_one(config, "tisa", 1, out).learning_rate == GOOD
    assert run_one(config, "tisa", 0, out, learning_rate=BAD).learning_rate == BAD
    with pytest.raises(ValueError, match=r"one of the experiment's, 1e-07, 0\.01, got 0\.5"):
        run_one(config, "tisa", 0, out, learning_rate=0.5)
    with pytest.raises(ValueError, match="the best learning rate of tisa is known once all of"):
        run_one(config, "tisa", 1, tmp_path / "out")


# By what a rate is chosen


def test_the_tokens_that_choose_a_rate_are_the_last_and_none_of_them_is_reported(
    tmp_path: Path,
) -> None:
    config = tuned(tmp_path, eval_tokens=10**6)
    source: Any = prepared(config, tmp_path / "out")
    plain: Any = prepared(replace(config, learning_rates=(GOOD,)), tmp_path / "plain")
    blocks = list(source.tuning(tokens=32))
    ids = torch.cat([batch.ids.flatten() for batch in blocks])
    targets = torch.cat([batch.targets.flatten() for batch in blocks])
    assert len(ids) == 64  # whole blocks of 16
    torch.testing.assert_close(targets, source.valid[-64:].long())
    torch.testing.assert_close(ids, source.valid[-65:-1].long())
    first = len(source.valid) - 65  # the first token of the part that chooses
    for length in (16, 32):
        for sliding in (False, True):
            seen = sum(
                int((batch.targets != IGNORED).sum())
                for batch in source.scored(length, sliding=sliding, tokens=64)
            )
            assert seen == source.scored_tokens < first  # their targets end before it
    assert source.scored_tokens == (first - 1) // 32 * 32
    assert plain.scored_tokens == (len(source.valid) - 1) // 32 * 32  # one rate: as ever
    model = new_model(config, "tisa", 0, source.vocab_size).eval()
    with torch.no_grad():
        logits = model(ids.view(4, 16)).logits.flatten(0, 1)
    expected = torch.nn.functional.cross_entropy(logits, targets)
    found = tuning_loss(model, source, config, torch.device("cpu"))
    torch.testing.assert_close(found, float(expected), rtol=1e-5, atol=1e-5)


def test_parts_that_would_overlap_are_refused_with_the_way_out(tmp_path: Path) -> None:
    n = len(prepared(tuned(tmp_path), tmp_path / "a").valid)  # type: ignore[attr-defined]
    config = tuned(tmp_path, train_length=4, eval_lengths=(4, 32), eval_tokens=10**6)
    most = (n - 32 - 2) // 4 * 4  # with 32 tokens, the one to predict last, and one between
    source: Any = prepared(replace(config, tuning_tokens=most), tmp_path / "b")
    assert source.scored_tokens == 32
    with pytest.raises(ValueError, match=r"too few for the longest .* a smaller --tuning-tokens"):
        prepared(replace(config, tuning_tokens=most + 4), tmp_path / "c")
    assert not (tmp_path / "c" / "experiment.json").exists()


def test_a_task_chooses_by_sequences_that_it_neither_trains_on_nor_reports(tmp_path: Path) -> None:
    task = Task("copy", distance=1, train_length=32, eval_tokens=320, tuning_tokens=200)
    chosen = {tuple(row.tolist()) for batch in task.tuning(tokens=64) for row in batch.ids}
    batches = task.scored(32, sliding=False, tokens=64)
    assert batches is not None
    reported = {tuple(row.tolist()) for batch in batches for row in batch.ids}
    trained = {tuple(task.example(0, i)["input_ids"].tolist()) for i in range(50)}
    assert len(chosen) == 6
    assert not chosen & (reported | trained)
    quick = {"steps": 4, "seeds": 1, "learning_rates": (BAD, GOOD), "tuning_tokens": 64}
    found = run_lm(tiny(None, ("nope",), task="copy", **quick), tmp_path / "out")
    assert len(found.tuning) == 2
    assert len(found.jobs) == 1


def tried(*losses: float | None) -> list[Job]:
    rates = (1e-3, 2e-3, 4e-3)
    return [
        made("a", 0, {}, learning_rate=rate, tuning_loss=loss, stopped="" if loss else "nan")
        for rate, loss in zip(rates, losses, strict=False)
    ]


def test_the_best_rate_has_the_smallest_loss_and_one_that_stopped_cannot_be_chosen() -> None:
    config = tiny(None, ("a",), task="copy", learning_rates=(1e-3, 2e-3, 4e-3), tuning_tokens=16)
    assert best_rate(config, "a", tried(3.0, 2.0, 2.5)) == 2e-3
    assert best_rate(config, "a", tried(3.0, None, 2.5)) == 4e-3
    assert best_rate(config, "a", tried(2.0, 2.0, 2.5)) == 1e-3  # the first of equals
    assert best_rate(config, "a", tried(None, None, None)) == 1e-3
    assert best_rate(config, "a", tried(3.0, 2.0)) is None  # one is not finished yet
    others = [replace(one, seed=1) for one in tried(3.0, 2.0, 2.5)]
    assert best_rate(config, "a", others) is None
    assert best_rate(replace(config, learning_rates=(5e-3,)), "a", []) == 5e-3


def test_a_method_of_which_every_rate_stopped_is_shown_as_stopped(tmp_path: Path) -> None:
    config = tuned(tmp_path, learning_rates=(1e30, 1e35), seeds=1)
    found = run_lm(config, tmp_path / "out")
    assert [x.loss for x in found.tuning] == [None, None]
    assert [(job.learning_rate, bool(job.stopped)) for job in found.jobs] == [(1e30, True)]


# Going on


@pytest.mark.slow
def test_a_run_that_ended_between_rates_and_seeds_goes_on_with_the_numbers_of_a_whole_one(
    whole: tuple[LMConfig, Path, Language], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, _, undisturbed = whole
    config, out = replace(config, data=str(text_file(tmp_path))), tmp_path / "out"
    import whence.experiments.lm.sweep as jobs

    train, begun = jobs.train, []

    def dies(config: LMConfig, method: str, seed: int, *rest: Any, **more: Any) -> Any:
        begun.append((method, seed, more["learning_rate"]))
        if seed == 1 and len(begun) == 5:
            raise KeyboardInterrupt
        return train(config, method, seed, *rest, **more)

    monkeypatch.setattr(jobs, "train", dies)
    with pytest.raises(KeyboardInterrupt):
        run_lm(config, out)
    first = [(m, 0, rate) for m in config.methods for rate in (BAD, GOOD)]
    assert begun == [*first, ("tisa", 1, GOOD)]  # all rates of all methods, then a seed
    found = run_lm(config, out)
    assert begun[5:] == [("tisa", 1, GOOD), ("nope", 1, GOOD)]
    same(found, undisturbed)
    assert [x.to_json() for x in found.tuning] == [x.to_json() for x in undisturbed.tuning]


def test_a_time_limit_before_all_rates_are_tried_leaves_a_method_out_of_the_table(
    tmp_path: Path,
) -> None:
    config, out = tuned(tmp_path), tmp_path / "out"
    run_one(config, "tisa", 0, out, learning_rate=BAD)
    with pytest.raises(OutOfTimeError, match="1 of 3 jobs are done"):
        run_lm(config, out, deadline=time.monotonic())
    found = Language.load(out / "lm.json")
    assert found.jobs == ()
    assert [x.learning_rate for x in found.tuning] == [BAD]


# The command, and files of before


def test_rates_are_a_list_at_the_command_line(
    whole: tuple[LMConfig, Path, Language], tmp_path: Path
) -> None:
    config, out, _ = whole
    given = [str(x) for x in ("lm", *flags(config), "--out", out)]
    assert given[given.index("--learning-rate") + 1] == "1e-07,0.01"
    result = CliRunner().invoke(app, given)  # all jobs are done: nothing is trained
    assert result.exit_code == 0, result.output
    assert "rate" in result.stdout
    wrong = CliRunner().invoke(app, [*given, "--learning-rate", "1e-3,fast"])
    assert wrong.exit_code == 2
    assert "--learning-rate takes numbers such as 1e-3,2e-3, got '1e-3,fast'" in wrong.stderr
    flagged = {"methods": ("tisa",), "task": "copy", "learning_rates": (1e-3,)}
    assert read_config(None, flagged).learning_rates == (1e-3,)


def test_results_of_before_have_no_rates_and_are_read_all_the_same() -> None:
    found = results(made("a", 0, {16: 2.0, 32: 2.0}))
    data = json.loads(found.to_json())
    del data["tuning"], data["jobs"][0]["learning_rate"], data["jobs"][0]["tuning_loss"]
    again = Language.from_json(json.dumps(data))
    assert (again.tuning, again.jobs[0].learning_rate, again.jobs[0].tuning_loss) == ((), 0.0, None)
    tuning = Tuning("a", 1e-3, None)
    assert Tuning.from_json(tuning.to_json()).loss is None
