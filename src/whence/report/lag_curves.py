"""The figure of lag curves: a small panel for each method, all at the same lags."""

import math
from collections.abc import Sequence

import torch
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, MaxNLocator

from whence.analysis import LagCurves
from whence.checks import require
from whence.report.style import AXIS, FAINT, GRID, INK, SPREAD

TITLE = "What each method tells attention about position, before any training"
HEADER = 0.78  # inches kept free above the panels


def draw_lag_curves(curves: Sequence[LagCurves], *, columns: int = 6) -> Figure:
    """Lag curves, one panel for each method, each with its own y axis, since their units differ.

    Heads run from dark to light in a map that keeps its order in grey print and to the
    colour-blind. Where a curve depends on content, a grey band shows one standard deviation, all
    heads together.

        >>> from whence.analysis import lag_curves
        >>> curves = [lag_curves(name, n_heads=2, reach=8) for name in ("alibi", "t5")]
        >>> draw_lag_curves(curves, columns=2)
        <Figure size 420x258 with 2 Axes>
    """
    require(len(curves) > 0, "draw_lag_curves needs the curves of at least one method, got none.")
    n_heads = max(len(curve.mean) for curve in curves)
    rows = math.ceil(len(curves) / columns)
    height = 1.55 * rows + 0.25 + HEADER
    layout = ConstrainedLayoutEngine(
        w_pad=0.06, h_pad=0.05, wspace=0.0, hspace=0.0, rect=(0.0, 0.0, 1.0, 1 - HEADER / height)
    )
    figure = Figure(figsize=(2.1 * columns, height), layout=layout)
    colors = head_colors(n_heads)
    panels = figure.subplots(rows, columns, squeeze=False).flatten()
    for place, panel in enumerate(panels):
        if place < len(curves):
            draw_panel(panel, curves[place], colors)
        else:
            panel.axis("off")
    figure.supxlabel("lag = key - query", fontsize=8, color=FAINT)
    _header(figure, curves, colors, n_heads)
    return figure


def head_colors(n_heads: int) -> ListedColormap:
    """A colour for each head, from dark to light."""
    viridis = colormaps["viridis"]
    return ListedColormap([viridis(0.87 * head / max(n_heads - 1, 1)) for head in range(n_heads)])


def draw_panel(panel: Axes, curve: LagCurves, colors: ListedColormap) -> None:
    """The curves of one method, into axes."""
    lag, reach = curve.lag.numpy(), int(curve.lag[-1])
    panel.axvline(0, color=GRID, linewidth=1.0, zorder=0)
    panel.axhline(0, color=GRID, linewidth=1.0, zorder=0)
    if curve.spread is not None:
        middle = curve.mean.mean(dim=0)
        variance = curve.spread.square().mean(dim=0) + curve.mean.var(dim=0, correction=0)
        low, high = middle - variance.sqrt(), middle + variance.sqrt()
        panel.fill_between(lag, low.numpy(), high.numpy(), color=SPREAD, linewidth=0, zorder=1)
    first = curve.mean[:1]
    alike = torch.allclose(curve.mean, first.expand_as(curve.mean), equal_nan=True)
    for head, mean in enumerate((first if alike else curve.mean).numpy()):
        panel.plot(lag, mean, color=INK if alike else colors(head), linewidth=1.0, zorder=3)
    panel.set_title(curve.method, loc="left", fontsize=8.5, fontweight="bold", color=INK, pad=3)
    tag = (curve.site or "nowhere") + (", causal" if curve.causal_only else "")
    panel.set_title(tag, loc="right", fontsize=7, color=FAINT, pad=3)
    panel.set_xlim(-reach, reach)
    panel.set_xticks([-reach, 0, reach])
    panel.margins(y=0.08)
    if float(curve.mean.nan_to_num().abs().max()) == 0.0 and curve.spread is None:
        panel.set(ylim=(-1, 1), yticks=[0.0])
    else:
        panel.yaxis.set_major_locator(MaxNLocator(3, min_n_ticks=2))
    panel.yaxis.set_major_formatter(FuncFormatter(_number))
    panel.tick_params(labelsize=6.5, labelcolor=FAINT, color=AXIS, length=2, pad=2)
    panel.spines[["top", "right"]].set_visible(False)
    panel.spines[["left", "bottom"]].set_color(AXIS)


def _number(value: float, place: int) -> str:
    return f"{value:.3g}".replace("-", "\N{MINUS SIGN}")


def _header(
    figure: Figure, curves: Sequence[LagCurves], colors: ListedColormap, n_heads: int
) -> None:
    """The title, what the panels of each site show, and the key to the lines."""
    height = figure.get_size_inches()[1]
    drawn = dict.fromkeys((curve.site, curve.quantity) for curve in curves if curve.site)
    shown = "    ".join(f"{site}: {quantity}" for site, quantity in drawn)
    figure.text(
        0.006, 1 - 0.07 / height, TITLE, va="top", fontsize=12.5, fontweight="bold", color=INK
    )
    figure.text(0.006, 1 - 0.35 / height, shown, va="top", fontsize=7.5, color=FAINT)
    handles: list[Line2D | Patch] = [
        Line2D([], [], color=colors(head), linewidth=1.6, label=f"head {head + 1}")
        for head in range(0, n_heads, math.ceil(n_heads / 4))
    ]
    handles += [
        Line2D([], [], color=INK, linewidth=1.6, label="the same for all heads"),
        Patch(color=SPREAD, label="spread over random content"),
    ]
    figure.legend(
        handles=handles,
        loc="upper left",
        bbox_to_anchor=(0.0, 1 - 0.47 / height),
        ncols=len(handles),
        fontsize=7.5,
        frameon=False,
        labelcolor=FAINT,
        handlelength=1.6,
        columnspacing=1.6,
        borderpad=0.3,
    )
