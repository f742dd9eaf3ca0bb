"""Backward by blocks of rows: gradients of queries, and of what belongs to each row."""

import triton
import triton.language as tl

from whence.kernels.triton_masses import mass_gradients
from whence.kernels.triton_query_range import query_range
from whence.kernels.triton_softmax import (
    far_state,
)
from whence.kernels.triton_tile import (
    FINE,
    LOG2E,
    load_part,
    load_tails,
    near_range,
    packed_row,
    whole_blocks,
)


@triton.jit(
    do_not_specialize=[
        "q_start",
        "before",
        "after",
        "n_q",
        "n_k",
        "reach",
        "edge",
        "value_reach",
        "far_start",
    ]
)
def query_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    d_out_ptr,
    lse_ptr,
    pair_ptr,  # [b, h, q, 2]: lse and delta, for the kernels after this one
    sides_ptr,  # [2, b, h, q, 2]: the same for far tiles, left and right
    out_ptr,
    rest_ptr,
    d_q_ptr,
    d_band_ptr,
    d_tails_ptr,
    far_left_q_ptr,
    far_right_q_ptr,
    far_left_ptr,
    far_left_lse_ptr,
    far_right_ptr,
    far_right_lse_ptr,
    band_ptr,
    extent_ptr,
    tails_ptr,
    keys_ptr,
    q_segment_ptr,
    k_segment_ptr,
    seed_ptr,
    d_mass_ptr,
    table_ptr,
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
    stride_table_h,
    D: tl.constexpr,
    D_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    NEAR_N: tl.constexpr,  # keys a step near the diagonal: divides BLOCK_N
    STAGES: tl.constexpr,
    BAND: tl.constexpr,
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
    ROW_BAND: tl.constexpr,  # a band for each query: its gradient is stored cell by cell
    TAIL_SUMS: tl.constexpr,  # gradients of the tails, a sum a row
    REST: tl.constexpr,
    FAR: tl.constexpr,  # the far keys' part was computed elsewhere: add it
    CAUSAL: tl.constexpr,  # nothing is far to the right
    TOKENS: tl.constexpr,  # out, d_q and what others gave are [b, n, h, d] in memory
    SIDES: tl.constexpr,
    EXACT: tl.constexpr,  # precision of products with the value table, which is in float32
    PRECISION: tl.constexpr,
):
    """dQ of one block of query rows, and the gradients of what belongs to each row.

    It also leaves delta = rowsum(out * d_out) and the gradient of the value table's masses,
    d_out @ table^T, for the kernels after it; `rest` is what rounding took from out.
    """
    block = tl.program_id(0)
    bh = tl.program_id(1).to(tl.int64)
    b = bh // n_heads
    h = bh % n_heads
    r = tl.arange(0, BLOCK_M)
    rows = block * BLOCK_M + r
    row = rows.to(tl.int64)
    first_row = block.to(tl.int64) * BLOCK_M
    on_row = rows < n_q
    d = tl.arange(0, BLOCK_D)
    d_v = tl.arange(0, BLOCK_DV)
    q = tl.load(
        q_ptr + b * stride_q_b + h * stride_q_h + row[:, None] * stride_q_n + d[None, :],
        mask=on_row[:, None] & (d < D)[None, :],
        other=0.0,
    )
    d_out = tl.load(
        d_out_ptr + b * stride_o_b + h * stride_o_h + row[:, None] * stride_o_n + d_v[None, :],
        mask=on_row[:, None] & (d_v < D_V)[None, :],
        other=0.0,
    )
    lse = tl.load(lse_ptr + bh * n_q + row, mask=on_row, other=0.0)
    packed = packed_row(b, h, row, n_q, n_heads, TOKENS)[:, None]
    cells = packed * D_V + d_v[None, :]
    on_out = on_row[:, None] & (d_v < D_V)[None, :]
    out = tl.load(out_ptr + cells, mask=on_out, other=0.0).to(tl.float32)
    if REST:
        out += tl.load(rest_ptr + cells, mask=on_out, other=0.0).to(tl.float32) / FINE
    delta = tl.sum(out * d_out.to(tl.float32), 1)
    pair = pair_ptr + (bh * n_q + row) * 2
    tl.store(pair, lse, mask=on_row)
    tl.store(pair + 1, delta, mask=on_row)
    k_ptr += b * stride_k_b + (h // GROUPS) * stride_k_h
    v_ptr += b * stride_v_b + (h // GROUPS) * stride_v_h
    near_reach = n_q * 0
    if BAND:
        band_ptr += b * stride_band_b + h * stride_band_h + first_row * stride_band_q
        near_reach = reach
        if EXTENT:
            near_reach = tl.maximum(tl.minimum(reach, tl.load(extent_ptr + h)), 0)
    if TAILS:
        tails_ptr += b * stride_tail_b + h * stride_tail_h
    left, left_slope, right, right_slope = load_tails(
        tails_ptr,
        rows,
        on_row,
        stride_tail_kind,
        stride_tail_q,
        TAILS,
        SLOPES,
        PER_ROW,
    )
    if KEYS:
        keys_ptr += b * stride_keys_b
    q_segment = rows
    if SEGMENTS:
        q_segment = tl.load(q_segment_ptr + b * stride_qs_b + rows, mask=on_row, other=-2)
        k_segment_ptr += b * stride_ks_b
    if VALUES:
        near_reach = tl.maximum(near_reach, value_reach)
        d_mass_ptr += (bh * n_q + first_row) * (2 * value_reach + 1)
    d_left_mass = 0.0
    d_right_mass = 0.0
    if VALUES:
        d_left_mass, d_right_mass = mass_gradients(
            d_mass_ptr, table_ptr + h * stride_table_h, d_out, r, on_row, value_reach, D_V, EXACT
        )
    if SIDES:  # what far tiles subtract from the logits and from d_weights
        side = sides_ptr + (bh * n_q + row) * 2
        tl.store(side, lse - left, mask=on_row)
        tl.store(side + 1, delta - d_left_mass, mask=on_row)
        side += tl.num_programs(1).to(tl.int64) * n_q * 2
        tl.store(side, lse - right, mask=on_row)
        tl.store(side + 1, delta - d_right_mass, mask=on_row)
    seed = 0
    if DROPOUT:
        seed = tl.load(seed_ptr) + bh
    if FAR:
        near_reach = tl.maximum(near_reach, far_start - 1)
    first = block * BLOCK_M + q_start
    last = tl.minimum((block + 1) * BLOCK_M, n_q) - 1 + q_start
    low, high = n_k * 0, n_k
    if BEFORE:
        low = first - before
    if AFTER:
        high = last + after + 1
    low, high = whole_blocks(low, high, n_k, BLOCK_N)
    near_start, near_stop = near_range(first, last, near_reach, low, high, BLOCK_N)
    d_q_sum = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    # Where others did the far keys, the sum of a row is known with its tails alone.
    SLACK: tl.constexpr = TAIL_SUMS or (VALUES and not FAR)
    d_left = tl.zeros([BLOCK_M], dtype=tl.float32)
    d_left_slope = tl.zeros([BLOCK_M], dtype=tl.float32)
    d_right = tl.zeros([BLOCK_M], dtype=tl.float32)
    d_right_slope = tl.zeros([BLOCK_M], dtype=tl.float32)
    slack = tl.zeros([BLOCK_M], dtype=tl.float32)
    left_mass = tl.zeros([BLOCK_M], dtype=tl.float32)
    right_mass = tl.zeros([BLOCK_M], dtype=tl.float32)
    left_reach = tl.zeros([BLOCK_M], dtype=tl.float32)
    right_reach = tl.zeros([BLOCK_M], dtype=tl.float32)
    if ROW_BAND:
        d_band_ptr += (bh * n_q + first_row) * (2 * reach + 1)
    if FAR and TAIL_SUMS:
        out_left, lse_left, out_right, lse_right = far_state(
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
            D_V,
            CAUSAL,
            TOKENS,
        )
        d_mass = tl.sum(out_left * d_out.to(tl.float32), 1) - delta + d_left_mass
        left_mass += tl.exp2(lse_left - lse)
        d_left += left_mass * d_mass
        if not CAUSAL:
            d_mass = tl.sum(out_right * d_out.to(tl.float32), 1) - delta + d_right_mass
            right_mass += tl.exp2(lse_right - lse)
            d_right += right_mass * d_mass
        slack += d_left + d_right
    for REGION in tl.static_range(3):
        if REGION == 0:
            start, stop = low, near_start
        elif REGION == 1:
            start, stop = near_start, near_stop
        else:
            start, stop = near_stop, high
        if REGION == 1 or not (FAR or (CAUSAL and REGION == 2)):
            (
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
            ) = query_range(
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
                lse[:, None],
                delta[:, None],
                k_ptr,
                v_ptr,
                band_ptr,
                d_band_ptr,
                left[:, None] if TAILS and PER_ROW else left,
                left_slope[:, None] if SLOPES and PER_ROW else left_slope,
                right[:, None] if TAILS and PER_ROW else right,
                right_slope[:, None] if SLOPES and PER_ROW else right_slope,
                keys_ptr,
                q_segment[:, None],
                k_segment_ptr,
                d_mass_ptr,
                d_left_mass[:, None] if VALUES else d_left_mass,  # type: ignore[index]
                d_right_mass[:, None] if VALUES else d_right_mass,  # type: ignore[index]
                seed,
                block * BLOCK_M,
                r[:, None],
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
                scale * LOG2E,
                dropout,
                stride_k_n,
                stride_v_n,
                stride_band_q,
                D,
                D_V,
                BLOCK_D,
                BLOCK_DV,
                NEAR_N if REGION == 1 else BLOCK_N,
                STAGES,
                REGION,
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
                EVEN,
                ROW_BAND,
                TAIL_SUMS,
                SLACK,
                CAUSAL,
                PRECISION,
            )
    # A row's logits have gradients that sum to zero. What rounding left of that sum is due to
    # delta; a sum over rows, a tail that holds most of the row, or a slope's distances magnify it.
    if SLACK:
        tl.store(pair + 1, delta + slack, mask=on_row)
    if TAIL_SUMS:
        d_left -= slack * left_mass
        d_right -= slack * right_mass
        if SLOPES:
            d_left_slope -= slack * left_reach
            d_right_slope -= slack * right_reach
    d_q_sum *= scale
    if FAR:
        m = n_q - far_start
        index = rows - far_start
        d_q_sum += load_part(far_left_q_ptr, b, h, index, m, n_heads, d, D, TOKENS).to(tl.float32)
        if not CAUSAL:
            index = m - 1 - rows
            part = load_part(far_right_q_ptr, b, h, index, m, n_heads, d, D, TOKENS)
            d_q_sum += part.to(tl.float32)
    place = bh * n_q + row
    tl.store(
        d_q_ptr + packed * D + d[None, :],
        d_q_sum.to(d_q_ptr.dtype.element_ty),
        mask=on_row[:, None] & (d < D)[None, :],
    )
    if TAIL_SUMS:
        kind = tl.num_programs(1).to(tl.int64) * n_q
        tl.store(d_tails_ptr + place, d_left, mask=on_row)
        tl.store(d_tails_ptr + kind + place, d_left_slope, mask=on_row)
        tl.store(d_tails_ptr + 2 * kind + place, d_right, mask=on_row)
        tl.store(d_tails_ptr + 3 * kind + place, d_right_slope, mask=on_row)
