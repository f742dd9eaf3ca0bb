"""A panel a method, the others behind it in grey: how a dozen methods and more are told apart."""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from whence.analysis.json_result import Array
from whence.analysis.lm_results import Job, LagView, Language, Row, ranked
from whence.report.panels import panels
from whence.report.style import (
    AXIS,
    BLUE,
    FAINT,
    GRID,
    INNER_PRODUCTS,
    ORANGE,
    inner_limits,
    matrix_limits,
    plain,
    short_count,
    title,
)

COLUMNS, SIZE = 6, (1.9, 1.75)
LAYERS_SHOWN = 4
TALL = 2.5  # times the usual spread: what is above is told by an arrow

Curve = tuple[list[float], list[float]]


def draw_lengths(results: Language) -> Figure:
    """Loss against length: from scratch, with the spread over seeds, and sliding (dashed)."""
    rows, home = ranked(results), int(results.config["train_length"])
    figure, grid = _grid(
        len(rows),
        "Loss against length, best at the length of training first",
        f"Nats a token. Solid: from scratch; dashed: sliding, where each token has half a window "
        f"before it. Dotted: the length of training, {home:,}. Grey: the other methods.",
    )
    curves = [_lengths(row.scratch, results.lengths) for row in rows]
    sliding = [_lengths(row.sliding, results.lengths) for row in rows]
    at_home = [y[x.index(home)] for x, y in curves if home in x]
    low, top = _limits([*curves, *sliding], at_home)
    for axes, row, curve, other in zip(grid, rows, curves, sliding, strict=True):
        _behind(axes, curves, curve)
        _curve(axes, curve, BLUE, "-", top, marker="o")
        spread = [x.spread or 0.0 for x in row.scratch if x is not None]
        if any(spread):
            x, y = (np.asarray(part) for part in curve)
            axes.fill_between(x, y - spread, y + spread, color=BLUE, alpha=0.25, linewidth=0)
        _curve(axes, other, ORANGE, "--", None)
        title(axes, row.method)
        axes.text(
            0.97, 0.04, _told(curve), transform=axes.transAxes, fontsize=7, color=BLUE, ha="right"
        )
        _length_axis(axes, results.lengths, home)
    if grid:
        grid[0].set_ylim(low - 0.2 * (top - low), top)
    return figure


def draw_positions(results: Language) -> Figure:
    """Loss along the longest sequences from scratch, mean over seeds."""
    rows, home, longest = ranked(results), int(results.config["train_length"]), results.lengths[-1]
    figure, grid = _grid(
        len(rows),
        f"Loss along sequences of {longest:,} tokens",
        "Nats a token at each position, mean over seeds; right of the dotted line are positions "
        "that training never had. Grey: the other methods. A method with a table ends at the line.",
    )
    curves = [_positions(results, row, longest, home) for row in rows]
    inside = [
        float(np.mean(found))
        for x, y in curves
        if (found := [value for n, value in zip(x, y, strict=True) if home / 4 < n <= home])
    ]
    low, top = _limits(curves, inside)
    for axes, row, curve in zip(grid, rows, curves, strict=True):
        _behind(axes, curves, curve)
        _curve(axes, curve, BLUE, "-", top)
        title(axes, row.method)
        _length_axis(axes, (1, home // 16, home, longest), home)
    if grid:
        grid[0].set_ylim(low - 0.05 * (top - low), top)
    return figure


def draw_learned_curves(results: Language) -> Figure | None:
    """What learned methods add at each lag, before (grey) and after training; a line a head."""
    order = [row.method for row in ranked(results)]
    jobs = [job for job in results.jobs if job.stated and job.positional and not job.stopped]
    jobs = sorted(
        {job.method: job for job in reversed(jobs)}.values(),
        key=lambda job: order.index(job.method),
    )
    if not jobs:
        return None
    shown = {job.method: _spread_out(job.stated, LAYERS_SHOWN) for job in jobs}
    several = [name for name, views in shown.items() if len(views) > 1]  # a row each
    single = [name for name in shown if name not in several]  # share rows
    blank = {name: LAYERS_SHOWN - len(shown[name]) for name in several}
    places: list[tuple[str, LagView | None]] = []
    for name in (*several, *single):
        places += [(name, view) for view in shown[name]] + [(name, None)] * blank.get(name, 0)
    figure, grid = panels(
        len(places),
        columns=LAYERS_SHOWN,
        size=(2.4, 1.35),
        share=False,
        heading="What learned methods add at each lag",
        detail="A line a head, grey before training. Lag = key − query. Where content has a say: "  # noqa: RUF001
        "the mean over random content. From the first layer (left) to the last; first seed.",
    )
    for axes, (name, view) in zip(grid, places, strict=True):
        if view is None:
            axes.axis("off")
            continue
        _heads(axes, view)
        layer = f"layer {view.layer}" if name in several else "all layers"
        title(axes, name if view is shown[name][0] else "", layer)
        plain(axes)
    return figure


def draw_tables(results: Language) -> Figure | None:
    """Learned tables: P = E E^T before and after, and Toeplitzness over training, each seed."""
    traced = [job for job in results.jobs if job.toeplitz and not job.stopped]
    names = list(dict.fromkeys(job.method for job in traced))
    if not names:
        return None
    figure, grid = panels(
        3 * len(names),
        columns=3,
        size=(3.0, 2.6),
        share=False,
        heading="Learned tables over training",
        detail="P = E Eᵀ of the position vectors; R² of its best Toeplitz fit, with its main "
        "diagonal (blue) and without (orange), each seed; dotted: a random table of equal norms.",
    )
    for place, name in enumerate(names):
        jobs = [job for job in traced if job.method == name]
        before, after, chart = grid[3 * place : 3 * place + 3]
        pictures = next((job for job in jobs if job.gram_after is not None), None)
        n = int(results.config["train_length"])
        for axes, when in ((before, "before"), (after, "after")):
            gram = None if pictures is None else getattr(pictures, f"gram_{when}")
            _gram(axes, gram, n, f"{name}, {when}")
        for job in jobs:
            _toeplitz(chart, job)
        title(chart, "Toeplitzness", "R²")
        chart.set(xlabel="step", ylim=(0, 1))
        plain(chart)
    return figure


def _grid(n: int, heading: str, detail: str) -> tuple[Figure, Sequence[Axes]]:
    return panels(n, columns=COLUMNS, size=SIZE, heading=heading, detail=detail)


def _lengths(found: Sequence[object], lengths: Sequence[int]) -> Curve:
    pairs = [(float(n), x.mean) for n, x in zip(lengths, found, strict=True) if x is not None]  # type: ignore[attr-defined]
    return [n for n, _ in pairs], [y for _, y in pairs]


def _positions(results: Language, row: Row, longest: int, home: int) -> Curve:
    """At the longest length, or at that of training where a method ends there."""
    for length in (longest, home):
        found = [job.loss(length) for job in results.jobs if job.method == row.method]
        curves = [x for x in found if x is not None and len(x.position)]
        if curves:
            y = np.mean([x.by_position for x in curves], axis=0)
            return [float(x) + 1 for x in curves[0].position], [float(x) for x in y]
    return [], []


def _limits(curves: Sequence[Curve], at_home: Sequence[float]) -> tuple[float, float]:
    """The lowest loss, and what is shown at the most: the good has the room, the rest is cut off.

    `at_home` are the methods' losses where all are at home, of which the worst quarter may be far
    off too.
    """
    everything = [value for _, y in curves for value in y]
    if not everything or not at_home:
        return 0.0, max(everything, default=1.0)
    low = min(everything)
    spread = max(float(np.quantile(at_home, 0.75)) - low, 0.1)
    return low, min(max(everything) + 0.1 * spread, low + TALL * spread)


def _behind(axes: Axes, curves: Sequence[Curve], own: Curve) -> None:
    for x, y in curves:
        if (x, y) != own:
            axes.plot(x, y, color=GRID, linewidth=0.7, zorder=1)


def _curve(
    axes: Axes, curve: Curve, color: str, dash: str, top: float | None, marker: str = ""
) -> None:
    x, y = curve
    axes.plot(x, y, color=color, linestyle=dash, linewidth=1.4, marker=marker, markersize=2.5)
    above = (
        [] if top is None else [(n, value) for n, value in zip(x, y, strict=True) if value > top]
    )
    if above:
        axes.annotate(
            f"↑ {above[-1][1]:.2f}",
            (1.0, 0.97),
            xycoords="axes fraction",
            ha="right",
            va="top",
            fontsize=7,
            color=color,
        )


def _told(curve: Curve) -> str:
    """The loss at the shortest and at the longest length."""
    y = curve[1]
    return "" if not y else f"{y[0]:.3f}" if len(y) == 1 else f"{y[0]:.3f} → {y[-1]:.3f}"


def _length_axis(axes: Axes, ticks: Sequence[int], home: int) -> None:
    axes.axvline(home, color=FAINT, linewidth=0.7, linestyle=":")
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(FixedLocator([float(n) for n in ticks]))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(short_count))
    plain(axes)


def _spread_out(views: Sequence[LagView], n: int) -> list[LagView]:
    places = sorted({round(x) for x in np.linspace(0, len(views) - 1, min(n, len(views)))})
    return [views[place] for place in places]


def _heads(axes: Axes, view: LagView) -> None:
    seen = np.isfinite(view.after).any(axis=0)
    lag = view.lag[seen]
    for curve in view.before[:, seen]:
        axes.plot(lag, curve, color=AXIS, linewidth=0.8, zorder=1)
    for head, curve in enumerate(view.after[:, seen]):
        color = _shade(head / max(len(view.after) - 1, 1))
        axes.plot(lag, curve, color=color, linewidth=1.0)
    axes.set_ylim(*inner_limits(lag, *view.after[:, seen], *view.before[:, seen]))


def _shade(share: float) -> str:
    """From dark to light, so that heads are told apart in grey print too."""
    from matplotlib import colormaps
    from matplotlib.colors import to_hex

    return str(to_hex(colormaps["viridis"](0.05 + 0.8 * share)))


def _gram(axes: Axes, gram: Array | None, n: int, name: str) -> None:
    title(axes, name)
    if gram is None:
        axes.axis("off")
        return
    low, high = matrix_limits(gram)
    axes.imshow(
        gram,
        cmap=INNER_PRODUCTS,
        vmin=low,
        vmax=high,
        extent=(0, n, n, 0),
        interpolation="nearest",
    )
    plain(axes, grid=False)


def _toeplitz(axes: Axes, job: Job) -> None:
    steps = [trace.step for trace in job.toeplitz]
    for field, color in (("r2", BLUE), ("r2_off_diagonal", ORANGE)):
        for name, dash in ((field, "-"), (f"null_{field}", ":")):
            y = [getattr(trace.table, name) for trace in job.toeplitz]
            if None not in y:
                axes.plot(steps, y, color=color, linestyle=dash, linewidth=1.0)
