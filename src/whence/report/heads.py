"""Positional attention of every head: lag curves with their spread, and matrices (Figure 8)."""

from collections.abc import Sequence

import numpy as np
from matplotlib import colormaps
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from whence.analysis.results import HeadReport, worded
from whence.checks import require
from whence.report.panels import color_bar, name_axes, panels
from whence.report.style import ATTENTION, GRID, LAG, matrix_limits, number, plain, title

SENSITIVE, BLIND = colormaps[ATTENTION](0.35), "#9a9a9a"
MOVED = "Each curve without its mean, which a softmax does not see."


def draw_head_curves(
    heads: Sequence[HeadReport], *, name: str, stated: bool = False, reach: int = 128
) -> Figure:
    """Lag curves, a panel for each head, on one scale: heads without a sense of position look flat.

    Lags up to `reach` are shown.

    The band is one standard deviation along each diagonal: how far the head is from a function of
    lag alone. `stated` is for curves that are part of the model, such as T5's bias or ALiBi.

        >>> from pathlib import Path
        >>> from whence.report import read_folder
        >>> found = read_folder(Path("out")).inspections[0]  # of whence inspect MODEL --out out
        >>> draw_head_curves(found.heads, name="tiny-bert", reach=16)
        <LiteralFigure size 960x232 with 4 Axes>
    """
    require(len(heads) > 0, "draw_head_curves needs one head or more, got none.")
    what = "Stated bias" if stated else f"Positional attention, {_biases(heads)}"
    figure, grid = panels(
        len(heads),
        heading=f"{name}, layer {_layers(heads)}: lag curves",
        detail=f"{what}, by lag, in logits; {MOVED.lower()} Grey: not sensitive to position.",
    )
    shown = [(head.curve - np.nanmean(head.curve))[np.abs(head.lag) <= reach] for head in heads]
    low = min(np.nanmin(part) for part in shown)
    high = max(np.nanmax(part) for part in shown)
    room = 0.15 * float(high - low) or 1.0
    grid[0].set_ylim(float(low) - room, float(high) + room)
    for axes, head in zip(grid, heads, strict=True):
        color = SENSITIVE if head.sensitive else BLIND
        curve = head.curve - np.nanmean(head.curve)
        axes.axhline(0, color=GRID, linewidth=1, zorder=0)
        axes.axvline(0, color=GRID, linewidth=1, zorder=0)
        edges = curve - head.spread, curve + head.spread
        axes.fill_between(head.lag, *edges, color=color, alpha=0.25, linewidth=0)
        axes.plot(head.lag, curve, color=color, linewidth=1.3)
        title(axes, f"head {head.head}", "" if stated else f"R² {worded(head.r2, '.2f')}")
        axes.set_xlim(max(float(head.lag.min()), -reach), min(float(head.lag.max()), reach))
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=True, steps=[1, 2, 5, 10]))
        axes.yaxis.set_major_formatter(FuncFormatter(number))
        plain(axes, grid=False)
    name_axes(figure, LAG, "logits")
    return figure


def draw_head_matrices(heads: Sequence[HeadReport], *, name: str) -> Figure:
    """The positional attention of each head over the first positions, as a heat map.

    Its colours differ from those of the inner products P, which `draw_heat_maps` draws.

    >>> from pathlib import Path
    >>> from whence.report import read_folder
    >>> found = read_folder(Path("out")).inspections[0]  # of whence inspect MODEL --out out
    >>> draw_head_matrices(found.heads, name="tiny-bert")
    <LiteralFigure size 960x267 with 8 Axes>
    """
    require(len(heads) > 0, "draw_head_matrices needs one head or more, got none.")
    n = len(heads[0].matrix)
    figure, grid = panels(
        len(heads),
        size=(2.4, 2.05),
        columns=5,
        heading=f"{name}, layer {_layers(heads)}: positional attention",
        detail=f"F = (E W_Q)(E W_K)ᵀ / √d in logits, {_biases(heads)}, first {n} positions. "
        "A scale each: 1st to 99th percentile of the cells off position 0.",
    )
    for axes, head in zip(grid, heads, strict=True):
        low, high = matrix_limits(head.matrix)
        image = axes.imshow(head.matrix, cmap=ATTENTION, vmin=low, vmax=high, extent=(0, n, n, 0))
        color_bar(figure, image, axes)
        title(axes, f"head {head.head}", f"R² {worded(head.r2, '.2f')}")
        axes.xaxis.set_major_locator(MaxNLocator(3, integer=True))
        axes.yaxis.set_major_locator(MaxNLocator(3, integer=True))
        plain(axes, grid=False)
        axes.spines[["left", "bottom"]].set_visible(False)
    name_axes(figure, "key", "query")
    return figure


def _biases(heads: Sequence[HeadReport]) -> str:
    return "with biases" if heads[0].with_biases else "without biases"


def _layers(heads: Sequence[HeadReport]) -> str:
    return ", ".join(str(layer) for layer in sorted({head.layer for head in heads}))
