"""The sweep that every experiment shares, on one that squares numbers."""

import time
from pathlib import Path
from typing import Any

import pytest

from processes import CONTEXT, free_port
from toy_sweep import AllSquared, Squares, SquareSweep
from whence.experiments import job_queue, run_sweep
from whence.experiments.progress import JobsFailedError, OutOfTimeError


@pytest.fixture(autouse=True)
def _fast_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_queue.multiprocessing, "get_context", lambda how: CONTEXT)


def squares(found: AllSquared) -> dict[int, int]:
    return {one.number: one.square for one in found.squares}


def begun(out: Path) -> list[int]:
    return sorted(int(line) for line in (out / "begun").read_text().split())


@pytest.mark.parametrize("workers", [1, 2])
def test_every_job_runs_once_and_more_jobs_join_it(tmp_path: Path, workers: int) -> None:
    said: list[tuple[str, float]] = []

    def run(*numbers: int, **more: Any) -> AllSquared:
        found: AllSquared = run_sweep(
            SquareSweep,
            Squares(numbers),
            tmp_path / "out",
            workers=workers,
            say=lambda what, share: said.append((what, share)),
            **more,
        )
        return found

    assert squares(run(1, 2, 3)) == {1: 1, 2: 4, 3: 9}
    assert squares(run(2, 3, 4)) == {2: 4, 3: 9, 4: 16}
    assert begun(tmp_path / "out") == [1, 2, 3, 4]
    found = run(2, machine={"gpu": "none"})
    assert AllSquared.load(tmp_path / "out" / "squares.json").machine == {"gpu": "none"}
    assert {one.side_by_side for one in found.squares} == {workers}
    if workers == 1:
        assert said[:2] == [("making the data ready", 0.0), ("number-1: squaring", 0.5 / 3)]
    else:
        assert any(what.startswith("3/3 number-") and share == 1 for what, share in said)


def test_a_job_that_fails_in_a_worker_ends_no_other_and_is_tried_again_by_the_same_command(
    tmp_path: Path,
) -> None:
    out = tmp_path / "out"
    with pytest.raises(JobsFailedError, match=r"1 of 3 jobs failed, number-2 .*cannot be squared"):
        run_sweep(SquareSweep, Squares((1, 2, 3), wrong=2), out, workers=2)
    assert squares(AllSquared.load(out / "squares.json")) == {1: 1, 3: 9}
    assert "really" in (out / "jobs" / "number-2" / "failed.txt").read_text()
    found = run_sweep(SquareSweep, Squares((1, 2, 3)), out, workers=2)
    assert squares(found) == {1: 1, 2: 4, 3: 9}
    assert begun(out) == [1, 2, 3]
    assert not (out / "jobs" / "number-2" / "failed.txt").exists()


@pytest.mark.parametrize("workers", [1, 2])
def test_a_sweep_whose_time_is_spent_keeps_what_is_done(tmp_path: Path, workers: int) -> None:
    out, past = tmp_path / "out", time.monotonic() - 1
    run_sweep(SquareSweep, Squares((1,)), out)
    with pytest.raises(OutOfTimeError, match="1 of 2 jobs are done"):
        run_sweep(SquareSweep, Squares((1, 2), late=2), out, workers=workers, deadline=past)
    assert squares(AllSquared.load(out / "squares.json")) == {1: 1}


def test_a_folder_of_another_experiment_and_ways_that_exclude_each_other_are_refused(
    tmp_path: Path,
) -> None:
    out = tmp_path / "out"
    run_sweep(SquareSweep, Squares((1,)), out)
    with pytest.raises(ValueError, match="another experiment: power is 2 there and 3 here"):
        run_sweep(SquareSweep, Squares((1,), power=3), out)
    with pytest.raises(ValueError, match="workers must be at least 1, got 0"):
        run_sweep(SquareSweep, Squares((1,)), tmp_path / "new", workers=0)
    with pytest.raises(ValueError, match="leave out torchrun and --ray, or the workers"):
        run_sweep(SquareSweep, Squares((1,)), tmp_path / "new", workers=2, ray="local")
    nobody = f"127.0.0.1:{free_port()}"
    for address, why in (("x", "--ray takes local, auto or"), (nobody, f"answers at {nobody}: ")):
        with pytest.raises(ValueError, match=why):
            run_sweep(SquareSweep, Squares((1,)), tmp_path / "new", ray=address)
    assert not (tmp_path / "new").exists()
