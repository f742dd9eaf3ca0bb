"""The page's plots as plotly's own JSON; "@name" is a colour that the page fills in by theme."""

import base64
from collections.abc import Sequence
from itertools import cycle
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.colors import to_hex
from numpy.typing import ArrayLike

from whence.analysis.comparison import Comparison
from whence.analysis.fit import fitted
from whence.analysis.json_result import Array
from whence.analysis.results import Fit, HeadReport, Inspection, LagProfile, TableReport
from whence.report.style import (
    ATTENTION,
    INNER_PRODUCTS,
    inner_limits,
    labels,
    matrix_limits,
    number,
    short_count,
)

Plot = dict[str, Any]
# Ten colours, seven symbols and four dashes: no two of 140 lines look the same.
COLORS = (
    *("@blue", "@orange", "@ink", "@green", "@purple", "@amber", "@sky", "@brown", "@grey"),
    "@pink",
)
SYMBOLS = ("circle", "square", "diamond", "cross", "triangle-up", "x", "star")
DASHES = ("solid", "dash", "dashdot", "dot")
MOST_CELLS, MOST_IN_TILE, MOST_TICKS = 512, 64, 7
BELOW: Plot = {"orientation": "h", "y": -0.25}  # where a legend goes
LAG = "lag = key − query"  # noqa: RUF001


def heat_map(table: TableReport) -> Plot:
    """P with hover. A long table is shown at every k-th position, so that each cell is exact."""
    step = -(-len(table.gram) // MOST_CELLS)
    gram = table.gram[::step, ::step]
    place = np.arange(0, len(table.gram), step)
    trace = {
        **matrix(gram, INNER_PRODUCTS, matrix_limits(table.gram)),
        "x": packed(place),
        "y": packed(place),
        "zsmooth": "fast" if len(gram) > 128 else False,
        "hovertemplate": "positions %{y} and %{x}<br>inner product %{z:.4g}<extra></extra>",
    }
    return square([trace], across="position", down="position")


def windows(inspections: Sequence[Inspection], field: str) -> Plot:
    """R^2 against the window, a line a model; thin: its null."""
    traces: list[Plot] = []
    names = labels([entry.model.name for entry in inspections])
    looks = zip(cycle(COLORS), cycle(SYMBOLS), cycle(DASHES), names, inspections, strict=False)
    for color, symbol, dash, name, entry in looks:
        if entry.table is None:
            continue
        parts = entry.table.windows or (entry.table.whole,)
        ends = [part.stop for part in parts]
        rows = [f"positions {part.start}..{part.stop - 1}" for part in parts]
        traces.append(
            {
                "type": "scatter",
                "mode": "lines+markers",
                "name": name,
                "x": ends,
                "y": [getattr(part, field) for part in parts],
                "text": rows,
                "line": {"color": color, "dash": dash, "width": 2},
                "marker": {"color": color, "symbol": symbol, "size": 7},
                "hovertemplate": "%{text}<br>R² %{y:.3f}",
            }
        )
        nulls = [getattr(part, f"null_{field}") for part in parts]
        if None not in nulls:
            traces.append(
                {
                    "type": "scatter",
                    "mode": "lines",
                    "name": "random table" if len(inspections) == 1 else f"random, as {name}",
                    "x": ends,
                    "y": nulls,
                    "text": rows,
                    "opacity": 0.6,
                    "showlegend": len(inspections) == 1,
                    "line": {"color": color, "dash": dash, "width": 1},
                    "hovertemplate": "%{text}<br>R² %{y:.3f}",
                }
            )
    ends = sorted({end for trace in traces for end in trace["x"]})
    return plot(
        traces,
        xaxis=counts_axis(ends, "window: rows up to"),
        yaxis={"range": [-0.03, 1.03], "title": {"text": "R²"}},
        legend=BELOW,
        showlegend=True,
    )


def explained(table: TableReport) -> Plot:
    """Share of the variance, summed over components."""
    share = np.cumsum(table.explained)
    count = np.arange(1, len(share) + 1)
    return plot(
        [
            {
                "type": "scatter",
                "x": packed(count),
                "y": packed(share),
                "line": {"color": "@blue", "width": 2},
                "hovertemplate": "%{x} components explain %{y:.1%}<extra></extra>",
            }
        ],
        xaxis={"title": {"text": "components"}, "range": [0, min(48, len(share)) + 1]},
        yaxis={"range": [0, 1.04], "tickformat": ".0%"},
    )


def component(table: TableReport, number: int, what: str) -> Plot:
    """One component along the positions ("values") or its spectrum ("power")."""
    part = table.components[number]
    along = what == "values"
    x = np.arange(len(part.values)) if along else part.frequency
    hover = "position %{x}: %{y:.3g}" if along else "%{x:.3f} cycles a position: %{y:.1%}"
    return plot(
        [
            {
                "type": "scatter",
                "x": packed(x),
                "y": packed(getattr(part, what)),
                "fill": None if along else "tozeroy",
                "line": {"color": "@blue" if along else "@orange", "width": 1.3},
                "hovertemplate": hover + "<extra></extra>",
            }
        ],
        yaxis={"nticks": 4} if along else {"nticks": 4, "rangemode": "tozero"},
        xaxis={"title": {"text": "position" if along else "cycles a position"}},
    )


def head_curve(head: HeadReport, fit: Fit | None) -> Plot:
    """The lag curve with its spread over each diagonal, and the fit that was picked, dashed."""
    color = "@teal" if head.sensitive else "@grey"
    traces = [
        *_band(head.lag, head.curve - head.spread, head.curve + head.spread, color),
        _line(head.lag, head.curve, color, "curve"),
    ]
    lines = [head.curve]
    if fit is not None:
        over = (fitted(fit, head.lag) + fit.level).astype(np.float32)
        lines.append(over)
        traces.append(_line(head.lag, over, "@orange", f"fit, S = {fit.kernels}", dash="dash"))
    return tile(traces, limits_of(head.lag), inner_limits(head.lag, *lines))


def head_matrix(head: HeadReport) -> Plot:
    """The corner of the head's matrix over the first positions."""
    corner = drawn_corner(head)
    trace = {
        **matrix(corner, ATTENTION, matrix_limits(corner)),
        "hovertemplate": "query %{y}, key %{x}: %{z:.3g} logits<extra></extra>",
    }
    return square([trace], across="key", down="query", nticks=4)


def drawn_corner(head: HeadReport) -> Array:
    """The cells of a head's matrix that the page draws."""
    return head.matrix[:MOST_IN_TILE, :MOST_IN_TILE]


def matrix(values: Array, colors: str, limits: tuple[float, float]) -> Plot:
    """A heat map with its colour bar, whose ends say that cells may lie beyond them."""
    low, high = limits
    ticks = np.linspace(low, high, 3)
    texts = [number(float(tick), digits=2) for tick in ticks]
    return {
        "type": "heatmap",
        "z": packed(values),
        "colorscale": scale(colors),
        "zmin": low,
        "zmax": high,
        "colorbar": {
            "thickness": 8,
            "outlinewidth": 0,
            "len": 0.94,
            "tickvals": [float(tick) for tick in ticks],
            "ticktext": [f"≤ {texts[0]}", *texts[1:-1], f"≥ {texts[-1]}"],
        },
    }


def square(traces: list[Plot], *, across: str, down: str, nticks: int = 6) -> Plot:
    """A plot of a matrix: square cells, the first row at the top."""
    axis = {"constrain": "domain", "showgrid": False, "zeroline": False, "nticks": nticks}
    return plot(
        traces,
        xaxis={**axis, "title": {"text": across, "standoff": 4}},
        yaxis={
            **axis,
            "autorange": "reversed",
            "scaleanchor": "x",
            "constraintoward": "top",
            "title": {"text": down, "standoff": 4},
        },
        margin={"l": 44, "r": 0, "t": 6, "b": 38},
    )


def profile(entry: LagProfile) -> Plot:
    """The measured lag profile with its 95% band."""
    traces = [
        *_band(entry.lag, entry.low, entry.high, "@purple"),
        _line(entry.lag, entry.mean, "@purple", "mean logit"),
    ]
    return tile(traces, limits_of(entry.lag), inner_limits(entry.lag, entry.mean))


def criterion(inspection: Inspection) -> Plot:
    """Residual against S, a line a head: where more Gaussians stop paying."""
    traces = [
        {
            "type": "scatter",
            "mode": "lines+markers",
            "name": f"layer {entry.layer}, head {entry.head}",
            "x": [fit.kernels for fit in entry.fits],
            "y": [max(1 - fit.r2, 1e-9) for fit in entry.fits],
            "opacity": 0.75,
            "line": {"color": "@teal", "width": 1.2},
            "marker": {
                "color": "@orange",
                "size": [9 if fit.kernels == entry.chosen else 0 for fit in entry.fits],
            },
            "hovertemplate": "%{fullData.name}<br>S = %{x}: 1 - R² = %{y:.2g}<extra></extra>",
        }
        for entry in inspection.fits
    ]
    return plot(
        traces,
        xaxis={"title": {"text": "S, Gaussians"}, "dtick": 1},
        yaxis={
            "type": "log",
            "dtick": 1,
            "title": {"text": "1 - R²"},
            "exponentformat": "power",
            "automargin": True,
        },
    )


def steps(comparison: Comparison, field: str) -> Plot:
    """Toeplitzness along a series of models, whole and near; thin: the nulls."""
    points = comparison.points
    stepped = all(point.step is not None for point in points)
    names = labels([point.model for point in points])
    x = [point.step for point in points] if stepped else names
    traces: list[Plot] = []
    for color, dash, which in (("@blue", "solid", "whole"), ("@orange", "dash", "near")):
        parts = [getattr(point, which) for point in points]
        name = "all rows" if which == "whole" else f"rows {parts[0].start}..{parts[0].stop - 1}"
        for label, key, width in ((name, field, 2), (f"random, {name}", f"null_{field}", 1)):
            y = [getattr(part, key) for part in parts]
            if None not in y:
                traces.append(
                    {
                        "type": "scatter",
                        "mode": "lines+markers" if width > 1 else "lines",
                        "name": label,
                        "x": x,
                        "y": y,
                        "text": [point.model for point in points],
                        "opacity": 1.0 if width > 1 else 0.6,
                        "line": {"color": color, "dash": dash, "width": width},
                        "hovertemplate": "%{text}<br>R² %{y:.3f}",
                    }
                )
    return plot(
        traces,
        xaxis={
            "type": "linear" if stepped else "category",  # plotly would take some names for dates
            "title": {"text": "training step" if stepped else ""},
            "automargin": True,
        },
        yaxis={"range": [-0.03, 1.03], "title": {"text": "R²"}},
        legend=BELOW,
        showlegend=True,
    )


def scores(comparison: Comparison, field: str) -> Plot:
    """Score against Toeplitzness, a point a model."""
    points = comparison.points
    trace = {
        "type": "scatter",
        "mode": "markers+text",
        "x": [getattr(point.whole, field) for point in points],
        "y": [point.score for point in points],
        "text": labels([point.model for point in points], 20),
        "textposition": "top center",
        "cliponaxis": False,
        "marker": {"color": "@blue", "size": 9},
        "hovertemplate": "%{text}<br>R² %{x:.3f}, score %{y:g}<extra></extra>",
    }
    return plot(
        [trace],
        xaxis={"title": {"text": "R²"}, "range": _roomy(trace["x"])},
        yaxis={"title": {"text": "score"}, "range": _roomy(trace["y"])},
    )


def packed(values: ArrayLike) -> Plot:
    """An array as plotly's base64: a quarter of the size of its digits."""
    data = np.ascontiguousarray(values, dtype="<f4")
    plain: Plot = {"dtype": "f4", "bdata": base64.b64encode(data.tobytes()).decode()}
    if data.ndim > 1:
        plain["shape"] = ", ".join(str(size) for size in data.shape)
    return plain


def _roomy(values: Any) -> list[float]:
    """Limits with room for a name beside the outermost points."""
    low, high = min(values), max(values)
    room = 0.18 * (high - low) or 1.0
    return [low - room, high + room]


def scale(name: str) -> list[list[Any]]:
    """A colour map of the figures, for plotly."""
    return [[place / 16, to_hex(colormaps[name](place / 16))] for place in range(17)]


def _line(lag: Array, values: Array, color: str, name: str, *, dash: str = "solid") -> Plot:
    return {
        "type": "scatter",
        "mode": "lines",
        "name": name,
        "x": packed(lag),
        "y": packed(values),
        "line": {"color": color, "width": 1.6, "dash": dash},
        "hovertemplate": "lag %{x}: %{y:.3g}",
    }


def _band(lag: Array, low: Array, high: Array, color: str) -> list[Plot]:
    edge = {"type": "scatter", "mode": "lines", "line": {"width": 0}, "hoverinfo": "skip"}
    return [
        {**edge, "x": packed(lag), "y": packed(low)},
        {
            **edge,
            "x": packed(lag),
            "y": packed(high),
            "fill": "tonexty",
            "fillcolor": f"{color}Pale",
        },
    ]


def tile(
    traces: list[Plot],
    lags: tuple[float, float],
    values: tuple[float, float] | None,
    what: str = "logits",
) -> Plot:
    """A small plot by lag of `what`; its y axis takes what it needs where no limits are given."""
    limits = {} if values is None else {"range": list(values)}
    return plot(
        traces,
        xaxis={"nticks": 5, "range": list(lags), "title": {"text": LAG, "standoff": 3}},
        yaxis={"nticks": 4, "exponentformat": "e", **limits},
        annotations=[  # lying above the axis it takes no width, and meets no number
            {
                "text": what,
                "showarrow": False,
                "xref": "paper",
                "yref": "paper",
                "x": 0,
                "y": 1,
                "xanchor": "left",
                "yanchor": "bottom",
            }
        ],
        margin={"l": 44, "r": 6, "t": 18, "b": 34},
    )


def limits_of(lag: Array) -> tuple[float, float]:
    """The first lag and the last."""
    return float(lag.min()), float(lag.max())


def counts_axis(ticks: Sequence[float], title: str) -> Plot:
    """A logarithmic axis of numbers of tokens, with labels at these and nowhere else."""
    shown = list(ticks)[:: -(-len(ticks) // MOST_TICKS) or 1]
    return {
        "type": "log",
        "title": {"text": title},
        "tickvals": shown,
        "ticktext": [short_count(tick) for tick in shown],
    }


def plot(traces: list[Plot], **layout: Any) -> Plot:
    """Traces with a layout that the given one adds to."""
    return {
        "data": traces,
        "layout": {
            "margin": {"l": 48, "r": 8, "t": 8, "b": 40},
            "showlegend": False,
            "hovermode": "closest",
            **layout,
        },
    }
