"""A sweep: many independent jobs into one folder, in turn, in worker processes or on Ray.

An experiment is a subclass of `Sweep` (`lm/sweep.py` is one). It says which jobs a configuration
has, how one of them is run, and what their results come to. All else is here and is the same for
every experiment: a finished job is not run again, a killed one goes on, and any number of processes
may work in one folder.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import torch

from whence.analysis.json_result import Result
from whence.checks import at_least, at_most, require
from whence.experiments.folder import JOBS, RESULT
from whence.experiments.full_disk import full_disk_named
from whence.experiments.processes import processes
from whence.experiments.progress import JobsFailedError, OutOfTimeError, Say, silent

J = TypeVar("J", bound=tuple[Any, ...])
R = TypeVar("R", bound=Result)


class Sweep(ABC, Generic[J, R]):
    """One experiment in one folder: kind(config, out) makes the data ready and claims the folder.

    A job is a NamedTuple of plain values. Its result is a frozen `Result` that has a field for each
    of the job's, with the same value, and one more, `fingerprint`, with the sweep's. Worker
    processes make the sweep anew from its class, configuration and folder, so `config` must pickle.

        >>> from dataclasses import dataclass
        >>> from typing import NamedTuple
        >>> from whence.experiments.job import run_job
        >>> class Number(NamedTuple):
        ...     number: int
        >>> @dataclass(frozen=True, eq=False)
        ... class Square(Result):
        ...     fingerprint: str
        ...     number: int
        ...     square: int
        >>> @dataclass(frozen=True, eq=False)
        ... class Squares(Result):
        ...     squares: tuple[int, ...]
        >>> class SquareSweep(Sweep[Number, Square]):
        ...     result, results_file = Square, "squares.json"
        ...     device, fingerprint = torch.device("cpu"), "squares of whole numbers"
        ...
        ...     def waves(self):
        ...         yield [Number(number) for number in self.config]
        ...
        ...     def n_jobs(self):
        ...         return len(self.config)
        ...
        ...     def job_name(self, job):
        ...         return f"number-{job.number}"
        ...
        ...     def run(self, job, folder, *, say, deadline, side_by_side):
        ...         return Square(self.fingerprint, job.number, job.number**2)
        ...
        ...     def gathered(self, machine):
        ...         done = [job for jobs in self.waves() for job in jobs if self.is_done(job)]
        ...         return Squares(tuple(run_job(self, job).square for job in done))
        >>> run_sweep(SquareSweep, (2, 3), Path("squaring")).squares
        (4, 9)
    """

    result: ClassVar[type[Result]]  # of one job
    results_file: ClassVar[str]  # the name of the file with all results in the folder

    device: torch.device  # set by a subclass when it is made, and so is this:
    fingerprint: str  # of config.py, the same for all results of the folder

    def __init__(self, config: Any, out: Path) -> None:
        self.config, self.out = config, out

    @abstractmethod
    def waves(self) -> Iterator[list[J]]:
        """All jobs, in lists that each need the results of the lists before."""

    @abstractmethod
    def n_jobs(self) -> int:
        """How many jobs there are in all."""

    @abstractmethod
    def job_name(self, job: J) -> str:
        """A name for the job's folder, different for different jobs."""

    @abstractmethod
    def run(
        self, job: J, folder: Path, *, say: Say, deadline: float | None, side_by_side: int
    ) -> R | None:
        """Run one job, from the last whole checkpoint in its folder on, and return its result.

        Of several processes the first one returns the result, the others None. Past the deadline
        (of time.monotonic) it saves a checkpoint and raises OutOfTimeError. `side_by_side` is how
        many jobs share the device.
        """

    @abstractmethod
    def gathered(self, machine: dict[str, Any]) -> Result:
        """What all finished jobs come to; `machine` is where this sweep runs."""

    def title(self, job: J) -> str:
        """The job, as progress names it."""
        return self.job_name(job)

    def accept(self, job: J, result: R) -> None:
        """Refuse (ValueError) a finished result that does not serve this configuration."""

    def keeps_checkpoints(self, result: R) -> bool:
        """Whether the checkpoints of a finished job stay in its folder."""
        return False

    def folder(self, job: J) -> Path:
        """Where a job is kept."""
        return self.out / JOBS / self.job_name(job)

    def is_done(self, job: J) -> bool:
        """Whether the job has a result."""
        return (self.folder(job) / RESULT).is_file()

    def n_done(self) -> int:
        """How many jobs have a result."""
        return sum(self.is_done(job) for jobs in self.waves() for job in jobs)


def run_sweep(
    kind: type[Sweep[J, R]],
    config: Any,
    out: Path,
    *,
    machine: dict[str, Any] | None = None,
    say: Say = silent,
    deadline: float | None = None,
    ray: str | None = None,
    workers: int = 1,
    side_by_side: int = 1,
) -> Any:
    """Run the jobs that are not yet in `out`, write all results there and return them.

    `deadline` (of time.monotonic) ends a run in order: what is done is written, and OutOfTimeError
    is raised. `workers` processes take jobs from one queue and share the device; a job that fails
    there ends no other, and JobsFailedError is raised at the end. `ray` is the address of a
    cluster, or "local" for one on this machine; it must see the folder. `side_by_side` is how many
    jobs share the device while this runs, counting ours. `Sweep` has an experiment of one's own.

        >>> from whence.experiments.lm.config import LMConfig
        >>> from whence.experiments.lm.sweep import LMSweep
        >>> small = {"n_layers": 1, "n_heads": 2, "d_model": 16, "train_length": 16, "steps": 2}
        >>> brief = {"batch": 2, "warmup": 1, "eval_lengths": (16,), "eval_tokens": 32}
        >>> config = LMConfig(methods=("tisa",), task="copy", device="cpu", **small, **brief)
        >>> [job.method for job in run_sweep(LMSweep, config, Path("copying")).jobs]
        ['tisa']
    """
    at_least(1, side_by_side=side_by_side, workers=workers)
    at_most(1_000, side_by_side=side_by_side, workers=workers)
    require(
        deadline is None or (processes()[1] == 1 and ray is None),
        "a time limit is for one process: leave out torchrun and --ray, or the limit.",
    )
    require(
        workers == 1 or (processes()[1] == 1 and ray is None),
        "workers share the device of one process: leave out torchrun and --ray, or the workers.",
    )
    if ray is not None:
        from whence.experiments.on_ray import check_address

        check_address(ray)
    say("making the data ready", 0.0)
    sweep = kind(config, out)
    stopped: OutOfTimeError | JobsFailedError | None = None
    try:
        if ray is not None:
            from whence.experiments.on_ray import run_on_ray

            run_on_ray(sweep, address=ray, say=say, side_by_side=side_by_side)
        elif workers > 1:
            from whence.experiments.workers import run_in_workers

            run_in_workers(
                sweep, workers, say=say, deadline=deadline, side_by_side=max(side_by_side, workers)
            )
        else:
            _run_in_turn(sweep, say, deadline, side_by_side)
    except (OutOfTimeError, JobsFailedError) as error:
        stopped = error
    results = sweep.gathered(machine or {})
    if processes()[0] == 0:
        with full_disk_named(out):
            results.save(out / sweep.results_file)
    if isinstance(stopped, OutOfTimeError):
        raise OutOfTimeError(f"{sweep.n_done()} of {sweep.n_jobs()} jobs are done")
    if stopped is not None:
        raise stopped
    return results


def _run_in_turn(sweep: Sweep[J, R], say: Say, deadline: float | None, side_by_side: int) -> None:
    from whence.experiments.job import run_job

    total = sweep.n_jobs()
    for place, job in enumerate(job for jobs in sweep.waves() for job in jobs):

        def report(what: str, share: float, place: int = place, job: J = job) -> None:
            say(f"{sweep.title(job)}: {what}", (place + share) / total)

        run_job(sweep, job, say=report, deadline=deadline, side_by_side=side_by_side)
