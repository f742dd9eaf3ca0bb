"""Heat maps of P = E E^T, model beside model: the slides' Figures 1, 4 and 5."""

from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from whence.analysis.results import Inspection, TableReport
from whence.checks import require
from whence.report.panels import panels
from whence.report.style import FAINT, INK, INNER_PRODUCTS, labels, number, plain, title


def draw_heat_maps(inspections: Sequence[Inspection], *, columns: int = 4) -> Figure:
    """Inner products of position embeddings, one heat map for each model that has a table.

    Each map has its own scale, from the 1st to the 99th percentile: position 0 alone, where [CLS]
    stands, would otherwise leave the rest dark.

        >>> from pathlib import Path
        >>> from whence.report import read_folder
        >>> found = read_folder(Path("out")).inspections[0]  # of whence inspect MODEL --out out
        >>> draw_heat_maps([found])
        <Figure size 500x522 with 2 Axes>
    """
    names = labels([entry.model.name for entry in inspections])
    pairs = zip(names, inspections, strict=True)
    drawn = [(name, entry.table) for name, entry in pairs if entry.table is not None]
    require(len(drawn) > 0, "draw_heat_maps needs a model with a position table, got none.")
    figure, grid = panels(
        len(drawn),
        columns=columns,
        size=(3.4, 3.2) if len(drawn) > 1 else (4.9, 4.6),
        share=False,
        heading="Inner products of position embeddings",
        detail="P = E Eᵀ, one cell for two positions. R² of the best Toeplitz fit below each.",
    )
    for axes, (name, table) in zip(grid, drawn, strict=True):
        n = len(table.gram)
        low, high = limits(table)
        image = axes.imshow(
            table.gram, cmap=INNER_PRODUCTS, vmin=low, vmax=high, extent=(0, n, n, 0)
        )
        title(axes, name)
        axes.set_xlabel(caption(table, ",\n"), fontsize=7, color=INK)
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=True, steps=[1, 2, 5, 10]))
        axes.yaxis.set_major_locator(MaxNLocator(5, integer=True, steps=[1, 2, 5, 10]))
        plain(axes, grid=False)
        axes.spines[["left", "bottom"]].set_visible(False)
        bar = figure.colorbar(image, ax=axes, extend="both", shrink=0.85, aspect=28, pad=0.02)
        bar.outline.set_visible(False)
        bar.ax.yaxis.set_major_formatter(FuncFormatter(number))
        bar.ax.tick_params(labelsize=6.5, labelcolor=FAINT, length=0)
    figure.draw_without_rendering()  # square axes get room for their labels in the second pass
    return figure


def limits(table: TableReport) -> tuple[float, float]:
    """The 1st and 99th percentile of P, kept apart where P is constant."""
    low, high = (float(edge) for edge in np.percentile(table.gram, (1, 99)))
    return (low, high) if high > low else (low - 0.5, high + 0.5)


def caption(table: TableReport, between: str = ", ") -> str:
    """Both measures of the whole table, each beside its null."""
    whole = table.whole
    first, second = f"R² {whole.r2:.3f}", f"off the diagonal {whole.r2_off_diagonal:.3f}"
    if whole.null_r2 is not None and whole.null_r2_off_diagonal is not None:
        first += f" (random: {whole.null_r2:.3f})"
        second += f" ({whole.null_r2_off_diagonal:.3f})"
    return f"{first}{between}{second}"
