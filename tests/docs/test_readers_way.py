"""The path of one training call through the sources, which docs/design.md names for a reader."""

import ast
import importlib
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import whence
from whence import attend
from whence.lag import GAUSSIANS, CurveBias

pytestmark = pytest.mark.triton

SOURCES = Path(whence.__file__).parent
DESIGN = Path(__file__).resolve().parents[2] / "docs" / "design.md"
FOLDERS = ("kernels", "lag")
MOST = 15  # files


@pytest.fixture(autouse=True)
def _interpreter() -> None:
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("run with TRITON_INTERPRET=1, as `make test` does")
    pytest.importorskip("triton", reason="Triton is a Linux package")


def entered(run: Callable[[], None]) -> set[Path]:
    """The files of FOLDERS of which a function is called while `run` runs."""
    found: set[str] = set()

    def called(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            found.add(frame.f_code.co_filename)

    before = sys.getprofile()
    sys.setprofile(called)
    try:
        run()
    finally:
        sys.setprofile(before)
    inside = (Path(name).resolve() for name in found)
    return {path for path in inside if any((SOURCES / x) in path.parents for x in FOLDERS)}


def device_modules(names: set[str]) -> set[str]:
    """These modules of device code, and those of device code whose functions they call."""
    found, waiting = set[str](), list(names)
    while waiting:
        name = waiting.pop()
        if name in found or ".device." not in name:
            continue
        found.add(name)
        tree = ast.parse(Path(sys.modules[name].__file__ or "").read_text(encoding="utf-8"))
        imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
        waiting += [node.module for node in imports if node.module is not None]
    return found


@pytest.fixture
def way(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The files below `attend` of a training call with TISA, relative to src/whence.

    The call is too short to be split, and too long for the kernels for short sequences, which are
    told to stop at 16 tokens here: Triton's interpreter is slow.
    """
    from whence.kernels.fused import short
    from whence.kernels.fused.plan import PLANS, Plan

    importlib.import_module("whence.kernels.fused.function")  # so that no import is in the way
    launched: set[str] = set()
    launch = Plan.launch

    def noting(plan: Plan, kernel: Any, *arguments: Any, **options: Any) -> None:
        launched.add(kernel.fn.__module__)
        launch(plan, kernel, *arguments, **options)

    monkeypatch.setattr(Plan, "launch", noting)
    monkeypatch.setattr(short, "LONGEST", 16)
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 1, 17, 16, requires_grad=True) for _ in range(3))
    bias = CurveBias(GAUSSIANS, 16, *((torch.randn(1, 2) / 32).requires_grad_() for _ in range(3)))
    PLANS.forget()
    files = entered(lambda: attend(q, k, v, bias=bias, backend="fused").sum().backward())
    PLANS.forget()
    assert launched, "no kernel was launched"
    device = device_modules(launched)
    files |= {Path(sys.modules[name].__file__ or "").resolve() for name in device}
    return {path.relative_to(SOURCES).as_posix() for path in files}


def test_the_design_page_names_the_files_of_a_training_call(way: set[str]) -> None:
    text = DESIGN.read_text(encoding="utf-8")
    section = text.partition("### From attend to the kernel and back\n")[2].partition("\n#")[0]
    assert set(re.findall(r"`((?:kernels|lag)/[\w/]+\.py)`", section)) == way


def test_a_reader_needs_at_most_fifteen_files(way: set[str]) -> None:
    assert len(way) <= MOST, sorted(way)
