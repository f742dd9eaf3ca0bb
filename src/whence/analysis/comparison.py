"""A series of models side by side: Toeplitzness against training step and against scores."""

import csv
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from whence.analysis.json_result import Result
from whence.analysis.results import Inspection, TableReport, Toeplitzness
from whence.checks import require, unknown

Doubles = np.ndarray[Any, np.dtype[np.float64]]
STEP = re.compile(r"(?:checkpoint|ckpt|global_step|step|iter|epoch)[-_]?(\d+)", re.IGNORECASE)
DEVIATES = 1.959963984540054  # of a normal variable, for an interval that holds it 95% of the time


@dataclass(frozen=True, eq=False)
class Point(Result):
    """One model of a series: whole table, and the window that ends nearest to 64 rows."""

    model: str
    step: int | None  # from a name such as checkpoint-500
    score: float | None
    whole: Toeplitzness
    near: Toeplitzness
    effective_dimensions: float | None


@dataclass(frozen=True, eq=False)
class Correlation(Result):
    """Correlation of a measure with the scores and its 95% interval by Fisher's transformation.

    Spearman's interval uses the standard error of Bonett and Wright, sqrt((1 + r^2/2) / (n - 3)).
    Three models or fewer say nothing: their interval is all of [-1, 1]. Ranks in perfect order are
    common among a few models and no proof, and the transformation of 1 is infinite, so their
    interval starts from half a swap of neighbours, r = 1 - 6 / (n (n^2 - 1)).
    """

    measure: str
    kind: str  # "Pearson" or "Spearman"
    value: float
    low: float
    high: float
    n: int


@dataclass(frozen=True, eq=False)
class Comparison(Result):
    """What `whence compare-checkpoints` found; the points are in the order of training."""

    points: tuple[Point, ...]
    correlations: tuple[Correlation, ...]  # empty without scores

    def __post_init__(self) -> None:
        require(len(self.points) > 1, "a Comparison is of two models or more.")
        known = [(p.score, p.whole.r2, p.whole.r2_off_diagonal) for p in self.points]
        require(
            not self.correlations or all(None not in numbers for numbers in known),
            "a Comparison with correlations needs a score and the R^2 of every model.",
        )


def compare(
    inspections: Sequence[Inspection], scores: Mapping[str, float] | None = None
) -> Comparison:
    """Put inspected models in order of their steps, where all names have one, and correlate.

    A score is looked up by the model's name, or by the last part of it.
    """
    require(len(inspections) > 1, f"a comparison needs two models or more, got {len(inspections)}.")
    points = [_point(inspection, scores) for inspection in inspections]
    if all(point.step is not None for point in points):
        points.sort(key=lambda point: point.step or 0)
    if scores is None:
        return Comparison(tuple(points), ())
    known = np.array([float("nan") if p.score is None else p.score for p in points])
    measures = {
        "all rows": [point.whole.r2 for point in points],
        "all rows, without the main diagonal": [point.whole.r2_off_diagonal for point in points],
    }
    correlations = []
    for name, values in measures.items():
        for point, value in zip(points, values, strict=True):
            require(
                value is not None,
                f"{point.model} has no Toeplitzness of {name}: its P is constant there. Leave it "
                "out, or the scores.",
            )
        numbers = np.array(values, dtype=np.float64)
        correlations += [correlate(name, kind, numbers, known) for kind in ("Pearson", "Spearman")]
    return Comparison(tuple(points), tuple(correlations))


def correlate(measure: str, kind: str, x: Doubles, y: Doubles) -> Correlation:
    """Pearson's correlation, or Spearman's: Pearson's of the ranks, ties at their mean."""
    for name, values in ((measure, x), ("the scores", y)):
        require(
            bool(np.ptp(values) > 0),
            f"all {len(values)} models have the same value of {name}, {values[0]:g}: "
            "there is no correlation to speak of.",
        )
    n = len(x)
    if kind == "Spearman":
        x, y = _ranks(x), _ranks(y)
    value = float(np.clip(np.corrcoef(x, y)[0, 1], -1, 1))
    if n <= 3:
        return Correlation(measure, kind, value, -1.0, 1.0, n)
    perfect, inner = abs(value) > 1 - 1e-12, value
    if perfect:
        value = math.copysign(1.0, value)
        if kind == "Pearson":
            return Correlation(measure, kind, value, value, value, n)
        inner = value * (1 - 6 / (n * (n**2 - 1)))
    factor = 1 + inner**2 / 2 if kind == "Spearman" else 1.0
    width = DEVIATES * math.sqrt(factor / (n - 3))
    low, high = (math.tanh(math.atanh(inner) + side) for side in (-width, width))
    if perfect:
        low, high = (low, 1.0) if value > 0 else (-1.0, high)
    return Correlation(measure, kind, value, low, high, n)


def read_scores(path: Path) -> dict[str, float]:
    """A CSV with the columns model and score; other columns are left alone."""
    require(path.is_file(), f"there is no file {path}.")
    with path.open(newline="", encoding="utf-8-sig") as file:
        reader = csv.DictReader(file)
        columns = reader.fieldnames or ()
        for column in ("model", "score"):
            require(
                column in columns,
                f"{path} has no column {column!r}, only {', '.join(columns) or 'nothing'}: "
                "its first line must be model,score.",
            )
        scores = {}
        for row in reader:
            name, text = (row["model"] or "").strip(), (row["score"] or "").strip()
            try:
                scores[name] = float(text)
            except ValueError:
                raise ValueError(
                    f"{path}, line {reader.line_num}: the score of {name!r} must be a number, "
                    f"got {text!r}."
                ) from None
            require(
                math.isfinite(scores[name]),
                f"{path}, line {reader.line_num}: the score of {name!r} is not finite: {text}.",
            )
    return scores


def step_of(name: str) -> int | None:
    """The training step in a model's name; the last one where there are several.

    >>> step_of("runs/a/checkpoint-500"), step_of("albert-base-v2")
    (500, None)
    """
    found = STEP.findall(name)
    return int(found[-1]) if found else None


def near_window(table: TableReport) -> Toeplitzness:
    """The window that ends nearest to 64 positions: lengths that most text in training has."""
    return min(table.windows or (table.whole,), key=lambda window: abs(window.stop - 64))


def _point(inspection: Inspection, scores: Mapping[str, float] | None) -> Point:
    name, table = inspection.model.name, inspection.table
    if table is None:
        raise ValueError(
            f"{name} has no position table ({inspection.model.position}), so it has no "
            "Toeplitzness to compare. Leave it out, or look at its lag profiles: whence inspect."
        )
    return Point(
        model=name,
        step=step_of(name),
        score=None if scores is None else _score(name, scores),
        whole=table.whole,
        near=near_window(table),
        effective_dimensions=table.effective_dimensions,
    )


def _score(name: str, scores: Mapping[str, float]) -> float:
    for key in (name, Path(name).name):
        if key in scores:
            return scores[key]
    raise ValueError(f"the scores have none for it. {unknown('model', name, scores)}")


def _ranks(values: Doubles) -> Doubles:
    """1 for the smallest; equal values share the mean of their ranks."""
    below = (values[None] < values[:, None]).sum(1)
    equal = (values[None] == values[:, None]).sum(1)
    ranks: Doubles = below + (equal + 1) / 2
    return ranks
