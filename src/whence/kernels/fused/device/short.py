"""Short sequences: one tile holds all keys of a head, so a row's softmax needs a single step.

The forward kernel reads q, k and v and keeps nothing for backward. The backward kernel computes
the softmax again from q, k and v, so that it needs neither the output nor the log-sum-exp: with a
whole row in hand, delta = rowsum(P * dP) is one sum in float32.

The logits are in base 2 (times log2 e), so that exp2 serves. lag = key - query; query row i stands
at key position q_start + i. The band of a head is laid out in base 2 from lag -edge to lag edge,
with its tails beyond its reach and -inf outside of the window, so a cell needs one look-up.

The gradient of a band is the sum of each diagonal of dS. Every program stores the sums of its own
tile, and a second kernel adds them up over the batch in a fixed order, without atomics.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from whence.kernels.fused.device.tile import LOG2E, dropout_factor, packed_row


class HeadGradients(NamedTuple):
    """What the backward kernel gives, [b, h, n, d]."""

    d_q: Any
    d_k: Any
    d_v: Any


@triton.jit
def load_head(
    x,
    b,
    h,
    first,
    n,
    LENGTH: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    EVEN: tl.constexpr,
):
    """Rows of one head from `first` on as a tile [LENGTH, BLOCK_D], zeros beyond its edges."""
    r = first + tl.arange(0, LENGTH)[:, None]
    d = tl.arange(0, BLOCK_D)[None, :]
    place = x.ptr + b * x.stride_b + h * x.stride_h + r.to(tl.int64) * x.stride_n + d
    if EVEN and D == BLOCK_D:
        tile = tl.load(place)
    else:
        tile = tl.load(place, mask=(r < n) & (d < D), other=0.0)
    return tile


@triton.jit
def store_head(
    ptr, tile, b, h, first, n, n_heads, D: tl.constexpr, TOKENS: tl.constexpr, EVEN: tl.constexpr
):
    """Store a tile as rows of one head, packed as [b, h, n, d] or with TOKENS as [b, n, h, d]."""
    r = first + tl.arange(0, tile.shape[0])[:, None]
    d = tl.arange(0, tile.shape[1])[None, :]
    place = ptr + packed_row(b, h, r, n, n_heads, TOKENS) * D + d
    if EVEN and tile.shape[1] == D:
        tl.store(place, tile.to(ptr.dtype.element_ty))
    else:
        tl.store(place, tile.to(ptr.dtype.element_ty), mask=(r < n) & (d < D))


@triton.jit
def masked(logits, visible, b, r, c, sizes, KIND: tl.constexpr, TILE: tl.constexpr):
    """-inf where a query may not look; a laid-out band has the window in it already."""
    WINDOW: tl.constexpr = (KIND.BEFORE or KIND.AFTER) and not KIND.BAND
    if KIND.KEYS or KIND.SEGMENTS or WINDOW or not TILE.EVEN:
        seen = (c < sizes.n_k) & (r < sizes.n_q)
        if KIND.BEFORE and WINDOW:
            seen = seen & (c - (r + sizes.q_start) >= -sizes.before)
        if KIND.AFTER and WINDOW:
            seen = seen & (c - (r + sizes.q_start) <= sizes.after)
        if KIND.KEYS:
            keys = visible.keys + b * visible.keys_b + c
            seen = seen & (tl.load(keys, mask=c < sizes.n_k, other=0) != 0)
        if KIND.SEGMENTS:
            of_row = visible.q_segment + b * visible.q_segment_b + r
            of_key = visible.k_segment + b * visible.k_segment_b + c
            segment = tl.load(of_row, mask=r < sizes.n_q, other=-2)
            seen = seen & (segment == tl.load(of_key, mask=c < sizes.n_k, other=-1))
        logits = tl.where(seen, logits, float("-inf"))
    return logits


@triton.jit
def exponentials(q, k, bias, visible, b, h, r, c, sizes, KIND: tl.constexpr, TILE: tl.constexpr):
    """exp2(logit - row maximum) and its sum in each row, 1 where a row may look at no key."""
    logits = tl.dot(q, tl.trans(k), input_precision=KIND.PRECISION) * (sizes.scale * LOG2E)
    if KIND.BAND:
        band = bias.band + b * bias.band_b + h * bias.band_h + (sizes.edge - sizes.q_start)
        logits += tl.load(band + (c - r))
    logits = masked(logits, visible, b, r, c, sizes, KIND, TILE)
    top = tl.max(logits, 1)
    top = tl.where(top == float("-inf"), 0.0, top)
    weights = tl.exp2(logits - top[:, None])
    total = tl.sum(weights, 1)
    return weights, tl.where(total == 0.0, 1.0, total)


@triton.jit(do_not_specialize=["sizes"])
def short_forward_kernel(
    q, k, v, out, bias, visible, seed, sizes, KIND: tl.constexpr, TILE: tl.constexpr
):
    """The output of one head of one sequence (program 0), for a block of its rows (program 1)."""
    bh = tl.program_id(0).to(tl.int64)
    b = bh // sizes.n_heads
    h = bh % sizes.n_heads
    h_kv = h // KIND.GROUPS
    first = tl.program_id(1) * TILE.ROWS
    r = first + tl.arange(0, TILE.ROWS)[:, None]
    c = tl.arange(0, TILE.KEYS)[None, :]
    q_tile = load_head(q, b, h, first, sizes.n_q, TILE.ROWS, KIND.D, KIND.BLOCK_D, TILE.EVEN)
    k_tile = load_head(k, b, h_kv, 0, sizes.n_k, TILE.KEYS, KIND.D, KIND.BLOCK_D, TILE.EVEN)
    v_tile = load_head(v, b, h_kv, 0, sizes.n_k, TILE.KEYS, KIND.D_V, KIND.BLOCK_DV, TILE.EVEN)
    weights, total = exponentials(q_tile, k_tile, bias, visible, b, h, r, c, sizes, KIND, TILE)
    if KIND.DROPOUT:
        weights = weights * dropout_factor(tl.load(seed) + bh, r, c, sizes.dropout)
    rows = tl.dot(weights.to(v_tile.dtype), v_tile, input_precision=KIND.PRECISION)
    rows = rows / total[:, None]
    store_head(out, rows, b, h, first, sizes.n_q, sizes.n_heads, KIND.D_V, KIND.TOKENS, TILE.EVEN)


@triton.jit
def store_diagonals(ptr, tile, M: tl.constexpr, N: tl.constexpr):
    """The sum of every diagonal of a tile [M, N], M <= N: that of c - r = t at place t modulo 2 N.

    The tile is cut into blocks of STEP x STEP cells. Within a block, row r is turned by r, so that
    a column t holds the cells with c - r = t and, below them, those with c - r = t - STEP: one
    exchange between neighbouring threads a cell. The sums [block row, block column, t] that are
    left are few, and the blocks' own diagonals are summed in the same way.
    """
    STEP: tl.constexpr = 32 if M >= 32 else M
    ROW_STEPS: tl.constexpr = M // STEP
    KEY_STEPS: tl.constexpr = N // STEP
    blocks = tl.reshape(tile, [ROW_STEPS, STEP, KEY_STEPS, STEP])
    r = tl.arange(0, STEP)[None, :, None, None]
    t = tl.arange(0, STEP)[None, None, None, :]
    turn = tl.broadcast_to(r + t, [ROW_STEPS, STEP, KEY_STEPS, STEP])
    turned = tl.gather(blocks, turn % STEP, 3)
    upper = tl.sum(tl.where(turn < STEP, turned, 0.0), 1)
    lower = tl.sum(tl.where(turn < STEP, 0.0, turned), 1)
    # upper[i, j, t] belongs to c - r = (j - i) STEP + t, lower[i, j, t] to (j - i - 1) STEP + t.
    i = tl.arange(0, ROW_STEPS)[:, None, None]
    j = tl.arange(0, KEY_STEPS)[None, :, None]
    t = tl.arange(0, STEP)[None, None, :]
    turn = tl.broadcast_to(i + j + 0 * t, [ROW_STEPS, KEY_STEPS, STEP])
    upper = tl.gather(upper, turn % KEY_STEPS, 1)
    lower = tl.gather(lower, (turn + 1) % KEY_STEPS, 1)
    right = tl.where(turn < KEY_STEPS, upper, 0.0) + tl.where(turn + 1 < KEY_STEPS, lower, 0.0)
    left = tl.where(turn < KEY_STEPS, 0.0, upper) + tl.where(turn + 1 < KEY_STEPS, 0.0, lower)
    place = tl.arange(0, KEY_STEPS)[:, None] * STEP + tl.arange(0, STEP)[None, :]
    tl.store(ptr + place, tl.sum(right, 0))
    tl.store(ptr + N + place, tl.sum(left, 0))


@triton.jit
def block_gradients(
    d_k,
    d_v,
    k_tile,
    v_tile,
    q,
    d_out,
    d_q,
    parts,
    bias,
    visible,
    seed,
    b,
    h,
    block,
    sizes,
    KIND: tl.constexpr,
    TILE: tl.constexpr,
    ROW_BLOCKS: tl.constexpr,
    DIAGONALS: tl.constexpr,
):
    """Store what belongs to a block of rows alone; add its terms to dK / scale and to dV."""
    first = block * TILE.ROWS
    r = first + tl.arange(0, TILE.ROWS)[:, None]
    c = tl.arange(0, TILE.KEYS)[None, :]
    bh = b * sizes.n_heads + h
    q_tile = load_head(q, b, h, first, sizes.n_q, TILE.ROWS, KIND.D, KIND.BLOCK_D, TILE.EVEN)
    d_rows = load_head(d_out, b, h, first, sizes.n_q, TILE.ROWS, KIND.D_V, KIND.BLOCK_DV, TILE.EVEN)
    weights, total = exponentials(q_tile, k_tile, bias, visible, b, h, r, c, sizes, KIND, TILE)
    weights = weights / total[:, None]
    d_weights = tl.dot(d_rows, tl.trans(v_tile), input_precision=KIND.PRECISION)
    met = weights
    if KIND.DROPOUT:
        factor = dropout_factor(tl.load(seed) + bh, r, c, sizes.dropout)
        met = weights * factor
        d_weights = d_weights * factor
    met = met.to(d_rows.dtype)
    d_v = tl.dot(tl.trans(met), d_rows, d_v, input_precision=KIND.PRECISION)
    delta = tl.sum(weights * d_weights, 1)
    d_logits = weights * (d_weights - delta[:, None])
    rounded = d_logits.to(q_tile.dtype)
    d_k = tl.dot(tl.trans(rounded), q_tile, d_k, input_precision=KIND.PRECISION)
    d_q_tile = tl.dot(rounded, k_tile, input_precision=KIND.PRECISION) * sizes.scale
    store_head(d_q, d_q_tile, b, h, 0, sizes.n_q, sizes.n_heads, KIND.D, KIND.TOKENS, TILE.EVEN)
    if DIAGONALS:
        part = parts + (bh * ROW_BLOCKS + block) * (2 * TILE.KEYS)
        store_diagonals(part, d_logits, TILE.ROWS, TILE.KEYS)
    return d_k, d_v


@triton.jit(do_not_specialize=["sizes"])
def short_backward_kernel(
    q,
    k,
    v,
    d_out,
    gradients,
    parts,
    bias,
    visible,
    seed,
    sizes,
    KIND: tl.constexpr,
    TILE: tl.constexpr,
    ROW_BLOCKS: tl.constexpr,
    DIAGONALS: tl.constexpr,
):
    """All gradients of one key head of one sequence and of the query heads that share it."""
    n_kv = sizes.n_heads // KIND.GROUPS
    bh = tl.program_id(0).to(tl.int64)
    b = bh // n_kv
    h_kv = bh % n_kv
    KEYS: tl.constexpr = TILE.KEYS
    BLOCK_D: tl.constexpr = KIND.BLOCK_D
    BLOCK_DV: tl.constexpr = KIND.BLOCK_DV
    k_tile = load_head(k, b, h_kv, 0, sizes.n_k, KEYS, KIND.D, BLOCK_D, TILE.EVEN)
    v_tile = load_head(v, b, h_kv, 0, sizes.n_k, KEYS, KIND.D_V, BLOCK_DV, TILE.EVEN)
    d_k = tl.zeros([KEYS, BLOCK_D], dtype=tl.float32)
    d_v = tl.zeros([KEYS, BLOCK_DV], dtype=tl.float32)
    for step in tl.range(0, KIND.GROUPS * ROW_BLOCKS, num_stages=1):
        d_k, d_v = block_gradients(
            d_k,
            d_v,
            k_tile,
            v_tile,
            q,
            d_out,
            gradients.d_q,
            parts,
            bias,
            visible,
            seed,
            b,
            h_kv * KIND.GROUPS + step // ROW_BLOCKS,
            step % ROW_BLOCKS,
            sizes,
            KIND,
            TILE,
            ROW_BLOCKS,
            DIAGONALS,
        )
    d_k = d_k * sizes.scale
    store_head(gradients.d_k, d_k, b, h_kv, 0, sizes.n_k, n_kv, KIND.D, KIND.TOKENS, TILE.EVEN)
    store_head(gradients.d_v, d_v, b, h_kv, 0, sizes.n_k, n_kv, KIND.D_V, KIND.TOKENS, TILE.EVEN)


@triton.jit
def diagonal_sums(
    parts,
    lag,
    first,
    h,
    batches,
    sizes,
    TILE: tl.constexpr,
    ROW_BLOCKS: tl.constexpr,
    BATCHES: tl.constexpr,
):
    """The sum of dS at these lags over `batches` sequences from `first` on, in a fixed order."""
    WIDTH: tl.constexpr = 2 * TILE.KEYS
    sums = tl.zeros([BATCHES, lag.shape[0]], dtype=tl.float32)
    for start in range(0, batches, BATCHES):
        each = start + tl.arange(0, BATCHES)
        row = ((first + each).to(tl.int64) * sizes.n_heads + h) * ROW_BLOCKS
        for BLOCK in tl.static_range(ROW_BLOCKS):
            diagonal = lag + sizes.q_start + BLOCK * TILE.ROWS
            there = (diagonal >= -TILE.KEYS) & (diagonal < TILE.KEYS)
            place = (diagonal + WIDTH) % WIDTH
            sums += tl.load(
                parts + (row[:, None] + BLOCK) * WIDTH + place[None, :],
                mask=(each < batches)[:, None] & there[None, :],
                other=0.0,
            )
    return tl.sum(sums, 0)


@triton.jit(do_not_specialize=["sizes", "batches"])
def short_band_kernel(
    parts,
    d_band,
    sizes,
    batches,
    TILE: tl.constexpr,
    ROW_BLOCKS: tl.constexpr,
    LAGS: tl.constexpr,
    BATCHES: tl.constexpr,
):
    """A block of lags (program 0) of d_band [b|1, h, 2 * reach + 1], one head (program 1)."""
    bh = tl.program_id(1).to(tl.int64)
    first = bh // sizes.n_heads * batches
    h = bh % sizes.n_heads
    place = tl.program_id(0) * LAGS + tl.arange(0, LAGS)
    lag = place - sizes.reach
    sums = diagonal_sums(parts, lag, first, h, batches, sizes, TILE, ROW_BLOCKS, BATCHES)
    width = 2 * sizes.reach + 1
    tl.store(d_band + bh * width + place, sums, mask=place < width)


@triton.jit(do_not_specialize=["sizes", "batches"])
def short_tails_kernel(
    parts,
    d_tails,
    sizes,
    batches,
    TILE: tl.constexpr,
    ROW_BLOCKS: tl.constexpr,
    LAGS: tl.constexpr,
    BATCHES: tl.constexpr,
):
    """d_tails [4, b|1, h] of one head: left constant and slope, right constant and slope."""
    bh = tl.program_id(0).to(tl.int64)
    first = bh // sizes.n_heads * batches
    h = bh % sizes.n_heads
    lag = tl.arange(0, LAGS) - (LAGS // 2 + sizes.q_start)
    sums = diagonal_sums(parts, lag, first, h, batches, sizes, TILE, ROW_BLOCKS, BATCHES)
    kind = tl.num_programs(0).to(tl.int64)
    distance = tl.abs(lag).to(tl.float32)
    left = tl.where(lag < -sizes.reach, sums, 0.0)
    right = tl.where(lag > sizes.reach, sums, 0.0)
    tl.store(d_tails + bh, tl.sum(left, 0))
    tl.store(d_tails + kind + bh, tl.sum(left * distance, 0))
    tl.store(d_tails + 2 * kind + bh, tl.sum(right, 0))
    tl.store(d_tails + 3 * kind + bh, tl.sum(right * distance, 0))
