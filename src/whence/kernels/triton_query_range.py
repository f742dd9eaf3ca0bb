"""What a range of keys gives to one block of queries, in backward."""

import triton
import triton.language as tl

from whence.kernels.triton_slopes import weights_and_slopes
from whence.kernels.triton_tile import load_rows, skewed, within


@triton.jit
def query_range(
    d_q_sum,
    d_left,
    d_right,
    d_left_slope,
    d_right_slope,
    slack,
    left_mass,
    right_mass,
    left_reach,
    right_reach,
    q,
    d_out,
    lse,
    delta,
    k_ptr,
    v_ptr,
    band_ptr,
    d_band_ptr,
    left,
    left_slope,
    right,
    right_slope,
    keys_ptr,
    q_segment,
    k_segment_ptr,
    d_mass_ptr,
    d_left_mass,
    d_right_mass,
    seed,
    first_row,
    r,
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
    ROW_BAND: tl.constexpr,
    TAIL_SUMS: tl.constexpr,
    SLACK: tl.constexpr,
    CAUSAL: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """What keys start..stop give to one block of rows; what belongs to a row is [m, 1]."""
    c = tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_D)
    d_v = tl.arange(0, BLOCK_DV)
    for key_block in tl.range(start, stop, BLOCK_N, num_stages=STAGES):
        cols = key_block + c
        k = load_rows(k_ptr, key_block, c[:, None], d[None, :], stride_k_n, n_k, D, BLOCK_D, EVEN)
        v = load_rows(
            v_ptr, key_block, c[:, None], d_v[None, :], stride_v_n, n_k, D_V, BLOCK_DV, EVEN
        )
        _, weights, d_logits = weights_and_slopes(
            q,
            k,
            v,
            d_out,
            lse,
            delta,
            first_row,
            r,
            key_block,
            c[None, :],
            band_ptr,
            left,
            left_slope,
            right,
            right_slope,
            keys_ptr,
            q_segment,
            k_segment_ptr,
            d_mass_ptr,
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
            False,
            EVEN,
            BAND,
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
        d_q_sum = tl.dot(d_logits.to(k.dtype), k, d_q_sum, input_precision=PRECISION)
        lag = cols[None, :] - (first_row + r + q_start)
        if ROW_BAND and REGION == 1:
            inside = within(lag, reach) & (first_row + r < n_q)
            zero = key_block - (first_row + q_start) + reach
            place = skewed(d_band_ptr, zero, r, c[None, :], 2 * reach + 1)
            tl.store(place, d_logits, mask=inside & (cols < n_k)[None, :])
        slope = slack
        if SLACK:
            slope = tl.sum(d_logits, 1)
            slack += slope
        if TAIL_SUMS:
            if REGION == 1:
                d_left += tl.sum(tl.where(lag < -reach, d_logits, 0.0), 1)
                left_mass += tl.sum(tl.where(lag < -reach, weights, 0.0), 1)
                if not CAUSAL:
                    d_right += tl.sum(tl.where(lag > reach, d_logits, 0.0), 1)
                    right_mass += tl.sum(tl.where(lag > reach, weights, 0.0), 1)
            elif REGION == 0:
                d_left += slope
                left_mass += tl.sum(weights, 1)
            else:
                d_right += slope
                right_mass += tl.sum(weights, 1)
        if TAIL_SUMS and SLOPES:
            distance = tl.abs(lag).to(tl.float32)
            before_band = lag < -reach
            left_reach += tl.sum(tl.where(before_band, weights * distance, 0.0), 1)
            d_left_slope += tl.sum(tl.where(before_band, d_logits * distance, 0.0), 1)
            if not CAUSAL:
                after_band = lag > reach
                right_reach += tl.sum(tl.where(after_band, weights * distance, 0.0), 1)
                d_right_slope += tl.sum(tl.where(after_band, d_logits * distance, 0.0), 1)
    return (
        d_q_sum,
        d_left,
        d_right,
        d_left_slope,
        d_right_slope,
        slack,
        left_mass,
        right_mass,
        left_reach,
        right_reach,
    )
