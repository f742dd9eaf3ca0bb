"""The page of promises: every promise names tests, and every test that it names exists."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "promises.md"
TEST = re.compile(r"`([\w/]+\.py)::([\w:]+)`")


def rows() -> list[tuple[str, str]]:
    """(promise, what keeps it) of every row, without the headings."""
    lines = [x for x in PAGE.read_text(encoding="utf-8").splitlines() if x.startswith("| ")][1:]
    cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]
    return [(row[0], row[-1].strip("| ")) for row in cells if not row[0].startswith("**")]


def names_in(path: Path) -> set[str]:
    """The tests of a file as pytest names them, those of a class with `Class::` in front."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    classes = [x for x in tree.body if isinstance(x, ast.ClassDef)]
    places = [("", tree.body), *((f"{x.name}::", x.body) for x in classes)]
    return {
        before + x.name for before, body in places for x in body if isinstance(x, ast.FunctionDef)
    }


def test_every_promise_names_the_tests_that_keep_it() -> None:
    promises = rows()
    assert len(promises) > 20
    assert [promise for promise, kept in promises if not TEST.findall(kept)] == []


def test_every_test_that_keeps_a_promise_exists() -> None:
    named = TEST.findall(PAGE.read_text(encoding="utf-8"))
    files = {name: ROOT / "tests" / name for name, _ in named}
    there = {name: names_in(path) if path.is_file() else set() for name, path in files.items()}
    missing = [f"{name}::{test}" for name, test in named if test not in there[name]]
    assert missing == []
