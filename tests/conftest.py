"""Every test starts from the same random numbers and without tapes."""

import os
import sys

import pytest
import torch
from hypothesis import settings

os.environ.setdefault("HF_HUB_OFFLINE", "1")
settings.register_profile("whence", deadline=None, max_examples=30, derandomize=True)
settings.load_profile("whence")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _no_tapes() -> None:
    """A test may change what decides about launches; a tape of another one would not know."""
    if "whence.replay" in sys.modules:
        sys.modules["whence.replay"].forget()
