"""The figures of `whence glue`: scores against kernels, and curves that were learned."""

import numpy as np
from matplotlib.figure import Figure

from whence.analysis.glue_results import FORMS, Glue, GlueJob, table
from whence.report.glue_table import task_title
from whence.report.panels import panels
from whence.report.style import BLUE, FAINT, GRID, INK, ORANGE, plain, title

LOOKS = {"a": (BLUE, "o", "-"), "b": (ORANGE, "s", "--")}


def draw_scores(results: Glue) -> Figure:
    """A panel a task: each seed as a point and the median as a line, against S."""
    figure, grid = panels(
        len(results.tasks),
        columns=5,
        size=(2.2, 2.3),
        share=False,
        heading="GLUE against the number of kernels",
        detail="A point a seed, lines at medians; position embeddings (a) kept, (b) left out.",
    )
    columns = (0, *results.kernels)
    for axes, task in zip(grid, results.tasks, strict=True):
        for shift, row in enumerate(row for row in table(results) if row.task == task):
            color, marker, dash = LOOKS[row.form]
            places = np.arange(len(columns)) + 0.16 * (shift - 0.5)
            for place, s in zip(places, columns, strict=True):
                scores = list(results.scores(task, row.form, s).values())
                axes.plot([place] * len(scores), scores, marker, color=color, ms=3, alpha=0.45)
            medians = [np.nan if c is None else c.median for c in (row.baseline, *row.cells)]
            axes.plot(places, medians, color=color, linestyle=dash, lw=1.4, label=f"({row.form})")
        axes.set_xticks(range(len(columns)), [str(s) for s in columns])
        title(axes, task_title(task))
        plain(axes)
    grid[0].legend(fontsize=7, frameon=False)
    figure.supxlabel("kernels S", fontsize=8, color=FAINT)
    return figure


def draw_curves(results: Glue, form: str) -> Figure:
    """What the most kernels have learned: a row a task, a panel a layer, a line a head."""
    jobs = shown(results, form)
    n_layers = max(len(job.curves) for job in jobs)
    most = jobs[0].kernels
    figure, grid = panels(
        n_layers * len(jobs),
        columns=n_layers,
        size=(1.8, 1.5),
        heading=f"({form}) {FORMS[form]}, S = {most}",
        detail="Added to the logit at each lag, a line a head: grey before, blue after training.",
    )
    for row, job in enumerate(jobs):
        in_row = grid[row * n_layers : (row + 1) * n_layers]
        for axes, view in zip(in_row, job.curves, strict=False):
            axes.axvline(0, color=GRID, linewidth=0.8)
            axes.plot(view.lag, view.before.T, color=FAINT, linewidth=0.7, alpha=0.6)
            axes.plot(view.lag, view.after.T, color=BLUE, linewidth=0.8, alpha=0.7)
            if row == 0:
                title(axes, f"layer {view.layer}" if n_layers > 1 else "all layers")
            plain(axes)
        in_row[0].set_ylabel(task_title(job.task), fontsize=8, weight="bold", color=INK)
        for axes in in_row[len(job.curves) :]:
            axes.axis("off")
    figure.supxlabel("lag = key − query", fontsize=8, color=FAINT)  # noqa: RUF001
    return figure


def shown(results: Glue, form: str) -> list[GlueJob]:
    """For each task the job of the first seed with the most kernels that has curves."""
    found = []
    for task in results.tasks:
        jobs = [j for j in results.jobs if (j.task, j.form) == (task, form) and j.curves]
        if jobs:
            found.append(max(jobs, key=lambda job: (job.kernels, -job.seed)))
    return found
