"""Principal components of the position table, along the positions and by frequency."""

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from whence.analysis.results import TableReport, worded
from whence.checks import require
from whence.report.panels import panels
from whence.report.style import BLUE, GRID, ORANGE, plain, title


def draw_components(table: TableReport, *, name: str, leading: int = 6) -> Figure:
    """The share of the variance by number of components, and the leading ones with their spectra.

    >>> from pathlib import Path
    >>> from whence.report import read_folder
    >>> found = read_folder(Path("out")).inspections[0]  # of whence inspect MODEL --out out
    >>> draw_components(found.table, name="tiny-bert", leading=1)
    <LiteralFigure size 740x312 with 4 Axes>
    """
    components = table.components[:leading]
    require(len(table.explained) > 0, "all position vectors are the same: there is no component.")
    figure, grid = panels(
        2 * (len(components) + 1),
        columns=2,
        size=(3.7, 1.25),
        share=False,
        heading=f"{name}: principal components of the position table",
        detail=f"{worded(table.effective_dimensions, '.1f')} effective dimensions of "
        f"{len(table.explained)}; {table.components_for_90} explain nine tenths of the variance.",
    )
    share = np.cumsum(table.explained)
    count = np.arange(1, len(share) + 1)
    for axes, many, what in ((grid[0], count[-1], "all"), (grid[1], min(32, count[-1]), "leading")):
        axes.plot(count[:many], share[:many], color=BLUE, linewidth=1.4)
        axes.axhline(0.9, color=ORANGE, linewidth=0.9, linestyle="--")
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        axes.set(ylim=(0, 1.05), xlim=(1, max(int(many), 2)))
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
        title(axes, "variance explained, summed", f"{what} {many}")
        plain(axes)
    for row, component in enumerate(components, start=1):
        along, spectrum = grid[2 * row], grid[2 * row + 1]
        along.axhline(0, color=GRID, linewidth=1)
        along.plot(component.values, color=BLUE, linewidth=1.0)
        title(along, f"component {row}", f"{component.explained:.1%} of the variance")
        along.set_xlim(0, max(len(component.values) - 1, 1))
        top = component.frequency[int(np.argmax(component.power))]
        spectrum.fill_between(component.frequency, component.power, color=ORANGE, alpha=0.3)
        spectrum.plot(component.frequency, component.power, color=ORANGE, linewidth=1.0)
        period = f"strongest: a cycle in {1 / top:.0f} positions" if top > 0 else "strongest: level"
        title(spectrum, "its spectrum", period)
        spectrum.set(ylim=(0, None))
        for axes in (along, spectrum):
            axes.yaxis.set_major_locator(MaxNLocator(3))
            plain(axes, grid=False)
    grid[-2].set_xlabel("position")
    grid[-1].set_xlabel("cycles a position")
    return figure
