"""The results of `whence translate`: BLEU of each position, and how sure their differences are."""

from dataclasses import dataclass, replace
from statistics import fmean, stdev
from typing import Any

import numpy as np

from whence.analysis.json_result import Array, Result

VALID = "valid"  # the name of the validation text among a job's scores
EXAMPLES = 20  # translations that are kept of a position's first seed


@dataclass(frozen=True, eq=False)
class TestScores(Result):
    """The translations of one test text and their scores.

    `joined` is how many of its sentences stand in a row of the input, 1 for the text as it is.
    `ratio` is the length of all translations over that of the references, in sacrebleu's words.
    `loss` is of the references' tokens: it does not depend on where a translation ends.
    """

    __test__ = False  # for pytest

    test: str
    joined: int
    source_tokens: float  # mean of a row
    bleu: float | None  # None where the position does not know so many places
    chrf: float | None
    ratio: float | None
    signatures: tuple[str, ...]
    statistics: Array  # [rows, 10] of BLEU: lengths, right n-grams, all n-grams
    translations: tuple[str, ...]
    loss: float | None = None  # nats a token; not in the first results

    def lighter(self, examples: int) -> "TestScores":
        """Without statistics, and with a few translations alone."""
        empty = np.zeros((0, 10), np.float32)
        return replace(self, statistics=empty, translations=self.translations[:examples])


@dataclass(frozen=True, eq=False)
class TranslationJob(Result):
    """A model trained with one position at one learning rate with one seed, and its scores."""

    position: str
    seed: int
    learning_rate: float
    fingerprint: str  # of the experiment that it belongs to
    stopped: str  # "" or why training ended early
    scores: tuple[TestScores, ...]
    valid_loss: float | None  # nats a token, of the averaged weights
    steps: Array  # [logs] of the training curve
    train_loss: Array  # [logs] mean since the log before, with label smoothing
    steps_a_second: float | None
    side_by_side: int  # jobs that shared the device
    peak_bytes: int | None
    seconds: float  # of training and testing
    parameters: int
    positional: int  # those of them that belong to the positions

    def bleu(self, test: str, joined: int = 1) -> float | None:
        """BLEU of a test text."""
        found = (x.bleu for x in self.scores if (x.test, x.joined) == (test, joined))
        return next(found, None)

    def lighter(self) -> "TranslationJob":
        """Without what only the comparison of sentences needs; seed 0 keeps some translations."""
        examples = EXAMPLES if self.seed == 0 else 0
        return replace(self, scores=tuple(x.lighter(examples) for x in self.scores))


@dataclass(frozen=True, eq=False)
class Difference(Result):
    """BLEU of a position less that of the baseline on one test text, the mean over shared seeds.

    `low` and `high` are the 95% interval and `p` the probability by chance of the paired bootstrap:
    test sentences are drawn again, the same for both positions and all seeds.
    """

    position: str
    test: str
    joined: int
    mean: float
    low: float
    high: float
    p: float
    seeds: int


@dataclass(frozen=True, eq=False)
class Cell(Result):
    """The mean over seeds and their spread."""

    mean: float
    spread: float | None  # standard deviation; None for one seed
    n: int


@dataclass(frozen=True, eq=False)
class Translation(Result):
    """Everything that `whence translate` found: positions x seeds, each at its learning rate."""

    config: dict[str, Any]
    data: dict[str, Any]
    machine: dict[str, Any]
    jobs: tuple[TranslationJob, ...]
    differences: tuple[Difference, ...]

    @property
    def positions(self) -> tuple[str, ...]:
        """Those with a finished job, in the order of the configuration."""
        there = {job.position for job in self.jobs}
        return tuple(x for x in self.config["positions"] if x in there)

    @property
    def tests(self) -> tuple[str, ...]:
        """The names of the test texts."""
        return tuple(self.config["tests"])

    @property
    def joined(self) -> tuple[int, ...]:
        """How many sentences the rows of tests have, 1 first."""
        return (1, *sorted(self.config["test_joined"]))

    def rate(self, position: str) -> float:
        """The learning rate with the best mean BLEU on the validation text."""
        rates = dict.fromkeys(job.learning_rate for job in self.jobs if job.position == position)
        return max(rates, key=lambda rate: self._valid(position, rate))

    def chosen(self, position: str) -> list[TranslationJob]:
        """The jobs of a position at its learning rate, in the order of seeds."""
        rate = self.rate(position)
        mine = [x for x in self.jobs if (x.position, x.learning_rate) == (position, rate)]
        return sorted(mine, key=lambda job: job.seed)

    def cell(self, position: str, test: str, joined: int = 1) -> Cell | None:
        """BLEU on a test text over the seeds that have one."""
        if position not in self.positions:
            return None
        return cell([job.bleu(test, joined) for job in self.chosen(position)])

    def source_tokens(self, test: str, joined: int = 1) -> float:
        """The mean length of a row of a test text."""
        parts = (part for job in self.jobs for part in job.scores)
        found = (x.source_tokens for x in parts if (x.test, x.joined) == (test, joined))
        return next(found, 0.0)

    def difference(self, position: str, test: str, joined: int = 1) -> Difference | None:
        """From the baseline."""
        wanted = (position, test, joined)
        found = (x for x in self.differences if (x.position, x.test, x.joined) == wanted)
        return next(found, None)

    def _valid(self, position: str, rate: float) -> float:
        mine = (x for x in self.jobs if (x.position, x.learning_rate) == (position, rate))
        known = [x for x in (job.bleu(VALID) for job in mine) if x is not None]
        return fmean(known) if known else -1.0


def cell(values: list[float | None]) -> Cell | None:
    """Mean and spread of the values that there are."""
    known = [value for value in values if value is not None]
    if not known:
        return None
    return Cell(fmean(known), stdev(known) if len(known) > 1 else None, len(known))
