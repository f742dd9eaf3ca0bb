"""Table 1 of the slides, measured: every criterion a probe, with a stated rule for its verdict."""

import platform
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

import whence
from whence.analysis import probes
from whence.analysis.json_result import Result
from whence.analysis.params import Shape, parameters
from whence.analysis.slides_table import CRITERIA, NOTES, WHY, tick
from whence.methods import METHODS

EFFICIENT, UNCHANGED, PARALLEL, EXPLAINED = 0.01, 1e-6, 0.1, 0.99

RULES = {
    "inductive": (
        f"Runs, finite and without a new parameter, at {probes.STRETCH} times the length it was "
        f"built for ({probes.LENGTH}). Value: the largest multiple that ran, by doubling."
    ),
    "data-driven": (
        "The gradient of what position does to logits and values reaches a parameter. Value: how "
        f"many of its parameters it reaches, at a length of {probes.LENGTH}."
    ),
    "parameter efficient": (
        "The number of parameters does not grow with the length, and is at most "
        f"{EFFICIENT:.0%} of BERT-base (12 layers, length 512). Value: that share."
    ),
    "translation invariant": (
        "No logit changes when all positions shift. Value: the largest change, over shifts by 1 "
        f"and {probes.FAR}, in standard deviations of the logits; below {UNCHANGED:g} is none."
    ),
    "parallelizable": (
        f"The chain of operations does not grow with the length, from {probes.OPERATIONS_AT[0]} to "
        f"{probes.OPERATIONS_AT[1]} tokens. Value: operations added for each position; below "
        f"{PARALLEL:g} is none."
    ),
    "interpretable": (
        "What position adds to a logit is a function of head and lag alone. Value: the share of "
        "its variance, over content and places, that they explain; the rule is "
        f"{EXPLAINED:g} or more."
    ),
}


@dataclass(frozen=True, eq=False)
class Criterion(Result):
    """One cell of Table 1."""

    name: str
    value: float | None  # None where there is nothing to measure
    text: str  # the value in a few characters
    verdict: bool | None
    slides: bool | None  # None where the slides say nothing
    why: str  # it differs from the slides, or what else to know of the verdict

    @property
    def differs(self) -> bool:
        """From the slides."""
        return self.slides is not None and self.verdict != self.slides


@dataclass(frozen=True, eq=False)
class MethodCriteria(Result):
    """One row of Table 1."""

    method: str
    criteria: tuple[Criterion, ...]  # in the slides' order
    time: float  # of attention with it, over attention without position, on this machine


@dataclass(frozen=True, eq=False)
class CriteriaReport(Result):
    """Table 1 as measured. All but the times is the same in every run."""

    rows: tuple[MethodCriteria, ...]
    rules: dict[str, str]
    left_out: dict[str, str]  # methods that this environment cannot build, and what they need
    versions: dict[str, str]

    def differences(self) -> list[tuple[str, Criterion]]:
        """Every (method, criterion) where the slides say otherwise."""
        return [(row.method, cell) for row in self.rows for cell in row.criteria if cell.differs]


def criteria(specs: Iterable[str] | None = None) -> CriteriaReport:
    """Measure every method of METHODS, or those given, in a few seconds.

    The probes know nothing of a method but its hooks, so a new one is judged like the others.
    """
    rows, left_out = [], {}
    for spec in METHODS if specs is None else specs:
        try:
            rows.append(measured(spec))
        except ImportError as error:
            left_out[spec] = str(error)
    return CriteriaReport(tuple(rows), RULES, left_out, versions())


def measured(spec: str) -> MethodCriteria:
    """The row of one method."""
    cells = (
        _inductive(spec),
        _data_driven(spec),
        _efficient(spec),
        _invariant(spec),
        _parallel(spec),
        _interpretable(spec),
    )
    return MethodCriteria(
        spec,
        tuple(_cell(spec, name, *cell) for name, cell in zip(CRITERIA, cells, strict=True)),
        probes.relative_time(spec),
    )


def versions() -> dict[str, str]:
    """What the numbers were made with; the commit is known in a checkout only."""
    known = {
        "whence": whence.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}, one thread",
    }
    folder = Path(whence.__file__).parent
    git = ["git", "-C", str(folder)]
    try:  # a package installed below somebody else's checkout is not tracked there
        subprocess.run(
            [*git, "ls-files", "--error-unmatch", "__init__.py"], check=True, capture_output=True
        )
        done = subprocess.run(
            [*git, "describe", "--always", "--dirty"], check=True, capture_output=True, text=True
        )
    except (OSError, subprocess.CalledProcessError):
        return known
    return {**known, "commit": done.stdout.strip()}


_Measured = tuple[float | None, str, bool | None]


def _cell(spec: str, name: str, value: float | None, text: str, verdict: bool | None) -> Criterion:
    slides = tick(spec, name)
    reasons = WHY if slides is not None and slides != verdict else NOTES
    return Criterion(name, value, text, verdict, slides, reasons.get((spec, name), ""))


def _inductive(spec: str) -> _Measured:
    factor, stopped = probes.longest_run(spec)
    return float(factor), f"{factor}x", not stopped


def _data_driven(spec: str) -> _Measured:
    reached, total = probes.learning_parameters(spec)
    return float(reached), f"{reached} of {total}", reached > 0


def _efficient(spec: str) -> _Measured:
    cost = parameters(spec, Shape())
    assert cost.share is not None  # or the probes before would have raised
    text = f"{100 * cost.share:.2g}%" + (", grows" if cost.grows else "")
    return cost.share, text, not cost.grows and cost.share <= EFFICIENT


def _invariant(spec: str) -> _Measured:
    change = probes.largest_change(spec)
    return change, f"{change:.2g}" if change >= UNCHANGED else f"<{UNCHANGED:g}", change < UNCHANGED


def _parallel(spec: str) -> _Measured:
    few, many = probes.operations(spec)
    short, long = probes.OPERATIONS_AT
    added = (many - few) / (long - short)
    return added, f"{added:.3g}", added < PARALLEL


def _interpretable(spec: str) -> _Measured:
    share = probes.lag_share(spec)
    if share is None:
        return None, "none", None
    return share, f"{share:.3f}", share >= EXPLAINED
