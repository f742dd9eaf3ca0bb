"""The fifth call with the same shapes sees nothing of the first: the kernels in Triton's interpreter."""

import copy
import os

import pytest
import torch
from torch import Tensor

from five_calls import (
    CASES,
    Sizes,
    errors_beyond,
    five_calls,
    five_steps,
    gradients_of,
    nan_in_empty_memory,
)
from shaking import shake
from whence.nn import MultiheadAttention

__all__ = ["nan_in_empty_memory"]
pytestmark = [
    pytest.mark.triton,
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="set TRITON_INTERPRET=1"),
    pytest.mark.usefixtures("nan_in_empty_memory"),
]
SMALL = Sizes(13, batch=2, heads=2, d_head=16, dtype=torch.float32, device="cpu")


def test_memory_that_nobody_wrote_is_nan() -> None:
    x = torch.zeros(2)
    for made in (torch.empty(3), torch.empty_strided((2, 3), (1, 2)), torch.empty_like(x)):
        torch.testing.assert_close(made, torch.full_like(made, torch.nan), equal_nan=True)
    for made in (x.new_empty(3), x.new_empty(3, dtype=torch.float16)):
        torch.testing.assert_close(made, torch.full_like(made, torch.nan), equal_nan=True)


FAST = {"tisa padded in groups", "shaw causal", "alibi causal in groups", "t5 in a window"}
FAST |= {"kerple", "a band a query packed"}  # every method and option; the rest are pairs of them


@pytest.mark.parametrize(
    "case", [case if case in FAST else pytest.param(case, marks=pytest.mark.slow) for case in CASES]
)
def test_the_first_and_the_fifth_call_are_as_exact_as_pytorch(case: str) -> None:
    assert errors_beyond(five_calls(CASES[case], SMALL), SMALL.dtype) == {}


@pytest.mark.parametrize("position", ["tisa", pytest.param("shaw", marks=pytest.mark.slow)])
def test_the_compiled_gradients_of_the_fifth_step_are_as_exact_as_the_called_ones(
    position: str,
) -> None:
    layer = MultiheadAttention(32, 2, batch_first=True, position=position, backend="fused")
    shake(layer, 0.1)
    wide = copy.deepcopy(layer).double()
    wide.backend = "reference"

    def forward(x: Tensor) -> Tensor:
        return layer(x, x, x, need_weights=False)[0]

    compiled = torch.compile(forward, fullgraph=True, backend="aot_eager")
    outcomes = five_steps(
        ours=lambda x: gradients_of(layer, compiled, x),
        plain=lambda x: gradients_of(layer, forward, x),
        truth=lambda x: gradients_of(
            wide, lambda x: wide(x, x, x, need_weights=False)[0], x.double()
        ),
        draw=lambda: torch.randn(1, 13, 32),
    )
    assert errors_beyond(outcomes, torch.float32) == {}
