"""The style of all figures: colours, axes, titles and labels.

They can be read in grey print and by the colour-blind.
"""

from collections.abc import Sequence
from itertools import cycle

import numpy as np
from matplotlib.axes import Axes

from whence.analysis.json_result import Array
from whence.analysis.results import worded
from whence.colours import AMBER as AMBER
from whence.colours import AXIS as AXIS
from whence.colours import BLUE as BLUE
from whence.colours import BROWN as BROWN
from whence.colours import FAINT as FAINT
from whence.colours import GREEN as GREEN
from whence.colours import GREY as GREY
from whence.colours import GRID as GRID
from whence.colours import INK as INK
from whence.colours import ORANGE as ORANGE
from whence.colours import PINK as PINK
from whence.colours import PURPLE as PURPLE
from whence.colours import SERIES as SERIES
from whence.colours import SKY as SKY
from whence.colours import SPREAD as SPREAD

LAG = "lag = key − query"  # noqa: RUF001
INNER_PRODUCTS, ATTENTION = "inferno", "viridis"  # two maps, as they are two things


def series() -> "cycle[tuple[str, str, str]]":
    """Colour, marker and dash, without an end."""
    return cycle(SERIES)


def plain(axes: Axes, *, grid: bool = True) -> Axes:
    """Two thin spines and small grey labels."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(AXIS)
    axes.tick_params(labelsize=7, labelcolor=FAINT, color=AXIS, length=2, pad=2)
    axes.xaxis.label.set(color=FAINT, fontsize=8)
    axes.yaxis.label.set(color=FAINT, fontsize=8)
    if grid:
        axes.grid(color=GRID, linewidth=0.6)
        axes.set_axisbelow(True)
    return axes


def title(axes: Axes, text: str, detail: str = "") -> None:
    """What it is in bold on the left, a number about it in grey on the right."""
    axes.set_title(text, loc="left", fontsize=8.5, fontweight="bold", color=INK, pad=4)
    axes.set_title(detail, loc="right", fontsize=7, color=FAINT, pad=4)


def number(value: float | None, place: int = 0, *, digits: int = 3) -> str:
    """A few digits, with a minus sign that is as wide as a plus."""
    return worded(value, f".{digits}g").replace("-", "\N{MINUS SIGN}")


def labels(names: Sequence[str], width: int = 30) -> list[str]:
    """The last parts of the models' names, as many of them as it takes to tell the models apart.

    A long name is cut in its middle, unless that makes two of them alike.

    >>> labels(["runs/a/checkpoint-5", "runs/b/checkpoint-5"])
    ['a/checkpoint-5', 'b/checkpoint-5']
    """
    parts = [name.rstrip("/").split("/") for name in names]
    for count in range(1, max(map(len, parts), default=1) + 1):
        tails = ["/".join(part[-count:]) for part in parts]
        if len(set(tails)) == len(set(names)):
            break
    cut = [_cut(tail, width) for tail in tails]
    return cut if len(set(cut)) == len(set(tails)) else tails


def short(name: str, width: int = 30) -> str:
    """The last part of a model's name, cut in its middle where it is long."""
    return labels([name], width)[0]


def _cut(name: str, width: int) -> str:
    if len(name) <= width:
        return name
    half = (width - 1) // 2
    return f"{name[:half]}\N{HORIZONTAL ELLIPSIS}{name[-half:]}"


def matrix_limits(matrix: Array) -> tuple[float, float]:
    """The ends of a matrix' colour scale: the 1st and 99th percentile of the cells off position 0.

    Position 0, where [CLS] stands in many models, is far off the others: in a small matrix its row
    and column alone would take the whole scale.
    """
    inner = matrix[1:, 1:] if min(matrix.shape) > 2 else matrix
    known = inner[np.isfinite(inner)]
    if not known.size:
        return -0.5, 0.5
    low, high = (float(edge) for edge in np.percentile(known, (1, 99)))
    return (low, high) if high > low else (low - 0.5, high + 0.5)


def beyond(matrix: Array, limits: tuple[float, float]) -> float:
    """The share of the cells that lie beyond a colour scale: they have the colour of its end."""
    return float(np.mean((matrix < limits[0]) | (matrix > limits[1])))


def short_count(value: int | float, place: int = 0) -> str:
    """A number of tokens in few characters.

    >>> short_count(512), short_count(2048), short_count(1000)
    ('512', '2k', '1,000')
    """
    return f"{value / 1024:.0f}k" if value >= 1024 and value % 1024 == 0 else f"{value:,.0f}"


def inner_limits(lag: Array, *curves: Array) -> tuple[float, float]:
    """Limits for the y axis from the inner 95% of the lags.

    The outermost lags are means of a handful of cells, [CLS] among them, and can stand far off.
    """
    inside = np.abs(lag) <= 0.95 * np.abs(lag).max(initial=1)
    values = np.concatenate([curve[inside] for curve in curves])
    low, high = float(np.nanmin(values)), float(np.nanmax(values))
    room = 0.08 * (high - low) or 1.0
    return low - room, high + room
