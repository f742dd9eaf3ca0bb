"""One HTML page with everything in it: no request leaves it, so it works from a file, offline."""

from collections.abc import Sequence
from html import escape
from importlib import resources
from pathlib import Path

from plotly.offline import get_plotlyjs

from whence.analysis.comparison import Comparison
from whence.analysis.criteria import CriteriaReport
from whence.analysis.results import Inspection
from whence.checks import require
from whence.report import sections
from whence.report.ink import labels
from whence.report.saved import save_bytes
from whence.report.sections import Page

# The browser itself refuses whatever would leave the page.
POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "img-src data: blob:; font-src data:"
)


def save_page(
    inspections: Sequence[Inspection],
    path: Path,
    *,
    comparison: Comparison | None = None,
    criteria: CriteriaReport | None = None,
) -> Path:
    """Write the page whole or not at all."""
    page = make_page(inspections, comparison=comparison, criteria=criteria)
    return save_bytes(page.encode(), path)


def make_page(
    inspections: Sequence[Inspection],
    *,
    comparison: Comparison | None = None,
    criteria: CriteriaReport | None = None,
) -> str:
    """The page as text."""
    require(len(inspections) > 0, "a page needs the results of one model or more, got none.")
    page = Page()
    parts = [
        ("summary", "Summary", sections.summary(inspections)),
        ("series", "Through the series", sections.series(page, comparison)),
        ("table", "Position table", sections.tables(page, inspections)),
        ("components", "Principal components", sections.components(page, inspections)),
        ("heads", "Heads", sections.heads(page, inspections)),
        ("fits", "TISA fits", sections.fits(page, inspections)),
        ("profiles", "Measured lag profiles", sections.profiles(page, inspections)),
        ("criteria", "Criteria", sections.criteria(criteria)),
        ("notes", "Notes", sections.notes(inspections)),
    ]
    drawn = [(key, heading, part) for key, heading, part in parts if part]
    links = "".join(f'<a href="#{key}">{heading}</a>' for key, heading, _ in drawn)
    body = "".join(
        f'<section id="{key}"><h2>{heading}</h2>{part}</section>' for key, heading, part in drawn
    )
    names = ", ".join(labels([entry.model.name for entry in inspections])[:3])
    more = f" and {len(inspections) - 3} more" if len(inspections) > 3 else ""
    versions = {key: text for entry in inspections for key, text in entry.versions.items()}
    made = ", ".join(f"{key} {text}" for key, text in sorted(versions.items()))
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(names + more)}: position</title>
<style>
{_own("page.css")}</style>
</head>
<body>
<header>
<h1>What {escape(names + more)} {"know" if len(inspections) > 1 else "knows"} about position</h1>
<nav>{links}</nav>
</header>
<main>
<noscript><p>The plots are drawn by the script of this page, which is off.</p></noscript>
{body}
</main>
<footer>Made by whence inspect with {escape(made)}. Lag is key minus query; positions, layers and
heads count from 0.</footer>
<script type="application/json" id="figures">{page.figures()}</script>
<script>{get_plotlyjs()}</script>
<script>
{_own("page.js")}</script>
</body>
</html>
"""


def _own(name: str) -> str:
    return resources.files("whence.report").joinpath(name).read_text(encoding="utf-8")
