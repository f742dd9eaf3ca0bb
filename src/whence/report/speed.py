"""Time and memory of attention against length, log-log, from the records of a benchmark."""

from collections.abc import Iterator
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullLocator

from whence.report.panels import panels
from whence.report.style import plain, series, title

MODES = {"forward": "forward", "both": "forward and backward", "decode": "decoding one token"}


def draw_speed(results: dict[str, Any]) -> dict[str, Figure]:
    """A figure for each mode, method, head size and batch that has times at two lengths or more.

    Contenders without position are in all of them: they are the limit.
    """
    figures = {}
    for (mode, method, d, causal, batch), rows in _groups(results["records"]):
        if len({row["n"] for row in rows}) < 2:
            continue
        words = [mode, method.replace(":", "-").replace("=", ""), f"d{d}"]
        words += ["causal"] * causal + [f"b{batch}"] * (batch is not None)
        heading = f"{method}, {MODES[mode]}"
        figures["-".join(words)] = _figure({"": rows}, heading, results["machine"])
    return figures


def draw_modes(results: dict[str, Any], heading: str, titles: dict[str, str]) -> Figure:
    """One figure of all measured records, a row of panels for each mode.

    `titles` are the contenders as the legend names them, in its order.
    """
    measured = [row for row in results["records"] if row["ms"] is not None]
    named = [
        {**row, "contender": title}
        for name, title in titles.items()
        for row in measured
        if row["contender"] == name
    ]
    modes = dict.fromkeys(row["mode"] for row in named)
    groups = {MODES[mode]: [row for row in named if row["mode"] == mode] for mode in modes}
    return _figure(groups, heading, results["machine"])


def _groups(
    records: list[dict[str, Any]],
) -> Iterator[tuple[tuple[Any, ...], list[dict[str, Any]]]]:
    measured = [row for row in records if row["ms"] is not None]
    keys = [_key(row, row["method"]) for row in measured if row["method"] != "nope"]
    for key in dict.fromkeys(keys):
        yield key, [row for row in measured if key in (_key(row, row["method"]), _key(row, key[1]))]


def _key(row: dict[str, Any], method: str) -> tuple[Any, ...]:
    """The batch is part of it when decoding; else it follows from n."""
    mine = method if row["method"] in (method, "nope") else row["method"]
    batch = row["batch"] if row["mode"] == "decode" else None
    return row["mode"], mine, row["d_head"], row["causal"], batch


def _figure(
    groups: dict[str, list[dict[str, Any]]], heading: str, machine: dict[str, Any]
) -> Figure:
    """Time and memory side by side, a row of panels for each group of records."""
    first = next(iter(groups.values()))[0]
    detail = (
        f"{first['n_heads']} heads of {first['d_head']}, {first['dtype']}, "
        f"{machine.get('gpu') or machine['cpu']}, torch {machine['torch'].split('+')[0]}"
    )
    figure, axes = panels(
        2 * len(groups), columns=2, size=(3.9, 3.1), share=False, heading=heading, detail=detail
    )
    for (name, rows), time, memory in zip(groups.items(), axes[::2], axes[1::2], strict=True):
        _draw(time, memory, rows)
        _finish(time, rows, "milliseconds", name or "20 to 80 % shaded")
        _finish(memory, rows, "MB beyond the inputs", name or "at the most")
    axes[0].legend(fontsize=6.5, frameon=False)
    return figure


def _draw(time: Axes, memory: Axes, rows: list[dict[str, Any]]) -> None:
    looks = series()
    for name in dict.fromkeys(row["contender"] for row in rows):
        mine = sorted((row for row in rows if row["contender"] == name), key=lambda row: row["n"])
        color, marker, dash = next(looks)
        n = [row["n"] for row in mine]
        line = {"color": color, "marker": marker, "linestyle": dash, "markersize": 4, "label": name}
        time.plot(n, [row["ms"]["median"] for row in mine], **line)
        low, high = ([row["ms"][key] for row in mine] for key in ("q20", "q80"))
        time.fill_between(n, low, high, color=color, alpha=0.15, linewidth=0)
        kept = [row for row in mine if row["extra_bytes"]]  # a log scale has no place for none
        memory.plot([row["n"] for row in kept], [row["extra_bytes"] / 1e6 for row in kept], **line)


def _finish(axes: Axes, rows: list[dict[str, Any]], what: str, detail: str) -> None:
    axes.set(xscale="log", yscale="log", xlabel="tokens")
    axes.xaxis.set_major_locator(FixedLocator(sorted({row["n"] for row in rows})))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, place: f"{value:,.0f}"))
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, place: f"{value:,g}"))
    title(axes, what, detail)
    plain(axes)
