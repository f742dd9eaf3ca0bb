"""TISA fitted to each head's lag curve, drawn over it."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from whence.analysis.fit import fitted
from whence.analysis.results import Fit, HeadFits, HeadReport, worded
from whence.checks import require
from whence.report.panels import name_axes, panels
from whence.report.style import LAG, ORANGE, inner_limits, number, plain, title

CURVE = "#8a8a8a"


def draw_fits(fits: Sequence[HeadFits], heads: Sequence[HeadReport], *, name: str) -> Figure:
    """Each head's lag curve in grey, and in orange the fit that BIC picks, with its S and R^2.

    >>> from pathlib import Path
    >>> from whence.report import read_folder
    >>> found = read_folder(Path("out")).inspections[0]  # of whence inspect MODEL --out out
    >>> draw_fits(found.fits, found.heads, name="tiny-bert")
    <LiteralFigure size 960x232 with 4 Axes>
    """
    pairs = with_curves(fits, heads)
    require(len(pairs) > 0, "draw_fits needs one fitted head or more, got none.")
    layers = ", ".join(str(layer) for layer in sorted({fit.layer for fit, _ in pairs}))
    figure, grid = panels(
        len(pairs),
        share=False,
        heading=f"{name}, layer {layers}: TISA fitted",
        detail="Lag curve (grey) and the sum of S Gaussians that BIC picks (orange), in logits; "
        "a scale each.",
    )
    for axes, (entry, head) in zip(grid, pairs, strict=True):
        fit = picked(entry)
        near = fitted_lags(fit, head)
        lag, curve = head.lag[near], head.curve[near]
        axes.plot(lag, curve, color=CURVE, linewidth=1.8)
        axes.plot(lag, fitted(fit, lag) + fit.level, color=ORANGE, linewidth=1.1, linestyle="--")
        title(axes, f"head {entry.head}", f"S = {fit.kernels}, R² {worded(fit.r2)}")
        axes.set_xlim(float(lag.min()), float(lag.max()))
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=True, steps=[1, 2, 5, 10]))
        axes.yaxis.set_major_locator(MaxNLocator(4))
        axes.set_ylim(*inner_limits(lag, curve))
        axes.yaxis.set_major_formatter(FuncFormatter(number))
        plain(axes, grid=False)
    name_axes(figure, LAG, "logits")
    return figure


def picked(entry: HeadFits) -> Fit:
    """The fit with as many kernels as the criterion picks."""
    return next(fit for fit in entry.fits if fit.kernels == entry.chosen)


def fitted_lags(fit: Fit, head: HeadReport) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Which lags of the head's curve the fit was made for."""
    reach = np.inf if fit.reach is None else fit.reach
    near: np.ndarray[Any, np.dtype[np.bool_]] = np.abs(head.lag) <= reach
    return near


def with_curves(
    fits: Sequence[HeadFits], heads: Sequence[HeadReport]
) -> list[tuple[HeadFits, HeadReport]]:
    """Each head's fits beside the curve that they were fitted to."""
    curves = {(head.layer, head.head): head for head in heads}
    places = [(entry, curves.get((entry.layer, entry.head))) for entry in fits]
    return [(entry, head) for entry, head in places if head is not None]
