"""A band laid out for near tiles, so that they ask nothing about a cell but its lag.

In base 2, with its tails beyond its reach: for a head as far as a near tile can touch, with -inf
out of sight; for a row one place beyond the reach, where the look-up is clipped.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from whence.kernels.triton_tile import LOG2E
from whence.lag import Curve
from whence.launcher import launch

MARGIN = 256  # how far beyond its reach a near tile may touch: rows and keys of the largest tile


@triton.jit
def _edges_kernel(
    out_ptr,
    band_ptr,
    tails_ptr,
    extent_ptr,  # of a curve: written
    curve_0_ptr,
    curve_1_ptr,
    curve_2_ptr,
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
    curve_count,
    BLOCK: tl.constexpr,
    TAILS: tl.constexpr,
    BEFORE: tl.constexpr,
    AFTER: tl.constexpr,
    CURVE: tl.constexpr,  # whether the band is still to be made, by the functions of a Curve
    CURVE_AT: tl.constexpr,
    CURVE_EXTENT: tl.constexpr,
    CURVE_COUNT: tl.constexpr,
):
    """One block of lags of one head of one batch."""
    bh = tl.program_id(1).to(tl.int64)
    b = bh // n_heads
    h = bh % n_heads
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    lag = place - edge
    inside = (lag >= -reach) & (lag <= reach)
    if CURVE:
        extent = CURVE_EXTENT(
            h, reach, curve_0_ptr, curve_1_ptr, curve_2_ptr, curve_count, CURVE_COUNT
        )
        if tl.program_id(0) == 0:
            tl.store(extent_ptr + h, extent)
        bias = tl.zeros([BLOCK], dtype=tl.float32)
        first = tl.program_id(0) * BLOCK - edge
        if (first <= extent) & (first + BLOCK > -extent):
            bias = CURVE_AT(h, lag, curve_0_ptr, curve_1_ptr, curve_2_ptr, curve_count, CURVE_COUNT)
        bias = tl.where(inside, bias, 0.0)
    else:
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
        (out, band, tails, None, None, None, None),
        (*shared(band, 0, 1), *strides, h, band.shape[-1] // 2, edge, before, after, 1),
        BLOCK=1024,
        TAILS=tails is not None,
        BEFORE=before >= 0,
        AFTER=after >= 0,
        CURVE=False,
        CURVE_AT=None,
        CURVE_EXTENT=None,
        CURVE_COUNT=1,
    )
    return out


def edges_of_curve(
    curve: Curve, parameters: tuple[Tensor, ...], reach: int, edge: int, before: int, after: int
) -> tuple[Tensor, Tensor]:
    """The same from a curve's parameters [h, count], and its extent [h]: no band in between."""
    parts = tuple(x.float().contiguous() for x in parameters)
    (h, count), device = parts[0].shape, parts[0].device
    out = torch.empty(1, h, 1, 2 * edge + 1, dtype=torch.float32, device=device)
    extent = torch.empty(h, dtype=torch.int32, device=device)
    launch(
        _edges_kernel,
        (-(-(2 * edge + 1) // 1024), h),
        (out, None, None, extent, *parts),
        (0, 0, 0, 0, 0, h, reach, edge, before, after, count),
        BLOCK=1024,
        TAILS=False,
        BEFORE=before >= 0,
        AFTER=after >= 0,
        CURVE=True,
        CURVE_AT=curve.at,
        CURVE_EXTENT=curve.extent_of,
        CURVE_COUNT=1 << (count - 1).bit_length(),
    )
    return out, extent


@triton.jit
def _row_edges_kernel(
    band_ptr,
    tails_ptr,
    out_ptr,
    stride_band_b,
    stride_band_h,
    stride_band_q,
    stride_tail_kind,
    stride_tail_b,
    stride_tail_h,
    stride_tail_q,
    n_heads,
    n_q,
    reach,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    TAILS: tl.constexpr,
):
    """One block of rows of one head of one batch."""
    bh = tl.program_id(1).to(tl.int64)
    b = bh // n_heads
    h = bh % n_heads
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    there = (row < n_q)[:, None]
    width = 2 * reach + 3
    left = tl.zeros([ROWS], dtype=tl.float32)
    right = tl.zeros([ROWS], dtype=tl.float32)
    if TAILS:
        tails = tails_ptr + b * stride_tail_b + h * stride_tail_h + row * stride_tail_q
        left = tl.load(tails, mask=row < n_q, other=0.0)
        right = tl.load(tails + 2 * stride_tail_kind, mask=row < n_q, other=0.0)
    band = band_ptr + b * stride_band_b + h * stride_band_h + row[:, None] * stride_band_q
    for start in range(0, width, BLOCK):
        place = (start + tl.arange(0, BLOCK))[None, :]
        inside = (place > 0) & (place < width - 1)
        bias = tl.load(band + (place - 1), mask=there & inside, other=0.0)
        bias = tl.where(inside, bias, tl.where(place == 0, left[:, None], right[:, None]))
        cells = out_ptr + (bh * n_q + row)[:, None] * width + place
        tl.store(cells, bias * LOG2E, mask=there & (place < width))


def with_row_edges(band: Tensor, tails: Tensor | None, b: int, h: int, n_q: int) -> Tensor:
    """[b, h, q, lag + 2] from a band and tails of which some differ from row to row."""
    reach = band.shape[-1] // 2
    out = torch.empty(b, h, n_q, 2 * reach + 3, dtype=torch.float32, device=band.device)
    launch(
        _row_edges_kernel,
        (-(-n_q // 32), b * h),
        (band, tails, out),
        (
            *shared(band, 0, 1, 2),
            *((0, 0, 0, 0) if tails is None else shared(tails, 0, 1, 2, 3)),
            *(h, n_q, reach),
        ),
        ROWS=32,
        BLOCK=min(64, triton.next_power_of_2(2 * reach + 3)),
        TAILS=tails is not None,
    )
    return out


def shared(x: Tensor, *axes: int) -> tuple[int, ...]:
    """The strides of these axes; an axis of size 1 is shared: 0."""
    return tuple(0 if x.shape[axis] == 1 else x.stride(axis) for axis in axes)
