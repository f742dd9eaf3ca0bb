"""A figure of small panels with a heading: the frame of all small multiples, and colour bars."""

import math
from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.colorbar import Colorbar
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.text import Text
from matplotlib.ticker import FuncFormatter

from whence.report.style import FAINT, INK, number

HEADER = 0.62  # inches kept free above the panels


class LiteralFigure(Figure):
    """A figure in whose texts a dollar sign is a dollar sign: names are no formulas."""

    def draw(self, renderer: Any) -> None:
        """Draw, with formulas off in every text that is there."""
        for text in self.findobj(Text):
            text.set_parse_math(False)
        super().draw(renderer)


def name_axes(figure: Figure, across: str, down: str) -> None:
    """One name for the x axes of all panels, and one for their y axes."""
    figure.supxlabel(across, fontsize=8, color=FAINT)
    figure.supylabel(down, fontsize=8, color=FAINT)


def color_bar(figure: Figure, image: AxesImage, axes: Axes | Sequence[Axes]) -> Colorbar:
    """A thin colour bar whose pointed ends say that values may lie beyond them."""
    bar = figure.colorbar(image, ax=axes, extend="both", shrink=0.85, aspect=28, pad=0.02)
    bar.outline.set_visible(False)
    bar.ax.yaxis.set_major_formatter(FuncFormatter(number))
    bar.ax.tick_params(labelsize=6.5, labelcolor=FAINT, length=0)
    return bar


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
    figure = LiteralFigure(figsize=(width, height), layout=layout)
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
