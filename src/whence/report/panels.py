"""A figure of small panels with a heading: the frame of all small multiples."""

import math
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from whence.report.style import FAINT, INK

HEADER = 0.62  # inches kept free above the panels


def panels(
    n: int,
    *,
    columns: int = 4,
    size: tuple[float, float] = (2.4, 1.7),
    share: bool = True,
    heading: str,
    detail: str = "",
) -> tuple[Figure, Sequence[Axes]]:
    """n panels under a heading; with `share`, one x axis and one y axis for all of them."""
    columns = min(columns, n)
    rows = math.ceil(n / columns)
    width, height = max(size[0] * columns, 5.0), size[1] * rows + HEADER
    layout = ConstrainedLayoutEngine(
        w_pad=0.06, h_pad=0.05, wspace=0.0, hspace=0.0, rect=(0.0, 0.0, 1.0, 1 - HEADER / height)
    )
    figure = Figure(figsize=(width, height), layout=layout)
    grid = figure.subplots(rows, columns, squeeze=False, sharex=share, sharey=share).flatten()
    for spare in grid[n:]:
        spare.axis("off")
    if share:  # a panel above an empty place keeps its own numbers
        for place in range(max(n - columns, 0), n):
            grid[place].tick_params(labelbottom=True)
    left = 0.08 / width
    figure.text(left, 1 - 0.08 / height, heading, va="top", fontsize=11, weight="bold", color=INK)
    figure.text(left, 1 - 0.33 / height, detail, va="top", fontsize=7.5, color=FAINT)
    return figure, list(grid[:n])
