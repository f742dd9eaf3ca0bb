"""Queries that stand outside of the keys, where positions cannot be read: lags are bounded all the same."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from shaking import shake
from whence import build
from whence.method import longest_lag
from whence.nn import positioned_attention
from whence.nn.positioned import _positions

pytestmark = [
    pytest.mark.compiled,  # for run-time shape checks, tensors without a GPU are none
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
]
STARTS = (12, -9, 70, 4, 0)


ALONE = ["tisa", "tisa2", "kerple", "sandwich", "transformer_xl", "shaw:clip=3"]
SUMS = ["tisa+alibi", "tisa+learned", "tisa+xpos", "tisa+fire"]  # the last two read positions


@pytest.mark.parametrize("spec", ALONE + SUMS)
def test_a_compiled_call_bounds_the_lags_of_queries_outside_of_the_keys(spec: str) -> None:
    torch.compiler.reset()
    method = build(spec, n_heads=2, d_head=8, d_model=16, max_length=128)
    shake(method, 0.1)
    q, k, v = (torch.randn(1, 2, n, 8) for n in (5, 9, 9))

    def attention(q_start: int) -> Tensor:
        return positioned_attention(method, q, k, v, q_start=q_start)

    compiled = torch.compile(attention, fullgraph=True, backend="aot_eager", dynamic=False)
    for q_start in STARTS:
        torch.testing.assert_close(compiled(q_start), attention(q_start))


@pytest.mark.parametrize("q_start", STARTS)
def test_on_a_gpu_the_number_of_positions_bounds_the_lags(q_start: int) -> None:
    q, k = (SimpleNamespace(shape=(1, 2, n, 8), is_cuda=True) for n in (5, 9))
    given: tuple[Any, ...] = (q, k, 3, q_start)
    bound = longest_lag(*_positions(*given, lengths_only=True))
    worst = max(abs(key - query) for key in range(9) for query in range(q_start, q_start + 5))
    assert bound >= worst
    assert bound == 8 or worst > 8  # no more than the keys need, where queries lie among them


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch's
def test_a_band_that_does_not_reach_them_is_an_error() -> None:
    torch.compiler.reset()
    method = build("deberta", n_heads=2, d_head=8, d_model=16)
    q, k, v = (torch.randn(1, 2, n, 8) for n in (5, 9, 9))

    def attention(q_start: int) -> Tensor:
        return positioned_attention(method, q, k, v, q_start=q_start)

    compiled = torch.compile(attention, backend="aot_eager", dynamic=False)
    torch.testing.assert_close(compiled(4), attention(4))
    with pytest.raises(ValueError, match=r"knows lags -8..8 and has no tails, got 16"):
        compiled(12)


@pytest.mark.parametrize("spec", ["tisa2d:width=4", "forget"])
def test_a_lag_that_no_number_of_positions_bounds_is_nan_and_not_another_one(spec: str) -> None:
    torch.compiler.reset()
    method = build(spec, n_heads=2, d_head=8, d_model=16, max_length=64)
    shake(method, 0.1)
    q, k, v = (torch.randn(1, 2, n, 8) for n in (5, 9, 9))
    content = {"x_q": torch.randn(1, 5, 16), "x_k": torch.randn(1, 9, 16)}

    def attention(q_start: int) -> Tensor:
        return positioned_attention(method, q, k, v, **content, q_start=q_start)

    compiled = torch.compile(attention, backend="aot_eager", dynamic=False)
    torch.testing.assert_close(compiled(4), attention(4))
    assert compiled(40).isnan().all()
