"""What the Triton kernels share: the bias of one tile of logits, and what may be looked at.

Logits are in base 2 (times log2 e), so that exp2 serves. lag = key - query; query row i stands at
key position q_start + i. A band belongs to a head, or to each query row (PER_ROW); `tails` holds,
for each, left const, left slope, right const, right slope.

Near the diagonal (region 1) the bias is looked up cell by cell. A far tile (region 0 to the left,
2 to the right) knows only a line: shift + level + tilt * column, one shift a row. The shift
goes into what is subtracted from the logits anyway, so a constant tail costs no work a cell.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
FINE = tl.constexpr(256.0)  # what rounding took is kept so many times, above float16's subnormals


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
def load_tails(
    tails_ptr,
    row,
    there,
    stride_kind,
    stride_q,
    TAILS: tl.constexpr,
    SLOPES: tl.constexpr,
    PER_ROW: tl.constexpr,
):
    """Left const and slope, right const and slope, in base 2: of these rows, or of the head."""
    left = 0.0
    left_slope = 0.0
    right = 0.0
    right_slope = 0.0
    if TAILS:
        if PER_ROW:
            place = tails_ptr + row.to(tl.int64) * stride_q
            left = tl.load(place, mask=there, other=0.0) * LOG2E
            right = tl.load(place + 2 * stride_kind, mask=there, other=0.0) * LOG2E
            if SLOPES:
                left_slope = tl.load(place + stride_kind, mask=there, other=0.0) * LOG2E
                right_slope = tl.load(place + 3 * stride_kind, mask=there, other=0.0) * LOG2E
        else:
            left = tl.load(tails_ptr) * LOG2E
            right = tl.load(tails_ptr + 2 * stride_kind) * LOG2E
            if SLOPES:
                left_slope = tl.load(tails_ptr + stride_kind) * LOG2E
                right_slope = tl.load(tails_ptr + 3 * stride_kind) * LOG2E
    return left, left_slope, right, right_slope


@triton.jit
def far_line(
    left,
    left_slope,
    right,
    right_slope,
    ahead,  # position of r = 0, less that of the tile's first key
    r,
    REGION: tl.constexpr,
    SLOPES: tl.constexpr,
    LEVEL: tl.constexpr,
):
    """A far tile's bias as shift + (level + tilt * column), the column counted from its first key.

    The shift is of a row. What all cells of a tile have in common is part of it, or with LEVEL the
    level: a thread of a tile [keys, queries] has few keys and many rows, so there it costs less.
    """
    level = 0.0
    if REGION == 0:
        shift = left
        tilt = -left_slope
        if SLOPES:
            if LEVEL:
                level = left + left_slope * (ahead * 1.0)
                shift = left_slope * r.to(tl.float32)
            else:
                shift = left + left_slope * (ahead * 1.0) + left_slope * r.to(tl.float32)
    else:
        shift = right
        tilt = right_slope
        if SLOPES:
            if LEVEL:
                level = right - right_slope * (ahead * 1.0)
                shift = -right_slope * r.to(tl.float32)
            else:
                shift = right - right_slope * (ahead * 1.0) - right_slope * r.to(tl.float32)
    return shift, level, tilt


@triton.jit
def within(lag, reach):
    """-reach <= lag <= reach, in one comparison."""
    return (lag + reach).to(tl.uint32) <= (2 * reach).to(tl.uint32)


@triton.jit
def skewed(ptr, zero, r, c, stride):
    """Where row r holds what belongs to lag = c - r + const: a plain tile whose rows are one less
    than `stride` apart. `zero` is the place of r = c = 0.
    """
    return (ptr + zero + r * (stride - 1)) + c


@triton.jit
def near_bias(
    band_ptr,
    position,
    first,
    r,  # the row counted from the one that band_ptr stands at, [m, 1] or [1, m]
    c,  # the key counted from `first`
    there,
    reach,
    edge,
    stride_band_q,
    left,
    left_slope,
    right,
    right_slope,
    TAILS: tl.constexpr,
    SLOPES: tl.constexpr,
    PER_ROW: tl.constexpr,
    RAW: tl.constexpr = False,
    DIRECT: tl.constexpr = False,
):
    """The bias of every cell of a near tile. `position` is that of r = 0.

    A band of the head is laid out to `edge` beyond what a near tile can touch, in base 2, with its
    tails and with -inf beyond the window; a band a row only to its constant tails, one place beyond
    its reach (triton_edges.py). So one look-up a cell does, with no question about its lag. A RAW
    band is as the caller gave it: for few queries the questions cost less than laying it out.
    """
    lag = (first - position) + (c - r)
    if RAW:
        inside = within(lag, reach)
        place = lag + reach
        if PER_ROW:
            place += r * stride_band_q
        bias = tl.load(band_ptr + place, mask=inside & there, other=0.0) * LOG2E
        if TAILS:
            line = tl.where(lag < 0, left, right)
            if SLOPES:
                slope = tl.where(lag < 0, left_slope, right_slope)
                line += slope * tl.abs(lag).to(tl.float32)
            bias = tl.where(inside, bias, line)
    elif PER_ROW:
        place = tl.minimum(tl.maximum(lag, -edge), edge) + (r * stride_band_q + edge)
        if DIRECT:
            # A condition that always holds: a look-up within one is not staged through shared
            # memory, which takes a thread a number and is slow where rows have their own.
            bias = 0.0 * place.to(tl.float32)
            if reach >= 0:
                bias = tl.load(band_ptr + place, mask=there, other=0.0)
        else:
            bias = tl.load(band_ptr + place, mask=there, other=0.0)
        if SLOPES:
            slope = tl.where(lag < 0, left_slope, right_slope) * tl.abs(lag).to(tl.float32)
            bias += tl.where(within(lag, reach), 0.0, slope)
    else:
        bias = tl.load(band_ptr + (first - position + edge) + (c - r))
    return bias


@triton.jit
def load_rows(
    ptr,
    first,
    r,
    d,
    stride,
    n,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    EVEN: tl.constexpr,
    HELD: tl.constexpr = False,
):
    """Rows first + r of a matrix as a tile, zeros beyond its edges.

    r is [m, 1] and d [1, d], or the other way for the transposed tile. HELD keeps the offsets
    within a tile in registers from one tile to the next, which saves work where there is room.
    """
    if HELD:
        place = ptr + (tl.zeros([], tl.int64) + first) * stride + (r * stride + d)
    else:
        place = ptr + (first + r).to(tl.int64) * stride + d
    if EVEN and D == BLOCK_D:
        tile = tl.load(place)
    else:
        tile = tl.load(place, mask=(first + r < n) & (d < D), other=0.0)
    return tile


@triton.jit
def packed_row(b, h, row, n, n_heads, TOKENS: tl.constexpr):
    """The place of a row, in rows, in [b, h, n, d], or with TOKENS in [b, n, h, d]."""
    place = (b * n_heads + h) * n + row
    if TOKENS:
        place = (b * n + row) * n_heads + h
    return place


@triton.jit
def load_part(ptr, b, h, index, m, n_heads, d, D: tl.constexpr, TOKENS: tl.constexpr):
    """Rows `index` of the m packed rows of one head; zeros beyond them."""
    there = (index >= 0) & (index < m)
    place = packed_row(b, h, index.to(tl.int64), m, n_heads, TOKENS)
    place = ptr + place[:, None] * D + d[None, :]
    return tl.load(place, mask=there[:, None] & (d < D)[None, :], other=0.0)


@triton.jit
def kept(seed, row, col, dropout):
    """What dropout multiplies the weights by: the same for a seed, whatever the tiles are."""
    first = col + 0 * row
    zero = 0 * first
    random, _, _, _ = tl.philox(seed, first, row + zero, zero, zero)
    return tl.where(tl.uint_to_uniform_float(random) >= dropout, 1.0 / (1.0 - dropout), 0.0)


@triton.jit
def rounded_off(exact, short):
    """What rounding took, FINE times, within the range of float16, in which it is kept."""
    return tl.minimum(tl.maximum((exact - short.to(tl.float32)) * FINE, -60000.0), 60000.0)


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
