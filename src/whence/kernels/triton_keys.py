"""Backward by blocks of keys: their gradients and the values', each summed by one program."""

import triton
import triton.language as tl

from whence.kernels.triton_key_range import key_range
from whence.kernels.triton_tile import (
    LOG2E,
    load_part,
    load_tails,
    near_range,
    packed_row,
    whole_blocks,
)


@triton.jit(
    do_not_specialize=[
        *(
            "q_start",
            "before",
            "after",
            "n_q",
            "n_k",
            "reach",
            "edge",
            "value_reach",
            "far_start",
            "groups",
        )
    ]
)
def key_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    d_out_ptr,
    pair_ptr,  # [b, h, q, 2]: lse and delta
    sides_ptr,  # [2, b, h, q, 2]: the same for far tiles, left and right
    d_k_ptr,
    d_v_ptr,
    far_left_k_ptr,
    far_left_v_ptr,
    far_right_k_ptr,
    far_right_v_ptr,
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
    groups,  # unknown to the compiler: it would unroll a loop of one, and serialise the products
    D: tl.constexpr,
    D_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    NEAR_M: tl.constexpr,  # rows a step near the diagonal: divides BLOCK_M
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
    FAR: tl.constexpr,  # the far keys' part was computed elsewhere: add it
    CAUSAL: tl.constexpr,  # nothing is far to a row's right
    TOKENS: tl.constexpr,  # d_k, d_v and what others gave are [b, n, h, d] in memory
    SIDES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """dK and dV of one block of keys of one key head: all query heads of its group in turn."""
    block = tl.program_id(0)
    bkv = tl.program_id(1).to(tl.int64)
    n_kv = n_heads // groups
    b = bkv // n_kv
    h_kv = bkv % n_kv
    c = tl.arange(0, BLOCK_N)
    cols = block * BLOCK_N + c
    column = cols.to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    d_v = tl.arange(0, BLOCK_DV)
    on_k = (cols < n_k)[:, None] & (d < D)[None, :]
    on_v = (cols < n_k)[:, None] & (d_v < D_V)[None, :]
    k = tl.load(
        k_ptr + b * stride_k_b + h_kv * stride_k_h + column[:, None] * stride_k_n + d[None, :],
        mask=on_k,
        other=0.0,
    )
    v = tl.load(
        v_ptr + b * stride_v_b + h_kv * stride_v_h + column[:, None] * stride_v_n + d_v[None, :],
        mask=on_v,
        other=0.0,
    )
    if KEYS:
        keys_ptr += b * stride_keys_b
    if SEGMENTS:
        q_segment_ptr += b * stride_qs_b
        k_segment_ptr += b * stride_ks_b
    # Rows whose window holds some key of this block: lag = key - position in -before..after.
    first = block * BLOCK_N - q_start
    last = tl.minimum((block + 1) * BLOCK_N, n_k) - 1 - q_start
    low, high = n_q * 0, n_q
    if AFTER:
        low = first - after
    if BEFORE:
        high = last + before + 1
    low, high = whole_blocks(low, high, n_q, BLOCK_M)
    d_k_sum = tl.zeros([BLOCK_N, BLOCK_D], dtype=tl.float32)
    d_v_sum = tl.zeros([BLOCK_N, BLOCK_DV], dtype=tl.float32)
    for g in range(0, groups):
        h = h_kv * groups + g
        bh = b * n_heads + h
        q_base = q_ptr + b * stride_q_b + h * stride_q_h
        o_base = d_out_ptr + b * stride_o_b + h * stride_o_h
        band_base = band_ptr
        tails_base = tails_ptr
        d_mass_base = d_mass_ptr
        near_reach = n_q * 0
        if BAND:
            band_base = band_ptr + b * stride_band_b + h * stride_band_h
            near_reach = reach
            if EXTENT:
                near_reach = tl.maximum(tl.minimum(reach, tl.load(extent_ptr + h)), 0)
        if TAILS:
            tails_base = tails_ptr + b * stride_tail_b + h * stride_tail_h
        if VALUES:
            near_reach = tl.maximum(near_reach, value_reach)
            d_mass_base = d_mass_ptr + bh * n_q * (2 * value_reach + 1)
        seed = 0
        if DROPOUT:
            seed = tl.load(seed_ptr) + bh
        if FAR:
            near_reach = tl.maximum(near_reach, far_start - 1)
        left, left_slope, right, right_slope = 0.0, 0.0, 0.0, 0.0
        if not PER_ROW:
            left, left_slope, right, right_slope = load_tails(
                tails_base, 0, True, stride_tail_kind, stride_tail_q, TAILS, SLOPES, PER_ROW
            )
        near_start, near_stop = near_range(first, last, near_reach, low, high, BLOCK_M)
        for STEP in tl.static_range(3):
            if STEP == 0:  # rows before: these keys lie far to their right
                start, stop = low, near_start
            elif STEP == 1:
                start, stop = near_start, near_stop
            else:
                start, stop = near_stop, high
            pair_base = pair_ptr + bh * n_q * 2
            if SIDES and STEP != 1:  # the query kernel put the tails and the table's ends in
                count = (tl.num_programs(1) * groups).to(tl.int64) * n_q
                pair_base = sides_ptr + ((1 - STEP // 2) * count + bh * n_q) * 2
            if STEP == 1 or not (FAR or (CAUSAL and STEP == 0)):
                d_k_sum, d_v_sum = key_range(
                    d_k_sum,
                    d_v_sum,
                    k,
                    v,
                    q_base,
                    o_base,
                    pair_base,
                    band_base,
                    tails_base,
                    left,
                    left_slope,
                    right,
                    right_slope,
                    keys_ptr,
                    q_segment_ptr,
                    k_segment_ptr,
                    d_mass_base,
                    seed,
                    block * BLOCK_N,
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
                    stride_q_n,
                    stride_o_n,
                    stride_band_q,
                    stride_tail_kind,
                    stride_tail_q,
                    D,
                    D_V,
                    BLOCK_D,
                    BLOCK_DV,
                    NEAR_M if STEP == 1 else BLOCK_M,
                    BLOCK_N,
                    STAGES,
                    2 - STEP,
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
                    SIDES and STEP != 1,
                    PRECISION,
                )
    d_k_sum *= scale
    if FAR:
        m = n_k - far_start
        k_part = load_part(far_left_k_ptr, b, h_kv, cols, m, n_kv, d, D, TOKENS)
        v_part = load_part(far_left_v_ptr, b, h_kv, cols, m, n_kv, d_v, D_V, TOKENS)
        d_k_sum += k_part.to(tl.float32)
        d_v_sum += v_part.to(tl.float32)
        if not CAUSAL:
            turned = n_k - 1 - cols
            k_part = load_part(far_right_k_ptr, b, h_kv, turned, m, n_kv, d, D, TOKENS)
            v_part = load_part(far_right_v_ptr, b, h_kv, turned, m, n_kv, d_v, D_V, TOKENS)
            d_k_sum += k_part.to(tl.float32)
            d_v_sum += v_part.to(tl.float32)
    place = packed_row(b, h_kv, column, n_k, n_kv, TOKENS)
    tl.store(
        d_k_ptr + place[:, None] * D + d[None, :],
        d_k_sum.to(d_k_ptr.dtype.element_ty),
        mask=on_k,
    )
    tl.store(
        d_v_ptr + place[:, None] * D_V + d_v[None, :],
        d_v_sum.to(d_v_ptr.dtype.element_ty),
        mask=on_v,
    )
