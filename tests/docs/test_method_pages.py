"""The page of each method: it is there, it is whole, its formulas can be shown."""

import re
from pathlib import Path

import pytest

from math_to_mathml import on_page_markdown
from whence import METHODS

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "docs" / "methods"
TRAPS = "Before you load someone's weights"
SECTIONS = ["When to use it", "In code", TRAPS, "As measured", "Definition and options"]
TABLES = ["method_facts", "method_measured", "method_definition"]


def test_every_method_has_a_page_in_the_index_and_the_navigation_and_no_other_has() -> None:
    pages = {path.stem for path in FOLDER.glob("*.md")} - {"index"}
    assert pages == set(METHODS) == {path.stem for path in FOLDER.glob("*.svg")}
    index = (FOLDER / "index.md").read_text(encoding="utf-8")
    assert set(re.findall(r"\[`\w+`\]\((\w+)\.md\)", index)) == pages
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    assert set(re.findall(r"methods/(\w+)\.md", navigation)) == pages | {"index"}


@pytest.mark.parametrize("name", METHODS)
def test_a_page_has_all_parts_in_order(name: str) -> None:
    text = (FOLDER / f"{name}.md").read_text(encoding="utf-8")
    sections = re.findall(r"^## (.*)$", text, re.MULTILINE)
    assert sections == [x for x in SECTIONS if x != TRAPS or x in sections]
    tables = re.findall(r"<!-- table: (\w+) of (\w+) -->", text)
    assert tables == [(table, name) for table in TABLES]
    assert text.index("```math") < text.index("<!-- table: method_facts")
    assert "```python" in text.partition("## In code")[2].partition("\n## ")[0]


def test_the_index_names_the_pages_with_traps() -> None:
    index = (FOLDER / "index.md").read_text(encoding="utf-8")
    named = set(re.findall(r"\((\w+)\.md#before-you-load-someones-weights\)", index))
    pages = {path.stem: path.read_text(encoding="utf-8") for path in FOLDER.glob("*.md")}
    assert named == {
        name for name, text in pages.items() if f"## {TRAPS}" in text and name in METHODS
    }


def test_formulas_become_mathml_without_anything_left_of_their_latex() -> None:
    for page in (ROOT / "docs").glob("**/*.md"):
        text = on_page_markdown(page.read_text(encoding="utf-8"))
        assert "```math" not in text, page
        for formula in re.findall(r"<math.*?</math>", text, re.DOTALL):
            assert "\\" not in formula, (page, formula)
            assert "<merror" not in formula, (page, formula)
    assert "<mo>&#x02211;</mo>" in on_page_markdown("```math\n\\sum_i x_i\n```")
