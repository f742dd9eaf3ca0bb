"""What the Triton kernels share: one tile of logits with its bias, and what may be looked at.

Logits are in base 2 (times log2 e), so that exp2 serves. lag = key - query; query row i stands at
key position q_start + i. A band has one row (stride 0) or one a query, and `tails` holds, for each
row, left const, left slope, right const, right slope.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def visible(
    row,
    col,
    n_k,
    q_start,
    before,
    after,
    keys_ptr,
    q_segment,
    k_segment_ptr,
    BEFORE: tl.constexpr,
    AFTER: tl.constexpr,
    KEYS: tl.constexpr,
    SEGMENTS: tl.constexpr,
):
    """Which cells count: within the keys, the window, the padding and the segment.

    row and col are whole numbers that broadcast to the tile, [m, 1] and [1, n] or the other way.
    """
    lag = col - (row + q_start)
    seen = (col < n_k) & (row >= 0)
    if BEFORE:
        seen = seen & (lag >= -before)
    if AFTER:
        seen = seen & (lag <= after)
    if KEYS:
        seen = seen & (tl.load(keys_ptr + col, mask=col < n_k, other=0) != 0)
    if SEGMENTS:
        seen = seen & (q_segment == tl.load(k_segment_ptr + col, mask=col < n_k, other=-1))
    return seen


@triton.jit
def bias_at(
    band_ptr,
    tails_ptr,
    row,
    col,
    n_q,
    q_start,
    reach,
    stride_band_q,
    stride_tail_kind,
    stride_tail_q,
    REGION: tl.constexpr,  # 0 far left, 1 near, 2 far right
    TAILS: tl.constexpr,
    SLOPES: tl.constexpr,
    PER_ROW: tl.constexpr,  # a band for each query, not one for all
):
    """The bias of every cell of a tile, in base 2: the band near the diagonal, a tail beyond."""
    lag = col - (row + q_start)
    there = row < n_q
    tail = tails_ptr + row.to(tl.int64) * stride_tail_q
    left = 0.0
    right = 0.0
    if TAILS and REGION != 2:
        left = tl.load(tail, mask=there, other=0.0)
        if SLOPES:
            slope = tl.load(tail + stride_tail_kind, mask=there, other=0.0)
            left = left + slope * tl.abs(lag).to(tl.float32)
    if TAILS and REGION != 0:
        right = tl.load(tail + 2 * stride_tail_kind, mask=there, other=0.0)
        if SLOPES:
            slope = tl.load(tail + 3 * stride_tail_kind, mask=there, other=0.0)
            right = right + slope * tl.abs(lag).to(tl.float32)
    bias = left
    if REGION == 2:
        bias = right
    if REGION == 1:
        inside = (lag >= -reach) & (lag <= reach)
        if PER_ROW:
            place = row.to(tl.int64) * stride_band_q + (lag + reach)
            bias = tl.load(band_ptr + place, mask=inside & there, other=0.0)
        else:
            bias = tl.load(band_ptr + (lag + reach), mask=inside, other=0.0)
        if TAILS:
            bias = tl.where(inside, bias, tl.where(lag < 0, left, right))
    return bias * LOG2E


@triton.jit
def load_rows(ptr, row, d, stride, n, D: tl.constexpr, BLOCK_D: tl.constexpr, EVEN: tl.constexpr):
    """Rows of a matrix as a tile, zeros beyond its edges."""
    place = ptr + row[:, None] * stride + d[None, :]
    if EVEN and D == BLOCK_D:
        tile = tl.load(place)
    else:
        tile = tl.load(place, mask=(row < n)[:, None] & (d < D)[None, :], other=0.0)
    return tile


@triton.jit
def kept(seed, row, col, n_k, dropout):
    """What dropout multiplies the weights by: the same for a seed, whatever the tiles are."""
    return tl.where(tl.rand(seed, row * n_k + col) >= dropout, 1.0 / (1.0 - dropout), 0.0)


@triton.jit
def near_range(first, last, reach, low, high, BLOCK: tl.constexpr):
    """The whole blocks of low..high that hold something within `reach` of positions first..last."""
    start = (tl.maximum(first - reach, 0) // BLOCK) * BLOCK
    stop = ((tl.maximum(last + reach + 1, 0) + BLOCK - 1) // BLOCK) * BLOCK
    start = tl.minimum(tl.maximum(start, low), high)
    return start, tl.minimum(tl.maximum(stop, start), high)


@triton.jit
def whole_blocks(low, high, n, BLOCK: tl.constexpr):
    """low..high cut to 0..n and widened to whole blocks."""
    low = (tl.minimum(tl.maximum(low, 0), n) // BLOCK) * BLOCK
    high = ((tl.minimum(tl.maximum(high, 0), n) + BLOCK - 1) // BLOCK) * BLOCK
    return low, tl.maximum(low, high)
