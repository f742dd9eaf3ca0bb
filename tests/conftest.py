"""Every test starts from the same random numbers and without launch plans."""

import gc
import os
import sys
from contextlib import suppress
from dataclasses import replace

import pytest
import torch
from hypothesis import settings

os.environ.setdefault("HF_HUB_OFFLINE", "1")
settings.register_profile("whence", deadline=None, max_examples=30, derandomize=True)
settings.load_profile("whence")
gc.disable()  # while the tests are imported
if os.environ.get("TRITON_INTERPRET") == "1":
    with suppress(ImportError):
        from triton.runtime.interpreter import interpreter_builder

        # Half of its time goes into a check for overflow, of which it makes nothing but in debug.
        interpreter_builder.options = replace(interpreter_builder.options, sanitize_overflow=False)


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
