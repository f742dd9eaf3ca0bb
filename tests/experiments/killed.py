"""Runs a comparison in children that it kills with SIGKILL: run by test_killed.py.

Children are forked from a process that has imported everything and computed nothing, so that a
kill costs a second and not the start of a Python.
"""

import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

import whence.experiments.lm.training
import whence.experiments.monitor
import whence.models
from lm_settings import tiny
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


if __name__ == "__main__":
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    config = tiny(folder / "text.txt", ("tisa", "learned"), steps=24, dropout=0.1)
    start = time.monotonic()
    assert ended(child(config, folder / "whole")) == 0
    seconds = time.monotonic() - start
    assert ended(child(config, folder / "killed", die_in_a_checkpoint)) == -signal.SIGKILL
    assert ended(child(config, folder / "killed", die_before_the_mark)) == -signal.SIGKILL
    draw, kills = random.Random(int(sys.argv[2])), 2
    for _ in range(int(sys.argv[3])):
        pid = child(config, folder / "killed")
        time.sleep(draw.uniform(0.05, 0.25) * seconds)
        os.kill(pid, signal.SIGKILL)
        kills += ended(pid) == -signal.SIGKILL
    assert not (folder / "killed" / "lm.json").is_file()  # every kill came in time
    assert ended(child(config, folder / "killed")) == 0
    print(f"killed {kills} times", flush=True)
