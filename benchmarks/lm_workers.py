"""Jobs shared out to processes on one device: one that fails says why and ends no other.

A process runs one job after another. After an error it is replaced by a new one, as its device may
be in no state to go on, and the job is tried once more at the end.
"""

import contextlib
import multiprocessing
import os
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

DONE, LATE, FAILED, AT = "done", "late", "failed", "at"  # what a process says of its job
TRIES = 2
HOPELESS = 3  # times as many failures as there are processes, and nothing done: all is in vain
NEWS, LOOK = 20.0, 1.0  # seconds between two lines on what runs, and between two looks
FAILURE = "failed.txt"

Job = tuple[str, int]  # method and seed
Work = Callable[[Connection, int, Any], None]


@dataclass
class Worker:
    """A process, the job that it is at, and how far it is."""

    process: BaseProcess
    pipe: Connection
    job: Job | None = None
    start: float = 0.0
    at: str = "starting"


def share_out(
    jobs: list[Job], work: Work, given: Any, *, at_once: int, end: float, say: Callable[[str], None]
) -> dict[Job, str]:
    """Run all jobs, `at_once` at a time, in order; gives the reason for each that is not done.

    work(pipe, place, given) receives jobs until None comes, and sends (kind, text) of each. By
    `end` (of time.monotonic) what still runs is ended.
    """
    context = multiprocessing.get_context("spawn")  # a fork would share the parent's threads
    waiting, tries = deque(jobs), dict.fromkeys(jobs, 0)
    left: dict[Job, str] = dict.fromkeys(jobs, "the time is spent")
    workers: list[Worker] = []
    late, started, failures, news = False, 0, 0, time.monotonic()

    def close(worker: Worker, why: str) -> None:
        """Go on without a worker; its job is tried again or given up."""
        nonlocal failures
        workers.remove(worker)
        worker.pipe.close()
        assert worker.job is not None
        left[worker.job] = why
        failures += 1
        again = tries[worker.job] < TRIES and not late
        say(f"{_name(worker.job)} FAILED: {why}{'; once more later' if again else ''}")
        if again:
            waiting.append(worker.job)

    while True:
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
                worker.job, worker.start = waiting.popleft(), time.monotonic()
                tries[worker.job] += 1
                worker.pipe.send(worker.job)
        busy = [worker for worker in workers if worker.job is not None]
        if len(left) == len(jobs) and failures > HOPELESS * at_once and waiting:
            say("nothing but failures: the rest is not tried")
            waiting.clear()
        if not busy:
            break
        if time.monotonic() > end:
            for worker in busy:
                worker.process.kill()
                left[worker.job] = "ended at the limit"
                say(f"{_name(worker.job)} ended at the limit, {worker.at}")
            break
        if time.monotonic() - news > NEWS:
            news = time.monotonic()
            say("  " + "; ".join(f"{_name(worker.job)} {worker.at}" for worker in busy))
        for pipe in wait([worker.pipe for worker in busy], LOOK):
            worker = next(one for one in busy if one.pipe is pipe)
            assert worker.job is not None
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
                done = sum(job not in left for job in jobs)
                say(f"{done}/{len(jobs)} {_name(worker.job)}: {text} ({took:.0f} s)")
                worker.job, worker.at = None, "starting"
    for worker in workers:
        with contextlib.suppress(OSError):  # one that died at rest
            worker.pipe.send(None)
    for worker in workers:
        worker.process.join(20)
        if worker.process.is_alive():
            worker.process.kill()
    return left


def lm_work(pipe: Connection, place: int, given: dict[str, Any]) -> None:
    """Jobs of a language-modelling experiment, in a process of its own."""
    logs = Path(given["out"]) / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    with (logs / f"{place}.txt").open("w") as log:  # what libraries remark goes there
        os.dup2(log.fileno(), sys.stderr.fileno())
    import torch

    from whence.analysis.language import Job as Found
    from whence.experiments import LMConfig, run_one
    from whence.experiments.folder import job_folder, prepared
    from whence.experiments.training import OutOfTimeError

    torch.set_num_threads(1)
    config, out = LMConfig.from_json(given["config"]), Path(given["out"])
    source = prepared(config, out)
    while (job := pipe.recv()) is not None:
        last = time.monotonic()

        def tell(what: str, share: float) -> None:
            nonlocal last
            if time.monotonic() - last > 2:
                last = time.monotonic()
                pipe.send((AT, f"{share:.0%}"))

        try:
            found: Found = run_one(
                config,
                *job,
                out,
                source=source,
                say=tell,
                deadline=given["deadline"],
                side_by_side=given["at_once"],
            )
        except OutOfTimeError as error:
            pipe.send((LATE, f"out of time at {str(error).rpartition(': ')[2]}"))
        except Exception as error:
            folder = job_folder(out, *job)
            folder.mkdir(parents=True, exist_ok=True)
            (folder / FAILURE).write_text(traceback.format_exc(), encoding="utf-8")
            line = next(iter(str(error).strip().splitlines()), "")
            pipe.send((FAILED, f"{type(error).__name__}: {line[:160]}"))
            return
        else:
            pipe.send((DONE, told(found)))


def told(job: Any) -> str:
    """A finished job in a few words."""
    if job.stopped:
        return f"STOPPED, {job.stopped}"
    found = [(x.length, x.loss) for x in job.losses if x.how == "from scratch"]
    losses = ", ".join("-" if loss is None else f"{loss:.3f}" for _, loss in found)
    last = float(job.train_loss[-1]) if len(job.train_loss) else float("nan")
    speed = f"{(job.tokens_a_second or 0) / 1e3:,.0f}k tokens/s"
    memory = f"{(job.peak_bytes or 0) / 1e9:.1f} GB"
    return f"train {last:.3f}, {losses}; {speed}, {memory}"


def _name(job: Job | None) -> str:
    return "" if job is None else f"{job[0]}.{job[1]}"
