"""Measured lag profiles: logits of real text, averaged over content, with their bands."""

from collections.abc import Sequence

from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from whence.analysis.results import LagProfile, worded
from whence.checks import require
from whence.report.panels import name_axes, panels
from whence.report.style import GRID, LAG, PURPLE, number, plain, title


def draw_profiles(profiles: Sequence[LagProfile], *, name: str) -> Figure:
    """Measured logits by lag, one panel for each head, with the 95% confidence band of the mean.

    >>> from pathlib import Path
    >>> from whence.report import read_folder
    >>> found = read_folder(Path("out")).inspections[0]  # of whence inspect MODEL --out out
    >>> draw_profiles(found.profiles, name="tiny-bert")
    <LiteralFigure size 960x232 with 4 Axes>
    """
    require(len(profiles) > 0, "draw_profiles needs one profile or more, got none.")
    layers = ", ".join(str(layer) for layer in sorted({entry.layer for entry in profiles}))
    figure, grid = panels(
        len(profiles),
        share=False,
        heading=f"{name}, layer {layers}: measured lag profiles",
        detail=f"Mean logit by lag over {profiles[0].n_tokens:,} tokens of text and its 95% band; "
        "to the right: the share of the logits' variance that lag explains. A scale each.",
    )
    for axes, entry in zip(grid, profiles, strict=True):
        axes.axvline(0, color=GRID, linewidth=1, zorder=0)
        axes.fill_between(entry.lag, entry.low, entry.high, color=PURPLE, alpha=0.25, linewidth=0)
        axes.plot(entry.lag, entry.mean, color=PURPLE, linewidth=1.2)
        title(axes, f"head {entry.head}", worded(entry.explained, ".0%"))
        axes.set_xlim(float(entry.lag.min()), float(entry.lag.max()))
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=True, steps=[1, 2, 5, 10]))
        axes.yaxis.set_major_locator(MaxNLocator(4))
        axes.yaxis.set_major_formatter(FuncFormatter(number))
        plain(axes, grid=False)
    name_axes(figure, LAG, "logits")
    return figure
