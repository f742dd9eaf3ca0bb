"""Toeplitzness as a function of the window, each beside its null."""

from collections.abc import Sequence

from matplotlib.figure import Figure

from whence.analysis.results import Inspection
from whence.checks import require
from whence.report.panels import panels
from whence.report.style import labels, plain, series, title


def draw_windows(inspections: Sequence[Inspection]) -> Figure:
    """Toeplitzness of the rows start..stop of a table against stop, with and without the diagonal.

    The thin line is a random table with the same row norms: what its bright diagonal gives alone.

        >>> from pathlib import Path
        >>> from whence.report import read_folder
        >>> found = read_folder(Path("out")).inspections[0]  # of whence inspect MODEL --out out
        >>> draw_windows([found])
        <LiteralFigure size 780x372 with 2 Axes>
    """
    drawn = [entry for entry in inspections if entry.table is not None]
    require(len(drawn) > 0, "draw_windows needs a model with a position table, got none.")
    names = labels([entry.model.name for entry in drawn])
    figure, grid = panels(
        2,
        columns=2,
        size=(3.9, 3.1),
        heading="Toeplitzness against window",
        detail="R² of the best Toeplitz fit of P; thin and pale: a random table of the same norms.",
    )
    measures = (("with the main diagonal", "r2"), ("without it", "r2_off_diagonal"))
    for axes, (name, field) in zip(grid, measures, strict=True):
        for (color, marker, dash), label, entry in zip(series(), names, drawn, strict=False):
            assert entry.table is not None
            windows = entry.table.windows or (entry.table.whole,)
            ends = [window.stop for window in windows]
            axes.plot(
                ends,
                [getattr(window, field) for window in windows],
                color=color,
                linestyle=dash,
                marker=marker,
                markersize=4,
                linewidth=1.4,
                label=label,
            )
            nulls = [getattr(window, f"null_{field}") for window in windows]
            if None not in nulls:
                axes.plot(ends, nulls, color=color, linestyle=dash, linewidth=0.9, alpha=0.55)
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(lambda value, place: f"{value:.0f}")
        axes.set(xlabel="rows of the window, from the first", ylim=(-0.03, 1.03))
        title(axes, name)
        plain(axes)
    grid[0].set_ylabel("R²")
    grid[-1].legend(fontsize=7, frameon=False, loc="best")
    return figure
