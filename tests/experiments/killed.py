"""Runs a comparison in children that it kills with SIGKILL, and compares with an undisturbed run.

    PYTHONPATH=tests/shared python tests/experiments/killed.py FOLDER --seed 0 --kills 100

test_killed.py runs it with few kills. Children are forked from a process that has imported everything and computed nothing, so that a
kill costs a second and not the start of a Python.
"""

import argparse
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import torch

import whence.experiments.lm.training
import whence.experiments.monitor
import whence.models
from lm_settings import same, text_file, tiny
from whence.analysis.lm_results import Language
from whence.experiments import LMConfig, run_lm


def child(config: LMConfig, out: Path, prepare: Callable[[], None] = lambda: None) -> int:
    """A fork that runs the comparison; its process id."""
    pid = os.fork()
    if pid:
        return pid
    try:
        prepare()
        run_lm(config, out)
    except BaseException as error:
        print(repr(error), file=sys.stderr, flush=True)
        os._exit(1)
    os._exit(0)


def ended(pid: int) -> tuple[int, float]:
    """0, or the signal or failure that ended it, and the seconds of CPU time that it took."""
    _, status, used = os.wait4(pid, 0)
    return os.waitstatus_to_exitcode(status), used.ru_utime + used.ru_stime


def kill_after(pid: int, seconds: float) -> None:
    """Kill a process that has had so much CPU time, however busy the machine is."""
    process = psutil.Process(pid)
    while process.status() != psutil.STATUS_ZOMBIE:
        used = process.cpu_times()
        if used.user + used.system >= seconds:
            os.kill(pid, signal.SIGKILL)
            return
        time.sleep(0.005)


def die_in_a_checkpoint() -> None:
    """The second optimizer state is cut off in its middle, and the process with it."""
    whole, calls = torch.save, []

    def half(thing: object, path: str, *rest: object) -> None:
        calls.append(path)
        whole(thing, path, *rest)
        if len([p for p in calls if "optimizer" in str(p)]) == 2:
            os.truncate(path, os.path.getsize(path) // 2)
            os.kill(os.getpid(), signal.SIGKILL)

    torch.save = half  # type: ignore[assignment]


def die_before_the_mark() -> None:
    """A checkpoint whose files are all written, but nobody has said so."""

    def kill(folder: Path, step: int) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    whence.experiments.monitor.mark_whole = kill


def run_with_kills(config: LMConfig, out: Path, points: Iterator[float]) -> int:
    """Run into `out` until it is done, killed at each of the points; the number of kills."""
    kills = 0
    for seconds in points:
        pid = child(config, out)
        kill_after(pid, seconds)
        end, _ = ended(pid)
        if end == 0:
            return kills
        assert end == -signal.SIGKILL
        kills += 1
    assert ended(child(config, out))[0] == 0
    return kills


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--kills", type=int, required=True, help="at random points")
    options = parser.parse_args()
    torch.set_num_threads(1)
    folder, draw = options.folder, random.Random(options.seed)
    config = tiny(text_file(folder), ("tisa", "learned"), steps=24, dropout=0.1)
    end, seconds = ended(child(config, folder / "whole"))
    assert end == 0
    whole, killed = Language.load(folder / "whole" / "lm.json"), folder / "killed"
    assert ended(child(config, killed, die_in_a_checkpoint))[0] == -signal.SIGKILL
    assert ended(child(config, killed, die_before_the_mark))[0] == -signal.SIGKILL
    assert ended(child(config, killed))[0] == 0
    same(Language.load(killed / "lm.json"), whole)
    assert not list(killed.glob("jobs/*/checkpoints"))
    kills = runs = 0
    while kills < options.kills:
        shutil.rmtree(killed)
        points = (draw.uniform(0, 0.7) * seconds for _ in range(options.kills - kills))
        kills, runs = kills + run_with_kills(config, killed, points), runs + 1
        same(Language.load(killed / "lm.json"), whole)
        assert not list(killed.glob("jobs/*/checkpoints"))
        print(f"killed {kills} times in {runs} runs, equal results", flush=True)
    print("killed in a checkpoint and before its mark, equal results", flush=True)
