"""Heat maps of P = E E^T, model beside model: the slides' Figures 1, 4 and 5."""

from collections.abc import Sequence

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from whence.analysis.results import Inspection, TableReport, worded
from whence.checks import require
from whence.report.panels import color_bar, panels
from whence.report.style import INK, INNER_PRODUCTS, labels, matrix_limits, plain, title


def draw_heat_maps(inspections: Sequence[Inspection], *, columns: int = 4) -> Figure:
    """Inner products of position embeddings, one heat map for each model that has a table.

    Each map has its own robust scale, see `matrix_limits`.

        >>> from pathlib import Path
        >>> from whence.report import read_folder
        >>> found = read_folder(Path("out")).inspections  # of whence inspect MODEL --out out
        >>> draw_heat_maps(found)
        <LiteralFigure size 500x522 with 2 Axes>
    """
    names = labels([entry.model.name for entry in inspections])
    pairs = zip(names, inspections, strict=True)
    drawn = [(name, entry.table) for name, entry in pairs if entry.table is not None]
    require(len(drawn) > 0, "draw_heat_maps needs a model with a position table, got none.")
    return _maps(drawn, columns=columns)


def _maps(drawn: Sequence[tuple[str, TableReport]], *, columns: int) -> Figure:
    figure, grid = panels(
        len(drawn),
        columns=columns,
        size=(3.4, 3.2) if len(drawn) > 1 else (4.9, 4.6),
        share=False,
        heading="Inner products of position embeddings",
        detail="P = E Eᵀ, one cell for two positions; colours end at the 1st and 99th percentile.",
    )
    for axes, (name, table) in zip(grid, drawn, strict=True):
        n = len(table.gram)
        low, high = matrix_limits(table.gram)
        image = axes.imshow(
            table.gram, cmap=INNER_PRODUCTS, vmin=low, vmax=high, extent=(0, n, n, 0)
        )
        title(axes, name)
        axes.set_xlabel(caption(table, ",\n"), fontsize=7, color=INK)
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=True, steps=[1, 2, 5, 10]))
        axes.yaxis.set_major_locator(MaxNLocator(5, integer=True, steps=[1, 2, 5, 10]))
        plain(axes, grid=False)
        axes.spines[["left", "bottom"]].set_visible(False)
        color_bar(figure, image, axes)
    figure.draw_without_rendering()  # square axes get room for their labels in the second pass
    return figure


def draw_table(table: TableReport, *, name: str = "position table") -> Figure:
    """The map of one table, as `table_report` measured it.

    >>> import numpy as np
    >>> from whence.analysis.toeplitz import table_report
    >>> table = np.random.default_rng(0).standard_normal((64, 8))
    >>> draw_table(table_report(table), name="random numbers")
    <LiteralFigure size 500x522 with 2 Axes>
    """
    return _maps([(name, table)], columns=1)


def caption(table: TableReport, between: str = ", ") -> str:
    """Both measures of the whole table, each beside its null."""
    whole = table.whole
    first, second = f"R² {worded(whole.r2)}", f"off the diagonal {worded(whole.r2_off_diagonal)}"
    if whole.null_r2 is not None and whole.null_r2_off_diagonal is not None:
        first += f" (random: {whole.null_r2:.3f})"
        second += f" ({whole.null_r2_off_diagonal:.3f})"
    return f"{first}{between}{second}"
