"""`whence lm` killed, on two processes, on Ray: the numbers are those of one undisturbed run."""

import os
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lm_settings import assert_same_numbers, flags, same, text_file, tiny
from processes import CONTEXT, free_port, run, run_two
from whence.analysis.lm_results import Job, Language
from whence.experiments import LMConfig, job_queue, run_lm
from whence.experiments.checkpoints import mark_whole
from whence.experiments.progress import OutOfTimeError

SCRIPT = Path(__file__).resolve().with_name("killed.py")


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)  # sums of two threads come out in another order


@pytest.mark.parametrize("at_random", [0, pytest.param(5, marks=pytest.mark.slow)])
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_run_that_was_killed_ends_with_the_numbers_of_one_that_was_not(
    tmp_path: Path, at_random: int
) -> None:
    """Killed in the middle of a checkpoint, before its mark, and so many times anywhere."""
    seed = str(time.time_ns() % 10_000)
    options = ("--seed", seed, "--kills", str(at_random))
    done = run(str(SCRIPT), str(tmp_path), *options, folder=tmp_path)
    assert done.returncode == 0, f"seed {seed}: {done.stderr[-3000:]}"
    *counts, last = done.stdout.splitlines()
    assert last == "killed in a checkpoint and before its mark, equal results"
    assert len(Language.load(tmp_path / "whole" / "lm.json").jobs) == 2
    assert [line.split()[1] for line in counts][-1:] == ([str(at_random)] if at_random else [])


def test_a_run_in_slices_of_time_ends_with_the_numbers_of_a_whole_one(tmp_path: Path) -> None:
    """Masks are drawn anew for each sequence, and are the same ones nevertheless."""
    config = tiny(text_file(tmp_path), ("t5",), objective="masked", dropout=0.1)
    whole = run_lm(config, tmp_path / "whole")
    slices = 0
    while True:
        try:
            sliced = run_lm(config, tmp_path / "sliced", deadline=time.monotonic())
        except OutOfTimeError:
            slices += 1
            assert (tmp_path / "sliced" / "lm.json").is_file()  # what is done, is written
            continue
        break
    assert slices == 5  # at each log before the last
    same(sliced, whole)


def test_a_run_shorter_than_save_every_is_saved_when_the_time_is_spent_and_else_never(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved: list[int] = []

    def noted(folder: Path, step: int) -> None:
        saved.append(step)
        mark_whole(folder, step)

    monkeypatch.setattr("whence.experiments.monitor.mark_whole", noted)
    config = tiny(text_file(tmp_path), save_every=14)
    whole = run_lm(config, tmp_path / "whole")
    assert saved == []
    with pytest.raises(OutOfTimeError):
        run_lm(config, tmp_path / "parts", deadline=time.monotonic())
    same(run_lm(config, tmp_path / "parts"), whole)
    assert saved == [2]


def test_a_finished_job_is_not_run_again_and_more_jobs_join_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny(text_file(tmp_path))
    first = run_lm(config, tmp_path / "out")
    path = tmp_path / "out" / "jobs" / "tisa.seed-0" / "result.json"
    written = path.stat().st_mtime_ns
    more = run_lm(replace(config, methods=("rope", "tisa"), seeds=2), tmp_path / "out")
    assert [(job.method, job.seed) for job in more.jobs] == [
        ("rope", 0),
        ("rope", 1),
        ("tisa", 0),
        ("tisa", 1),
    ]
    assert path.stat().st_mtime_ns == written
    assert_same_numbers(more.jobs[2], first.jobs[0])
    assert more.jobs[2].losses[0].loss != more.jobs[3].losses[0].loss
    assert more.jobs[2].attention
    assert not more.jobs[3].attention  # pictures are of a method's first seed

    def never(*_: object, **__: object) -> None:
        raise AssertionError("trained again")

    monkeypatch.setattr("whence.experiments.lm.sweep.train", never)
    same(run_lm(config, tmp_path / "out"), first)


def test_results_keep_the_machine_that_they_are_from(tmp_path: Path) -> None:
    config, out = tiny(text_file(tmp_path)), tmp_path / "out"
    run_lm(config, out, machine={"gpu": "first"})
    assert run_lm(config, out, machine={"gpu": "second"}).machine == {"gpu": "first"}
    more = replace(config, methods=("tisa", "nope"))
    assert run_lm(more, out, machine={"gpu": "second"}).machine == {"gpu": "second"}
    assert Language.load(out / "lm.json").machine == {"gpu": "second"}


@pytest.mark.slow
def test_two_processes_have_the_loss_curve_of_one(tmp_path: Path) -> None:
    if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
        pytest.skip("needs torch.distributed with gloo")
    config = tiny(text_file(tmp_path), ("tisa+learned",))
    one = run_lm(config, tmp_path / "one").jobs[0]
    command = ("-m", "whence", "lm", *flags(config), "--out", str(tmp_path / "two"))
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    ends = run_two(*command, folder=tmp_path, **meeting)
    for end in ends:
        assert end.returncode == 0, end.stderr[-3000:]
    assert "page.html" in ends[0].stdout
    assert ends[1].stdout == ""  # the first one alone speaks
    two = Language.load(tmp_path / "two" / "lm.json").jobs[0]
    near = {"rtol": 0.0, "atol": 1e-4}
    torch.testing.assert_close(
        torch.from_numpy(two.train_loss), torch.from_numpy(one.train_loss), **near
    )
    for a, b in zip(two.losses, one.losses, strict=True):
        torch.testing.assert_close(a.loss, b.loss, **near)


@pytest.fixture(scope="module")
def serial(tmp_path_factory: pytest.TempPathFactory) -> tuple[LMConfig, Language]:
    """A sweep in turn, of which the second seed needs what the rates have found."""
    folder = tmp_path_factory.mktemp("serial")
    rates = {"learning_rates": (1e-7, 1e-2), "tuning_tokens": 64, "seeds": 2, "steps": 4}
    config = tiny(text_file(folder), **rates)
    return config, run_lm(config, folder / "out")


def test_a_sweep_in_worker_processes_gives_the_table_of_a_serial_one(
    serial: tuple[LMConfig, Language], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_queue.multiprocessing, "get_context", lambda how: CONTEXT)
    config, alone = serial
    parallel = run_lm(config, tmp_path / "out", workers=2)
    same(parallel, alone)
    assert [x.to_json() for x in parallel.tuning] == [x.to_json() for x in alone.tuning]
    assert [job.side_by_side for job in parallel.jobs] == [2, 2]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("local_ray")
def test_a_sweep_on_ray_gives_the_table_of_a_serial_one(
    serial: tuple[LMConfig, Language], tmp_path: Path
) -> None:
    config, alone = serial
    said: list[str] = []
    parallel = run_lm(
        config, tmp_path / "ray", ray="local", say=lambda what, share: said.append(what)
    )
    same(parallel, alone)
    assert said[1:] == [f"{n} of 3 jobs done" for n in (1, 2, 3)]
    assert [x.to_json() for x in parallel.tuning] == [x.to_json() for x in alone.tuning]
    assert [job.learning_rate for job in parallel.jobs] == [1e-2, 1e-2]


def test_a_job_goes_to_and_from_json_without_loss(tmp_path: Path) -> None:
    job = run_lm(tiny(text_file(tmp_path), ("learned",)), tmp_path / "out").jobs[0]
    again = Job.from_json(job.to_json())
    assert_same_numbers(again, job)
    assert again.to_json() == job.to_json()
