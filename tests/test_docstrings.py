"""Every public function and class has an example, and every example prints what it says.

The examples run in a folder where `tiny-bert` is a model of transformers with its tokenizer, and
`out` holds the results that the commands of whence leave.
"""

import ast
import doctest
import importlib
import inspect
import io
import re
from pathlib import Path
from typing import Any

import pytest
from transformers.utils import logging

import whence
from hf_models import tiny
from inspections import inspection
from lm_jobs import job, results
from whence import METHODS
from whence.analysis.comparison import compare
from whence.distill.results import Closeness, Distillation, Stage, TextFacts
from words import with_tokenizer

SOURCES = Path(whence.__file__).parent
ROOT = Path(__file__).resolve().parents[1]
PACKAGES = "nn hf models analysis report bench experiments distill kernels lag methods"
IMPORT = re.compile(r"^ *from (whence[\w.]*) import ([\w, ]+)$", re.MULTILINE)
SLOW = {"whence.report.folder"}  # it draws many figures


def public() -> dict[str, Any]:
    """By module and name: every method, what an `__all__` names, and what README and docs import."""
    modules = [importlib.import_module(f"whence.{name}") for name in PACKAGES.split()]
    named = [(module, name) for module in (whence, *modules) for name in module.__all__]
    for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "examples").glob("*")):
        for module, names in IMPORT.findall(page.read_text(encoding="utf-8")):
            named += [(importlib.import_module(module), name.strip()) for name in names.split(",")]
    found = [*METHODS.values(), *(getattr(module, name) for module, name in named)]
    ours = (x for x in found if inspect.isclass(x) or inspect.isfunction(x))
    return {f"{x.__module__}.{x.__name__}": x for x in ours}


def module_of(path: Path) -> str:
    parts = path.relative_to(SOURCES.parent).with_suffix("").parts
    return ".".join(parts).removesuffix(".__init__")


def modules_with_examples() -> list[Any]:
    """Cheap, since it is asked whenever tests are collected: no module is imported or parsed."""
    paths = sorted(SOURCES.rglob("*.py"))
    names = [module_of(path) for path in paths if ">>>" in path.read_text(encoding="utf-8")]
    return [pytest.param(x, marks=[pytest.mark.slow] if x in SLOW else []) for x in names]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("examples")
    out, model = folder / "out", with_tokenizer(folder / "tiny-bert")
    tiny("bert").save_pretrained(model)
    inspection("tiny-bert", n=24, n_heads=4).save(out / "tiny-bert.json")
    series = [inspection(f"checkpoint-{n}", n=24, r2=0.1 * n) for n in (1, 2, 3, 4)]
    compare(series, {f"checkpoint-{n}": n**1.5 for n in (1, 2, 3, 4)}).save(out / "series.json")
    results(job("rope", 0, {16: 2.5, 32: 3.0}), job("tisa", 0, {16: 2.0, 32: 2.5})).save(
        out / "lm.json"
    )
    fitted = Stage("fitted", Closeness((1.0,), (0.0,), 1.0), None)
    text = TextFacts("a text", 6, 60, 0, 2, 20, 10)
    facts = ("tiny-bert", "bert", "0" * 64, "tisa:kernels=1", 24, 24, {}, text)
    Distillation(*facts, (fitted,), None, (), (), (), {}, {}).save(out / "distill.json")
    return folder


@pytest.fixture
def _in_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        pytest.fail("a network connection was made")

    monkeypatch.chdir(folder)
    monkeypatch.setattr("socket.socket.connect", refuse)
    monkeypatch.setattr("socket.getaddrinfo", refuse)
    logging.disable_progress_bar()


def test_every_public_function_and_class_has_an_example_that_runs() -> None:
    without = []
    for name, thing in public().items():
        docstring = vars(thing).get("__doc__") if inspect.isclass(thing) else thing.__doc__
        found = doctest.DocTestParser().get_examples(docstring or "")
        if all(example.options.get(doctest.SKIP) for example in found):
            without.append(name)
    assert without == []


@pytest.mark.usefixtures("_in_folder")
@pytest.mark.parametrize("name", modules_with_examples())
def test_the_examples_of_a_module_print_what_they_say(name: str) -> None:
    module = importlib.import_module(name)
    tree = ast.parse(Path(module.__file__ or "").read_text(encoding="utf-8"))
    # Not by doctest's own finder: it passes over functions that the run-time shape checks wrap.
    tried = 0
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
            whose = f"{name}.{getattr(node, 'name', '')}"
            docstring = ast.get_docstring(node) or ""
            test = doctest.DocTestParser().get_doctest(docstring, vars(module), whose, name, 0)
            said = io.StringIO()
            doctest.DocTestRunner().run(test, out=said.write)
            assert not said.getvalue(), said.getvalue()
            tried += len(test.examples)
    assert tried
