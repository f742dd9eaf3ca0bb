"""A band laid out for near tiles, so that they need one load a cell.

The laid-out band is in base 2. For a head it extends as far as a near tile can touch, with its
tails beyond its reach and -inf outside the window. There are four copies, of which copy i begins
at lag -edge - i. Row r of a tile looks its lags up in copy r % 4, where the first of them is at a
multiple of four, so that one load brings four cells. The key kernel, whose tiles are transposed,
has four copies in reverse. For a row it extends one place beyond its reach
on each side, where it holds the constant of the tail; the look-up is clipped to these places.
"""

import triton
import triton.language as tl

from whence.kernels.fused.device.arguments import VARYING
from whence.kernels.fused.device.tile import (
    COPIES,
    COPY_MARGIN,
    LOG2E,
    copy_length,
    reversed_edge,
    sizes_of,
)


def edge_of(width: int, q_start: int) -> int:
    """The largest |lag| in the copies of a head's laid-out band, of all of which this is the width.

    It is q_start away from a multiple of four, as device/tile.py's near_bias wants it.
    """
    return (width // (2 * COPIES.value) - COPY_MARGIN.value) // 2 + q_start % COPIES.value


@triton.jit(do_not_specialize=[*VARYING])
def head_layout_kernel(
    laid_out,  # float32 [b, h, copy, copy_length]; not laid out, [b, h, 2 * edge + 1]
    bias,  # the band as the caller gave it; of a curve, its extent and tails are written
    parameters,
    numbers,
    n_q,
    n_k,
    q_start,
    reach,
    edge,
    KIND: tl.constexpr,
    BLOCK: tl.constexpr,
    BASE_2: tl.constexpr,  # lay it out; else write what a caller would have given (decoding)
    CURVE_AT: tl.constexpr,  # the functions of a curve that makes the band, or None
    CURVE_EXTENT: tl.constexpr,
    CURVE_TAILS: tl.constexpr,
    COUNT: tl.constexpr,
):
    """One block of lags (program 0) of one head of one sequence (program 1), of one copy (2)."""
    sizes = sizes_of(numbers, n_q, n_k, q_start, reach, edge)
    bh = tl.program_id(1).to(tl.int64)
    b = bh // sizes.n_heads
    h = bh % sizes.n_heads
    length = 2 * edge + 1
    if BASE_2:
        length = copy_length(edge)
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    copy = tl.program_id(2)
    first, step = -edge - copy, 1
    if copy >= COPIES:
        first, step = reversed_edge(edge) + (copy - COPIES), -1
    lag = first + step * place
    inside = (lag >= -reach) & (lag <= reach)
    if CURVE_EXTENT is not None:
        extent = CURVE_EXTENT(h, reach, parameters, COUNT)
        if (tl.program_id(0) == 0) & (tl.program_id(2) == 0):
            tl.store(bias.extent + h, extent)
        cells = tl.zeros([BLOCK], dtype=tl.float32)
        if tl.min(tl.abs(lag)) <= extent:
            cells = CURVE_AT(h, lag, reach, parameters, COUNT)
        cells = tl.where(inside, cells, 0.0)
    elif CURVE_AT is not None:
        cells = tl.where(inside, CURVE_AT(h, lag, reach, parameters, COUNT), 0.0)
    else:
        band = bias.band + b * bias.band_b + h * bias.band_h
        cells = tl.load(band + (lag + reach), mask=inside, other=0.0)
    if KIND.TAILS:
        tails = bias.tails + b * bias.tail_b + h * bias.tail_h
        kind = bias.tail_kind
        if CURVE_TAILS is not None:
            left, left_slope, right, right_slope = CURVE_TAILS(h, reach, parameters)
            if (tl.program_id(0) == 0) & (tl.program_id(2) == 0):
                tl.store(tails, left)
                tl.store(tails + kind, left_slope)
                tl.store(tails + 2 * kind, right)
                tl.store(tails + 3 * kind, right_slope)
        else:
            left = tl.load(tails)
            left_slope = tl.load(tails + kind)
            right = tl.load(tails + 2 * kind)
            right_slope = tl.load(tails + 3 * kind)
        distance = tl.abs(lag).to(tl.float32)
        left = left + left_slope * distance
        right = right + right_slope * distance
        cells = tl.where(inside, cells, tl.where(lag < 0, left, right))
    if BASE_2:
        cells = cells * LOG2E
        if KIND.BEFORE:
            cells = tl.where(lag < -sizes.before, float("-inf"), cells)
        if KIND.AFTER:
            cells = tl.where(lag > sizes.after, float("-inf"), cells)
    tl.store(
        laid_out + (bh * tl.num_programs(2) + copy) * length + place, cells, mask=place < length
    )


@triton.jit(do_not_specialize=[*VARYING])
def row_layout_kernel(
    laid_out,  # float32 [b, h, q, 2 * reach + 3]
    bias,
    numbers,
    n_q,
    n_k,
    q_start,
    reach,
    edge,
    KIND: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One block of rows (program 0) of one head of one sequence (program 1)."""
    sizes = sizes_of(numbers, n_q, n_k, q_start, reach, edge)
    bh = tl.program_id(1).to(tl.int64)
    b = bh // sizes.n_heads
    h = bh % sizes.n_heads
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    there = (row < sizes.n_q)[:, None]
    width = 2 * sizes.reach + 3
    left = tl.zeros([ROWS], dtype=tl.float32)
    right = tl.zeros([ROWS], dtype=tl.float32)
    if KIND.TAILS:
        tails = bias.tails + b * bias.tail_b + h * bias.tail_h + row * bias.tail_q
        left = tl.load(tails, mask=row < sizes.n_q, other=0.0)
        right = tl.load(tails + 2 * bias.tail_kind, mask=row < sizes.n_q, other=0.0)
    band = bias.band + b * bias.band_b + h * bias.band_h + row[:, None] * bias.band_q
    for start in range(0, width, BLOCK):
        place = (start + tl.arange(0, BLOCK))[None, :]
        inside = (place > 0) & (place < width - 1)
        cells = tl.load(band + (place - 1), mask=there & inside, other=0.0)
        cells = tl.where(inside, cells, tl.where(place == 0, left[:, None], right[:, None]))
        out = laid_out + (bh * sizes.n_q + row)[:, None] * width + place
        tl.store(out, cells * LOG2E, mask=there & (place < width))
