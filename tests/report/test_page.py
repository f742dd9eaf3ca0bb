"""The page of inspected models as text: whole, without requests, escaped."""

import base64
import dataclasses
import hashlib
import html
import json
import re
from typing import Any

import numpy as np
from markupsafe import escape

from inspections import inspection, series, without_table
from whence.report import make_page

BASE = inspection()


def figures_in(page: str) -> list[dict[str, Any]]:
    (text,) = re.findall(
        r'<script type="application/json" id="figures">(.*?)</script>', page, re.DOTALL
    )
    found: list[dict[str, Any]] = json.loads(text)
    return found


def own_text(page: str) -> str:
    """The page without plotly's own code."""
    before, after = page.split("/**\n* plotly.js", 1)
    return before + after[after.index("</script>") :]


def policy(page: str) -> str:
    (content,) = re.findall(r'<meta http-equiv="Content-Security-Policy" content="(.*?)">', page)
    return html.unescape(content)


def test_the_page_is_one_file_that_loads_nothing_and_holds_the_data() -> None:
    page = make_page([BASE])
    ours = own_text(page)
    assert "http:" not in ours
    assert "https:" not in ours
    assert not re.search(r"\b(src|srcset|action|poster)\s*=|@import|url\(", ours)
    assert set(re.findall(r'href="(.)', ours)) == {"#"}
    assert "default-src 'none'" in policy(page)
    packed = [
        trace["z"]
        for figure in figures_in(page)
        for trace in figure["data"]
        if trace["type"] == "heatmap"
    ]
    assert packed[0]["shape"] == "64, 64"
    assert BASE.table is not None
    sent = np.frombuffer(base64.b64decode(packed[0]["bdata"]), dtype="<f4").reshape(64, 64)
    np.testing.assert_array_equal(sent, BASE.table.gram)


def test_only_the_two_scripts_of_the_page_itself_may_run() -> None:
    page = make_page([BASE])
    allowed = re.findall(r"'sha256-(.*?)'", policy(page))
    inline = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    digests = [hashlib.sha256(script.encode()).digest() for script in inline]
    assert allowed == [base64.b64encode(digest).decode() for digest in digests]
    assert len(allowed) == 2
    scripts = policy(page).split("script-src")[1].split(";")[0]
    assert re.sub(r"'sha256-.*?'", "", scripts).strip() == ""


def test_names_and_notes_cannot_break_the_page() -> None:
    page = make_page([inspection('</script><b a="1">&')])
    assert "</script><b" not in page
    assert str(escape('</script><b a="1">&')) in page
    assert "a note about &lt;the&gt; model" in page


def test_every_plot_is_valid_to_plotly_and_every_place_has_its_plot() -> None:
    from plotly import graph_objects

    page = make_page([BASE, without_table(relative=True)], comparison=series())
    figures = figures_in(page)
    assert re.findall(r'data-figure="(\d+)"', page) == [str(n) for n in range(len(figures))]
    for figure in figures:
        plain = re.sub(r'"@\w+"', '"#123456"', json.dumps(figure))
        graph_objects.Figure(json.loads(plain))
    colors = set(re.findall(r'"@(\w+)"', json.dumps(figures)))
    for theme in re.findall(r"(?:light|dark): \{(.*?)\}", page, re.DOTALL):
        assert colors <= set(re.findall(r"(\w+): \"#", theme))


def test_fits_are_drawn_over_the_curves_that_they_were_fitted_to() -> None:
    both = dataclasses.replace(
        BASE, heads=BASE.heads[:2], relative=BASE.heads[:2], fits=BASE.fits[:2]
    )
    for entry in (both, dataclasses.replace(both, heads=())):
        drawn = [figure["data"] for figure in figures_in(make_page([entry]))]
        names = [[trace.get("name") for trace in traces] for traces in drawn]
        assert sum("fit, S = 2" in part for part in names) == 2
