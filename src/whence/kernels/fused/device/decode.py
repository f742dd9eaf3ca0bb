"""Few queries against many keys: one kernel for a share of the keys, one to merge the shares.

A program takes one share of the keys for all query heads of one key head, so that a grouped cache
is read once. The rows of its tile are the queries of all these heads, one head's after the other's.
"""

import triton
import triton.language as tl

from whence.kernels.fused.device.arguments import VARYING
from whence.kernels.fused.device.forward import attended, empty_softmax
from whence.kernels.fused.device.tile import (
    Head,
    Range,
    RowBlock,
    between_ends,
    columns,
    exponential,
    head_rows,
    in_base_e,
    load_tails,
    near_range,
    packed_row,
    rounding_residual,
    row_lse,
    sizes_of,
    whole_blocks,
)


@triton.jit(do_not_specialize=["share", *VARYING])
def share_kernel(
    q,
    k,
    v,
    bias,
    visible,
    parameters,
    mass,
    sums,
    share,  # keys of a share
    numbers,
    n_q,
    n_k,
    q_start,
    reach,
    edge,
    KIND: tl.constexpr,
    TILE: tl.constexpr,
    CURVE_AT: tl.constexpr,  # the functions of the curve that makes the band, or None
    CURVE_EXTENT: tl.constexpr,
    COUNT: tl.constexpr,
):
    """One share of the keys (program 0) for one key head (program 1)."""
    sizes = sizes_of(numbers, n_q, n_k, q_start, reach, edge)
    groups = KIND.GROUPS
    bkv = tl.program_id(1).to(tl.int64)
    n_kv = sizes.n_heads // groups
    b = bkv // n_kv
    head_0 = bkv % n_kv * groups
    r = tl.arange(0, TILE.ROWS)
    there = r < groups * n_q
    row = r % n_q
    h = head_0 + tl.minimum(r // n_q, groups - 1)
    bhq = (b * sizes.n_heads + h) * n_q + row
    d = tl.arange(0, KIND.BLOCK_D)
    d_v = tl.arange(0, KIND.BLOCK_DV)
    queries = tl.load(
        q.ptr + b * q.stride_b + (h * q.stride_h + row * q.stride_n)[:, None] + d[None, :],
        mask=there[:, None] & (d < KIND.D)[None, :],
        other=0.0,
    )
    near_reach = sizes.n_k * 0
    band = bias.band
    if KIND.BAND:
        band += b * bias.band_b + (h * bias.band_h)[:, None]
        near_reach = sizes.reach
        if CURVE_AT is not None:
            near_reach = sizes.n_k * 0
            for g in range(groups):
                extent = CURVE_EXTENT(head_0 + g, sizes.reach, parameters, COUNT)
                near_reach = tl.maximum(near_reach, extent)
        if KIND.EXTENT:  # the largest extent of these heads
            near_reach = tl.minimum(near_reach, tl.max(tl.load(bias.extent + h), 0))
    if KIND.VALUES:
        near_reach = tl.maximum(near_reach, sizes.value_reach)
        mass += ((b * sizes.n_heads + h) * n_q * (KIND.VALUE_LAST + 1))[:, None]
    tails = load_tails(bias, b, h, row, there, KIND)
    padding = 0
    if KIND.KEYS:
        padding = visible.keys + b * visible.keys_b
    q_segment = row
    k_segment = 0
    if KIND.SEGMENTS:
        of_rows = visible.q_segment + b * visible.q_segment_b + row
        q_segment = tl.load(of_rows, mask=there, other=-2)
        k_segment = visible.k_segment + b * visible.k_segment_b
    head = Head(band, bias.band_q, columns(tails, KIND), padding, q_segment[:, None], k_segment, 0)
    last = sizes.q_start + n_q - 1
    keys = share_range(share, near_reach, sizes, KIND, TILE)
    if CURVE_AT is not None:
        # Evaluate the part of the band that this share looks up; all sequences write the same.
        for g in range(groups):
            of_head = bias.band + (head_0 + g) * bias.band_h + sizes.reach
            for start in range(keys.near_start - last, keys.near_stop - sizes.q_start, 128):
                lag = start + tl.arange(0, 128)
                cells = CURVE_AT(head_0 + g, lag, sizes.reach, parameters, COUNT)
                inside = (lag >= -sizes.reach) & (lag <= sizes.reach)
                tl.store(of_head + lag, cells, mask=inside)
        tl.debug_barrier()  # threads read what other threads of this program wrote
    softmax = empty_softmax(TILE.ROWS, KIND)
    rows = RowBlock(0, row, there, tails)
    k_head = head_rows(k, b, bkv % n_kv)
    v_head = head_rows(v, b, bkv % n_kv)
    for REGION in tl.static_range(3):
        if not (KIND.CAUSAL and REGION == 2):
            softmax = attended(
                softmax, queries, k_head, v_head, head, mass, rows, keys, sizes, KIND, TILE, REGION
            )
    place = tl.program_id(0).to(tl.int64) * tl.num_programs(1) * groups * n_q + bhq
    cells = sums.acc + place[:, None] * KIND.D_V + d_v[None, :]
    tl.store(cells, softmax.acc, mask=there[:, None] & (d_v < KIND.D_V)[None, :])
    tl.store(sums.state + place * 4, softmax.top, mask=there)
    tl.store(sums.state + place * 4 + 1, softmax.total, mask=there)
    if KIND.VALUES:
        tl.store(sums.state + place * 4 + 2, softmax.left_mass, mask=there)
        tl.store(sums.state + place * 4 + 3, softmax.right_mass, mask=there)


@triton.jit
def share_range(share, near_reach, sizes, KIND: tl.constexpr, TILE: tl.constexpr):
    """The keys of a share that are in the window of some query, in whole tiles."""
    low = tl.program_id(0) * share
    high = tl.minimum(low + share, sizes.n_k)
    if KIND.BEFORE:
        window = tl.maximum(sizes.q_start - sizes.before, 0) // TILE.KEYS
        low = tl.maximum(low, window * TILE.KEYS)
    if KIND.AFTER:
        high = tl.minimum(high, sizes.q_start + sizes.n_q + sizes.after)
    low, high = whole_blocks(low, high, sizes.n_k, TILE.KEYS)
    last = sizes.q_start + sizes.n_q - 1
    start, stop = near_range(sizes.q_start, last, near_reach, low, high, TILE.KEYS)
    return Range(low, start, stop, high)


@triton.jit(do_not_specialize=["shares", *VARYING])
def merge_kernel(
    sums,
    table,
    result,
    shares,
    numbers,
    n_q,
    n_k,
    q_start,
    reach,
    edge,
    KIND: tl.constexpr,
    SHARES: tl.constexpr,  # a power of two
):
    """One query of one head (program 0): merges its shares and adds the value table's part."""
    sizes = sizes_of(numbers, n_q, n_k, q_start, reach, edge)
    bhq = tl.program_id(0).to(tl.int64)
    s = tl.arange(0, SHARES)
    d_v = tl.arange(0, KIND.BLOCK_DV)
    place = s.to(tl.int64) * tl.num_programs(0) + bhq
    top = tl.load(sums.state + place * 4, mask=s < shares, other=float("-inf"))
    total = tl.load(sums.state + place * 4 + 1, mask=s < shares, other=0.0)
    highest = tl.max(top, 0)
    base = tl.where(highest == float("-inf"), 0.0, highest)
    weight = exponential(top - base, KIND)
    total = tl.sum(weight * total, 0)
    safe = tl.where(total == 0.0, 1.0, total)
    lse, norm = row_lse(base, total, KIND)
    parts = tl.load(
        sums.acc + place[:, None] * KIND.D_V + d_v[None, :],
        mask=(s < shares)[:, None] & (d_v < KIND.D_V)[None, :],
        other=0.0,
    )
    out = tl.sum(parts * weight[:, None], 0) / safe
    bh = bhq // sizes.n_q
    row = bhq % sizes.n_q
    b = bh // sizes.n_heads
    h = bh % sizes.n_heads
    if KIND.VALUES:
        left = tl.load(sums.state + place * 4 + 2, mask=s < shares, other=0.0)
        right = tl.load(sums.state + place * 4 + 3, mask=s < shares, other=0.0)
        left = tl.sum(weight * left, 0) / safe
        right = tl.sum(weight * right, 0) / safe
        width = KIND.VALUE_LAST + 1
        position = sizes.q_start + row.to(tl.int32)
        low, high = sizes.n_k * 0, sizes.n_k
        if KIND.BEFORE:
            low = tl.maximum(0, position - sizes.before)
        if KIND.AFTER:
            high = tl.minimum(high, position + sizes.after + 1)
        of_head = table.ptr + h * table.stride_h
        for start in range(0, width, 32):
            lag = start + tl.arange(0, 32)
            col = position + lag - sizes.value_reach
            cells = result.mass + bhq * width + lag
            there = between_ends(lag - sizes.value_reach, KIND.VALUE_LAST, KIND.CAUSAL)
            there = there & (col >= low) & (col < high)
            mass = exponential(tl.load(cells, mask=there, other=float("-inf")) - lse, KIND)
            if in_base_e(KIND):
                mass *= norm
            tl.debug_barrier()  # threads read a cell before one of them overwrites it
            mass += tl.where(lag == 0, left, 0.0) + tl.where(lag == width - 1, right, 0.0)
            tl.store(cells, mass, mask=lag < width)
            vectors = tl.load(
                of_head + lag[:, None] * KIND.D_V + d_v[None, :],
                mask=(lag < width)[:, None] & (d_v < KIND.D_V)[None, :],
                other=0.0,
            )
            out += tl.sum(mass[:, None] * vectors, 0)
    tl.store(result.lse + bhq, lse)
    if in_base_e(KIND):
        tl.store(result.lse + tl.num_programs(0) + bhq, norm)
    packed = packed_row(b, h, row, sizes.n_q, sizes.n_heads, KIND.TOKENS) * KIND.D_V + d_v
    rounded = out.to(result.out.dtype.element_ty)
    tl.store(result.out + packed, rounded, mask=d_v < KIND.D_V)
    if result.residual is not None:
        residual = rounding_residual(out, rounded)
        tl.store(result.residual + packed, residual, mask=d_v < KIND.D_V)
