"""The plots of the page of `whence lm`, as plotly's JSON."""

from collections.abc import Iterable, Iterator
from itertools import cycle
from typing import Any

import numpy as np

from whence.analysis.json_result import Array
from whence.analysis.lm_results import SCRATCH, SLIDING, Job, LagView, Language, Mean, ranked
from whence.report.plots import (
    BELOW,
    COLORS,
    DASHES,
    LAG,
    SYMBOLS,
    Plot,
    counts_axis,
    limits_of,
    matrix,
    packed,
    plot,
    scale,
    square,
    tile,
)
from whence.report.style import ATTENTION, INNER_PRODUCTS, matrix_limits


def looks(results: Language) -> Iterator[tuple[str, str, str, str]]:
    """Each method, best first, with the colour, symbol and dash that it has in all plots."""
    names = [row.method for row in ranked(results)]
    yield from zip(names, cycle(COLORS), cycle(SYMBOLS), cycle(DASHES), strict=False)


def by_length(results: Language, how: str) -> Plot:
    """Loss against length with the spread over seeds; the length of training is marked."""
    rows = {row.method: row for row in ranked(results)}
    traces = []
    for name, color, symbol, dash in looks(results):
        found = {SCRATCH: rows[name].scratch, SLIDING: rows[name].sliding}[how]
        line = loss_line(name, zip(results.lengths, found, strict=True), color, dash, symbol)
        traces += [] if line is None else [line]
    return plot(
        traces,
        xaxis=counts_axis(results.lengths, "tokens"),
        yaxis={"title": {"text": "loss, nats"}},
        shapes=[_mark(int(results.config["train_length"]))],
        legend=BELOW,
        showlegend=True,
    )


def loss_line(
    name: str, found: Iterable[tuple[int, Mean | None]], color: str, dash: str, symbol: str
) -> Plot | None:
    """A line of losses with the spread over seeds; None where there is no loss at all."""
    pairs = [(n, x) for n, x in found if x is not None]
    if not pairs:
        return None
    said = "%{x:,} tokens: %{y:.3f} nats<br>%{text}"
    return {
        **_line(name, [n for n, _ in pairs], [x.mean for _, x in pairs], color, dash, said),
        "mode": "lines+markers",
        "marker": {"color": color, "symbol": symbol, "size": 7},
        "error_y": {
            "array": [x.spread or 0.0 for _, x in pairs],
            "visible": any(x.spread for _, x in pairs),
            "thickness": 1,
            "width": 3,
        },
        "text": [_seeds(x) for _, x in pairs],
    }


def by_position(results: Language, length: int) -> Plot:
    """Loss along sequences of one length, mean over seeds."""
    traces = []
    for name, color, _, dash in looks(results):
        found = [job.loss(length) for job in results.jobs if job.method == name]
        curves = [x for x in found if x is not None and len(x.position)]
        if curves:
            y = np.mean([x.by_position for x in curves], axis=0)
            place = curves[0].position + 1
            said = "near position %{x:,.0f}: %{y:.3f} nats"
            traces.append(_line(name, packed(place), packed(y), color, dash, said))
    powers = [2.0**n for n in range(length.bit_length())]
    return plot(
        traces,
        xaxis=counts_axis(powers, "position in the sequence"),
        yaxis={"title": {"text": "loss, nats"}},
        shapes=[_mark(int(results.config["train_length"]))],
        legend=BELOW,
        showlegend=True,
    )


def training(results: Language) -> Plot:
    """Training loss against step, mean over seeds."""
    traces = []
    for name, color, _, dash in looks(results):
        jobs = [job for job in results.jobs if job.method == name and len(job.steps)]
        if jobs:
            n = min(len(job.steps) for job in jobs)
            y = np.mean([job.train_loss[:n] for job in jobs], axis=0)
            said = "step %{x:,}: %{y:.3f} nats"
            traces.append(_line(name, packed(jobs[0].steps[:n]), packed(y), color, dash, said))
    return plot(
        traces,
        xaxis={"title": {"text": "step"}},
        yaxis={"title": {"text": "training loss, nats"}},
        legend=BELOW,
        showlegend=True,
    )


def toeplitz(job: Job) -> Plot:
    """Toeplitzness of a learned table over training, with and without the main diagonal."""
    steps = [trace.step for trace in job.toeplitz]
    traces = []
    for field, name, color in (
        ("r2", "with the main diagonal", "@blue"),
        ("r2_off_diagonal", "without it", "@orange"),
    ):
        y = [getattr(trace.table, field) for trace in job.toeplitz]
        null = [getattr(trace.table, f"null_{field}") for trace in job.toeplitz]
        said = "step %{x:,}: R² %{y:.3f}"
        traces.append(_line(name, steps, y, color, "solid", said))
        if None not in null:
            pale = _line(f"random table, {name}", steps, null, color, "dot", said)
            traces.append({**pale, "opacity": 0.7})
    return plot(
        traces,
        xaxis={"title": {"text": "step"}},
        yaxis={"title": {"text": "R²"}, "rangemode": "tozero"},
        legend=BELOW,
        showlegend=True,
    )


def heads(view: LagView) -> Plot:
    """A line a head: pale and dotted before training, solid after it."""
    traces = []
    for head, (first, last) in enumerate(zip(view.before, view.after, strict=True)):
        color = COLORS[head % len(COLORS)]
        lag, said = packed(view.lag), "lag %{x}: %{y:.3g}"
        before = _line(f"head {head}, before training", lag, packed(first), color, "dot", said)
        traces.append({**before, "opacity": 0.55, "line": {**before["line"], "width": 1}})
        traces.append(_line(f"head {head}", lag, packed(last), color, "solid", said))
    seen = np.isfinite(view.after).any(axis=0)
    return tile(traces, limits_of(view.lag[seen]), None, view.quantity)


def attention_map(views: tuple[LagView, ...], when: str) -> Plot:
    """Mean attention weight, a row a head from the first layer down; brighter is more (log)."""
    values = np.concatenate([getattr(view, when) for view in views])
    names = [f"{view.layer}.{h}" for view in views for h in range(len(view.after))]
    both = np.concatenate([np.concatenate([view.before, view.after]) for view in views])
    top = float(np.log10(max(np.nanmax(both), 1e-6)))
    trace = {
        "type": "heatmap",
        "x": packed(views[0].lag),
        "y": names,
        "z": packed(np.log10(np.maximum(values, 1e-6))),
        "colorscale": scale(ATTENTION),
        "zmin": top - 3,
        "zmax": top,
        "colorbar": {
            "thickness": 10,
            "outlinewidth": 0,
            "tickvals": [top - 3, top - 2, top - 1, top],
            "ticktext": [f"{'≤ ' if x == 3 else ''}{10 ** (top - x):.2g}" for x in (3, 2, 1, 0)],
        },
        "customdata": packed(values),
        "hovertemplate": "layer.head %{y}, lag %{x}<br>weight %{customdata:.2g}<extra></extra>",
    }
    return plot(
        [trace],
        xaxis={"title": {"text": LAG}, "showgrid": False},
        yaxis={
            "type": "category",
            "autorange": "reversed",
            "nticks": 12,
            "showgrid": False,
            "title": {"text": "layer.head", "standoff": 4},
        },
        margin={"l": 48, "r": 0, "t": 6, "b": 40},
    )


def gram_map(gram: Array) -> Plot:
    """P = E E^T of a learned table."""
    trace = {
        **matrix(gram, INNER_PRODUCTS, matrix_limits(gram)),
        "hovertemplate": "positions %{y} and %{x}<br>inner product %{z:.4g}<extra></extra>",
    }
    return square([trace], across="position", down="position")


def _line(name: str, x: Any, y: Any, color: str, dash: str, said: str) -> Plot:
    """A line; `said` is what a mouse over a point brings up, below the line's name."""
    return {
        "type": "scatter",
        "mode": "lines",
        "name": name,
        "x": x,
        "y": y,
        "line": {"color": color, "dash": dash, "width": 2},
        "hovertemplate": _hover(said),
    }


def _hover(said: str) -> str:
    return f"<b>%{{fullData.name}}</b><br>{said}<extra></extra>"


def _seeds(found: Mean) -> str:
    return "one seed" if found.spread is None else f"± {found.spread:.3f} over {found.n} seeds"


def _mark(length: int) -> Plot:
    """A dotted line where training ended."""
    return {
        "type": "line",
        "x0": length,
        "x1": length,
        "y0": 0,
        "y1": 1,
        "yref": "paper",
        "line": {"color": "@faint", "width": 1, "dash": "dot"},
    }
