"""The documentation site: its navigation, links out of docs/, and what it loads."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest

import site_links
from whence import METHODS

ROOT = Path(__file__).resolve().parents[2]
CONFIG = ROOT / "mkdocs.yml"


def navigation() -> list[str]:
    """Every page of the navigation, in order."""
    text = CONFIG.read_text(encoding="utf-8").partition("\nnav:")[2]
    return re.findall(r"^ +- (?:[^:\n]+: )?(\S+\.md)$", text, re.MULTILINE)


def test_the_navigation_has_every_page_once_and_a_page_a_method() -> None:
    named = navigation()
    assert len(named) == len(set(named))
    pages = {x.relative_to(ROOT / "docs").as_posix() for x in (ROOT / "docs").rglob("*.md")}
    assert pages - set(named) == set()
    methods = {x.removeprefix("methods/") for x in named if x.startswith("methods/")}
    assert methods == {"index.md", *(f"{name}.md" for name in METHODS)}


def test_a_link_leads_to_the_same_file_in_the_repository_and_in_the_site() -> None:
    def led(page: str, text: str) -> str:
        file = SimpleNamespace(src_uri=page)
        return site_links.on_page_markdown(text, SimpleNamespace(file=file), None, None)

    picture = "results/lm/python/length.png"
    assert led("lm.md", f"![x](../{picture})") == f"![x](repository/{picture})"
    assert led("methods/a.md", f"![x](../../{picture})") == f"![x](../repository/{picture})"
    assert led("a.md", "[x](../CONTRIBUTING.md#tests)") == "[x](repository/CONTRIBUTING.md#tests)"
    assert led("repository/CONTRIBUTING.md", "[x](docs/design.md)") == "[x](../design.md)"
    assert led("methods/a.md", "[x](../design.md#layers)") == "[x](../design.md#layers)"
    for same in ("[x](https://arxiv.org)", "[x](#here)", "[x](../nowhere.md)", "a[0](x)"):
        assert led("a.md", same) == same


def test_files_outside_docs_that_pages_link_to_are_found() -> None:
    assert "results/lm/python/length.png" in site_links.targets("docs/lm_results.md")
    assert "docs/own_method.md" in site_links.targets("CONTRIBUTING.md")


def test_make_docs_does_not_silence_the_warnings_that_it_counts() -> None:
    recipe = (ROOT / "Makefile").read_text(encoding="utf-8").partition("\ndocs:")[2]
    (command,) = re.findall(r"mkdocs build[^>]*", recipe)
    assert "--strict" in command
    assert "--quiet" not in command  # with it mkdocs counts no warning, and every build succeeds


@pytest.mark.slow  # `make docs` builds it too
def test_the_site_builds_strictly_and_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    from mkdocs.commands.build import build
    from mkdocs.config import load_config

    build(load_config(str(CONFIG), strict=True, site_dir=str(tmp_path)))
    pages = list(tmp_path.rglob("*.html"))
    assert len(pages) > 20
    loaded = re.compile(r'<(?:script|img|iframe|link)\b[^>]*?\b(?:src|href)="(https?:[^"]+)"')
    assert {page.name: found for page in pages if (found := loaded.findall(page.read_text()))} == {}
