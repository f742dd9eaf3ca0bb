"""Plots as SVG text, drawn in milliseconds: lines by x, and matrices as heat maps.

A `Drawing` holds the SVG and the numbers in it as a table, from which the page makes JSON and CSV.
"""

import base64
import math
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any, SupportsFloat

import numpy as np

from whence.colours import AXIS, BLUE, FAINT, GRID, INK, VIRIDIS

Array = np.ndarray[Any, np.dtype[Any]]
Real = int | float
Numbers = Sequence[Real] | Array
DASHES = {"-": "", "--": "6 4", "-.": "7 3 2 3", ":": "2 3"}
FONT = "font-family='system-ui, sans-serif'"
DIGITS = 5  # of the numbers in the table


@dataclass(frozen=True)
class Drawing:
    """A plot: its title, the SVG, and the numbers in it as rows of a table."""

    title: str
    svg: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str | Real | None, ...], ...]


@dataclass(frozen=True)
class Line:
    """One line of a plot; `low` and `high` bound a pale band about it."""

    name: str
    x: Numbers
    y: Numbers
    colour: str = BLUE
    dash: str = "-"
    width: Real = 1.6
    markers: bool = False
    low: Numbers | None = None
    high: Numbers | None = None
    labelled: bool = True  # in the legend


def draw_lines(
    lines: Sequence[Line],
    *,
    title: str,
    detail: str = "",
    x_name: str,
    y_name: str,
    width: int = 430,
    height: int = 280,
    log_x: bool = False,
    log_y: bool = False,
    x_ticks: Sequence[Real] | None = None,
    tick_names: Sequence[str] | None = None,
    legend: bool = True,
) -> Drawing:
    """Lines on common axes. NaN is a gap, and what a logarithmic axis cannot show is one too."""
    shown = [line for line in lines if line.labelled and legend]
    per_row = max(1, width // (30 + 7 * max((len(line.name) for line in shown), default=1)))
    legend_rows = -(-len(shown) // per_row) if len(shown) > 1 else 0
    frame = _Frame(width, height, left=52, right=22, top=44, bottom=40 + 15 * legend_rows)
    x_axis = _Axis([line.x for line in lines], log=log_x, room=0.0)
    bounds = [part for line in lines for part in (line.y, line.low, line.high) if part is not None]
    y_axis = _Axis(bounds, log=log_y, room=0.06)
    parts = [*_axes(frame, x_axis, y_axis, x_ticks, tick_names)]
    for line in lines:
        if line.low is not None and line.high is not None:
            parts.append(_band(frame, x_axis, y_axis, line))
        for run in _runs(frame, x_axis, y_axis, line.x, line.y):
            points = " ".join(f"{x:.1f},{y:.1f}" for x, y in run)
            dash = DASHES[line.dash]
            parts.append(
                f"<polyline points='{points}' fill='none' stroke='{line.colour}' "
                f"stroke-width='{line.width}' stroke-linejoin='round'"
                + (f" stroke-dasharray='{dash}'" if dash else "")
                + "/>"
            )
            if line.markers or len(run) == 1:
                parts += [
                    f"<circle cx='{x:.1f}' cy='{y:.1f}' r='2.8' fill='{line.colour}'/>"
                    for x, y in run
                ]
    if legend_rows:
        parts += _legend(frame, shown, per_row)
    parts += [
        _text(frame.middle_x, frame.bottom_edge + 32, x_name, anchor="middle"),
        _text(8, frame.top - 6, y_name),
    ]
    rows = tuple(
        (line.name, _rounded(x), _rounded(y))
        for line in lines
        for x, y in zip(line.x, line.y, strict=True)
    )
    return Drawing(title, _svg(frame, title, detail, parts), ("line", x_name, y_name), rows)


def draw_matrix(
    matrix: Array,
    *,
    title: str,
    detail: str = "",
    what: str,
    names: Sequence[str] | None = None,
    limits: tuple[Real, Real] | None = None,
    colours: Sequence[str] = VIRIDIS,
    width: int = 430,
) -> Drawing:
    """A matrix of queries (down) and keys (across), with a scale of colours; NaN is white."""
    values = np.asarray(matrix, dtype=np.float64)
    known = values[np.isfinite(values)]
    low, high = limits or ((known.min(), known.max()) if known.size else (0.0, 0.0))
    if not high > low:
        low, high = low - 0.5, high + 0.5
    n = len(values)
    longest = max((len(name) for name in names), default=0) if names else 4
    left = min(110, 16 + 7 * longest) if names else 44
    side = width - left - 74
    top = 44 + (min(90, 6 * longest) if names else 0)
    frame = _Frame(width, top + side + 38, left=left, right=74, top=top, bottom=38)
    parts = [_image(values, low, high, colours, frame)]
    cell = side / n
    if names:
        size = max(6.5, min(12.0, 0.8 * cell))
        for place, name in enumerate(names):
            at, shown = (place + 0.5) * cell, _cut(name, 14)
            parts.append(
                _text(left - 5, top + at + size / 3, shown, anchor="end", size=size, colour=INK)
            )
            parts.append(
                f"<text transform='translate({left + at + size / 3:.1f} {top - 5}) rotate(-60)' "
                f"font-size='{size:.1f}' fill='{INK}'>{escape(shown)}</text>"
            )
    else:
        for tick in _steps(0, n - 1, 5, whole=True):
            at = (tick + 0.5) * cell
            parts.append(_text(left + at, top + side + 14, _number(tick), anchor="middle"))
            parts.append(_text(left - 5, top + at + 4, _number(tick), anchor="end"))
    parts.append(_text(left + side / 2, top + side + 30, "key", anchor="middle"))
    parts.append(
        f"<text transform='translate(12 {top + side / 2:.1f}) rotate(-90)' text-anchor='middle' "
        f"font-size='12' fill='{FAINT}'>query</text>"
    )
    parts += _colour_bar(frame, low, high, what, colours)
    labels = tuple(names) if names else tuple(str(place) for place in range(n))
    rows = tuple(
        (label, *(_rounded(value) for value in row))
        for label, row in zip(labels, values.tolist(), strict=True)
    )
    return Drawing(
        title, _svg(frame, title, detail, parts), (f"{what}: query \\ key", *labels), rows
    )


def draw_ranking(
    names: Sequence[str],
    values: Sequence[Real],
    *,
    title: str,
    detail: str = "",
    x_name: str,
    spreads: Sequence[Real | None] | None = None,
    width: int = 430,
) -> Drawing:
    """A dot for each name, one below the other, with a whisker of one spread to each side.

    The axis need not begin at 0, as that of bars would have to.
    """
    longest = max((len(_cut(name, 28)) for name in names), default=4)
    height, left = 78 + 22 * len(names), 14 + 6.6 * longest
    frame = _Frame(width, height, left=left, right=58, top=40, bottom=38)
    axis = _Axis([values], room=0.08)
    parts = []
    for tick in axis.ticks(4):
        x = frame.x(axis, tick)
        parts.append(_stroke(x, frame.top, x, frame.bottom_edge, GRID))
        parts.append(_text(x, frame.bottom_edge + 14, _number(tick), anchor="middle"))
    every = list(spreads) if spreads else [None] * len(values)
    for place, (name, value, spread) in enumerate(zip(names, values, every, strict=True)):
        y, x = frame.top + 22 * place + 11, frame.x(axis, value)
        parts.append(_stroke(frame.left, y, x, y, GRID))
        end = x
        if spread:
            end = frame.x(axis, value + spread)
            parts.append(_stroke(frame.x(axis, value - spread), y, end, y, INK))
        parts.append(f"<circle cx='{x:.1f}' cy='{y}' r='4.5' fill='{BLUE}'/>")
        parts.append(
            _text(frame.left - 6, y + 4, _cut(name, 28), anchor="end", colour=INK, size=11)
        )
        parts.append(_text(max(x + 4, end) + 4, y + 4, _number(value, 4), size=11))
    parts.append(_text(frame.middle_x, frame.bottom_edge + 31, x_name, anchor="middle"))
    rows = tuple(zip(names, values, every, strict=True))
    return Drawing(title, _svg(frame, title, detail, parts), ("name", x_name, "spread"), rows)


@dataclass(frozen=True)
class _Frame:
    """The plot's area inside of its margins."""

    width: Real
    height: Real
    left: Real
    right: Real
    top: Real
    bottom: Real

    @property
    def right_edge(self) -> Real:
        return self.width - self.right

    @property
    def bottom_edge(self) -> Real:
        return self.height - self.bottom

    @property
    def middle_x(self) -> Real:
        return (self.left + self.right_edge) / 2

    def x(self, axis: "_Axis", value: Real) -> Real:
        return self.left + axis.share(value) * (self.right_edge - self.left)

    def y(self, axis: "_Axis", value: Real) -> Real:
        return self.bottom_edge - axis.share(value) * (self.bottom_edge - self.top)


class _Axis:
    """The range of some numbers, and where in it a number lies."""

    def __init__(self, parts: Sequence[Numbers], *, log: bool = False, room: Real) -> None:
        every = np.concatenate([np.zeros(0), *(np.asarray(part, float) for part in parts)])
        known = every[np.isfinite(every) & ((every > 0) if log else True)]
        self.log = log
        low, high = (float(known.min()), float(known.max())) if known.size else (1.0, 1.0)
        if log:
            low, high = math.log10(low), math.log10(high)
        if not high > low:
            low, high = low - 0.5, high + 0.5
        margin = room * (high - low)
        self.low, self.high = low - margin, high + margin

    def share(self, value: Real) -> Real:
        place = math.log10(value) if self.log else value
        return (place - self.low) / (self.high - self.low)

    def shows(self, value: Real) -> bool:
        return math.isfinite(value) and (value > 0 or not self.log)

    def ticks(self, most: int) -> list[Real]:
        if not self.log:
            return _steps(self.low, self.high, most)
        powers = range(math.floor(self.low), math.ceil(self.high) + 1)
        digits = (1, 2, 5) if self.high - self.low < 2 else (1,)
        ticks = [digit * 10.0**power for power in powers for digit in digits]
        inside = [tick for tick in ticks if self.low <= math.log10(tick) <= self.high]
        return inside[:: max(1, -(-len(inside) // (most + 2)))]


def _steps(low: Real, high: Real, most: int, *, whole: bool = False) -> list[Real]:
    """At most about `most` round numbers between two."""
    rough = (high - low) / max(most, 1)
    power = 10.0 ** math.floor(math.log10(rough)) if rough > 0 else 1.0
    step = next((digit * power for digit in (1, 2, 5, 10) if digit * power >= rough), 10 * power)
    if whole:
        step = max(1.0, round(step))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [place * step for place in range(first, last + 1)]


def _axes(
    frame: _Frame,
    x_axis: _Axis,
    y_axis: _Axis,
    x_ticks: Sequence[Real] | None,
    tick_names: Sequence[str] | None,
) -> list[str]:
    parts = []
    for tick in y_axis.ticks(round((frame.bottom_edge - frame.top) / 42)):
        y = frame.y(y_axis, tick)
        parts.append(_stroke(frame.left, y, frame.right_edge, y, GRID))
        parts.append(_text(frame.left - 5, y + 4, _number(tick), anchor="end"))
    ticks = (
        x_axis.ticks(round((frame.right_edge - frame.left) / 60))
        if x_ticks is None
        else list(x_ticks)
    )
    names = [_number(tick) for tick in ticks] if tick_names is None else list(tick_names)
    for tick, name in zip(ticks, names, strict=True):
        x = frame.x(x_axis, tick)
        parts.append(_stroke(x, frame.top, x, frame.bottom_edge, GRID))
        parts.append(_text(x, frame.bottom_edge + 15, name, anchor="middle"))
    if not x_axis.log and x_axis.low < 0 < x_axis.high:
        zero = frame.x(x_axis, 0.0)
        parts.append(_stroke(zero, frame.top, zero, frame.bottom_edge, AXIS))
    parts.append(_stroke(frame.left, frame.bottom_edge, frame.right_edge, frame.bottom_edge, AXIS))
    return parts


def _runs(
    frame: _Frame, x_axis: _Axis, y_axis: _Axis, xs: Numbers, ys: Numbers
) -> list[list[tuple[Real, Real]]]:
    """The points of a line in pixels, cut at gaps."""
    runs: list[list[tuple[Real, Real]]] = [[]]
    for x, y in zip(xs, ys, strict=True):
        if x_axis.shows(float(x)) and y_axis.shows(float(y)):
            runs[-1].append((frame.x(x_axis, float(x)), frame.y(y_axis, float(y))))
        elif runs[-1]:
            runs.append([])
    return [run for run in runs if run]


def _band(frame: _Frame, x_axis: _Axis, y_axis: _Axis, line: Line) -> str:
    assert line.low is not None
    assert line.high is not None
    under = _runs(frame, x_axis, y_axis, line.x, line.low)
    over = _runs(frame, x_axis, y_axis, line.x, line.high)
    shapes = (
        " ".join(f"{x:.1f},{y:.1f}" for x, y in [*low, *reversed(high)])
        for low, high in zip(under, over, strict=False)
    )
    return "".join(
        f"<polygon points='{points}' fill='{line.colour}' fill-opacity='0.18'/>"
        for points in shapes
    )


def _legend(frame: _Frame, lines: Sequence[Line], per_row: int) -> list[str]:
    parts = []
    column = (frame.width - 16) / per_row
    for place, line in enumerate(lines):
        row, at = divmod(place, per_row)
        x, y = 10 + at * column, frame.bottom_edge + 48 + 15 * row
        dash = DASHES[line.dash]
        parts.append(
            f"<line x1='{x:.1f}' y1='{y - 4:.1f}' x2='{x + 18:.1f}' y2='{y - 4:.1f}' "
            f"stroke='{line.colour}' stroke-width='2.2'"
            + (f" stroke-dasharray='{dash}'" if dash else "")
            + "/>"
        )
        parts.append(_text(x + 23, y, line.name, colour=INK, size=11))
    return parts


def _image(
    values: Array,
    low: Real,
    high: Real,
    colours: Sequence[str],
    frame: _Frame,
) -> str:
    shares = np.clip((values - low) / (high - low), 0, 1)
    index = np.where(np.isfinite(values), 1 + np.round(shares * 254), 0).astype(np.uint8)
    data = base64.b64encode(_png(index, [(255, 255, 255), *_ramp(colours)])).decode()
    side_x, side_y = frame.right_edge - frame.left, frame.bottom_edge - frame.top
    return (
        f"<image x='{frame.left}' y='{frame.top}' width='{side_x:.1f}' height='{side_y:.1f}' "
        "preserveAspectRatio='none' style='image-rendering:pixelated' "
        f"href='data:image/png;base64,{data}'/>"
        f"<rect x='{frame.left}' y='{frame.top}' width='{side_x:.1f}' height='{side_y:.1f}' "
        f"fill='none' stroke='{AXIS}'/>"
    )


def _ramp(colours: Sequence[str], size: int = 255) -> list[tuple[int, int, int]]:
    """Colours between those of a map, at equal steps."""
    stops = np.asarray([[int(text[i : i + 2], 16) for i in (1, 3, 5)] for text in colours])
    places = np.linspace(0, len(stops) - 1, size)
    mixed = np.stack([np.interp(places, range(len(stops)), part) for part in stops.T], axis=1)
    return [(int(r), int(g), int(b)) for r, g, b in np.round(mixed)]


def _png(index: Array, palette: Sequence[tuple[int, int, int]]) -> bytes:
    """An image of palette colours as PNG."""
    height, width = index.shape

    def chunk(kind: bytes, data: bytes) -> bytes:
        check = zlib.crc32(kind + data)
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", check)

    rows = b"".join(b"\0" + row.tobytes() for row in index)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 3, 0, 0, 0))
        + chunk(b"PLTE", bytes(part for colour in palette for part in colour))
        + chunk(b"IDAT", zlib.compress(rows, 6))
        + chunk(b"IEND", b"")
    )


def _colour_bar(
    frame: _Frame, low: Real, high: Real, what: str, colours: Sequence[str]
) -> list[str]:
    x, height = frame.right_edge + 12, frame.bottom_edge - frame.top
    steps = 32
    ramp = _ramp(colours, steps)
    parts = [
        f"<rect x='{x}' y='{frame.bottom_edge - (place + 1) * height / steps:.2f}' width='10' "
        f"height='{height / steps + 0.4:.2f}' fill='rgb({r},{g},{b})'/>"
        for place, (r, g, b) in enumerate(ramp)
    ]
    for tick in _steps(low, high, 5):
        y = frame.bottom_edge - (tick - low) / (high - low) * height
        parts.append(_text(x + 14, y + 4, _number(tick), size=11))
    parts.append(_text(frame.width - 6, frame.bottom_edge + 16, what, anchor="end", size=11))
    return parts


def _svg(frame: _Frame, title: str, detail: str, parts: Sequence[str]) -> str:
    head = (
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {frame.width:g} {frame.height:g}' "
        f"role='img' aria-label='{escape(title, quote=True)}' {FONT}>"
        f"<rect width='{frame.width:g}' height='{frame.height:g}' fill='#ffffff'/>"
    )
    room = int(frame.width / 7)
    heading = _text(8, 17, _cut(title, room), colour=INK, size=14, weight=600)
    under = _text(frame.width - 8, 32, _cut(detail, room), anchor="end", size=11) if detail else ""
    return f"{head}{heading}{under}{''.join(parts)}</svg>"


def _text(
    x: Real,
    y: Real,
    text: str,
    *,
    anchor: str = "start",
    size: Real = 12,
    colour: str = FAINT,
    weight: int = 400,
) -> str:
    bold = f" font-weight='{weight}'" if weight != 400 else ""
    return (
        f"<text x='{x:.1f}' y='{y:.1f}' text-anchor='{anchor}' font-size='{size:g}' "
        f"fill='{colour}'{bold}>{escape(text)}</text>"
    )


def _stroke(x1: Real, y1: Real, x2: Real, y2: Real, colour: str) -> str:
    return f"<line x1='{x1:.1f}' y1='{y1:.1f}' x2='{x2:.1f}' y2='{y2:.1f}' stroke='{colour}'/>"


def _number(value: Real, digits: int = 3) -> str:
    """A few digits, thousands as k and M."""
    for size, letter in ((1e6, "M"), (1e3, "k")):
        if abs(value) >= 10 * size or (abs(value) >= size and value % size == 0):
            return f"{value / size:.{digits}g}{letter}".replace("-", "\N{MINUS SIGN}")
    return f"{value:.{digits + (abs(value) >= 1000)}g}".replace("-", "\N{MINUS SIGN}")


def _rounded(value: SupportsFloat) -> float | None:
    """For the table: JSON has no NaN."""
    number = float(value)
    return float(f"{number:.{DIGITS}g}") if math.isfinite(number) else None


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "\N{HORIZONTAL ELLIPSIS}"
