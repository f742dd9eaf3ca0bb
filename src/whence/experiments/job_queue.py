"""Jobs shared out to processes on one device: one that fails says why and ends no other.

A process runs one job after another. After an error it is replaced by a new one, as its device may
be in no state to go on, and the job is tried once more at the end.
"""

import contextlib
import heapq
import multiprocessing
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from whence.files import open_log

DONE, LATE, FAILED, AT = "done", "late", "failed", "at"  # what a process says of its job
TRIES = 2
HOPELESS = 3  # times as many failures as there are processes, and nothing done: all is in vain
NEWS, LOOK = 20.0, 1.0  # seconds between two lines on what runs, and between two looks
FAILURE = "failed.txt"  # in the folder of a job: the traceback of its last failure
LOGS = "logs"  # in the folder of a sweep: what libraries print in each worker
SPENT = "the time is spent"

Job = Any  # anything that can be hashed and sent to a process
Work = Callable[[Connection, int, Any], None]


def log_to(path: Path) -> None:
    """What this process and its libraries print from now on goes to a file."""
    log = open_log(path)
    os.dup2(log, sys.stderr.fileno())
    os.close(log)


def received(pipe: Connection) -> Job | None:
    """The next job; None at the end, and when the process that has the queue is gone."""
    try:
        return pipe.recv()
    except EOFError:
        return None


def in_a_line(error: Exception) -> str:
    """The kind of an error and its first line."""
    line = next(iter(str(error).strip().splitlines()), "")
    return f"{type(error).__name__}: {line[:160]}"


@dataclass
class Worker:
    """A process, the job that it is at, and how far it is."""

    process: BaseProcess
    pipe: Connection
    job: Job | None = None
    start: float = 0.0
    at: str = "starting"


def share_out(
    jobs: list[Job],
    work: Work,
    given: Any,
    *,
    place: Callable[[Job], int],
    follow: Callable[[Job], list[Job]] = lambda job: [],
    name: Callable[[Job], str] = str,
    at_once: int,
    until: float,
    end: float,
    say: Callable[[str], None],
) -> dict[Job, str]:
    """Run all jobs, `at_once` at a time; gives the reason for each that is not done.

    A job with a smaller `place` is begun earlier, and `name` is how it is reported. `follow` gives
    the jobs that a finished one has made possible. work(pipe, number, given) receives jobs until
    None comes, and sends (kind, text) of each. No job is begun after `until`, and by `end` (both of
    time.monotonic) what still runs is ended.
    """
    context = multiprocessing.get_context("spawn")  # a fork would share the parent's threads
    tries = dict.fromkeys(jobs, 0)
    left: dict[Job, str] = dict.fromkeys(jobs, SPENT)
    waiting = [(1, place(job), job) for job in jobs]  # by try, then by place
    heapq.heapify(waiting)
    workers: list[Worker] = []
    late, started, failures, news = False, 0, 0, time.monotonic()

    def close(worker: Worker, why: str) -> None:
        """Go on without a worker; its job is tried again or given up."""
        nonlocal failures
        workers.remove(worker)
        worker.pipe.close()
        job = worker.job
        left[job] = why
        failures += 1
        again = tries[job] < TRIES and not late
        say(f"{name(job)} FAILED: {why}{'; once more later' if again else ''}")
        if again:
            heapq.heappush(waiting, (tries[job] + 1, place(job), job))

    while True:
        late = late or time.monotonic() > until
        idle = sum(worker.job is None for worker in workers)
        for _ in range(0 if late else min(len(waiting) - idle, at_once - len(workers))):
            ours, theirs = context.Pipe()
            process = context.Process(target=work, args=(theirs, started, given), daemon=True)
            process.start()
            theirs.close()
            workers.append(Worker(process, ours))
            started += 1
        for worker in workers:
            if worker.job is None and waiting and not late:
                worker.job, worker.start = heapq.heappop(waiting)[-1], time.monotonic()
                tries[worker.job] += 1
                worker.pipe.send(worker.job)
        busy = [worker for worker in workers if worker.job is not None]
        if len(left) == len(tries) and failures > HOPELESS * at_once and waiting:
            say("nothing but failures: the rest is not tried")
            waiting.clear()
        if not busy:
            break
        if time.monotonic() > end:
            for worker in busy:
                worker.process.kill()
                left[worker.job] = "ended at the limit"
                say(f"{name(worker.job)} ended at the limit, {worker.at}")
            break
        if time.monotonic() - news > NEWS:
            news = time.monotonic()
            say("  " + "; ".join(f"{name(worker.job)} {worker.at}" for worker in busy))
        for pipe in wait([worker.pipe for worker in busy], LOOK):
            worker = next(one for one in busy if one.pipe is pipe)
            try:
                kind, text = worker.pipe.recv()
            except (EOFError, OSError):
                worker.process.join(10)
                close(worker, f"its process ended with code {worker.process.exitcode}")
                continue
            if kind == AT:
                worker.at = text
            elif kind == FAILED:
                worker.process.join(10)
                close(worker, text)
            else:
                took = time.monotonic() - worker.start
                late = late or kind == LATE
                if kind == DONE:
                    del left[worker.job]
                    for job in follow(worker.job):
                        if job not in tries:
                            tries[job], left[job] = 0, SPENT
                            heapq.heappush(waiting, (1, place(job), job))
                done = len(tries) - len(left)
                say(f"{done}/{len(tries)} {name(worker.job)}: {text} ({took:.0f} s)")
                worker.job, worker.at = None, "starting"
    for worker in workers:
        with contextlib.suppress(OSError):  # one that died at rest
            worker.pipe.send(None)
    for worker in workers:
        worker.process.join(20)
        if worker.process.is_alive():
            worker.process.kill()
    return left
