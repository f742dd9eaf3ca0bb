"""Every test starts from the same random numbers and without launch plans."""

import gc
import os
import sys
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from hypothesis import settings

os.environ.setdefault("HF_HUB_OFFLINE", "1")
settings.register_profile("whence", deadline=None, max_examples=30, derandomize=True)
settings.load_profile("whence")
gc.disable()  # while the tests are imported
if os.environ.get("TRITON_INTERPRET") == "1":
    with suppress(ImportError):
        from quick_interpreter import speed_up_interpreter

        speed_up_interpreter()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Where a call asks for one of these marks alone, files that do not name it are not imported.

    To import all files takes a worker ten seconds longer.
    """
    mark, _, rest = config.option.markexpr.partition(" and ")
    alone = mark in ("compiled", "triton") and " or " not in rest
    if not alone or collection_path.suffix != ".py" or not collection_path.name.startswith("test_"):
        return None
    return True if f"mark.{mark}" not in collection_path.read_text(encoding="utf-8") else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest test begins first: at the end, one worker would run it and the other wait."""
    items.sort(key=lambda item: "inductor" not in item.name)


def pytest_collection_finish() -> None:
    """Imports are done."""
    gc.enable()


def pytest_unconfigure() -> None:
    """Extensions that count what is left at the end shall find nothing."""
    gc.unfreeze()


@pytest.fixture(autouse=True, scope="module")
def _freeze() -> None:
    """What is imported stays: to look through it takes 0.3 s for each of many `gc.collect()`."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _no_plans() -> None:
    """A test may change what decides about launches; the plan of an earlier test would not know."""
    if "whence.kernels.fused.function" in sys.modules:
        sys.modules["whence.kernels.fused.function"].PLANS.forget()
