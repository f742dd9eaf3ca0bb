"""Folders of `whence glue`: results read, and their page, tables and figures written as one."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from whence.analysis.glue_results import Glue
from whence.checks import require
from whence.report.folder import PAGE, read_result
from whence.report.glue_figures import draw_curves, draw_scores, shown
from whence.report.glue_page import make_glue_page
from whence.report.glue_table import formatted
from whence.report.lm_folder import Drawing, write_report

GLUE = "glue.json"


def read_glue_folder(folder: Path) -> Glue:
    """The results that `whence glue` left in a folder; without a finished job it is an error."""
    results = read_result(Glue, folder / GLUE)
    require(
        len(results.jobs) > 0,
        f"{folder} has no finished job yet: the whence glue that began there goes on with it.",
    )
    return results


def write_glue_report(results: Glue, out: Path, *, formats: Sequence[str] = ("png",)) -> Path:
    """Page, table.md, table.tex and figures into a folder, all of them or none: the page."""
    texts = {
        "table.md": f"{formatted(results, 'markdown')}\n",
        "table.tex": f"{formatted(results, 'latex')}\n",
        PAGE: make_glue_page(results),
    }
    drawings: list[Drawing] = [("scores", partial(draw_scores, results))]
    drawings += [
        (f"curves-{form}", partial(draw_curves, results, form))
        for form in results.forms
        if shown(results, form)
    ]
    return write_report(out, texts, drawings, formats)
