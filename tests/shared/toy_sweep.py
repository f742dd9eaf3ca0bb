"""The smallest experiment there can be: it squares numbers, and some of them go wrong."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from whence.analysis.json_result import Result
from whence.experiments.config import fingerprint
from whence.experiments.folder import Experiment, claim
from whence.experiments.progress import OutOfTimeError, Say
from whence.experiments.sweep import Sweep


@dataclass(frozen=True, eq=False)
class Squares(Result):
    """The configuration: which numbers, of which one may be wrong or late."""

    numbers: tuple[int, ...]
    power: int = 2
    wrong: int = -1
    late: int = -1


class Number(NamedTuple):
    """One job."""

    number: int


@dataclass(frozen=True, eq=False)
class Squared(Result):
    """The result of one job."""

    fingerprint: str
    number: int
    square: int
    side_by_side: int


@dataclass(frozen=True, eq=False)
class AllSquared(Result):
    """The results of all jobs."""

    squares: tuple[Squared, ...]
    machine: dict[str, Any]


class SquareSweep(Sweep[Number, Squared]):
    """Every number is a job."""

    result = Squared
    results_file = "squares.json"

    def __init__(self, config: Squares, out: Path) -> None:
        super().__init__(config, out)
        fixed, sha256 = {"power": config.power}, hashlib.sha256(b"numbers").hexdigest()
        claim(out, Experiment(fixed, sha256), command="whence square")
        self.device = torch.device("cpu")
        self.fingerprint = fingerprint(fixed, sha256)

    def waves(self) -> Iterator[list[Number]]:
        yield [Number(n) for n in self.config.numbers]

    def n_jobs(self) -> int:
        return len(self.config.numbers)

    def job_name(self, job: Number) -> str:
        return f"number-{job.number}"

    def run(
        self, job: Number, folder: Path, *, say: Say, deadline: float | None, side_by_side: int
    ) -> Squared:
        say("squaring", 0.5)
        if job.number == self.config.wrong:
            raise ArithmeticError(f"{job.number} cannot be squared\nreally")
        if job.number == self.config.late:
            raise OutOfTimeError("late")
        with (self.out / "begun").open("a") as log:
            log.write(f"{job.number}\n")
        square = job.number**self.config.power
        return Squared(self.fingerprint, job.number, square, side_by_side)

    def gathered(self, machine: dict[str, Any]) -> AllSquared:
        done = [job for jobs in self.waves() for job in jobs if self.is_done(job)]
        found = tuple(Squared.load(self.folder(job) / "result.json") for job in done)
        return AllSquared(found, machine)
