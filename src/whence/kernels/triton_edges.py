"""A head's band laid out for near tiles: in base 2, tails beyond its reach, -inf out of sight.

Then a tile near the diagonal asks nothing about a cell but its lag. One small kernel, once a call.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from whence.kernels.launcher import launch
from whence.kernels.triton_tile import LOG2E

MARGIN = 256  # how far beyond its reach a near tile may touch: rows and keys of the largest tile


@triton.jit
def _edges_kernel(
    band_ptr,
    tails_ptr,
    out_ptr,
    stride_band_b,
    stride_band_h,
    stride_tail_kind,
    stride_tail_b,
    stride_tail_h,
    n_heads,
    reach,
    edge,
    before,
    after,
    BLOCK: tl.constexpr,
    TAILS: tl.constexpr,
    BEFORE: tl.constexpr,
    AFTER: tl.constexpr,
):
    """One block of lags of one head of one batch."""
    bh = tl.program_id(1).to(tl.int64)
    b = bh // n_heads
    h = bh % n_heads
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    lag = place - edge
    inside = (lag >= -reach) & (lag <= reach)
    band = band_ptr + b * stride_band_b + h * stride_band_h
    bias = tl.load(band + (lag + reach), mask=inside, other=0.0)
    if TAILS:
        tails = tails_ptr + b * stride_tail_b + h * stride_tail_h
        distance = tl.abs(lag).to(tl.float32)
        left = tl.load(tails) + tl.load(tails + stride_tail_kind) * distance
        right = tl.load(tails + 2 * stride_tail_kind)
        right += tl.load(tails + 3 * stride_tail_kind) * distance
        bias = tl.where(inside, bias, tl.where(lag < 0, left, right))
    bias = bias * LOG2E
    if BEFORE:
        bias = tl.where(lag < -before, float("-inf"), bias)
    if AFTER:
        bias = tl.where(lag > after, float("-inf"), bias)
    tl.store(out_ptr + bh * (2 * edge + 1) + place, bias, mask=place <= 2 * edge)


def with_edges(band: Tensor, tails: Tensor | None, edge: int, before: int, after: int) -> Tensor:
    """[b|1, h|1, 1, 2 * edge + 1] from a band [b|1, h|1, 1, lag] and tails [4, b|1, h|1, 1]."""
    b, h = band.shape[:2]
    strides: tuple[int, ...] = (0, 0, 0)
    if tails is not None:
        b, h = max(b, tails.shape[1]), max(h, tails.shape[2])
        strides = (tails.stride(0), *shared(tails, 1, 2))
    out = torch.empty(b, h, 1, 2 * edge + 1, dtype=torch.float32, device=band.device)
    launch(
        _edges_kernel,
        (-(-(2 * edge + 1) // 1024), b * h),
        (band, tails, out),
        (*shared(band, 0, 1), *strides, h, band.shape[-1] // 2, edge, before, after),
        BLOCK=1024,
        TAILS=tails is not None,
        BEFORE=before >= 0,
        AFTER=after >= 0,
    )
    return out


def shared(x: Tensor, *axes: int) -> tuple[int, ...]:
    """The strides of these axes; an axis of size 1 is shared: 0."""
    return tuple(0 if x.shape[axis] == 1 else x.stride(axis) for axis in axes)
