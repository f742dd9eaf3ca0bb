"""The README's picture, from results: loss against length, and time and memory at 16,384 tokens."""

import json
from dataclasses import asdict
from io import BytesIO
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from tables.first_screen import OURS, TOKENS, Cost, costs, losses
from tables.results_folder import ResultsFolder
from whence.analysis.lm_results import Mean
from whence.files import write_bytes
from whence.report.style import (
    BLUE,
    FAINT,
    GREEN,
    GREY,
    INK,
    ORANGE,
    SPREAD,
    plain,
    short_count,
)

LINES = {  # method: its name in the picture, colour, marker and dash
    "tisa": ("TISA", BLUE, "o", "-"),
    "t5": ("T5", GREEN, "D", ":"),
    "alibi": ("ALiBi", INK, "^", "-."),
    "rope": ("RoPE", ORANGE, "s", "--"),
}
SOURCE = "Description"  # the part of the file that holds the numbers it was drawn from


def drawn_from(stored: ResultsFolder) -> str:
    """All numbers of the picture as text, which the file holds, so that a test finds an old one."""
    lines = {m: means for m, means in losses(stored).items() if m in LINES}
    numbers = {
        "losses": {m: {n: asdict(mean) for n, mean in means.items()} for m, means in lines.items()},
        "costs": {name: asdict(cost) for name, cost in costs(stored).items()},
    }
    return json.dumps(numbers)


def draw(stored: ResultsFolder) -> Figure:
    """Two halves: what is gained on the left, what it costs on the right."""
    figure = Figure(figsize=(9.6, 3.1), layout="constrained")
    left, right = figure.subfigures(1, 2, width_ratios=(1, 1.25), wspace=0.03)
    _losses(left.subplots(), losses(stored))
    left.suptitle("Trained at 512 tokens, tested at more", **_TITLE)
    _costs(right.subplots(1, 2, sharey=True), costs(stored))
    right.suptitle(f"Attention with its gradients, {TOKENS:,} tokens", **_TITLE)
    return figure


_TITLE = {"fontsize": 10, "fontweight": "bold", "color": INK}


def _losses(axes: Axes, found: dict[str, dict[int, Mean]]) -> None:
    plain(axes)
    lengths = sorted({n for means in found.values() for n in means})
    for method, (name, colour, marker, dash) in LINES.items():
        means = found[method]
        values = [means[n].mean for n in means]
        axes.plot(list(means), values, dash, color=colour, marker=marker, markersize=4, label=name)
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [short_count(n) for n in lengths])
    axes.minorticks_off()
    axes.set(xlabel="tokens", ylabel="loss, nats a token (Python source)")
    axes.axvline(lengths[0], color=SPREAD, linewidth=5, zorder=0)
    axes.legend(frameon=False, fontsize=8, labelcolor=INK, loc="upper left", borderaxespad=2.2)


def _costs(panels: list[Axes], found: dict[str, Cost]) -> None:
    names = list(found)[::-1]  # the first at the top
    colours = [BLUE if name == OURS else GREY for name in names]
    shown = {
        "time, ms": [found[name].milliseconds for name in names],
        "memory beyond the inputs, MB": [found[name].megabytes for name in names],
    }
    for axes, (title, values) in zip(panels, shown.items(), strict=True):
        plain(axes, grid=False)
        axes.spines["bottom"].set_visible(False)
        bars = axes.barh(names, values, color=colours, height=0.62)
        labels = [f"{x:,.1f}" if title.startswith("time") else f"{x:,.0f}" for x in values]
        axes.bar_label(bars, labels, padding=3, fontsize=8, color=INK)
        axes.set_xlim(0, max(values) * 1.28)
        axes.set_xticks([])
        axes.set_xlabel(title)
        axes.tick_params(axis="y", length=0, labelsize=8, labelcolor=INK)
        axes.spines["left"].set_color(FAINT)


def save(stored: ResultsFolder, path: Path) -> None:
    """Write it as PNG, with the numbers that it was drawn from."""
    drawn = BytesIO()
    metadata = {"Software": None, SOURCE: drawn_from(stored)}
    draw(stored).savefig(drawn, format="png", dpi=170, facecolor="white", metadata=metadata)
    write_bytes(path, drawn.getvalue())
