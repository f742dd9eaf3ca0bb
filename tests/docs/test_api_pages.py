"""The API reference shows every public name, and examples in docstrings as code."""

import importlib
import inspect
import re
from pathlib import Path

import pytest

from docstring_blocks import with_blocks
from tables.api import BESIDE

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "api"
PACKAGES = sorted(path.stem for path in FOLDER.glob("*.md") if path.stem != "index")


@pytest.mark.parametrize("page", PACKAGES)
def test_a_page_shows_every_public_class_and_function(page: str) -> None:
    package = importlib.import_module("whence" if page == "whence" else f"whence.{page}")
    shown = re.findall(r"^::: (\S+)$", (FOLDER / f"{page}.md").read_text(), re.MULTILINE)
    wanted = [getattr(package, name) for name in package.__all__]
    wanted = [x for x in wanted if inspect.isclass(x) or inspect.isfunction(x)]
    found = []
    for path in shown:
        module, _, name = path.rpartition(".")
        found.append(getattr(importlib.import_module(module), name))
    assert set(wanted) == set(found[: len(wanted)])
    assert tuple(shown[len(wanted) :]) == BESIDE.get(page, ())


def test_examples_and_lists_in_docstrings_keep_their_lines() -> None:
    docstring = "It adds.\n\n    >>> 1 + 1\n    2\n\nq   the queries\nk   the keys\n\nMore words."
    assert with_blocks(docstring) == (
        "It adds.\n\n```pycon\n>>> 1 + 1\n2\n```\n\n"
        "```text\nq   the queries\nk   the keys\n```\n\nMore words."
    )
    assert with_blocks(">>> 2\n2") == "```pycon\n>>> 2\n2\n```"
