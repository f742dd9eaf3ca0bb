"""The exponential function of the curves, in Triton's interpreter."""

import math

import pytest
import torch
from torch import Tensor

pytestmark = [pytest.mark.triton, pytest.mark.usefixtures("_interpreter")]

triton = pytest.importorskip("triton", reason="curves are evaluated by Triton kernels")
tl = pytest.importorskip("triton.language", reason="curves are evaluated by Triton kernels")


@triton.jit
def exp_kernel(x_ptr, out_ptr, EXP: tl.constexpr, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + place, EXP(tl.load(x_ptr + place)))


def exponentials(x: Tensor) -> Tensor:
    from whence.kernels.fused.device.tile import exact_exp

    out = torch.empty_like(x)
    block = math.gcd(len(x), 1024)
    exp_kernel[(len(x) // block,)](x, out, EXP=exact_exp, BLOCK=block)
    return out


def test_it_has_the_digits_of_float32() -> None:
    x = torch.linspace(-80, 80, 16 * 4000)
    torch.testing.assert_close(exponentials(x).double(), x.double().exp(), rtol=1.2e-7, atol=0.0)


@pytest.mark.filterwarnings("ignore:overflow encountered")
def test_beyond_the_range_of_float32_it_is_infinite_or_0_and_nan_stays_nan() -> None:
    x = torch.tensor([100.0, float("inf"), -120.0, -float("inf"), float("nan"), 0.0]).repeat(8)
    wanted = torch.tensor([float("inf"), float("inf"), 0.0, 0.0, float("nan"), 1.0]).repeat(8)
    torch.testing.assert_close(exponentials(x), wanted, equal_nan=True)
