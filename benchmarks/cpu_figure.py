"""The figures of the CPU benchmark, drawn from its JSON alone: time and memory, log-log."""

from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from whence.files import replace_file
from whence.report import save_png

INK, FAINT, GRID = "#222222", "#555555", "#dddddd"
# Okabe and Ito's colours, which the colour-blind can tell apart, with a marker and a dash each.
LOOKS = {
    "whence": ("whence", "#0072B2", "o", "-"),
    "eager": ("eager, n x n", "#D55E00", "s", "--"),
    "sdpa_dense": ("PyTorch SDPA, dense bias", "#CC79A7", "^", ":"),
    "plain": ("PyTorch SDPA, no bias", "#555555", "x", "-."),
    "article": ("the article's algorithm", "#D55E00", "s", "--"),
}
TITLES = {
    "tisa": ("attention", "Attention with TISA's learned bias, forward and backward"),
    "shaw": ("shaw", "Attention with Shaw's keys and values, forward and backward"),
}


def draw(results: dict[str, Any], out: Path) -> list[Path]:
    """A figure for each group of contenders, as PNG and SVG; gives the paths."""
    paths = []
    for group, (name, title) in TITLES.items():
        rows = [row for row in results["rows"] if row["group"] == group and row["seconds"]]
        figure = figure_of(rows, title, results)
        paths.append(save_png(figure, out / f"{name}.png", dpi=200))
        paths.append(save_svg(figure, out / f"{name}.svg"))
    return paths


def figure_of(rows: list[dict[str, Any]], title: str, results: dict[str, Any]) -> Figure:
    figure = Figure(figsize=(8.0, 3.7), layout="constrained")
    left, right = figure.subplots(1, 2)
    for name, (label, color, marker, dash) in LOOKS.items():
        mine = [row for row in rows if row["contender"] == name]
        if not mine:
            continue
        n = [row["n"] for row in mine]
        line = {"color": color, "linestyle": dash, "marker": marker, "markersize": 5}
        seconds = [row["seconds"] for row in mine]
        left.plot(n, [s["median"] for s in seconds], label=label, **line)
        left.fill_between(
            n,
            [s["q20"] for s in seconds],
            [s["q80"] for s in seconds],
            color=color,
            alpha=0.15,
            linewidth=0,
        )
        right.plot(n, [row["peak_bytes"] / 1e6 for row in mine], label=label, **line)
    finish(left, rows, "seconds, median and 20 to 80 %")
    finish(right, rows, "peak memory beyond the inputs, MB")
    config, machine = results["config"], results["machine"]
    figure.suptitle(title, x=0.01, ha="left", fontsize=11, fontweight="bold", color=INK)
    handles, labels = left.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower left", ncols=4, fontsize=8, frameon=False)
    note = (
        f"{config['n_heads']} heads of {config['d_head']}, batch {config['batch']}, "
        f"{config['dtype']}, {config['threads']} threads, {machine['cpu']}, "
        f"torch {machine['torch'].split('+')[0]}"
    )
    left.set_title(note, loc="left", fontsize=7.5, color=FAINT)
    return figure


def finish(panel: Axes, rows: list[dict[str, Any]], what: str) -> None:
    panel.set(xscale="log", yscale="log", xlabel="tokens n")
    panel.set_ylabel(what, fontsize=8.5)
    panel.xaxis.set_major_locator(FixedLocator(sorted({row["n"] for row in rows})))
    panel.xaxis.set_minor_locator(NullLocator())
    panel.xaxis.set_major_formatter(FuncFormatter(lambda value, place: f"{value:,.0f}"))
    panel.yaxis.set_major_formatter(FuncFormatter(lambda value, place: f"{value:,g}"))
    panel.tick_params(labelsize=8)
    panel.grid(color=GRID, linewidth=0.6)
    panel.set_axisbelow(True)
    panel.spines[["top", "right"]].set_visible(False)


def save_svg(figure: Figure, path: Path) -> Path:
    """Write an SVG without a date or random names, so that equal figures give equal files."""
    with replace_file(path) as file, matplotlib.rc_context({"svg.hashsalt": "whence"}):
        figure.savefig(file, format="svg", metadata={"Date": None})
    return path
