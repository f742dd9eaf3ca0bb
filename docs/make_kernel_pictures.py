"""The pictures of docs/how_fused_attention_works.md: drawings of tiles, which measure nothing.

python docs/make_kernel_pictures.py
"""

from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, Polygon, Rectangle

from whence.report import save_figure
from whence.report.style import AMBER, AXIS, BLUE, FAINT, GREEN, GREY, INK, ORANGE, SKY, title

FOLDER = Path(__file__).resolve().parent
N, ROWS, KEYS, REACH = 1024, 128, 64, 160  # of the drawn call
FAR, NEAR = "#e8eef4", "#f6d7b0"
SMALL = 7.5
CENTRED = {"ha": "center", "va": "center", "fontsize": SMALL, "color": INK}


def regions() -> Figure:
    """A block of rows and the keys it meets; and one near tile with the lags of its cells."""
    figure = Figure(figsize=(7.4, 3.5), layout="constrained")
    whole, tile = figure.subplots(1, 2, width_ratios=(1.35, 1))
    matrix(whole, "all pairs of a head", f"{N:,} tokens, reach {REACH}")
    band = [(0, 0), (REACH, 0), (N, N - REACH), (N, N), (N - REACH, N), (0, REACH)]
    whole.add_patch(Polygon(band, color=AMBER, alpha=0.45, linewidth=0))
    first = 3 * ROWS
    for start in range(0, N, KEYS):
        near = start + KEYS - 1 >= first - REACH and start <= first + ROWS - 1 + REACH
        color = NEAR if near else FAR
        whole.add_patch(Rectangle((start, first), KEYS, ROWS, facecolor=color, edgecolor=GREY))
    whole.add_patch(Polygon(band, facecolor="none", edgecolor=AMBER, linewidth=0.8))
    whole.add_patch(Rectangle((0, first), N, ROWS, facecolor="none", edgecolor=INK, linewidth=1.4))
    for x, text in ((110, "far: a line"), (448, "near: looked up"), (860, "far: a line")):
        whole.text(x, first + ROWS / 2, text, ha="center", va="center", fontsize=SMALL, color=INK)
    whole.text(20, first + ROWS + 70, "one program:\na block of rows", fontsize=SMALL, va="center")
    side = 8
    lag = np.arange(side)[None, :] - np.arange(side)[:, None]
    tile.imshow(lag, cmap="YlOrBr", vmin=-14, vmax=22)
    for i in range(side):
        for j in range(side):
            tile.text(
                j,
                i,
                f"{lag[i, j]:+d}" if lag[i, j] else "0",
                ha="center",
                va="center",
                fontsize=6.5,
                color=INK,
            )
    title(tile, "a near tile", "the lag of each cell")
    tile.set(xticks=[], yticks=[])
    tile.set_xlabel("64 cells need 15 numbers of the band: -7 to +7", fontsize=SMALL, color=FAINT)
    tile.spines[:].set_color(AXIS)
    return figure


def layout() -> Figure:
    """The laid-out band with its tails, and what the rows of one tile read of it."""
    figure = Figure(figsize=(7.4, 2.5), layout="constrained")
    axes = figure.subplots()
    lag = np.arange(-150, 151)
    curve = 3.2 * np.exp(-np.abs(lag) / 30.0) + 0.5
    inside = np.abs(lag) <= 80
    axes.plot(lag[inside], curve[inside], color=ORANGE, linewidth=2)
    for beyond in (lag < -80, lag > 80):
        axes.plot(lag[beyond], np.full(beyond.sum(), curve[inside][0]), color=BLUE, linewidth=2)
    axes.axvspan(-80, 80, color=NEAR, alpha=0.6, linewidth=0)
    for edge in (-150, 150):
        axes.axvline(edge, color=GREY, linestyle=":")
    axes.text(0, 4.15, "the band: |lag| up to the reach", ha="center", fontsize=SMALL)
    for x in (-115, 115):
        axes.text(x, 1.05, "its tail", ha="center", fontsize=SMALL, color=BLUE)
    axes.text(-153, 2.2, "as far as\na near tile\ncan touch", ha="right", fontsize=SMALL)
    for row in range(4):
        y, first = -0.9 - 0.55 * row, -100 - 6 * row
        axes.add_patch(Rectangle((first, y), 96, 0.4, facecolor=SKY, alpha=0.5, linewidth=0))
        axes.text(first + 100, y + 0.05, f"row {row}", fontsize=6.5, color=FAINT)
    axes.text(-153, -1.9, "what four rows\nof a tile read", ha="right", fontsize=SMALL)
    axes.set(xlim=(-215, 195), ylim=(-3.1, 4.8), xticks=[], yticks=[])
    axes.spines[:].set_visible(False)
    return figure


def sums() -> Figure:
    """The three ways in which backward sums the gradient of the logits."""
    figure = Figure(figsize=(7.4, 2.75), layout="constrained")
    ways = (
        ("query_kernel", "along rows: dQ", BLUE),
        ("key_kernel", "along columns: dK, dV", GREEN),
        ("band_kernel", "along diagonals: d band", ORANGE),
    )
    blocks, step = 8, 1
    for axes, (name, what, color) in zip(figure.subplots(1, 3), ways, strict=True):
        for i in range(blocks):
            for j in range(blocks):
                on = {"query_kernel": i == 3, "key_kernel": j == 4}.get(name, j - i == 1)
                face = color if on else "white"
                axes.add_patch(
                    Rectangle((j, i), step, step, facecolor=face, alpha=0.45, edgecolor=AXIS)
                )
        ends = {
            "query_kernel": ((0.2, 3.5), (7.8, 3.5)),
            "key_kernel": ((4.5, 0.2), (4.5, 7.8)),
        }.get(name, ((1.3, 0.3), (7.8, 6.8)))
        arrow = FancyArrowPatch(
            *ends, arrowstyle="-|>", mutation_scale=12, color=INK, linewidth=1.3
        )
        axes.add_patch(arrow)
        title(axes, name)
        axes.set_xlabel(what, fontsize=SMALL, color=FAINT)
        axes.set(xlim=(0, blocks), ylim=(blocks, 0), xticks=[], yticks=[], aspect="equal")
        axes.spines[:].set_color(AXIS)
    return figure


def short() -> Figure:
    """A short sequence: one tile; a causal one of up to 128: three tiles."""
    figure = Figure(figsize=(5.2, 2.6), layout="constrained")
    one, three = figure.subplots(1, 2)
    matrix(one, "up to 64 tokens", "one tile", n=64)
    one.add_patch(Rectangle((0, 0), 64, 64, facecolor=NEAR, edgecolor=INK))
    one.text(32, 32, "a whole head:\none program,\none softmax step", **CENTRED)
    matrix(three, "causal, up to 128", "three tiles backward", n=128)
    for x, y in ((0, 0), (0, 64), (64, 64)):
        three.add_patch(Rectangle((x, y), 64, 64, facecolor=NEAR, edgecolor=INK))
    three.add_patch(Rectangle((64, 0), 64, 64, facecolor="white", edgecolor=AXIS, hatch="///"))
    three.text(96, 32, "never\ncomputed", **CENTRED)
    return figure


def matrix(axes: Axes, name: str, detail: str, *, n: int = N) -> None:
    """Empty axes of n queries, downwards, and n keys."""
    title(axes, name, detail)
    axes.set(xlim=(0, n), ylim=(n, 0), xticks=[], yticks=[], aspect="equal")
    axes.set_xlabel("key", fontsize=SMALL, color=FAINT)
    axes.set_ylabel("query", fontsize=SMALL, color=FAINT)
    axes.spines[:].set_color(AXIS)


def main() -> None:
    """Draw all four."""
    for drawing in (regions, layout, sums, short):
        save_figure(drawing(), FOLDER / f"fused_{drawing.__name__}.svg")


if __name__ == "__main__":
    main()
