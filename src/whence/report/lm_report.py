"""What is shown of `whence lm`: its ranking, figures and page."""

from collections.abc import Iterator
from functools import partial

from whence.analysis.lm_results import Language
from whence.report.experiment_report import Drawing, ExperimentReport
from whence.report.lm_figures import draw_attention, draw_by_length
from whence.report.lm_page import make_lm_page, make_runs_page
from whence.report.lm_table import rank_table


def _figures(results: Language) -> Iterator[Drawing]:
    yield "length", partial(draw_by_length, results)
    if any(job.attention for job in results.jobs):
        yield "attention", partial(draw_attention, results)


LM_REPORT = ExperimentReport(
    command="whence lm",
    kind=Language,
    results_file="lm.json",
    tables=lambda results: [rank_table(results)],
    figures=_figures,
    page=make_lm_page,
    page_of_several=make_runs_page,
)
