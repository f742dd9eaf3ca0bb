"""The gradient of a band that all queries share, without atomics.

On one block-diagonal every tile has the same lag in the same cell. So a program walks a share of a
block-diagonal, sums the tiles in registers, and at the end sums the diagonals of that one tile; a
second small kernel adds up the shares. Only block-diagonals that touch the band are visited.
"""

import triton
import triton.language as tl

from whence.kernels.triton_slopes import weights_and_slopes
from whence.kernels.triton_tile import LOG2E, load_rows, load_tails


@triton.jit
def _floor_div(x, BLOCK: tl.constexpr):
    """x // BLOCK rounded down for negative x too, which // on the GPU does not do."""
    return tl.where(x >= 0, x // BLOCK, -((-x + BLOCK - 1) // BLOCK))


@triton.jit
def _visited(
    extent_ptr,
    h,
    n_q,
    n_k,
    q_start,
    reach,
    before,
    after,
    BLOCK: tl.constexpr,
    EXTENT: tl.constexpr,
    BEFORE: tl.constexpr,
    AFTER: tl.constexpr,
):
    """The first and last block-diagonal (key block - query block) with a cell in the band."""
    left = reach
    if EXTENT:
        left = tl.minimum(reach, tl.load(extent_ptr + h))
    right = left
    if BEFORE:
        left = tl.minimum(left, before)
    if AFTER:
        right = tl.minimum(right, after)
    low = tl.maximum(_floor_div(q_start - left, BLOCK), 1 - (n_q + BLOCK - 1) // BLOCK)
    high = tl.minimum(
        _floor_div(q_start + right + BLOCK - 1, BLOCK), (n_k + BLOCK - 1) // BLOCK - 1
    )
    return low, high


@triton.jit
def _parts(low, high, most, room):
    """Into how many shares each of these block-diagonals is cut, for `room` of them in all."""
    return tl.minimum(most, tl.maximum(room // tl.maximum(high - low + 1, 1), 1))


@triton.jit(
    do_not_specialize=[
        "q_start",
        "before",
        "after",
        "n_q",
        "n_k",
        "reach",
        "edge",
        "room",
        "far_start",
    ]
)
def band_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    d_out_ptr,
    pair_ptr,  # [b, h, q, 2]: lse and delta
    part_ptr,  # [batches of the band, heads, room, 2, BLOCK]
    band_ptr,
    extent_ptr,
    tails_ptr,
    keys_ptr,
    q_segment_ptr,
    k_segment_ptr,
    seed_ptr,
    d_mass_ptr,
    stride_q_b,
    stride_q_h,
    stride_q_n,
    stride_k_b,
    stride_k_h,
    stride_k_n,
    stride_v_b,
    stride_v_h,
    stride_v_n,
    stride_o_b,
    stride_o_h,
    stride_o_n,
    stride_band_b,
    stride_band_h,
    stride_band_q,
    stride_tail_kind,
    stride_tail_b,
    stride_tail_h,
    stride_tail_q,
    stride_keys_b,
    stride_qs_b,
    stride_ks_b,
    n_heads,
    n_q,
    n_k,
    q_start,
    reach,
    edge,
    value_reach,
    before,
    after,
    far_start,
    scale,
    dropout,
    room,  # for shares of a head
    batches,  # of one program: all of them where they share the band, else one
    D: tl.constexpr,
    D_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK: tl.constexpr,
    EXTENT: tl.constexpr,
    TAILS: tl.constexpr,
    SLOPES: tl.constexpr,
    PER_ROW: tl.constexpr,
    VALUES: tl.constexpr,
    BEFORE: tl.constexpr,
    AFTER: tl.constexpr,
    KEYS: tl.constexpr,
    SEGMENTS: tl.constexpr,
    DROPOUT: tl.constexpr,
    EVEN: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """A share (program 1) of every n-th block-diagonal (program 0) of one head (program 2)."""
    bh = tl.program_id(2).to(tl.int64)
    h = bh % n_heads
    first_batch = (bh // n_heads) * batches
    row_blocks = (n_q + BLOCK - 1) // BLOCK
    key_blocks = (n_k + BLOCK - 1) // BLOCK
    low, high = _visited(
        extent_ptr, h, n_q, n_k, q_start, reach, before, after, BLOCK, EXTENT, BEFORE, AFTER
    )
    parts = _parts(low, high, tl.num_programs(1), room)
    if tl.program_id(1) >= parts:
        return
    r = tl.arange(0, BLOCK)
    d = tl.arange(0, BLOCK_D)
    d_v = tl.arange(0, BLOCK_DV)
    for diagonal in range(low + tl.program_id(0), high + 1, tl.num_programs(0)):
        row_low = tl.maximum(0, -diagonal)
        count = tl.minimum(row_blocks, key_blocks - diagonal) - row_low
        share = (count * batches + parts - 1) // parts
        start = tl.minimum(tl.program_id(1) * share, count * batches)
        stop = tl.minimum(start + share, count * batches)
        sums = tl.zeros([BLOCK, BLOCK], dtype=tl.float32)
        for tile in range(start, stop):
            b = first_batch + tile // count
            row_block = row_low + tile % count
            first, first_col = row_block * BLOCK, (row_block + diagonal) * BLOCK
            rows = first + r
            row = rows.to(tl.int64)
            on_row = rows < n_q
            q = load_rows(
                q_ptr + b * stride_q_b + h * stride_q_h,
                *(first, r[:, None], d[None, :], stride_q_n, n_q, D, BLOCK_D, EVEN),
            )
            d_out = load_rows(
                d_out_ptr + b * stride_o_b + h * stride_o_h,
                *(first, r[:, None], d_v[None, :], stride_o_n, n_q, D_V, BLOCK_DV, EVEN),
            )
            k = load_rows(
                k_ptr + b * stride_k_b + (h // GROUPS) * stride_k_h,
                *(first_col, r[:, None], d[None, :], stride_k_n, n_k, D, BLOCK_D, EVEN),
            )
            v = load_rows(
                v_ptr + b * stride_v_b + (h // GROUPS) * stride_v_h,
                *(first_col, r[:, None], d_v[None, :], stride_v_n, n_k, D_V, BLOCK_DV, EVEN),
            )
            place = (b * n_heads + h) * n_q
            pair = pair_ptr + (place + row) * 2
            lse = tl.load(pair, mask=on_row, other=0.0)
            delta = tl.load(pair + 1, mask=on_row, other=0.0)
            keys = keys_ptr
            if KEYS:
                keys = keys_ptr + b * stride_keys_b
            q_segment = rows
            k_segment = k_segment_ptr
            if SEGMENTS:
                k_segment = k_segment_ptr + b * stride_ks_b
                q_segment = tl.load(q_segment_ptr + b * stride_qs_b + rows, mask=on_row, other=-2)
            seed = 0
            if DROPOUT:
                seed = tl.load(seed_ptr) + b * n_heads + h
            first_row = row_block.to(tl.int64) * BLOCK
            tails = tails_ptr
            if TAILS:
                tails = tails_ptr + b * stride_tail_b + h * stride_tail_h
            left, left_slope, right, right_slope = load_tails(
                tails,
                rows[:, None],
                on_row[:, None],
                stride_tail_kind,
                stride_tail_q,
                TAILS,
                SLOPES,
                PER_ROW,
            )
            d_mass = d_mass_ptr
            if VALUES:
                d_mass = d_mass_ptr + (place + first_row) * (2 * value_reach + 1)
            _, _, d_logits = weights_and_slopes(
                q,
                k,
                v,
                d_out,
                lse[:, None],
                delta[:, None],
                first,
                r[:, None],
                first_col,
                r[None, :],
                band_ptr + b * stride_band_b + h * stride_band_h + first_row * stride_band_q,
                left,
                left_slope,
                right,
                right_slope,
                keys,
                q_segment[:, None],
                k_segment,
                d_mass,
                0.0,  # what belongs to far tiles
                0.0,
                seed,
                n_q,
                n_k,
                q_start,
                reach,
                edge,
                value_reach,
                before,
                after,
                scale * LOG2E,
                dropout,
                stride_band_q,
                1,
                False,
                EVEN,
                True,
                TAILS,
                SLOPES,
                PER_ROW,
                VALUES,
                BEFORE,
                AFTER,
                KEYS,
                SEGMENTS,
                DROPOUT,
                PRECISION,
            )
            sums += d_logits
        # Cell (r, c) has lag lag_0 + c - r. Turned, column t holds every cell with c - r = t, and
        # below them those with c - r = t - BLOCK.
        wrap = r[None, :] + r[:, None]
        turned = tl.gather(sums, wrap % BLOCK, 1)
        upper = tl.sum(tl.where(wrap < BLOCK, turned, 0.0), 0)
        lower = tl.sum(tl.where(wrap < BLOCK, 0.0, turned), 0)
        index = bh * room + (diagonal - low) * parts + tl.program_id(1)
        out = part_ptr + index * (2 * BLOCK)
        tl.store(out + r, upper)
        tl.store(out + BLOCK + r, lower)


@triton.jit(do_not_specialize=["q_start", "before", "after", "n_q", "n_k", "reach", "room"])
def collect_kernel(
    part_ptr,
    d_band_ptr,  # [batches of the band, heads, 2 * reach + 1]
    extent_ptr,
    n_heads,
    n_q,
    n_k,
    q_start,
    reach,
    before,
    after,
    room,
    first,  # the block of lags of program 0
    most,  # shares of a block-diagonal
    BLOCK: tl.constexpr,
    EXTENT: tl.constexpr,
    BEFORE: tl.constexpr,
    AFTER: tl.constexpr,
):
    """One block of lags of one head: the shares of the two block-diagonals that hold them."""
    bh = tl.program_id(1).to(tl.int64)
    diagonal = first + tl.program_id(0)
    low, high = _visited(
        extent_ptr,
        bh % n_heads,
        n_q,
        n_k,
        q_start,
        reach,
        before,
        after,
        BLOCK,
        EXTENT,
        BEFORE,
        AFTER,
    )
    parts = _parts(low, high, most, room)
    t = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for part in range(0, parts):
        for STEP in tl.static_range(2):
            at = diagonal + STEP
            lane = at + 0 * t
            index = bh * room + (at - low) * parts + part
            place = index * (2 * BLOCK) + STEP * BLOCK + t
            total += tl.load(part_ptr + place, mask=(lane >= low) & (lane <= high), other=0.0)
    lag = diagonal * BLOCK - q_start + t
    tl.store(
        d_band_ptr + bh * (2 * reach + 1) + lag + reach,
        total,
        mask=(lag >= -reach) & (lag <= reach),
    )
