"""The jobs of a sweep in worker processes that share one device."""

import math
import time
import traceback
from multiprocessing.connection import Connection
from typing import Any

import torch

from whence.experiments.job import run_job
from whence.experiments.job_queue import (
    AT,
    DONE,
    FAILED,
    FAILURE,
    LATE,
    LOGS,
    LOOK,
    SPENT,
    in_a_line,
    log_to,
    received,
    share_out,
)
from whence.experiments.progress import JobsFailedError, OutOfTimeError, Say
from whence.experiments.sweep import J, R, Sweep
from whence.files import write_text

GRACE = 60.0  # seconds after the deadline that a job may take to save what it has


def run_in_workers(
    sweep: Sweep[J, R], workers: int, *, say: Say, deadline: float | None, side_by_side: int
) -> None:
    """All jobs of a sweep in this many processes, each of which makes the sweep once.

    On a CPU a worker has as many threads as this process, because their number changes the order of
    sums, and with it the last bits of a result.
    """
    until = math.inf if deadline is None else deadline
    threads = torch.get_num_threads() if sweep.device.type == "cpu" else 1
    given = (type(sweep), sweep.config, sweep.out, threads, deadline, side_by_side)
    total, why = sweep.n_jobs(), dict[J, str]()
    for jobs in sweep.waves():
        for job in jobs:
            if sweep.is_done(job):
                run_job(sweep, job)  # reads its result, and refuses that of another experiment
        why |= share_out(
            [job for job in jobs if not sweep.is_done(job)],
            _work,
            given,
            place=jobs.index,
            name=sweep.title,
            at_once=workers,
            until=until,
            end=until + GRACE,
            say=lambda line: say(line, sweep.n_done() / total),
        )
    if why and time.monotonic() > until:
        raise OutOfTimeError(SPENT)
    if why:
        job, reason = next(iter(why.items()))
        raise JobsFailedError(
            f"{len(why)} of {total} jobs failed, {sweep.title(job)} among them: {reason} "
            f"(all of it in {sweep.folder(job) / FAILURE})"
        )


def _work(pipe: Connection, number: int, given: Any) -> None:
    """Jobs of one sweep, in a process of its own."""
    kind, config, out, threads, deadline, side_by_side = given
    log_to(out / LOGS / f"{number}.txt")
    torch.set_num_threads(threads)
    sweep: Sweep[Any, Any] | None = None
    while (job := received(pipe)) is not None:
        last = time.monotonic()

        def tell(what: str, share: float) -> None:
            nonlocal last
            if time.monotonic() - last > LOOK:
                last = time.monotonic()
                pipe.send((AT, f"{what} {share:.0%}"))

        try:
            sweep = kind(config, out) if sweep is None else sweep
            run_job(sweep, job, say=tell, deadline=deadline, side_by_side=side_by_side)
        except OutOfTimeError as error:
            pipe.send((LATE, str(error)))
        except BrokenPipeError:  # the process that has the queue is gone
            return
        except Exception as error:
            if sweep is not None:
                write_text(sweep.folder(job) / FAILURE, traceback.format_exc())
            pipe.send((FAILED, in_a_line(error)))
            return
        else:
            (sweep.folder(job) / FAILURE).unlink(missing_ok=True)
            pipe.send((DONE, "done"))
