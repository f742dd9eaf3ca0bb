"""The scripts of the language-modelling comparison, on sizes that any machine can run."""

import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import lm_corpus
import lm_gpu
import lm_results
import lm_state
from lm_plan import read_plan
from lm_settings import text_file
from lm_work import work
from processes import CONTEXT
from whence.analysis.lm_results import Job, LagView, Language
from whence.experiments import job_queue
from whence.experiments.job_queue import share_out
from whence.methods import METHODS


@pytest.fixture(autouse=True, scope="module")
def _fast_start() -> Iterator[None]:
    """Workers come from a process that has imported everything."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(job_queue.multiprocessing, "get_context", lambda how: CONTEXT)
        yield


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


@pytest.mark.slow
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


@pytest.mark.slow
def test_once_a_job_says_that_the_time_is_spent_none_is_begun(tmp_path: Path) -> None:
    left, _ = shared([("late", 0), ("late", 1), ("a", 0), ("a", 1)], tmp_path / "log")
    assert ("a", 1) in left
    assert ("late", 0) in left
    assert left["late", 0] == "the time is spent"


@pytest.mark.slow
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
from whence.experiments import job_queue
from whence.experiments.job_queue import share_out
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
    results = lm_results.unpacked(state)["methods"]
    assert results.machine["commit"] == "abc"
    same = [
        (folder / name / "methods/jobs/nope.seed-0/result.json").read_text()
        for name in ("first", "second")
    ]
    assert same[0] == same[1]  # it was not run again


def test_a_plan_tries_all_rates_then_runs_the_other_seeds_and_packs_pictures_of_the_best(
    state: Path, tmp_path: Path
) -> None:
    results = lm_results.unpacked(state)["rates"]
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
    for name, config in small.experiments.items():
        assert config.data == str(tmp_path / "corpus.safetensors")
        assert config.methods == plan.experiments[name].methods[:2]
        assert (len(config.learning_rates), config.seeds) == (2, 2)


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
    joined.save(tmp_path / "lm.json")
    last = [*more, replace(jobs[0], seed=2)]  # and once more from there
    again = lm_gpu.with_commits(last, tmp_path / "lm.json", found)
    assert again["commits"]["def"] == ["nope.1", "nope.2"]


def test_results_are_written_small_and_with_the_figures_of_their_experiment(
    state: Path, tmp_path: Path
) -> None:
    lm_results.main(["--state", str(state), "--out", str(tmp_path)])
    found = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.*")}
    assert found == {"methods/lm.json", "rates/lm.json"}  # names that no figure is drawn for
    results = lm_results.unpacked(state)["methods"]
    for name, figures in {
        "python": {"length.png", "curves.png"},
        "toeplitz": {"tables.png"},
        "python_long": set(),
    }.items():
        lm_results.write(name, results, tmp_path)
        assert {path.name for path in (tmp_path / name).iterdir()} == {"lm.json"} | figures
        written = Language.load(tmp_path / name / "lm.json")
        kept, given = ([x.loss for job in y.jobs for x in job.losses] for y in (written, results))
        assert kept == given
        assert written.config["data"] == "corpus.safetensors"  # not where it stood
        assert all(not job.attention for job in written.jobs)
        assert any(job.stated for job in written.jobs) == bool(figures)


def test_a_thinned_result_keeps_the_lags_that_were_seen_and_a_sparse_map(
    state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lm_results, "MAP", 5)
    nope, learned = lm_results.unpacked(state)["methods"].jobs
    after = np.asarray([[0.5, np.nan, 1.0], [0.25, np.nan, np.nan]], np.float32)
    seen = LagView(0, "bias", np.asarray([-1, 0, 1], np.float32), after + 1, after)
    given = replace(
        Language({"data": "/far/away.txt", "valid": None}, {}, {}, ()),
        jobs=(replace(nope, stated=(seen, seen)), replace(learned, stated=(seen, seen))),
    )
    with_pictures = lm_results.thinned(given, pictures=True)
    assert with_pictures.config == {"data": "away.txt", "valid": None}
    assert [len(job.stated) for job in with_pictures.jobs] == [1, 2]  # nope has no parameters
    view = with_pictures.jobs[0].stated[0]
    assert view.lag.tolist() == [-1, 1]
    np.testing.assert_array_equal(view.after, after[:, [0, 2]])
    np.testing.assert_array_equal(view.before, after[:, [0, 2]] + 1)
    places = [0, 8, 16, 23, 31]
    assert learned.gram_after is not None
    np.testing.assert_array_equal(
        with_pictures.jobs[1].gram_after, learned.gram_after[np.ix_(places, places)]
    )
    bare = lm_results.thinned(given, pictures=False)
    assert [(job.stated, job.gram_after) for job in bare.jobs] == [((), None)] * 2
