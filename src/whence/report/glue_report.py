"""What is shown of `whence glue`: its tables, figures and page."""

from collections.abc import Iterator
from functools import partial

from whence.analysis.glue_results import Glue
from whence.report.experiment_report import Drawing, ExperimentReport
from whence.report.glue_figures import draw_curves, draw_scores, shown
from whence.report.glue_page import make_glue_page
from whence.report.glue_table import tables


def _figures(results: Glue) -> Iterator[Drawing]:
    yield "scores", partial(draw_scores, results)
    for form in results.forms:
        if shown(results, form):
            yield f"curves-{form}", partial(draw_curves, results, form)


GLUE_REPORT = ExperimentReport(
    command="whence glue",
    kind=Glue,
    results_file="glue.json",
    tables=tables,
    figures=_figures,
    page=make_glue_page,
)
