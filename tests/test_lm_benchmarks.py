"""The scripts of the language-modelling comparison, on sizes that any machine can run."""

import json
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import lm_bigram
import lm_clock
import lm_contender
import lm_cost
import lm_gpu
import lm_results
import lm_trials
import lm_workers
from lm_settings import text_file
from lm_work import work
from lm_workers import share_out
from make_tables import TABLES
from processes import CONTEXT
from tables.stored import Stored
from whence.analysis.language import Language


def shared(
    jobs: list[tuple[str, int]], log: Path, seconds: float = 30.0
) -> tuple[dict[tuple[str, int], str], list[str]]:
    said: list[str] = []
    end = time.monotonic() + seconds
    left = share_out(jobs, work, str(log), at_once=2, end=end, say=said.append)
    return left, said


def test_a_process_that_dies_and_a_job_that_fails_end_no_other(tmp_path: Path) -> None:
    jobs = [("a", 0), ("dies", 0), ("fails", 0), ("a", 1), ("b", 0), ("b", 1)]
    left, said = shared(jobs, tmp_path / "log")
    assert left == {
        ("dies", 0): "its process ended with code -9",
        ("fails", 0): "ValueError: no",
    }
    ran = (tmp_path / "log").read_text().splitlines()
    assert sorted(ran) == sorted(["a.0", "a.1", "b.0", "b.1", *["dies.0", "fails.0"] * 2])
    assert sum("FAILED" in line for line in said) == 4
    assert any(line.startswith("4/6 ") for line in said)


def test_once_a_job_says_that_the_time_is_spent_none_is_begun(tmp_path: Path) -> None:
    left, _ = shared([("late", 0), ("late", 1), ("a", 0), ("a", 1)], tmp_path / "log")
    assert ("a", 1) in left
    assert ("late", 0) in left
    assert left["late", 0] == "the time is spent"


def test_what_hangs_is_ended_at_the_limit(tmp_path: Path) -> None:
    left, said = shared([("hangs", 0), ("a", 0)], tmp_path / "log", seconds=2.0)
    assert left == {("hangs", 0): "ended at the limit"}
    assert "hangs.0 ended at the limit, starting" in said


def test_where_all_fails_the_rest_is_not_tried(tmp_path: Path) -> None:
    left, said = shared([("fails", seed) for seed in range(30)], tmp_path / "log")
    assert len(left) == 30
    assert len((tmp_path / "log").read_text().splitlines()) < 15
    assert "nothing but failures: the rest is not tried" in said


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("lm")


@pytest.fixture(scope="module")
def state(folder: Path) -> Path:
    """Two methods packed on a second machine, which had the first one's state."""
    text, packed = text_file(folder), folder / "state.tar.gz"
    given = ["--tiny", "--data", str(text), "--valid", str(text), "--at-once", "2", "--seeds", "1"]
    given += ["--pack", str(packed), "--unpack", str(packed), "--commit", "abc"]
    first = [*given, "--out", str(folder / "first")]
    both = ["--methods", "nope;learned"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lm_workers.multiprocessing, "get_context", lambda how: CONTEXT)
        assert lm_gpu.main([*first, "--methods", "nope", "--seconds", "100"]) == 0
        assert lm_gpu.main([*first, *both, "--seconds", "0"]) == lm_gpu.UNFINISHED
        assert lm_gpu.main([*given, *both, "--out", str(folder / "second")]) == 0
    return packed


def test_the_comparison_goes_on_from_its_packed_state_and_ends_with_all_jobs(
    state: Path, folder: Path
) -> None:
    first, second = (
        [(job.method, job.side_by_side) for job in Language.load(folder / name / "lm.json").jobs]
        for name in ("first", "second")
    )
    assert first == [("nope", 2)]
    assert second == [("nope", 2), ("learned", 2)]
    results = lm_results.unpacked(state)
    assert results.machine["commit"] == "abc"
    same = [
        (folder / name / "jobs/nope.seed-0/result.json").read_text() for name in ("first", "second")
    ]
    assert same[0] == same[1]  # it was not run again


@pytest.fixture(scope="module")
def measured(folder: Path) -> str:
    """What lm_cost.py writes."""
    out = folder / "cost.json"
    sizes = ["--layers", "1", "--heads", "2", "--width", "32", "--lengths", "16", "--tokens", "32"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lm_cost.gc, "unfreeze", lambda: None)  # what conftest.py froze
        patch.setattr(lm_contender, "VOCABULARY", 64)
        patch.setattr(lm_clock, "ENOUGH", 3)
        patch.setattr(lm_cost, "EACH", 0.0)
        lm_cost.main(["--out", str(out), "--seconds", "90", "--methods", "nope;learned", *sizes])
    return out.read_text()


@pytest.fixture
def costs(measured: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(measured)
    return found


def test_tables_figures_and_page_are_made_of_the_packed_state_and_the_costs(
    state: Path, costs: dict[str, Any], tmp_path: Path
) -> None:
    for record in costs["alone"][2:]:  # nope and learned, as if at the length of training
        record["n"] = 32
    cost, out = tmp_path / "made.json", tmp_path / "results" / "lm"
    cost.write_text(json.dumps(costs))
    lm_results.main(["--state", str(state), "--cost", str(cost), "--out", str(out)])
    figures = {path.stem for path in (out / "figures").iterdir()}
    assert figures == {"length", "position", "curves", "tables", "attention"}
    table = (out / "table.md").read_text()
    speed = f"{costs['alone'][3]['tokens_a_second']:,.0f}"
    assert f" | {speed} | " in next(x for x in table.splitlines() if x.startswith("| `learned`"))
    assert "- no loss at a longer length: learned knows 32 positions" in table
    assert "/" not in Language.load(out / "lm.json").config["data"]
    before = {path: path.read_bytes() for path in out.rglob("*.md")}
    lm_results.main(["--out", str(out)])  # from its own files
    assert {path: path.read_bytes() for path in out.rglob("*.md")} == before

    lm_results.main(["--state", str(state), "--light", "--out", str(out / "half_rate")])
    assert not (out / "half_rate" / "figures").exists()
    assert all(not x.attention for x in Language.load(out / "half_rate" / "lm.json").jobs)
    stored = Path(__file__).parent.parent / "results" / "lm"
    for name in ("trials.json", "bigram.json", "embedding_scale.json"):  # of scripts of their own
        shutil.copy(stored / name, out)
    made = {name: make(Stored(tmp_path)) for name, make in TABLES.items() if name[:3] == "lm_"}
    assert not [name for name, text in made.items() if "Not measured" in text]
    assert made["lm_losses"] == table
    assert "at most 3%" in made["lm_bars"]
    assert "commit abc" in made["lm_setting"]
    (row,) = (x for x in made["lm_seeds"].splitlines() if x.startswith("| `learned`"))
    loss = Language.load(out / "lm.json").jobs[1].loss(32)
    assert loss is not None
    assert row == f"| `learned` | {loss.loss:.3f} | {loss.loss:.3f} | +0.000 |"
    assert "1 seeds" in made["lm_short"]
    assert "`learned`" not in made["lm_far"]  # it has no loss beyond its table


def test_jobs_that_ran_at_another_commit_than_the_state_they_joined_are_named(
    state: Path, folder: Path, tmp_path: Path
) -> None:
    path = folder / "second" / "lm.json"
    there = Language.load(path)
    jobs = list(there.jobs)
    assert lm_gpu.with_commits(jobs, path, {"commit": "def"}) == there.machine  # none ran
    more = [*jobs, replace(jobs[0], seed=1)]
    found = lm_gpu.with_commits(more, path, there.machine | {"commit": "def"})
    assert found["commits"] == {"abc": ["nope.0", "learned.0"], "def": ["nope.1"]}
    joined = replace(there, machine=found, jobs=tuple(more))
    joined.save(tmp_path / "results" / "lm" / "lm.json")
    assert "commit abc, but nope.1 at commit def." in TABLES["lm_setting"](Stored(tmp_path))
    last = [*more, replace(jobs[0], seed=2)]  # and once more from there
    again = lm_gpu.with_commits(last, tmp_path / "results" / "lm" / "lm.json", found)
    assert again["commits"]["def"] == ["nope.1", "nope.2"]


def test_a_comparison_of_which_not_every_method_was_measured_alone_shows_the_memory_of_its_runs(
    state: Path, costs: dict[str, Any]
) -> None:
    results = lm_results.unpacked(state)
    without = lm_results.with_costs(results, None)
    assert "peak memory" in without.head
    assert lm_results.with_costs(results, costs | {"alone": []}) == without
    nope, learned = (record | {"n": 32} for record in costs["alone"][2:])
    late = {"contender": "learned", "n": 32, "skipped": lm_cost.SPENT}
    for reached in ([nope], [nope, learned | {"n": 16}], [nope, late]):
        assert lm_results.with_costs(results, costs | {"alone": reached}) == without
    found = lm_results.with_costs(results, costs | {"alone": [nope, learned]})
    assert "peak memory" not in found.head
    place = found.head.index("tokens/s")
    assert {row[0]: row[place] for row in found.rows} == {
        record["contender"]: f"{record['tokens_a_second']:,.0f}" for record in (nope, learned)
    }


def test_trials_are_read_from_their_logs_in_order() -> None:
    line = "  99 s  1/1 {}.0: train 4.8{}, 4.5{}; 119k tokens/s, 7.4 GB (104 s)\n"
    log = "".join(
        line.format(method, place, place) for place, (method, *_) in enumerate(lm_trials.TRIALS)
    )
    found = lm_trials.trials("   0 s  0 of 1 jobs are done; 1 at once\n" + log)
    assert [x["loss"] for x in found] == [4.50, 4.51, 4.52, 4.53, 4.54, 4.55]
    assert (found[4]["position_rate"], found[4]["train_loss"]) == (30.0, 4.84)
    with pytest.raises(SystemExit, match="not of the six trials"):
        lm_trials.trials(log.replace("tisa", "t5"))


def test_pairs_are_counted_as_the_formula_says() -> None:
    tokens = np.asarray([0, 1, 0, 1, 0, 2, 1])
    model = lm_bigram.Bigrams(tokens, 4)
    single = (np.asarray([3, 3, 1, 0]) + 0.1) / 7.4
    # after 0 came 1 twice and 2 once; 3 was never seen, so nothing is known of what follows it
    after_zero = [(2 - 0.75 + 0.75 * 2 * single[1]) / 3, 0.75 * 2 * single[3] / 3]
    for pair, p in (((0, 1), after_zero[0]), ((0, 3), after_zero[1]), ((3, 2), single[2])):
        assert model.loss(np.asarray(pair)) == pytest.approx(-np.log(p))
    p = [np.exp(-model.loss(np.asarray([0, w]))) for w in range(4)]
    assert sum(p) == pytest.approx(1)
