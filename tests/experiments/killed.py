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


def ended(pid: int) -> int:
    """0, or the signal or failure that ended it."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


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


def run_with_kills(config: LMConfig, out: Path, pauses: Iterator[float]) -> int:
    """Run into `out` until it is done, killed after each of the pauses; the number of kills."""
    for kills, pause in enumerate(pauses):
        pid = child(config, out)
        time.sleep(pause)
        os.kill(pid, signal.SIGKILL)
        if ended(pid) == 0:
            return kills
    assert ended(child(config, out)) == 0
    return kills + 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--kills", type=int, required=True, help="at random points")
    options = parser.parse_args()
    torch.set_num_threads(1)
    folder, draw = options.folder, random.Random(options.seed)
    config = tiny(text_file(folder), ("tisa", "learned"), steps=24, dropout=0.1)
    start = time.monotonic()
    assert ended(child(config, folder / "whole")) == 0
    seconds = time.monotonic() - start
    whole, killed = Language.load(folder / "whole" / "lm.json"), folder / "killed"
    assert ended(child(config, killed, die_in_a_checkpoint)) == -signal.SIGKILL
    assert ended(child(config, killed, die_before_the_mark)) == -signal.SIGKILL
    assert ended(child(config, killed)) == 0
    same(Language.load(killed / "lm.json"), whole)
    assert not list(killed.glob("jobs/*/checkpoints"))
    kills = runs = 0
    while kills < options.kills:
        shutil.rmtree(killed)
        pauses = (draw.uniform(0, 0.7) * seconds for _ in range(options.kills - kills))
        kills, runs = kills + run_with_kills(config, killed, pauses), runs + 1
        same(Language.load(killed / "lm.json"), whole)
        assert not list(killed.glob("jobs/*/checkpoints"))
        print(f"killed {kills} times in {runs} runs, equal results", flush=True)
    print("killed in a checkpoint and before its mark, equal results", flush=True)
