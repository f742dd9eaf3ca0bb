"""The page of inspected models: its sections, in order."""

from collections.abc import Sequence
from pathlib import Path

from whence.analysis.comparison import Comparison
from whence.analysis.criteria import CriteriaReport
from whence.analysis.results import Inspection
from whence.checks import require
from whence.files import write_text
from whence.report import sections
from whence.report.html_page import html_page
from whence.report.style import labels


def save_page(
    inspections: Sequence[Inspection],
    path: Path,
    *,
    comparison: Comparison | None = None,
    criteria: CriteriaReport | None = None,
) -> Path:
    """Write the page of `make_page` to a file, whole or not at all.

    >>> from pathlib import Path
    >>> from whence.report import read_folder
    >>> found = read_folder(Path("out")).inspections[0]  # of whence inspect MODEL --out out
    >>> save_page([found], Path("report.html")).name
    'report.html'
    """
    page = make_page(inspections, comparison=comparison, criteria=criteria)
    return write_text(path, page)


def make_page(
    inspections: Sequence[Inspection],
    *,
    comparison: Comparison | None = None,
    criteria: CriteriaReport | None = None,
) -> str:
    """The HTML page of these results, one file that loads nothing, as text.

    >>> from pathlib import Path
    >>> from whence.report import read_folder
    >>> found = read_folder(Path("out")).inspections[0]  # of whence inspect MODEL --out out
    >>> make_page([found])[:15]
    '<!doctype html>'
    """
    require(len(inspections) > 0, "a page needs the results of one model or more, got none.")
    parts = [
        sections.summary(inspections),
        sections.series(comparison),
        sections.tables(inspections),
        sections.components(inspections),
        sections.heads(inspections),
        sections.fits(inspections),
        sections.profiles(inspections),
        sections.criteria(criteria),
        sections.notes(inspections),
    ]
    names = ", ".join(labels([entry.model.name for entry in inspections])[:3])
    more = f" and {len(inspections) - 3} more" if len(inspections) > 3 else ""
    versions = {key: text for entry in inspections for key, text in entry.versions.items()}
    made = ", ".join(f"{key} {text}" for key, text in sorted(versions.items()))
    whose = "know" if len(inspections) > 1 else "knows"
    return html_page(
        f"{names + more}: position",
        f"What {names + more} {whose} about position",
        parts,
        footer=f"Made by whence inspect with {made}. Lag is key minus query; positions, layers and "
        "heads count from 0.",
    )
