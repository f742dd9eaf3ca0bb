"""The kernels of decoding: one share of the keys, and the merge of all shares."""

import triton
import triton.language as tl

from whence.kernels.triton_softmax import attended_range
from whence.kernels.triton_tile import LOG2E, load_tails, near_range, rounded_off, whole_blocks


@triton.jit(do_not_specialize=["q_start", "before", "after", "n_q", "n_k", "reach", "value_reach"])
def share_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    part_ptr,  # [shares, b, h, q, d_v]: sums of weighted values
    state_ptr,  # [shares, b, h, q, 4]: largest logit, mass, and mass beyond the value table's ends
    mass_ptr,
    band_ptr,
    extent_ptr,
    tails_ptr,
    keys_ptr,
    q_segment_ptr,
    k_segment_ptr,
    curve_0_ptr,
    curve_1_ptr,
    curve_2_ptr,
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
    n_heads,
    groups,
    n_q,
    n_k,
    q_start,
    reach,
    value_reach,
    before,
    after,
    share,
    curve_count,
    scale,
    D: tl.constexpr,
    D_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
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
    EVEN_N: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
    CURVE: tl.constexpr,  # whether the band is still to be made, by the functions of a Curve
    CURVE_AT: tl.constexpr,
    CURVE_EXTENT: tl.constexpr,
    CURVE_COUNT: tl.constexpr,
):
    """One share of the keys (program 0) for one key head (program 1)."""
    bkv = tl.program_id(1).to(tl.int64)
    n_kv = n_heads // groups
    b = bkv // n_kv
    r = tl.arange(0, BLOCK_M)
    there = r < groups * n_q
    row = r % n_q
    h = (bkv % n_kv) * groups + tl.minimum(r // n_q, groups - 1)
    bhq = (b * n_heads + h) * n_q + row
    d = tl.arange(0, BLOCK_D)
    d_v = tl.arange(0, BLOCK_DV)
    q = tl.load(
        q_ptr + b * stride_q_b + (h * stride_q_h + row * stride_q_n)[:, None] + d[None, :],
        mask=there[:, None] & (d < D)[None, :],
        other=0.0,
    )
    k_ptr += b * stride_k_b + (bkv % n_kv) * stride_k_h
    v_ptr += b * stride_v_b + (bkv % n_kv) * stride_v_h
    near_reach = n_k * 0
    made_ptr = band_ptr
    head = bkv % n_kv * groups
    if BAND:
        band_ptr += b * stride_band_b + (h * stride_band_h)[:, None]
        near_reach = reach
        if CURVE:
            near_reach = n_k * 0
            for g in range(groups):
                extent = CURVE_EXTENT(
                    head + g, reach, curve_0_ptr, curve_1_ptr, curve_2_ptr, curve_count, CURVE_COUNT
                )
                near_reach = tl.maximum(near_reach, extent)
        if EXTENT:  # that of the head that reaches farthest
            near_reach = tl.minimum(reach, tl.max(tl.load(extent_ptr + h), 0))
    if TAILS:
        tails_ptr += b * stride_tail_b + h * stride_tail_h
    left, left_slope, right, right_slope = load_tails(
        tails_ptr, row, there, stride_tail_kind, stride_tail_q, TAILS, SLOPES, True
    )
    if VALUES:
        near_reach = tl.maximum(near_reach, value_reach)
        mass_ptr += ((b * n_heads + h) * n_q * (2 * value_reach + 1))[:, None]
    if KEYS:
        keys_ptr += b * stride_keys_b
    q_segment = row
    if SEGMENTS:
        q_segment = tl.load(q_segment_ptr + b * stride_qs_b + row, mask=there, other=-2)
        k_segment_ptr += b * stride_ks_b
    low = tl.program_id(0) * share
    high = tl.minimum(low + share, n_k)
    if BEFORE:
        low = tl.maximum(low, (tl.maximum(q_start - before, 0) // BLOCK_N) * BLOCK_N)
    if AFTER:
        high = tl.minimum(high, q_start + n_q + after)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], dtype=tl.float32)
    top = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    total = tl.zeros([BLOCK_M], dtype=tl.float32)
    left_mass = tl.zeros([BLOCK_M], dtype=tl.float32)
    right_mass = tl.zeros([BLOCK_M], dtype=tl.float32)
    low, high = whole_blocks(low, high, n_k, BLOCK_N)
    last = q_start + n_q - 1
    near_start, near_stop = near_range(q_start, last, near_reach, low, high, BLOCK_N)
    if CURVE:  # what this share's near tiles look up, the same numbers for every sequence
        for g in range(groups):
            for first in range(near_start - last, near_stop - q_start, 128):
                lag = first + tl.arange(0, 128)
                bias = CURVE_AT(
                    head + g, lag, curve_0_ptr, curve_1_ptr, curve_2_ptr, curve_count, CURVE_COUNT
                )
                cells = made_ptr + (head + g) * stride_band_h + lag + reach
                tl.store(cells, bias, mask=(lag >= -reach) & (lag <= reach))
        tl.debug_barrier()
    for REGION in tl.static_range(3):
        if REGION == 0:
            start, stop = low, near_start
        elif REGION == 1:
            start, stop = near_start, near_stop
        else:
            start, stop = near_stop, high
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
            0,
            tl.where(there, row, n_q),
            row,
            q_start,
            start,
            stop,
            n_q,
            n_k,
            q_start,
            reach,
            reach,
            value_reach,
            before,
            after,
            scale * LOG2E,
            0.0,
            stride_k_n,
            stride_v_n,
            stride_band_q,
            D,
            D_V,
            BLOCK_D,
            BLOCK_DV,
            BLOCK_N,
            REGION,
            BAND,
            TAILS,
            SLOPES,
            PER_ROW,
            True,
            VALUES,
            BEFORE,
            AFTER,
            KEYS,
            SEGMENTS,
            EVEN_N,
            False,
            STAGES,
            PRECISION,
            RAW=True,
        )
    place = tl.program_id(0).to(tl.int64) * tl.num_programs(1) * groups * n_q + bhq
    tl.store(
        part_ptr + place[:, None] * D_V + d_v[None, :],
        acc,
        mask=there[:, None] & (d_v < D_V)[None, :],
    )
    tl.store(state_ptr + place * 4, top, mask=there)
    tl.store(state_ptr + place * 4 + 1, total, mask=there)
    if VALUES:
        tl.store(state_ptr + place * 4 + 2, left_mass, mask=there)
        tl.store(state_ptr + place * 4 + 3, right_mass, mask=there)


@triton.jit(do_not_specialize=["q_start", "before", "after", "n_q", "n_k", "value_reach", "shares"])
def merge_kernel(
    part_ptr,
    state_ptr,
    mass_ptr,
    table_ptr,
    out_ptr,
    rest_ptr,
    lse_ptr,
    stride_table_h,
    n_heads,
    n_q,
    n_k,
    q_start,
    value_reach,
    before,
    after,
    shares,
    D_V: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    SHARES: tl.constexpr,
    VALUES: tl.constexpr,
    BEFORE: tl.constexpr,
    AFTER: tl.constexpr,
    REST: tl.constexpr,
):
    """One query of one head: the shares' sums to one scale, and the value table's part."""
    bhq = tl.program_id(0).to(tl.int64)
    s = tl.arange(0, SHARES)
    d_v = tl.arange(0, BLOCK_DV)
    place = s.to(tl.int64) * tl.num_programs(0) + bhq
    top = tl.load(state_ptr + place * 4, mask=s < shares, other=float("-inf"))
    total = tl.load(state_ptr + place * 4 + 1, mask=s < shares, other=0.0)
    highest = tl.max(top, 0)
    base = tl.where(highest == float("-inf"), 0.0, highest)
    weight = tl.exp2(top - base)
    total = tl.sum(weight * total, 0)
    safe = tl.where(total == 0.0, 1.0, total)
    lse = tl.where(total == 0.0, float("inf"), base + tl.log2(safe))
    parts = tl.load(
        part_ptr + place[:, None] * D_V + d_v[None, :],
        mask=(s < shares)[:, None] & (d_v < D_V)[None, :],
        other=0.0,
    )
    out = tl.sum(parts * weight[:, None], 0) / safe
    if VALUES:
        left = tl.load(state_ptr + place * 4 + 2, mask=s < shares, other=0.0)
        right = tl.load(state_ptr + place * 4 + 3, mask=s < shares, other=0.0)
        left = tl.sum(weight * left, 0) / safe
        right = tl.sum(weight * right, 0) / safe
        width = 2 * value_reach + 1
        position = q_start + (bhq % n_q).to(tl.int32)
        low, high = n_k * 0, n_k
        if BEFORE:
            low = tl.maximum(0, position - before)
        if AFTER:
            high = tl.minimum(n_k, position + after + 1)
        table_ptr += ((bhq // n_q) % n_heads) * stride_table_h
        for start in range(0, width, 32):
            lag = start + tl.arange(0, 32)
            col = position + lag - value_reach
            cells = mass_ptr + bhq * width + lag
            there = (lag < width) & (col >= low) & (col < high)
            mass = tl.exp2(tl.load(cells, mask=there, other=float("-inf")) - lse)
            tl.debug_barrier()  # several threads read a cell that one of them overwrites
            mass += tl.where(lag == 0, left, 0.0) + tl.where(lag == width - 1, right, 0.0)
            tl.store(cells, mass, mask=lag < width)
            table = tl.load(
                table_ptr + lag[:, None] * D_V + d_v[None, :],
                mask=(lag < width)[:, None] & (d_v < D_V)[None, :],
                other=0.0,
            )
            out += tl.sum(mass[:, None] * table, 0)
    tl.store(lse_ptr + bhq, lse)
    short = out.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + bhq * D_V + d_v, short, mask=d_v < D_V)
    if REST:
        rest = rounded_off(out, short).to(rest_ptr.dtype.element_ty)
        tl.store(rest_ptr + bhq * D_V + d_v, rest, mask=d_v < D_V)
