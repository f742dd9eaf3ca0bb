"""The time of steps that take turns, and how much of the machine others took meanwhile.

A step that shares the cores with another process says little: threads wait for each other, and a
wait costs a slice of the scheduler's, not microseconds. So the system's own count of busy time,
less ours, is kept beside each time, and steps that were disturbed are taken again.
"""

import gc
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

MORE = 2  # rounds at the most, as a multiple of those asked for, while others disturb
SHARE, SLACK = 0.1, 0.03  # of a core, and seconds: the system counts in hundredths of a second


@dataclass(frozen=True)
class Sample:
    """Seconds of one step: on the clock, on our cores, and on the cores by others."""

    wall: float
    cpu: float
    others: float

    @property
    def disturbed(self) -> bool:
        """Whether others took more than the counters' own uncertainty."""
        return self.others > SHARE * self.wall + SLACK


def settle_malloc() -> None:
    """Bring glibc's malloc where the first training step of any model brings it.

    It gives large freed blocks back to the system, and every page of the next one costs a fault,
    until a block of up to 32 MiB has been freed: from then on it keeps blocks of that size. Without
    this a step's time depends on what happened to run before it.
    """
    block = torch.ones(31 << 20, dtype=torch.uint8)
    del block


def busy() -> float:
    """Seconds that all cores together have been at work, stolen time included; 0 if unknown."""
    try:
        fields = Path("/proc/stat").read_text().split(maxsplit=9)[1:9]
    except OSError:
        return 0.0
    user, nice, system, _idle, _wait, irq, softirq, steal = map(int, fields)
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def sample(step: Callable[[], object]) -> Sample:
    """One step, timed."""
    gc.collect()
    all_before, cpu_before, before = busy(), time.process_time(), time.perf_counter()
    step()
    wall, cpu = time.perf_counter() - before, time.process_time() - cpu_before
    return Sample(wall, cpu, max(0.0, busy() - all_before - cpu))


def take_turns(steps: dict[str, Callable[[], object]], repeats: int) -> dict[str, list[Sample]]:
    """`repeats` samples of each step, after one that does not count.

    A round starts with another step each time, so that none always follows the same one. While
    some step has too few undisturbed samples there are more rounds, up to a limit; what is kept are
    the least disturbed.
    """
    samples: dict[str, list[Sample]] = {name: [] for name in steps}
    settle_malloc()
    for step in steps.values():
        step()
    names = list(steps)
    for turn in range(MORE * repeats if steps else 0):
        start = turn % len(names)
        for name in names[start:] + names[:start]:
            if sum(not s.disturbed for s in samples[name]) < repeats:
                samples[name].append(sample(steps[name]))
    return {name: quietest(found, repeats) for name, found in samples.items()}


def quietest(samples: list[Sample], count: int) -> list[Sample]:
    """Undisturbed samples first; of the disturbed, those that others took the least from."""
    return sorted(samples, key=lambda s: s.others / s.wall if s.disturbed else 0.0)[:count]


def summary(samples: list[Sample]) -> dict[str, float]:
    """Median and 20 and 80 % quantiles of the wall time; our cores and the others' beside it."""
    wall = [s.wall for s in samples]
    cuts = statistics.quantiles(wall, n=5, method="inclusive") if len(wall) > 1 else wall
    return {
        "median": statistics.median(wall),
        "q20": cuts[0],
        "q80": cuts[-1],
        "cpu": statistics.median(s.cpu for s in samples),
        "others": statistics.median(s.others for s in samples),
        "disturbed": sum(s.disturbed for s in samples) / len(samples),
    }
