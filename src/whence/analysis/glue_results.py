"""The results of `whence glue`: a model fine-tuned on GLUE with and without a method, Table 3."""

import math
from dataclasses import dataclass, replace
from itertools import product
from statistics import fmean, median, stdev, variance
from typing import Any

import numpy as np

from whence.analysis.json_result import Array, Result
from whence.analysis.lm_results import LagView

KEPT, DROPPED = "a", "b"  # the slides' forms: with the model's own position embeddings, and without
FORMS = {KEPT: "with position embeddings", DROPPED: "without position embeddings"}
DRAWS = 10_000  # resamplings of seeds behind an interval
Points = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True, eq=False)
class SplitScores(Result):
    """The metrics of one dev set, in percent, and what the model said of each row."""

    split: str  # "" where a task has one dev set; "matched" and "mismatched" of MNLI
    metrics: dict[str, float]
    predictions: Array  # [rows] number of the class, or the score of STS-B


@dataclass(frozen=True, eq=False)
class GlueJob(Result):
    """A model fine-tuned on one task in one form, with S kernels and one seed; 0 is the baseline.

    `score` is the mean of all metrics of the task, as GLUE's own average takes it; None where
    training ended early.
    """

    task: str
    form: str  # KEPT or DROPPED
    kernels: int
    seed: int
    fingerprint: str  # of the experiment that it belongs to
    data_sha256: str  # of the rows of the task
    stopped: str  # "" or why training ended early
    score: float | None
    scores: tuple[SplitScores, ...]
    steps: Array  # [logs] of the training curve
    train_loss: Array  # [logs] mean since the log before
    seconds: float  # of training and testing, alone or beside other jobs
    parameters: int
    positional: int  # those of them that the method brought
    curves: tuple[LagView, ...]  # what the method adds at each lag, before and after

    def lighter(self) -> "GlueJob":
        """Without what is shown of one seed alone, and without predictions."""
        empty = np.zeros(0, np.float32)
        return replace(
            self,
            curves=(),
            scores=tuple(replace(part, predictions=empty) for part in self.scores),
        )


@dataclass(frozen=True, eq=False)
class Glue(Result):
    """Everything that `whence glue` found: tasks x forms x kernels x seeds."""

    config: dict[str, Any]
    data: dict[str, Any]
    machine: dict[str, Any]
    jobs: tuple[GlueJob, ...]

    @property
    def tasks(self) -> tuple[str, ...]:
        """In the order of the configuration."""
        return tuple(self.config["tasks"])

    @property
    def forms(self) -> tuple[str, ...]:
        """In the order of the slides."""
        return tuple(sorted(self.config["forms"]))

    @property
    def kernels(self) -> tuple[int, ...]:
        """S of each column but the baseline's."""
        return tuple(sorted(s for s in self.config["kernels"] if s > 0))

    def scores(self, task: str, form: str, kernels: int) -> dict[int, float]:
        """The score of each seed that has one."""
        return {
            job.seed: job.score
            for job in self.jobs
            if (job.task, job.form, job.kernels) == (task, form, kernels) and job.score is not None
        }


@dataclass(frozen=True, eq=False)
class Cell(Result):
    """One number of the table: the median over seeds, and their spread."""

    median: float
    spread: float | None  # standard deviation; None for one seed
    n: int


@dataclass(frozen=True, eq=False)
class Difference(Result):
    """Scores with S kernels less those of the baseline, seed by seed.

    A seed draws the head of the model and the order of the rows, for both alike. `low` and `high`
    are the 95% interval of the mean and `p` its probability by chance, of Student's paired test:
    None with fewer than two seeds, or where all differences are the same.
    """

    kernels: int
    mean: float
    low: float | None
    high: float | None
    p: float | None
    better: int  # seeds
    n: int


@dataclass(frozen=True, eq=False)
class GlueRow(Result):
    """A task in one form, in the slides' layout, with a test for each number of kernels.

    `delta` is the median of the best S less the baseline's, `reduction` delta / (100 - baseline).
    """

    task: str
    form: str
    baseline: Cell | None
    cells: tuple[Cell | None, ...]  # for each S
    delta: float | None
    reduction: float | None
    differences: tuple[Difference | None, ...]  # for each S


@dataclass(frozen=True, eq=False)
class WonBack(Result):
    """What S kernels win back of what leaving the position embeddings out loses.

    The mean over seeds of form (b) with S less form (b) without, over the mean of form (a) without
    kernels less form (b) without. `low` and `high` bound 95% of the shares of resampled seeds; None
    with fewer than two seeds, or where some resampled seeds lose nothing: a share of it is none.
    """

    task: str
    kernels: int
    lost: float  # in points
    won: float
    share: float | None
    low: float | None
    high: float | None
    n: int


def table(results: Glue) -> tuple[GlueRow, ...]:
    """All rows, form by form."""
    return tuple(_row(results, task, form) for form in results.forms for task in results.tasks)


def won_back(results: Glue) -> tuple[WonBack, ...]:
    """For each task and S where both forms were run."""
    if set(results.forms) != {KEPT, DROPPED}:
        return ()
    cells = product(results.tasks, results.kernels)
    found = ((task, s, _lost_and_won(results, task, s)) for task, s in cells)
    return tuple(_share(task, s, [pair]) for task, s, pair in found if pair.size)


def _row(results: Glue, task: str, form: str) -> GlueRow:
    baseline = _cell(results.scores(task, form, 0))
    cells = [_cell(results.scores(task, form, s)) for s in results.kernels]
    known = [cell.median for cell in cells if cell is not None]
    delta = reduction = None
    if baseline is not None and known:
        delta = max(known) - baseline.median
        reduction = delta / (100 - baseline.median) if baseline.median < 100 else None
    apart = {s: _apart(results, task, form, s) for s in results.kernels}
    return GlueRow(
        task,
        form,
        baseline,
        tuple(cells),
        delta,
        reduction,
        tuple(_difference(s, [found]) if found else None for s, found in apart.items()),
    )


def _cell(scores: dict[int, float]) -> Cell | None:
    values = list(scores.values())
    if not values:
        return None
    return Cell(median(values), stdev(values) if len(values) > 1 else None, len(values))


def mean_difference(results: Glue, form: str, kernels: int) -> Difference | None:
    """The mean over tasks of what S kernels add, every task weighing the same."""
    found = [_apart(results, task, form, kernels) for task in results.tasks]
    known = [apart for apart in found if apart]
    return _difference(kernels, known) if known else None


def mean_won_back(results: Glue, kernels: int) -> WonBack | None:
    """What is won back in all tasks over what is lost in all of them; its task is ""."""
    if set(results.forms) != {KEPT, DROPPED}:
        return None
    found = [_lost_and_won(results, task, kernels) for task in results.tasks]
    known = [pair for pair in found if pair.size]
    return _share("", kernels, known) if known else None


def _apart(results: Glue, task: str, form: str, kernels: int) -> list[float]:
    """Scores less those of the baseline, a number a seed that has both."""
    base, scores = results.scores(task, form, 0), results.scores(task, form, kernels)
    return [scores[seed] - base[seed] for seed in sorted(base.keys() & scores.keys())]


def _difference(kernels: int, tasks: list[list[float]]) -> Difference:
    """Of the differences of each task; the degrees of freedom are Welch's, of one task Student's.

    The mean of the tasks' means has the variance sum(s_i^2 / n_i) / tasks^2.
    """
    mean = fmean(fmean(apart) for apart in tasks)
    better, n = sum(x > 0 for apart in tasks for x in apart), sum(map(len, tasks))
    if min(map(len, tasks)) < 2 or max(map(stdev, tasks)) == 0:
        return Difference(kernels, mean, None, None, None, better, n)
    from scipy.stats import t

    parts = [variance(apart) / len(apart) for apart in tasks]
    squares = (part**2 / (len(apart) - 1) for part, apart in zip(parts, tasks, strict=True))
    freedom = sum(parts) ** 2 / sum(squares)
    error = math.sqrt(sum(parts)) / len(tasks)
    half = float(t.ppf(0.975, freedom)) * error
    p = 2 * float(t.sf(abs(mean) / error, freedom))
    return Difference(kernels, mean, mean - half, mean + half, p, better, n)


def _lost_and_won(results: Glue, task: str, kernels: int) -> Points:
    """[2, seeds]: points that leaving the embeddings out loses, and that S kernels win back."""
    kept, dropped = results.scores(task, KEPT, 0), results.scores(task, DROPPED, 0)
    scores = results.scores(task, DROPPED, kernels)
    seeds = sorted(kept.keys() & dropped.keys() & scores.keys())
    lost = [kept[seed] - dropped[seed] for seed in seeds]
    return np.asarray([lost, [scores[seed] - dropped[seed] for seed in seeds]], np.float64)


def _share(task: str, kernels: int, pairs: list[Points]) -> WonBack:
    """Of lost and won [2, seeds] of each task, whose seeds are resampled for the interval."""
    lost, won = np.mean([pair.mean(axis=1) for pair in pairs], axis=0).tolist()
    share = won / lost if lost > 0 else None
    low = high = None
    if share is not None and min(pair.shape[1] for pair in pairs) > 1:
        draw = np.random.default_rng(0).integers
        drawn = [pair[:, draw(pair.shape[1], size=(DRAWS, pair.shape[1]))] for pair in pairs]
        losses, wins = np.mean([part.mean(axis=2) for part in drawn], axis=0)
        if losses.min() > 0:
            low, high = np.quantile(wins / losses, (0.025, 0.975)).tolist()
    n = sum(pair.shape[1] for pair in pairs)
    return WonBack(task, kernels, lost, won, share, low, high, n)
