"""The results of `whence lm`: the same model trained with each method, and their ranking."""

from dataclasses import dataclass, replace
from statistics import fmean, median, stdev
from typing import Any

import numpy as np

from whence.analysis.json_result import AGAIN, Array, Result
from whence.analysis.results import Toeplitzness
from whence.checks import require

EMPTY = np.zeros(0, np.float32)
SCRATCH, SLIDING = "from scratch", "sliding"


@dataclass(frozen=True, eq=False)
class LengthLoss(Result):
    """The loss of one model on sequences of one length; None with the reason where it has none.

    From scratch: sequences side by side, every token scored, the first ones with little before
    them. Sliding: windows that overlap by half, the second half of each scored.
    """

    length: int
    how: str  # SCRATCH or SLIDING
    loss: float | None  # nats a scored token
    accuracy: float | None  # share of scored tokens whose most likely prediction is right
    tokens: int  # scored
    position: Array  # [bins] mean place in the sequence
    by_position: Array  # [bins] mean loss there; empty for windows that slide
    why_not: str = ""


@dataclass(frozen=True, eq=False)
class Trace(Result):
    """Toeplitzness of the learned table at one step of training."""

    step: int
    table: Toeplitzness


@dataclass(frozen=True, eq=False)
class LagView(Result):
    """One number for each head and lag of a layer, before and after training; NaN: never seen."""

    layer: int
    quantity: str
    lag: Array  # [l] lag = key - query
    before: Array  # [h, l]
    after: Array  # [h, l]

    def __post_init__(self) -> None:
        shapes = [list(part.shape) for part in (self.lag, self.before, self.after)]
        require(
            self.before.shape == self.after.shape == (*self.after.shape[:1], *self.lag.shape)
            and self.lag.ndim == 1,
            f"a LagView needs lags [l] and values [h, l] before and after, got {shapes}. {AGAIN}",
        )


@dataclass(frozen=True, eq=False)
class Job(Result):
    """One method trained with one seed."""

    method: str
    seed: int
    fingerprint: str  # of the experiment that it belongs to
    stopped: str  # "" or why training ended early
    losses: tuple[LengthLoss, ...]
    steps: Array  # [logs] of the training curve
    train_loss: Array  # [logs] mean since the log before
    tokens_a_second: float | None
    side_by_side: int  # jobs that shared the device, the most; alone it is 1
    peak_bytes: int | None  # of the GPU's memory, or of the process on a CPU
    parameters: int
    positional: int  # those of them that are the method's
    toeplitz: tuple[Trace, ...]
    gram_before: Array | None  # [n, n] P = E E^T of a learned table
    gram_after: Array | None
    stated: tuple[LagView, ...]  # what the method itself adds at each lag
    attention: tuple[LagView, ...]  # mean attention weight at each lag, on validation data
    learning_rate: float = 0.0  # 0 in files of versions that did not say
    tuning_loss: float | None = None  # on data that is not reported, where rates were compared

    def loss(self, length: int, how: str = SCRATCH) -> LengthLoss | None:
        """The loss at a length, if it was asked for."""
        return next((x for x in self.losses if (x.length, x.how) == (length, how)), None)

    def lighter(self) -> "Job":
        """Without what is shown of one seed alone."""
        return replace(self, stated=(), attention=(), gram_before=None, gram_after=None)


@dataclass(frozen=True, eq=False)
class Tuning(Result):
    """One learning rate that a method tried with seed 0; no loss where training ended early."""

    method: str
    learning_rate: float
    loss: float | None  # nats a token, on data that is not reported


@dataclass(frozen=True, eq=False)
class Language(Result):
    """Everything `whence lm` found: methods x seeds on one data set.

    Where each method chose among several learning rates, `jobs` are those at its chosen rate, and
    `tuning` says what it chose from.
    """

    config: dict[str, Any]
    data: dict[str, Any]
    machine: dict[str, Any]
    jobs: tuple[Job, ...]
    tuning: tuple[Tuning, ...] = ()

    @property
    def methods(self) -> tuple[str, ...]:
        """In the order in which they were given."""
        return tuple(dict.fromkeys(job.method for job in self.jobs))

    @property
    def lengths(self) -> tuple[int, ...]:
        """At which the models were tested."""
        return tuple(sorted({int(n) for n in self.config["eval_lengths"]}))

    @property
    def side_by_side(self) -> int:
        """The most jobs that shared a device; 1 where each speed is that of a job alone."""
        return max((job.side_by_side for job in self.jobs), default=1)


@dataclass(frozen=True, eq=False)
class Mean(Result):
    """A number over seeds: mean and standard deviation (None for one seed)."""

    mean: float
    spread: float | None
    n: int


@dataclass(frozen=True, eq=False)
class Row(Result):
    """One method in the table; `scratch` and `sliding` go with the lengths of the results."""

    method: str
    scratch: tuple[Mean | None, ...]
    sliding: tuple[Mean | None, ...]
    accuracy: tuple[Mean | None, ...]  # from scratch
    tokens_a_second: float | None  # median over seeds that had the device for themselves
    peak_bytes: int | None  # the most
    positional: int
    parameters: int
    stopped: tuple[str, ...]  # a sentence for each seed that ended early
    why_not: tuple[str, ...]  # for each length that could not be run
    learning_rate: float = 0.0  # that of all its seeds


def ranked(results: Language) -> tuple[Row, ...]:
    """One row for each method, ordered by the loss at the length of training.

    A method with a seed that ended early comes last, without a mean: a mean over the other seeds
    would flatter it.

        >>> from pathlib import Path
        >>> results = Language.load(Path("out/lm.json"))  # of whence lm --out out
        >>> [row.method for row in ranked(results)]
        ['tisa', 'rope']
    """
    rows = [_row(results, method) for method in results.methods]
    home = results.lengths.index(int(results.config["train_length"]))

    def key(row: Row) -> tuple[bool, float]:
        found = row.scratch[home]
        return found is None, 0.0 if found is None else found.mean

    return tuple(sorted(rows, key=key))


def _row(results: Language, method: str) -> Row:
    jobs = [job for job in results.jobs if job.method == method]

    def over_seeds(length: int, how: str, field: str) -> Mean | None:
        found = [job.loss(length, how) for job in jobs]
        values = [None if x is None else getattr(x, field) for x in found]
        known = [float(value) for value in values if value is not None]
        return mean(known) if len(known) == len(values) else None

    alone = [job.tokens_a_second for job in jobs if job.side_by_side == 1]
    speeds = [speed for speed in alone if speed is not None]
    peaks = [job.peak_bytes for job in jobs if job.peak_bytes is not None]
    lengths = results.lengths
    reasons = dict.fromkeys(x.why_not for job in jobs for x in job.losses if x.why_not)
    return Row(
        method,
        tuple(over_seeds(n, SCRATCH, "loss") for n in lengths),
        tuple(over_seeds(n, SLIDING, "loss") for n in lengths),
        tuple(over_seeds(n, SCRATCH, "accuracy") for n in lengths),
        median(speeds) if speeds else None,
        max(peaks) if peaks else None,
        jobs[0].positional,
        jobs[0].parameters,
        tuple(f"seed {job.seed}: {job.stopped}" for job in jobs if job.stopped),
        tuple(reasons),
        jobs[0].learning_rate,
    )


def mean(values: list[float]) -> Mean:
    """Of one number or more."""
    return Mean(fmean(values), stdev(values) if len(values) > 1 else None, len(values))
