"""The results of `whence glue`: a model fine-tuned on GLUE with and without a method, Table 3."""

from dataclasses import dataclass, replace
from statistics import fmean, median, stdev
from typing import Any

import numpy as np

from whence.analysis.json_result import Array, Result
from whence.analysis.lm_results import LagView

KEPT, DROPPED = "a", "b"  # the slides' forms: with the model's own position embeddings, and without
FORMS = {KEPT: "with position embeddings", DROPPED: "without position embeddings"}
DRAWS = 10_000  # resamplings of seeds behind an interval


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
    with fewer than two seeds, or where the loss itself is not told from 0.
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
    found = [_won_back(results, task, s) for task in results.tasks for s in results.kernels]
    return tuple(one for one in found if one is not None)


def _row(results: Glue, task: str, form: str) -> GlueRow:
    base = results.scores(task, form, 0)
    columns = [results.scores(task, form, s) for s in results.kernels]
    baseline, cells = _cell(base), [_cell(column) for column in columns]
    known = [cell.median for cell in cells if cell is not None]
    delta = reduction = None
    if baseline is not None and known:
        delta = max(known) - baseline.median
        reduction = delta / (100 - baseline.median) if baseline.median < 100 else None
    pairs = zip(results.kernels, columns, strict=True)
    return GlueRow(
        task,
        form,
        baseline,
        tuple(cells),
        delta,
        reduction,
        tuple(_difference(s, base, column) for s, column in pairs),
    )


def _cell(scores: dict[int, float]) -> Cell | None:
    values = list(scores.values())
    if not values:
        return None
    return Cell(median(values), stdev(values) if len(values) > 1 else None, len(values))


def _difference(
    kernels: int, base: dict[int, float], scores: dict[int, float]
) -> Difference | None:
    seeds = sorted(base.keys() & scores.keys())
    if not seeds:
        return None
    apart = [scores[seed] - base[seed] for seed in seeds]
    low = high = p = None
    if len(apart) > 1 and stdev(apart) > 0:
        from scipy.stats import ttest_1samp

        test = ttest_1samp(apart, 0.0)
        bounds = test.confidence_interval(0.95)
        low, high, p = float(bounds.low), float(bounds.high), float(test.pvalue)
    better = sum(one > 0 for one in apart)
    return Difference(kernels, fmean(apart), low, high, p, better, len(apart))


def _won_back(results: Glue, task: str, kernels: int) -> WonBack | None:
    kept = results.scores(task, KEPT, 0)
    dropped = results.scores(task, DROPPED, 0)
    scores = results.scores(task, DROPPED, kernels)
    seeds = sorted(kept.keys() & dropped.keys() & scores.keys())
    if not seeds:
        return None
    lost = np.asarray([kept[seed] - dropped[seed] for seed in seeds])
    won = np.asarray([scores[seed] - dropped[seed] for seed in seeds])
    share = low = high = None
    if lost.mean() > 0:
        share = float(won.mean() / lost.mean())
    if share is not None and len(seeds) > 1:
        draws = np.random.default_rng(0).integers(len(seeds), size=(DRAWS, len(seeds)))
        losses = lost[draws].mean(axis=1)
        if np.quantile(losses, 0.025) > 0:
            shares = won[draws].mean(axis=1) / losses
            low, high = (float(np.quantile(shares, q)) for q in (0.025, 0.975))
    return WonBack(
        task, kernels, float(lost.mean()), float(won.mean()), share, low, high, len(seeds)
    )
