"""The picture of each method, docs/methods/NAME.svg: its lag curves, and one head as a matrix.

    python docs/make_method_pictures.py            every method
    python docs/make_method_pictures.py tisa t5    these

What is drawn is a new method, before any training.
"""

import sys
from pathlib import Path

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from tables.methods import BEGIN_AT_ZERO
from whence.analysis import LagCurves, position_matrix
from whence.analysis.lag_curves import curves_of
from whence.method import PositionMethod
from whence.methods import METHODS, build
from whence.report import save_figure
from whence.report.lag_curves import draw_panel, head_colors
from whence.report.style import ATTENTION, AXIS, FAINT, LAG, title

FOLDER = Path(__file__).resolve().parent / "methods"
HEADS, D_HEAD, REACH = 4, 32, 64
LENGTH = 36  # of the matrix: a square, for the methods of images


def draw(name: str) -> Figure:
    """Curves on the left, for every head; on the right the matrix of the first head."""
    shape = {"n_heads": HEADS, "d_head": D_HEAD}
    curves = curves_of(new(name, 2 * REACH + 1), name=name, reach=REACH, **shape)
    matrix = position_matrix(new(name, LENGTH), n=LENGTH, **shape)[1][0]
    figure = Figure(figsize=(6.4, 2.5), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(1.65, 1))
    draw_panel(left, curves, head_colors(HEADS))
    title(left, curves.quantity, told(curves))
    left.set_xlabel(LAG, fontsize=8, color=FAINT)
    draw_matrix(right, matrix)
    return figure


def new(name: str, length: int) -> PositionMethod:
    """The method as it begins, or for BEGIN_AT_ZERO with parameters from N(0, 1)."""
    torch.manual_seed(0)
    method = build(name, n_heads=HEADS, d_head=D_HEAD, max_length=length)
    if name in BEGIN_AT_ZERO:
        for parameter in method.parameters():
            torch.nn.init.normal_(parameter)
    return method


def told(curves: LagCurves) -> str:
    """How many curves there are, and whether content changes them."""
    alike = torch.allclose(curves.mean, curves.mean[:1].expand_as(curves.mean), equal_nan=True)
    heads = "all heads alike" if alike else "four heads, dark to light"
    return heads if curves.spread is None else "grey: over random content"


def draw_matrix(axes: Axes, matrix: torch.Tensor) -> None:
    """One head's value for each pair of positions."""
    axes.imshow(matrix.numpy(), cmap=ATTENTION, interpolation="nearest")
    title(axes, "first head", "bright is more")
    axes.set_xlabel("key", fontsize=8, color=FAINT)
    axes.set_ylabel("query", fontsize=8, color=FAINT)
    axes.set(xticks=[0, LENGTH - 1], yticks=[0, LENGTH - 1])
    axes.tick_params(labelsize=6.5, labelcolor=FAINT, color=AXIS, length=2, pad=2)
    axes.spines[:].set_color(AXIS)


def main() -> None:
    """Draw the methods that are named, or all."""
    for name in sys.argv[1:] or METHODS:
        save_figure(draw(name), FOLDER / f"{name}.svg")


if __name__ == "__main__":
    main()
