"""The page of `whence lm`: one run, or several runs side by side."""

from collections.abc import Mapping
from dataclasses import replace

from whence.analysis.lm_results import Language
from whence.checks import require
from whence.report import lm_sections as sections
from whence.report.html_page import Section, html_page
from whence.report.lm_side_by_side import side_by_side

FOOTER = (
    "Made by whence lm. Lag is key minus query; positions, layers and heads count from 0. Pictures "
    "are of the first seed."
)


def make_lm_page(results: Language) -> str:
    """The page of one run as text."""
    names = ", ".join(results.methods[:4])
    more = f" and {len(results.methods) - 4} more" if len(results.methods) > 4 else ""
    return html_page(
        f"{names}{more}: compared",
        f"{len(results.methods)} ways to tell a model where its tokens are",
        _sections(results),
        footer=FOOTER,
    )


def make_runs_page(runs: Mapping[str, Language]) -> str:
    """The page of several runs by name: first what differs between them, then each of them."""
    require(len(runs) > 1, f"a page of several runs needs two or more, got {len(runs)}.")
    parts: list[Section | None] = [side_by_side(runs)]
    for place, (name, results) in enumerate(runs.items()):
        parts += [
            replace(part, key=f"{part.key}-{place}", heading=f"{name}: {part.heading}")
            for part in _sections(results)
            if part is not None
        ]
    names = " and ".join(runs) if len(runs) < 4 else f"{len(runs)} runs"
    return html_page(f"{names}: compared", f"{names}, side by side", parts, footer=FOOTER)


def _sections(results: Language) -> list[Section | None]:
    return [
        sections.ranking(results),
        sections.lengths(results),
        sections.lag_curves(results),
        sections.attention(results),
        sections.tables(results),
        sections.setting(results),
    ]
