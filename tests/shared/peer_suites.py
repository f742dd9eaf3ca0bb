"""The test suite of transformers, imported from a checkout of its repository."""

import importlib
import importlib.metadata
import os
import re
import sys
import types
import warnings
from pathlib import Path
from typing import Any

import pytest

VARIABLE = "TRANSFORMERS_TESTS"


def transformers_suite(module: str) -> Any:
    """A module of the suite, such as "models.bert.test_modeling_bert".

    Where there is no checkout, or a library that its tests need is not installed, the tests of the
    calling module are skipped with the reason.
    """
    root = os.environ.get(VARIABLE)
    if not root:
        pytest.skip(
            f"{VARIABLE} does not name a checkout of transformers, see tests/peers/README.md",
            allow_module_level=True,
        )
    folder = Path(root) / "tests"
    if not (folder / "test_modeling_common.py").is_file():
        pytest.skip(f"{VARIABLE}={root} has no tests/test_modeling_common.py", True)
    pytest.importorskip("parameterized", reason="the suite needs: pip install parameterized")
    # Its modules import each other as `tests.…`. Ours, of the same name, are loaded by their paths.
    package = sys.modules.setdefault("tests", types.ModuleType("tests"))
    if str(folder) not in getattr(package, "__path__", ()):
        package.__path__ = [str(folder), *getattr(package, "__path__", ())]
        sys.path.append(root)  # for its folder `utils`
    while True:
        try:
            with warnings.catch_warnings(action="ignore"):  # theirs, as they are imported
                return importlib.import_module(f"tests.{module}")
        except ImportError as error:
            missing = re.match(
                r"cannot import name '(\w+)' from '(transformers\.[\w.]+)'", str(error)
            )
            if missing is None:
                raise
            name, owner = missing.groups()
            setattr(importlib.import_module(owner), name, _Missing(f"{owner}.{name}"))


class _Missing:
    """A name that the checkout imports and the installed transformers lacks; a call skips a test."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, *args: object, **kwargs: object) -> None:
        version = importlib.metadata.version("transformers")
        pytest.skip(f"the installed transformers {version} has no {self.name}")
