"""What `whence lm` leaves to look at: the page, the table in three forms, the figures."""

from pathlib import Path

from whence.analysis.lm_results import Language
from whence.checks import require
from whence.files import write_text
from whence.report import lm_sections as sections
from whence.report.figure_files import save_png
from whence.report.html_page import html_page
from whence.report.lm_figures import draw_attention, draw_by_length
from whence.report.lm_table import formatted

PAGE = "page.html"


def make_lm_page(results: Language) -> str:
    """The page as text."""
    parts = [
        sections.ranking(results),
        sections.lengths(results),
        sections.lag_curves(results),
        sections.attention(results),
        sections.tables(results),
        sections.setting(results),
    ]
    names = ", ".join(results.methods[:4])
    more = f" and {len(results.methods) - 4} more" if len(results.methods) > 4 else ""
    return html_page(
        f"{names}{more}: compared",
        f"{len(results.methods)} ways to tell a model where its tokens are",
        parts,
        footer="Made by whence lm. Lag is key minus query; positions, layers and heads count "
        "from 0. Pictures are of the first seed.",
    )


def write_lm_report(results: Language, out: Path, *, figures: bool = True) -> Path:
    """Page, table.md, table.tex and figures into a folder, each whole or not at all: the page."""
    require(
        len(results.jobs) > 0,
        f"{out} has no finished job yet: the whence lm that began there goes on with it.",
    )
    for name, form in (("table.md", "markdown"), ("table.tex", "latex")):
        write_text(out / name, f"{formatted(results, form)}\n")
    if figures:
        save_png(draw_by_length(results), out / "figures" / "length.png", dpi=150)
        if any(job.attention for job in results.jobs):
            save_png(draw_attention(results), out / "figures" / "attention.png", dpi=150)
    return write_text(out / PAGE, make_lm_page(results))
