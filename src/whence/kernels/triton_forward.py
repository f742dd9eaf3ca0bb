"""The forward kernel: one pass over the keys, the bias looked up near the diagonal alone."""

import triton
import triton.language as tl

from whence.kernels.triton_masses import with_table
from whence.kernels.triton_product import made_band
from whence.kernels.triton_softmax import (
    attended_range,
    far_state,
)
from whence.kernels.triton_tile import (
    LOG2E,
    load_tails,
    near_range,
    packed_row,
    rounded_off,
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
def forward_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    lse_ptr,
    band_ptr,
    extent_ptr,
    tails_ptr,
    keys_ptr,
    q_segment_ptr,
    k_segment_ptr,
    seed_ptr,
    table_ptr,
    mass_ptr,
    rest_ptr,
    far_left_ptr,
    far_left_lse_ptr,
    far_right_ptr,
    far_right_lse_ptr,
    query_ptr,
    factor_ptr,
    stride_q_b,
    stride_q_h,
    stride_q_n,
    stride_k_b,
    stride_k_h,
    stride_k_n,
    stride_v_b,
    stride_v_h,
    stride_v_n,
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
    stride_table_h,
    stride_query_b,
    stride_query_h,
    stride_query_n,
    stride_factor_h,
    factor_scale,
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
    PRODUCT: tl.constexpr,  # columns of the queries that make the band and its tails; 0: they are
    EXTENT: tl.constexpr,
    TAILS: tl.constexpr,
    SLOPES: tl.constexpr,
    PER_ROW: tl.constexpr,
    VALUES: tl.constexpr,
    BEFORE: tl.constexpr,
    AFTER: tl.constexpr,
    KEYS: tl.constexpr,
    SEGMENTS: tl.constexpr,
    EVEN_N: tl.constexpr,
    DROPOUT: tl.constexpr,
    REST: tl.constexpr,
    FAR: tl.constexpr,  # keys at |lag| >= far_start were attended to elsewhere: start from there
    CAUSAL: tl.constexpr,  # nothing is far to the right
    TOKENS: tl.constexpr,  # out and what others gave are [b, n, h, d] in memory
    EXACT: tl.constexpr,  # precision of products with the value table, which is in float32
    PRECISION: tl.constexpr,
):
    """One block of query rows of one head."""
    block = tl.program_id(0)
    bh = tl.program_id(1).to(tl.int64)
    b = bh // n_heads
    h = bh % n_heads
    r = tl.arange(0, BLOCK_M)
    rows = block * BLOCK_M + r
    row = rows.to(tl.int64)
    first_row = block.to(tl.int64) * BLOCK_M
    d = tl.arange(0, BLOCK_D)
    d_v = tl.arange(0, BLOCK_DV)
    q = tl.load(
        q_ptr + b * stride_q_b + h * stride_q_h + row[:, None] * stride_q_n + d[None, :],
        mask=(rows < n_q)[:, None] & (d < D)[None, :],
        other=0.0,
    )
    k_ptr += b * stride_k_b + (h // GROUPS) * stride_k_h
    v_ptr += b * stride_v_b + (h // GROUPS) * stride_v_h
    near_reach = n_k * 0
    if BAND:
        band_ptr += b * stride_band_b + h * stride_band_h + first_row * stride_band_q
        near_reach = reach
        if EXTENT:
            near_reach = tl.maximum(tl.minimum(reach, tl.load(extent_ptr + h)), 0)
    if TAILS:
        tails_ptr += b * stride_tail_b + h * stride_tail_h
    if PRODUCT > 0:
        left_slope, right_slope = 0.0, 0.0
        left, right = made_band(
            query_ptr + b * stride_query_b + h * stride_query_h + first_row * stride_query_n,
            factor_ptr + h * stride_factor_h,
            band_ptr,
            tails_ptr + first_row * stride_tail_q,
            r,
            rows < n_q,
            reach,
            factor_scale,
            stride_query_n,
            stride_band_q,
            stride_tail_kind,
            stride_tail_q,
            PRODUCT,
            EXACT,
        )
    else:
        left, left_slope, right, right_slope = load_tails(
            tails_ptr,
            rows,
            rows < n_q,
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
        q_segment = tl.load(q_segment_ptr + b * stride_qs_b + rows, mask=rows < n_q, other=-2)
        k_segment_ptr += b * stride_ks_b
    seed = 0
    if DROPOUT:
        seed = tl.load(seed_ptr) + bh
    if VALUES:
        near_reach = tl.maximum(near_reach, value_reach)
        mass_ptr += (bh * n_q + first_row) * (2 * value_reach + 1)
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
    scale2 = scale * LOG2E
    acc = tl.zeros([BLOCK_M, BLOCK_DV], dtype=tl.float32)
    top = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    total = tl.zeros([BLOCK_M], dtype=tl.float32)
    left_mass = tl.zeros([BLOCK_M], dtype=tl.float32)
    right_mass = tl.zeros([BLOCK_M], dtype=tl.float32)
    if FAR:
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
        top = tl.maximum(lse_left, lse_right)
        base = tl.where(top == float("-inf"), 0.0, top)
        left_mass = tl.exp2(lse_left - base)
        right_mass = tl.exp2(lse_right - base)
        total = left_mass + right_mass
        acc = left_mass[:, None] * out_left + right_mass[:, None] * out_right
    for REGION in tl.static_range(3):
        if REGION == 0:
            start, stop = low, near_start
        elif REGION == 1:
            start, stop = near_start, near_stop
        else:
            start, stop = near_stop, high
        if REGION == 1 or not (FAR or (CAUSAL and REGION == 2)):
            acc, top, total, left_mass, right_mass = attended_range(
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
                stride_k_n,
                stride_v_n,
                stride_band_q,
                D,
                D_V,
                BLOCK_D,
                BLOCK_DV,
                NEAR_N if REGION == 1 else BLOCK_N,
                REGION,
                BAND,
                TAILS,
                SLOPES,
                PER_ROW,
                PER_ROW,
                VALUES,
                BEFORE,
                AFTER,
                KEYS,
                SEGMENTS,
                EVEN_N,
                DROPOUT,
                STAGES,
                PRECISION,
                CAUSAL,
            )
    safe = tl.where(total == 0.0, 1.0, total)
    out = acc / safe[:, None]
    # In base 2; +inf for a row that saw nothing, so that exp2(logit - lse) is 0 in backward.
    lse = tl.where(total == 0.0, float("inf"), top + tl.log2(safe))
    if VALUES:
        out = with_table(
            out,
            mass_ptr,
            table_ptr + h * stride_table_h,
            lse,
            left_mass / safe,
            right_mass / safe,
            r,
            rows < n_q,
            first,
            low,
            tl.minimum(high, n_k),
            value_reach,
            dropout,
            D_V,
            BLOCK_DV,
            EXACT,
        )
    tl.store(lse_ptr + bh * n_q + row, lse, mask=rows < n_q)
    there = (rows < n_q)[:, None] & (d_v < D_V)[None, :]
    cells = packed_row(b, h, row, n_q, n_heads, TOKENS)[:, None] * D_V + d_v[None, :]
    short = out.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + cells, short, mask=there)
    if REST:  # what rounding took: backward's delta needs it where gradients of a bias are summed
        rest = rounded_off(out, short).to(rest_ptr.dtype.element_ty)
        tl.store(rest_ptr + cells, rest, mask=there)
