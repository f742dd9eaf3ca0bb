"""PyTorch's tests of MultiheadAttention, on ours without a position."""

import importlib.util
import os
import unittest
from pathlib import Path

import pytest
import torch

from whence.nn import MultiheadAttention

VARIABLE = "PYTORCH_TESTS"  # names a checkout of pytorch/pytorch at the installed version
FILE = Path("test", "nn", "test_multihead_attention.py")

if not os.environ.get(VARIABLE):
    pytest.skip(f"{VARIABLE} does not name a checkout of PyTorch", allow_module_level=True)
path = Path(os.environ[VARIABLE]) / FILE
if not path.is_file():
    pytest.skip(f"{VARIABLE} has no {FILE}", allow_module_level=True)
pytest.importorskip("expecttest", reason="the suite needs: pip install expecttest")
found = importlib.util.spec_from_file_location("pytorch_multihead_attention", path)
assert found is not None
assert found.loader is not None
suite = importlib.util.module_from_spec(found)
found.loader.exec_module(suite)
suite.MultiheadAttention = MultiheadAttention  # type: ignore[attr-defined]
for name, kind in vars(suite).items():
    if isinstance(kind, type) and issubclass(kind, unittest.TestCase) and name.startswith("Test"):
        globals()[name] = kind


@pytest.fixture(autouse=True)
def _ours_in_place_of_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.nn, "MultiheadAttention", MultiheadAttention)
