"""The scripts of the language-modelling comparison, on sizes that any machine can run."""

import json
import shutil
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import lm_bigram
import lm_clock
import lm_contender
import lm_corpus
import lm_cost
import lm_gpu
import lm_results
import lm_state
import lm_workers
from lm_plan import read_plan
from lm_settings import text_file
from lm_work import work
from lm_workers import share_out
from make_tables import TABLES
from processes import CONTEXT
from tables.stored import Stored
from whence.analysis.language import Job, Language
from whence.methods import METHODS


def shared(
    jobs: list[tuple[str, int]], log: Path, seconds: float = 30.0
) -> tuple[dict[tuple[str, int], str], list[str]]:
    said: list[str] = []
    now = time.monotonic()
    left = share_out(
        jobs,
        work,
        str(log),
        place=jobs.index,
        at_once=2,
        until=now + 60,
        end=now + seconds,
        say=said.append,
    )
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
    assert "('hangs', 0) ended at the limit, starting" in said


def test_where_all_fails_the_rest_is_not_tried(tmp_path: Path) -> None:
    left, said = shared([("fails", seed) for seed in range(30)], tmp_path / "log")
    assert len(left) == 30
    assert len((tmp_path / "log").read_text().splitlines()) < 15
    assert "nothing but failures: the rest is not tried" in said


def test_jobs_begin_by_their_places_and_those_that_others_make_possible_come_in_between(
    tmp_path: Path,
) -> None:
    """When both a's are done the c's may begin, before d, which was known all along."""
    order = [("a", 0), ("a", 1), ("b", 0), ("c", 0), ("c", 1), ("d", 0)]
    done: list[tuple[str, int]] = []

    def follow(job: tuple[str, int]) -> list[tuple[str, int]]:
        done.append(job)
        return order[3:5] if {("a", 0), ("a", 1)} <= set(done) else []

    now = time.monotonic()
    left = share_out(
        [order[5], *order[:3]],
        work,
        str(tmp_path / "log"),
        place=order.index,
        follow=follow,
        at_once=1,
        until=now + 30,
        end=now + 60,
        say=lambda what: None,
    )
    assert left == {}
    assert done == order  # each once, though more than one said that the c's may begin


def test_no_job_begins_after_the_time_for_it(tmp_path: Path) -> None:
    now = time.monotonic()
    jobs = [("a", 0), ("a", 1)]
    left = share_out(
        jobs,
        work,
        str(tmp_path / "log"),
        place=jobs.index,
        at_once=2,
        until=now - 1,
        end=now + 9,
        say=lambda what: None,
    )
    assert left == dict.fromkeys(jobs, "the time is spent")
    assert not (tmp_path / "log").exists()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("lm")


PLUGIN = """
from whence.methods import METHODS

METHODS["plugged"] = METHODS["nope"]
"""
PLAN = """
plugins = ["lm_plugged"]

[all]
data = "{corpus}"
train_length = 32
eval_lengths = [32, 64]
eval_tokens = 256
n_layers = 1
n_heads = 2
d_model = 32
steps = 4
batch = 4
warmup = 1
log_every = 2
save_every = 6
device = "cpu"

[experiment.methods]
methods = {methods}

[experiment.rates]
methods = ["plugged"]
learning_rates = [1e-7, 1e-2]
tuning_tokens = 64
seeds = 2
steps = 2
"""


@pytest.fixture(scope="module")
def state(folder: Path) -> Iterator[Path]:
    """A plan of two experiments, of which one gets a method more, packed on a second machine."""
    text, packed, corpus = text_file(folder), folder / "state.tar.gz", folder / "corpus.safetensors"
    lm_corpus.main(["--data", str(text), "--vocab-size", "300", "--out", str(corpus)])
    (folder / "lm_plugged.py").write_text(PLUGIN)

    def run(methods: str, out: str, *more: str) -> int:
        (folder / "plan.toml").write_text(PLAN.format(corpus=corpus, methods=methods))
        given = ["--plan", str(folder / "plan.toml"), "--out", str(folder / out), "--at-once", "2"]
        given += ["--pack", str(packed), "--unpack", str(packed), "--commit", "abc"]
        return lm_gpu.main([*given, *more])

    both = '["nope", "learned"]'
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lm_workers.multiprocessing, "get_context", lambda how: CONTEXT)
        patch.setattr(sys, "path", list(sys.path))
        try:
            assert run('["nope"]', "first", "--only", "methods") == 0
            assert run(both, "first", "--seconds", "0") == lm_gpu.UNFINISHED
            assert run(both, "second") == 0
        finally:
            METHODS.pop("plugged", None)
        yield packed


def test_the_comparison_goes_on_from_its_packed_state_and_ends_with_all_jobs(
    state: Path, folder: Path
) -> None:
    def jobs(out: str) -> list[tuple[str, int]]:
        found = Language.load(folder / out / "methods" / "lm.json").jobs
        return [(job.method, job.side_by_side) for job in found]

    assert jobs("first") == [("nope", 2)]
    assert jobs("second") == [("nope", 2), ("learned", 2)]
    results = lm_results.unpacked(state, "methods")
    assert results.machine["commit"] == "abc"
    same = [
        (folder / name / "methods/jobs/nope.seed-0/result.json").read_text()
        for name in ("first", "second")
    ]
    assert same[0] == same[1]  # it was not run again


def test_a_plan_tries_all_rates_then_runs_the_other_seeds_and_packs_pictures_of_the_best(
    state: Path, tmp_path: Path
) -> None:
    results = lm_results.unpacked(state, "rates")
    assert [(x.method, x.learning_rate) for x in results.tuning] == [
        ("plugged", 1e-7),  # a method of the plan's own plugin
        ("plugged", 1e-2),
    ]
    assert [(job.seed, job.learning_rate) for job in results.jobs] == [(0, 1e-2), (1, 1e-2)]
    lm_state.unpack(state, tmp_path)
    found = {path.parent.name: Job.load(path) for path in tmp_path.glob("rates/jobs/*/result.json")}
    pictures = {name for name, job in found.items() if job.attention}
    assert pictures == {"plugged.rate-0.01.seed-0"}
    assert len(found) == 3


def test_a_plan_that_cannot_be_read_is_one_sentence(tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    for text, message in (
        ("[al]", "Unknown part of .* 'al'. Did you mean 'all'"),
        ("x = ", "is not TOML"),
        ("[all]", r"has no table \[experiment.NAME\]"),
        ("[experiment.a]\nstep = 1", "Unknown option in .*, experiment a 'step'"),
    ):
        path.write_text(text)
        with pytest.raises(ValueError, match=message):
            read_plan(path)


def test_the_plan_in_the_repository_can_be_read_and_rehearsed(tmp_path: Path) -> None:
    plan = read_plan(Path(lm_gpu.__file__).with_name("lm_plan.toml"))
    small = lm_gpu.rehearsal(plan, tmp_path)
    assert len(small.experiments) == 2
    for config in small.experiments.values():
        assert config.data == str(tmp_path / "corpus.safetensors")
        assert (len(config.methods), len(config.learning_rates), config.seeds) == (2, 2, 2)


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
    path = folder / "second" / "methods" / "lm.json"
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
    results = lm_results.unpacked(state, "methods")
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
