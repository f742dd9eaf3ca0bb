"""Every test starts from the same random numbers, on two threads at most."""

import os

import pytest
import torch
from hypothesis import settings

os.environ.setdefault("HF_HUB_OFFLINE", "1")
settings.register_profile("whence", deadline=None, max_examples=30, derandomize=True)
settings.load_profile("whence")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
