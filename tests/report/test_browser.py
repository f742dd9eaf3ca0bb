"""Pages in a real browser: every plot is drawn, and nothing in a result file becomes markup."""

import dataclasses
import json
import re
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

from hostile_results import inspected, trained
from whence.analysis.comparison import Comparison
from whence.analysis.lm_results import Language
from whence.report import make_page
from whence.report.lm_page import make_lm_page, make_runs_page

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on PATH to look with")

# Text that would run, or load, or become a link, wherever it is taken for markup: in HTML, in an
# attribute of it, in a script, in a label of plotly (which knows <a>, <em> and <span>), in a template
# of plotly's hover texts, and in one of Jinja2.
PAYLOAD = (
    "@x'\"><script>window.hit=1</script><img src=x onerror=window.hit=1><svg onload=window.hit=1>"
    "</script><a href='https://example.org/'>a</a><em>b</em><span style='color:red'>s</span>"
    "%{y}</extra>{{ 7 * 7 }}&lt;i&gt;"
)
# What hostile text can leave in the page if it is not shown as text.
INJECTED = (
    "img, iframe, object, main svg a, main svg tspan[style*='red'], main svg tspan[style*='italic'], "
    "main > section script, [onload], [onerror], a:not([href^='#'])"
)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


def until(page: Page, condition: str, seconds: float = 60) -> None:
    """Ask from outside: Playwright's own way to wait evaluates text, which the policy forbids."""
    end = time.monotonic() + seconds
    while not page.evaluate(condition):
        assert time.monotonic() < end, condition
        page.wait_for_timeout(50)


@pytest.fixture
def look(browser: Browser, tmp_path: Path) -> Iterator[Callable[..., tuple[Page, list[str]]]]:
    """Open a page, wait until all plots are there, and give it with what the browser complained."""
    opened = []

    def shown(text: str) -> tuple[Page, list[str]]:
        path = tmp_path / "page.html"
        path.write_text(text, encoding="utf-8")
        context = browser.new_context(viewport={"width": 1400, "height": 900}, offline=True)
        context.set_default_timeout(120_000)  # of a machine that is busy
        opened.append(context)
        page, said = context.new_page(), []
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.goto(path.as_uri())
        page.evaluate("document.querySelectorAll('details').forEach((part) => part.open = true)")
        page.wait_for_selector("body[data-ready]", state="attached")
        until(page, "[...document.querySelectorAll('.plot')].every((box) => box.dataset.drawn)")
        return page, said

    yield shown
    for context in opened:
        context.close()


def hostile(data: Any, keep: Callable[[str, Any], bool], key: str = "") -> Any:
    """The same data with the payload in each of its strings, and beside the keys of its tables."""
    if isinstance(data, dict):
        return {name: hostile(value, keep, name) for name, value in data.items()} | (
            {PAYLOAD: PAYLOAD} if key in TABLES else {}
        )
    if isinstance(data, list):
        return [hostile(value, keep, key) for value in data]
    return PAYLOAD if isinstance(data, str) and not keep(key, data) else data


TABLES = {"rules", "versions", "left_out", "config", "data", "machine"}
ARRAY = {"float32"}


def test_hostile_text_in_every_string_and_key_of_inspect_is_shown_as_text(
    look: Callable[..., tuple[Page, list[str]]],
) -> None:
    kept = {"kind"} | ARRAY

    def changed(result: Any) -> Any:
        data = hostile(json.loads(result.to_json()), lambda key, value: key in kept)
        if "measure" in json.dumps(data):  # the two measures are told apart by a word
            for place, part in enumerate(data["correlations"]):
                part["measure"] += " without" * (place % 2)
        return type(result).from_json(json.dumps(data))

    models, comparison, criteria = inspected()
    text = make_page(
        [changed(model) for model in models],
        comparison=changed(dataclasses.replace(comparison, points=_unstepped(comparison))),
        criteria=changed(criteria),
    )
    check(*look(text))


@pytest.mark.slow
def test_hostile_text_in_every_string_and_key_of_lm_is_shown_as_text(
    look: Callable[..., tuple[Page, list[str]]],
) -> None:
    logic = {"objective", "task", "how"} | ARRAY  # words with a meaning of their own

    def kept(key: str, value: Any) -> bool:
        return key in logic | {"kind"} or key in {"train_tokens"}

    data = hostile(json.loads(trained().to_json()), kept)
    data["jobs"][1]["method"] += "2"  # still two methods
    run = Language.from_json(json.dumps(data))
    other = dataclasses.replace(run, machine={"another": PAYLOAD})
    check(*look(make_runs_page({PAYLOAD: run, f"{PAYLOAD}2": other})))


def check(page: Page, said: list[str]) -> None:
    """The payload did nothing, left nothing, and can be read in the text and in the plots."""
    page.evaluate(  # each label that a mouse would bring up
        """() => document.querySelectorAll('.plot').forEach((box) => box.data.forEach((_, curve) => {
            try { Plotly.Fx.hover(box, [{curveNumber: curve, pointNumber: 0}]) } catch {} }))"""
    )
    assert page.evaluate("window.hit") is None
    assert said == []
    found = page.eval_on_selector_all(INJECTED, "parts => parts.map((part) => part.outerHTML)")
    assert found == []
    assert page.locator("script").count() == 3
    shown = page.eval_on_selector("body", "body => body.textContent")
    assert PAYLOAD in shown
    labels = page.eval_on_selector_all(
        ".plot text", "texts => texts.map((text) => text.textContent)"
    )
    assert any("<script>" in label for label in labels)
    assert not any("49" in label for label in labels if "7 * 7" in label)


def _unstepped(comparison: Comparison) -> tuple[Any, ...]:
    """Names along the axis instead of steps."""
    return tuple(dataclasses.replace(point, step=None) for point in comparison.points)


@pytest.mark.parametrize("kind", ["inspect", pytest.param("lm", marks=pytest.mark.slow)])
def test_every_plot_is_drawn_without_an_error_and_nothing_is_wider_than_the_window(
    look: Callable[..., tuple[Page, list[str]]], kind: str
) -> None:
    if kind == "inspect":
        models, comparison, criteria = inspected()
        text, least = make_page(models, comparison=comparison, criteria=criteria), 20
    else:
        text, least = make_lm_page(trained()), 3
    page, said = look(text)
    places = page.locator(".plot")
    assert places.count() == len(re.findall("data-figure=", text)) > least
    assert page.locator(".plot .main-svg").count() >= 2 * places.count()
    for width in (1400, 390):
        page.set_viewport_size({"width": width, "height": 900})
        until(page, f"document.documentElement.scrollWidth <= {width}")
    assert said == []
