"""The figures of `whence translate`: BLEU of each position, BLEU by length, training curves."""

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from whence.analysis.translation_results import Translation
from whence.report.panels import panels
from whence.report.style import BLUE, FAINT, number, plain, series, title

MOST = 9  # lines that can be told apart


def draw_bleu(results: Translation) -> Figure:
    """A panel a test text: each seed as a point, the mean as a line, a row a position."""
    positions = results.positions
    figure, grid = panels(
        len(results.tests),
        columns=2,
        size=(4.4, 0.22 * len(positions) + 0.9),
        share=False,
        heading=f"BLEU, {results.config['source']}-{results.config['target']}",
        detail="A point a seed; the bar is their mean.",
    )
    for axes, test in zip(grid, results.tests, strict=True):
        for row, position in enumerate(positions):
            found = [job.bleu(test) for job in results.chosen(position)]
            known = [x for x in found if x is not None]
            axes.plot(known, [row] * len(known), "o", color=BLUE, ms=3.5, alpha=0.6)
            if known:
                axes.plot([np.mean(known)] * 2, [row - 0.3, row + 0.3], color=BLUE, lw=1.5)
        axes.set_yticks(range(len(positions)), positions, fontsize=6.5)
        axes.invert_yaxis()
        title(axes, test)
        plain(axes)
    return figure


def draw_lengths(results: Translation) -> Figure:
    """BLEU against the tokens of an input row, the sentences of a test text joined."""
    test = results.tests[0]
    longest = results.data["longest_row"]
    figure, (axes,) = panels(
        1,
        columns=1,
        size=(5.4, 3.4),
        heading="BLEU against the length of the input",
        detail=f"Sentences of {test} joined; the dotted line is the longest row of training, "
        f"{longest} tokens.",
    )
    for (color, marker, dash), position in zip(series(), results.positions[:MOST], strict=False):
        cells = {n: results.cell(position, test, n) for n in results.joined}
        points = [
            (results.source_tokens(test, n), cell.mean)
            for n, cell in cells.items()
            if cell is not None
        ]
        axes.plot(
            [tokens for tokens, _ in points],
            [bleu for _, bleu in points],
            color=color,
            marker=marker,
            linestyle=dash,
            markersize=4,
            linewidth=1.3,
            label=position,
        )
    axes.axvline(longest, color=FAINT, linewidth=0.8, linestyle=":")
    axes.set(xlabel="mean tokens of an input row", ylabel="BLEU")
    axes.legend(fontsize=6.5, frameon=False)
    plain(axes)
    return figure


def draw_curves(results: Translation) -> Figure:
    """The training loss of the first seed of each position."""
    figure, (axes,) = panels(
        1,
        columns=1,
        size=(5.4, 3.4),
        heading="Training loss",
        detail=f"Nats a token with label smoothing; the first seed, {MOST} positions at most.",
    )
    for (color, _, dash), position in zip(series(), results.positions[:MOST], strict=False):
        job = results.chosen(position)[0]
        axes.plot(
            job.steps, job.train_loss, color=color, linestyle=dash, linewidth=1.2, label=position
        )
    axes.set(xlabel="steps", ylabel="loss", yscale="log")
    axes.yaxis.set_major_formatter(FuncFormatter(number))
    axes.yaxis.set_minor_formatter(FuncFormatter(number))
    axes.legend(fontsize=6.5, frameon=False, ncols=2)
    plain(axes)
    return figure
