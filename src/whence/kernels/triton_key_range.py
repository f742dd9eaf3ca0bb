"""What a range of rows gives to one block of keys, in backward."""

import triton
import triton.language as tl

from whence.kernels.triton_slopes import weights_and_slopes
from whence.kernels.triton_tile import load_rows, load_tails


@triton.jit
def _row_pair(ptr, r, there, EVEN: tl.constexpr):
    """lse and delta of every row of a tile.

    As one load of at least 128 numbers, which the compiler spreads over the threads. Of fewer it
    makes every thread load all that it will need: sixteen times the work. Hence for few rows each
    number twice.
    """
    TWICE: tl.constexpr = r.shape[0] < 64
    place = ptr + (r[:, None] * 2 + tl.arange(0, 2)[None, :])
    on = there[:, None]
    if TWICE:
        place = place[:, None, :] + tl.zeros([1, 2, 1], tl.int32)
        on = on[:, None, :]
    pairs = tl.load(place) if EVEN else tl.load(place, mask=on, other=0.0)
    lse, delta = tl.split(pairs)
    if TWICE:
        lse, _ = tl.split(lse)
        delta, _ = tl.split(delta)
    return lse, delta


@triton.jit
def key_range(
    d_k_sum,
    d_v_sum,
    k,
    v,
    q_ptr,
    d_out_ptr,
    pair_ptr,
    band_ptr,
    tails_ptr,
    left,
    left_slope,
    right,
    right_slope,
    keys_ptr,
    q_segment_ptr,
    k_segment_ptr,
    d_mass_ptr,
    seed,
    first,
    start,
    stop,
    n_q,
    n_k,
    q_start,
    reach,
    edge,
    value_reach,
    before,
    after,
    scale2,
    dropout,
    stride_q_n,
    stride_o_n,
    stride_band_q,
    stride_tail_kind,
    stride_tail_q,
    D: tl.constexpr,
    D_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
    REGION: tl.constexpr,
    BAND: tl.constexpr,
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
    PREPARED: tl.constexpr,  # lse and delta hold the far side's constants
    PRECISION: tl.constexpr,
):
    """What rows start..stop of one query head give to one block of keys."""
    HELD: tl.constexpr = BLOCK_D <= 64
    r = tl.arange(0, BLOCK_M)
    c = tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_D)
    d_v = tl.arange(0, BLOCK_DV)
    for row_block in tl.range(start, stop, BLOCK_M, num_stages=STAGES):
        rows = row_block + r
        first_row = tl.zeros([], tl.int64) + row_block
        on_row = rows < n_q
        q = load_rows(q_ptr, row_block, r[:, None], d[None, :], stride_q_n, n_q, D, BLOCK_D, EVEN)
        d_out = load_rows(
            d_out_ptr,
            row_block,
            r[:, None],
            d_v[None, :],
            stride_o_n,
            n_q,
            D_V,
            BLOCK_DV,
            EVEN,
            HELD,
        )
        lse, delta = _row_pair(pair_ptr + first_row * 2, r, on_row, EVEN)
        q_segment = rows
        if SEGMENTS:
            q_segment = tl.load(q_segment_ptr + rows, mask=on_row, other=-2)
        line = left, left_slope, right, right_slope
        if PER_ROW and not PREPARED:
            line = load_tails(
                tails_ptr,
                rows[None, :],
                on_row[None, :],
                stride_tail_kind,
                stride_tail_q,
                TAILS,
                SLOPES,
                PER_ROW,
            )
        d_left_mass = 0.0
        d_right_mass = 0.0
        d_mass = d_mass_ptr
        if VALUES and not PREPARED:
            d_mass = d_mass_ptr + first_row * (2 * value_reach + 1)
            end = d_mass + (r * (2 * value_reach + 1))[None, :]
            if REGION == 0:
                d_left_mass = tl.load(end, mask=on_row[None, :], other=0.0)
            if REGION == 2:
                d_right_mass = tl.load(end + 2 * value_reach, mask=on_row[None, :], other=0.0)
        band = band_ptr
        if BAND:
            band = band_ptr + first_row * stride_band_q
        met, _, d_logits = weights_and_slopes(
            q,
            k,
            v,
            d_out,
            lse[None, :],
            delta[None, :],
            row_block,
            r[None, :],
            first,
            c[:, None],
            band,
            line[0],
            line[1],
            line[2],
            line[3],
            keys_ptr,
            q_segment[None, :],
            k_segment_ptr,
            d_mass,
            d_left_mass,
            d_right_mass,
            seed,
            n_q,
            n_k,
            q_start,
            reach,
            edge,
            value_reach,
            before,
            after,
            scale2,
            dropout,
            stride_band_q,
            REGION,
            True,
            EVEN,
            BAND,
            TAILS and not PREPARED,
            SLOPES,
            PER_ROW,
            VALUES and not PREPARED,
            BEFORE,
            AFTER,
            KEYS,
            SEGMENTS,
            DROPOUT,
            PRECISION,
        )
        d_v_sum = tl.dot(met.to(d_out.dtype), d_out, d_v_sum, input_precision=PRECISION)
        d_k_sum = tl.dot(d_logits.to(q.dtype), q, d_k_sum, input_precision=PRECISION)
    return d_k_sum, d_v_sum
