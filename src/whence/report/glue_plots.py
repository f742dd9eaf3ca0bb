"""The plots of the page of `whence glue`, as plotly's JSON."""

from whence.analysis.glue_results import FORMS, Glue, table
from whence.report.plots import Plot, plot

LOOKS = {"a": ("@blue", "circle", "solid", -0.08), "b": ("@orange", "square", "dash", 0.08)}


def by_kernels(results: Glue, task: str) -> Plot:
    """Scores of a task against S, a line a form at the medians, a point a seed."""
    columns = (0, *results.kernels)
    traces: list[Plot] = []
    for row in (row for row in table(results) if row.task == task):
        color, symbol, dash, shift = LOOKS[row.form]
        points = [
            (place + shift, score, f"S = {s}, seed {seed}")
            for place, s in enumerate(columns)
            for seed, score in results.scores(task, row.form, s).items()
        ]
        medians = [
            (place + shift, cell.median)
            for place, cell in enumerate((row.baseline, *row.cells))
            if cell is not None
        ]
        traces += [
            {
                "type": "scatter",
                "mode": "markers",
                "x": [x for x, _, _ in points],
                "y": [y for _, y, _ in points],
                "text": [text for _, _, text in points],
                "marker": {"color": color, "symbol": symbol, "size": 6},
                "opacity": 0.45,
                "hovertemplate": "%{text}: %{y:.1f}<extra></extra>",
            },
            {
                "type": "scatter",
                "mode": "lines",
                "name": f"({row.form}) {FORMS[row.form]}",
                "x": [x for x, _ in medians],
                "y": [y for _, y in medians],
                "line": {"color": color, "dash": dash, "width": 2},
                "hovertemplate": "%{fullData.name}: median %{y:.1f}<extra></extra>",
            },
        ]
    return plot(
        traces,
        xaxis={
            "tickvals": list(range(len(columns))),
            "ticktext": [str(s) for s in columns],
            "title": {"text": "kernels S", "standoff": 3},
            "zeroline": False,
        },
        yaxis={"nticks": 5},
        margin={"l": 36, "r": 4, "t": 6, "b": 36},
    )
