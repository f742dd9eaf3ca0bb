"""What tests of the kernels in Triton's interpreter share."""

import os

import pytest


@pytest.fixture
def _interpreter() -> None:
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("run with TRITON_INTERPRET=1, as `make test` does")
    pytest.importorskip("triton", reason="Triton is a Linux package")
