"""An HTML page with all of its scripts and data in it, which works offline from a file."""

from collections.abc import Sequence
from html import escape
from importlib import resources

from plotly.offline import get_plotlyjs

from whence.report.sections import Page

# By this the browser refuses every request that would leave the page.
POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "img-src data: blob:; font-src data:"
)


def html_page(
    title: str, heading: str, parts: Sequence[tuple[str, str, str]], page: Page, *, footer: str
) -> str:
    """The page of these sections (key, heading, HTML); those without HTML are left out."""
    drawn = [(key, name, part) for key, name, part in parts if part]
    links = "".join(f'<a href="#{key}">{name}</a>' for key, name, _ in drawn)
    body = "".join(
        f'<section id="{key}"><h2>{name}</h2>{part}</section>' for key, name, part in drawn
    )
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title>
<style>
{_own("page.css")}</style>
</head>
<body>
<header>
<h1>{escape(heading)}</h1>
<nav>{links}</nav>
</header>
<main>
<noscript><p>The plots are drawn by the script of this page, which is off.</p></noscript>
{body}
</main>
<footer>{escape(footer)}</footer>
<script type="application/json" id="figures">{page.figures()}</script>
<script>{get_plotlyjs()}</script>
<script>
{_own("page.js")}</script>
</body>
</html>
"""


def _own(name: str) -> str:
    return resources.files("whence.report").joinpath(name).read_text(encoding="utf-8")
