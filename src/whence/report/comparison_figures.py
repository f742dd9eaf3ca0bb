"""Figures of compared models: Toeplitzness against training step and against score."""

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from whence.analysis.comparison import Comparison, Correlation
from whence.checks import require
from whence.report.panels import panels
from whence.report.style import BLUE, FAINT, GRID, INK, ORANGE, labels, plain, title

LINES = (("all rows", "whole", BLUE, "o", "-"), ("near window", "near", ORANGE, "s", "--"))


def draw_steps(comparison: Comparison) -> Figure:
    """Toeplitzness along a series of checkpoints, with and without the main diagonal.

    Pale lines are the nulls, random tables with the same norms.

    >>> from pathlib import Path
    >>> from whence.report import read_folder
    >>> found = read_folder(Path("out"))  # of whence compare-checkpoints DIR --out out
    >>> draw_steps(found.comparison)
    <LiteralFigure size 780x372 with 2 Axes>
    """
    figure, grid = panels(
        2,
        columns=2,
        size=(3.9, 3.1),
        heading="Toeplitzness through training"
        if _stepped(comparison)
        else "Toeplitzness by model",
        detail="R² of the best Toeplitz fit of P; thin and pale: a random table of the same norms.",
    )
    points = comparison.points
    stepped = _stepped(comparison)
    steps = [(point.step or 0) if stepped else place for place, point in enumerate(points)]
    measures = (("with the main diagonal", "r2"), ("without it", "r2_off_diagonal"))
    for axes, (what, field) in zip(grid, measures, strict=True):
        for name, which, color, marker, dash in LINES:
            parts = [getattr(point, which) for point in points]
            stop = f"rows {parts[0].start}..{parts[0].stop - 1}"
            axes.plot(
                steps,
                [getattr(part, field) for part in parts],
                color=color,
                marker=marker,
                linestyle=dash,
                linewidth=1.4,
                markersize=4,
                label=name if which == "whole" else stop,
            )
            nulls = [getattr(part, f"null_{field}") for part in parts]
            if None not in nulls:
                axes.plot(steps, nulls, color=color, linestyle=dash, linewidth=0.9, alpha=0.55)
        axes.set_ylim(-0.03, 1.03)
        title(axes, what)
        plain(axes)
        if stepped:
            axes.set_xlabel("training step")
            axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
        else:
            names = labels([point.model for point in points], 22)
            axes.set_xticks(steps, names, rotation=30, ha="right")
    grid[0].set_ylabel("R²")
    grid[0].legend(fontsize=7, frameon=False)
    return figure


def draw_scores(comparison: Comparison) -> Figure:
    """Toeplitzness against score: a point for each model, the fitted line, and the correlation.

    >>> from pathlib import Path
    >>> from whence.report import read_folder
    >>> found = read_folder(Path("out"))  # of whence compare-checkpoints DIR --out out
    >>> draw_scores(found.comparison)
    <LiteralFigure size 820x412 with 2 Axes>
    """
    require(len(comparison.correlations) > 0, "draw_scores needs scores: compare with --scores.")
    measures = sorted({entry.measure for entry in comparison.correlations})
    figure, grid = panels(
        len(measures),
        columns=2,
        size=(4.1, 3.5),
        share=False,
        heading="Toeplitzness against score",
        detail="Correlations with their 95% intervals by Fisher's transformation.",
    )
    scores = np.array([point.score for point in comparison.points], dtype=float)
    for axes, measure in zip(grid, measures, strict=True):
        off = "without" in measure
        r2 = [p.whole.r2_off_diagonal if off else p.whole.r2 for p in comparison.points]
        x = np.array(r2, dtype=float)
        slope, level = np.polyfit(x, scores, 1)
        ends = np.array([x.min(), x.max()])
        axes.plot(ends, slope * ends + level, color=GRID, linewidth=2, zorder=1)
        axes.scatter(x, scores, color=BLUE, s=26, zorder=3)
        for place, name in enumerate(labels([point.model for point in comparison.points], 22)):
            right = x[place] > ends.mean()  # the label goes inwards, away from the axes' end
            axes.annotate(
                name,
                (x[place], scores[place]),
                xytext=(-4, 4) if right else (4, 4),
                ha="right" if right else "left",
                textcoords="offset points",
                fontsize=6.5,
                color=INK,
            )
        title(axes, measure)
        said = [entry for entry in comparison.correlations if entry.measure == measure]
        axes.text(
            0.02,
            0.98,
            "\n".join(sentence(entry) for entry in said),
            transform=axes.transAxes,
            va="top",
            fontsize=7,
            color=FAINT,
        )
        axes.set(xlabel="R² of the best Toeplitz fit", ylabel="score")
        axes.margins(x=0.16, y=0.22)
        plain(axes)
    return figure


def sentence(entry: Correlation) -> str:
    """A correlation with its interval, as text."""
    return f"{entry.kind} {entry.value:+.2f} [{entry.low:+.2f}, {entry.high:+.2f}], n = {entry.n}"


def _stepped(comparison: Comparison) -> bool:
    return all(point.step is not None for point in comparison.points)
