"""What is shown of `whence translate`: its tables, figures and page."""

from collections.abc import Iterator
from functools import partial

from whence.analysis.translation_results import Translation
from whence.report.experiment_report import Drawing, ExperimentReport
from whence.report.translation_figures import draw_bleu, draw_curves, draw_lengths
from whence.report.translation_page import make_translation_page
from whence.report.translation_table import tables


def _figures(results: Translation) -> Iterator[Drawing]:
    if results.tests:
        yield "bleu", partial(draw_bleu, results)
    if len(results.joined) > 1:
        yield "lengths", partial(draw_lengths, results)
    yield "curves", partial(draw_curves, results)


TRANSLATION_REPORT = ExperimentReport(
    command="whence translate",
    kind=Translation,
    results_file="translation.json",
    tables=tables,
    figures=_figures,
    page=make_translation_page,
)
