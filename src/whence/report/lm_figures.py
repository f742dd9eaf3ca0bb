"""The figures of `whence lm` for paper and README: loss against length, and where heads look."""

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, MultipleLocator, NullLocator

from whence.analysis.lm_results import Language, ranked
from whence.report.panels import color_bar, name_axes, panels
from whence.report.style import ATTENTION, FAINT, LAG, plain, series, title

LEAST, DECADES = 1e-6, 3  # no weight is drawn as less, and how many powers of ten the colours span


def draw_by_length(results: Language) -> Figure:
    """Mean loss against length, from scratch and sliding, with the spread over seeds."""
    rows = ranked(results)
    kinds = [
        (name, field)
        for name, field in (("from scratch", "scratch"), ("sliding", "sliding"))
        if any(x is not None for row in rows for x in getattr(row, field))
    ] or [("from scratch", "scratch")]
    train = int(results.config["train_length"])
    figure, grid = panels(
        len(kinds),
        columns=2,
        size=(4.4, 3.4),
        heading="Loss against length",
        detail=f"Nats a token; the dotted line is the length of training, {train:,}.",
    )
    for axes, (name, field) in zip(grid, kinds, strict=True):
        for (color, marker, dash), row in zip(series(), rows, strict=False):
            found = zip(results.lengths, getattr(row, field), strict=True)
            pairs = [(n, x) for n, x in found if x is not None]
            axes.errorbar(
                [n for n, _ in pairs],
                [x.mean for _, x in pairs],
                [x.spread or 0.0 for _, x in pairs],
                color=color,
                marker=marker,
                linestyle=dash,
                markersize=4,
                linewidth=1.3,
                capsize=2,
                label=row.method,
            )
        axes.axvline(train, color=FAINT, linewidth=0.8, linestyle=":")
        axes.set(xscale="log", xlabel="tokens")
        axes.xaxis.set_major_locator(FixedLocator(list(results.lengths)))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, place: f"{value:,.0f}"))
        title(axes, name)
        plain(axes)
    grid[0].set_ylabel("loss")
    grid[-1].legend(fontsize=6.5, frameon=False, ncols=2)
    return figure


def draw_attention(results: Language) -> Figure:
    """Mean attention weight after training, a panel a method, a row a head."""
    with_pictures = {job.method: job for job in results.jobs if job.attention}
    names = [row.method for row in ranked(results) if row.method in with_pictures]
    figure, grid = panels(
        len(names),
        columns=4,
        size=(2.6, 2.2),
        heading="Where heads look after training",
        detail="Mean attention weight at each lag, a row a head from the first layer down.",
    )
    weights = [
        np.concatenate([view.after for view in with_pictures[name].attention]) for name in names
    ]
    drawn = [np.log10(np.maximum(weight, LEAST)) for weight in weights]
    top = max((float(np.nanmax(values)) for values in drawn), default=0.0)
    image = None
    for axes, name, values in zip(grid, names, drawn, strict=True):
        lag = with_pictures[name].attention[0].lag
        image = axes.imshow(
            values,
            aspect="auto",
            cmap=ATTENTION,
            vmin=top - DECADES,
            vmax=top,
            extent=(float(lag[0]) - 0.5, float(lag[-1]) + 0.5, len(values), 0),
            interpolation="nearest",
        )
        title(axes, name)
        plain(axes, grid=False)
    if image is not None:
        bar = color_bar(figure, image, list(grid))
        bar.ax.yaxis.set_major_locator(MultipleLocator(1))
        bar.ax.yaxis.set_major_formatter(FuncFormatter(lambda value, place: f"{10**value:.2g}"))
    name_axes(figure, LAG, "head")
    return figure
