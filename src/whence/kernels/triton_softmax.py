"""The online softmax over a range of keys, and its start where others did the far keys."""

import triton
import triton.language as tl

from whence.kernels.triton_tile import (
    LOG2E,
    far_line,
    kept,
    load_part,
    load_rows,
    near_bias,
    skewed,
    visible,
    within,
)


@triton.jit
def attended_range(
    acc,
    top,
    total,
    left_mass,
    right_mass,
    q,
    k_ptr,
    v_ptr,
    band_ptr,
    left,
    left_slope,
    right,
    right_slope,
    keys_ptr,
    q_segment,
    k_segment_ptr,
    mass_ptr,
    seed,
    rows,
    r,
    first,  # the position of the first row
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
    stride_k_n,
    stride_v_n,
    stride_band_q,
    D: tl.constexpr,
    D_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_N: tl.constexpr,
    REGION: tl.constexpr,  # 0 far left, 1 near, 2 far right
    BAND: tl.constexpr,
    TAILS: tl.constexpr,
    SLOPES: tl.constexpr,
    PER_ROW: tl.constexpr,
    ROW_TAILS: tl.constexpr,  # tails differ from row to row, be it that rows are of several heads
    VALUES: tl.constexpr,
    BEFORE: tl.constexpr,
    AFTER: tl.constexpr,
    KEYS: tl.constexpr,
    SEGMENTS: tl.constexpr,
    EVEN_N: tl.constexpr,
    DROPOUT: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
    CAUSAL: tl.constexpr = False,
    RAW: tl.constexpr = False,  # the band is not laid out
):
    """Online softmax over keys start..stop; *_mass is the mass beyond the value table."""
    d = tl.arange(0, BLOCK_D)
    d_v = tl.arange(0, BLOCK_DV)
    c = tl.arange(0, BLOCK_N)
    there = rows < n_q
    LAID_OUT: tl.constexpr = BAND and REGION == 1 and not PER_ROW and not RAW  # with the window
    LEFT_EDGE: tl.constexpr = BEFORE and REGION < 2 and not LAID_OUT
    RIGHT_EDGE: tl.constexpr = AFTER and REGION > 0 and not LAID_OUT
    MASKED: tl.constexpr = KEYS or SEGMENTS or LEFT_EDGE or RIGHT_EDGE or not EVEN_N
    LINE: tl.constexpr = TAILS and REGION != 1
    for block in tl.range(start, stop, BLOCK_N, num_stages=STAGES):
        cols = block + c
        k = load_rows(k_ptr, block, c[None, :], d[:, None], stride_k_n, n_k, D, BLOCK_D, EVEN_N)
        logits = tl.dot(q, k, input_precision=PRECISION) * scale2
        shift = 0.0
        if BAND and REGION == 1:
            logits += near_bias(
                band_ptr,
                first,
                block,
                r[:, None],
                c[None, :],
                there[:, None],
                reach,
                edge,
                stride_band_q,
                left[:, None] if TAILS and ROW_TAILS else left,
                left_slope[:, None] if SLOPES and ROW_TAILS else left_slope,
                right[:, None] if TAILS and ROW_TAILS else right,
                right_slope[:, None] if SLOPES and ROW_TAILS else right_slope,
                TAILS,
                SLOPES,
                PER_ROW,
                RAW,
            )
        if LINE:
            shift, _, tilt = far_line(
                left, left_slope, right, right_slope, first - block, r, REGION, SLOPES, False
            )
            if SLOPES and ROW_TAILS:
                logits += tilt[:, None] * c.to(tl.float32)[None, :]
            elif SLOPES:
                logits += (tilt * c.to(tl.float32))[None, :]
        if MASKED:
            seen = visible(
                rows[:, None],
                cols[None, :],
                n_k,
                q_start,
                before,
                after,
                keys_ptr,
                q_segment[:, None],
                k_segment_ptr,
                LEFT_EDGE,
                RIGHT_EDGE,
                KEYS,
                SEGMENTS,
            )
            logits = tl.where(seen, logits, float("-inf"))
        higher = tl.maximum(top, tl.max(logits, 1) + shift)
        base = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp2(logits - (base - shift)[:, None])
        shrink = tl.exp2(top - base)
        mass = tl.sum(weights, 1)
        total = total * shrink + mass
        top = higher
        if DROPOUT:
            weights = weights * kept(seed, rows[:, None], cols[None, :], dropout)
            if VALUES and REGION != 1:
                mass = tl.sum(weights, 1)
        if VALUES:
            left_mass = left_mass * shrink
            right_mass = right_mass * shrink
            if REGION == 0:
                left_mass += mass
            if REGION == 2:
                right_mass += mass
            if REGION == 1:
                lag = cols[None, :] - (rows[:, None] + q_start)
                left_mass += tl.sum(tl.where(lag < -value_reach, weights, 0.0), 1)
                if not CAUSAL:
                    right_mass += tl.sum(tl.where(lag > value_reach, weights, 0.0), 1)
                inside = within(lag, value_reach) & there[:, None]
                if DROPOUT:
                    logits = tl.where(weights > 0.0, logits, float("-inf"))
                zero = block - first + value_reach
                place = skewed(mass_ptr, zero, r[:, None], c[None, :], 2 * value_reach + 1)
                tl.store(place, logits, mask=inside & (cols < n_k)[None, :])
        v = load_rows(
            v_ptr, block, c[:, None], d_v[None, :], stride_v_n, n_k, D_V, BLOCK_DV, EVEN_N
        )
        acc = acc * shrink[:, None]
        acc = tl.dot(weights.to(v.dtype), v, acc, input_precision=PRECISION)
    return acc, top, total, left_mass, right_mass


@triton.jit
def far_state(
    far_left_ptr,
    far_left_lse_ptr,
    far_right_ptr,
    far_right_lse_ptr,
    b,
    h,
    n_heads,
    rows,
    n_q,
    far_start,
    d_v,
    left,
    right,
    D_V: tl.constexpr,
    CAUSAL: tl.constexpr,  # there is nothing far to the right
    TOKENS: tl.constexpr,
):
    """What others computed for the far keys of these rows: output and log-sum-exp of both sides.

    Left: row i is row i - far_start of what was computed; right: all was computed in reverse.
    """
    m = n_q - far_start
    index = rows - far_start
    lse_row = (b * n_heads + h) * m
    out_left = load_part(far_left_ptr, b, h, index, m, n_heads, d_v, D_V, TOKENS).to(tl.float32)
    lse_left = tl.load(
        far_left_lse_ptr + lse_row + index, mask=(index >= 0) & (index < m), other=float("-inf")
    )
    lse_left = lse_left * LOG2E + left
    out_right = out_left * 0.0
    lse_right = tl.full(lse_left.shape, float("-inf"), dtype=tl.float32)
    if not CAUSAL:
        index = m - 1 - rows
        out_right = load_part(far_right_ptr, b, h, index, m, n_heads, d_v, D_V, TOKENS)
        out_right = out_right.to(tl.float32)
        lse_right = tl.load(
            far_right_lse_ptr + lse_row + index,
            mask=(index >= 0) & (index < m),
            other=float("-inf"),
        )
        lse_right = lse_right * LOG2E + right
    return out_left, lse_left, out_right, lse_right
