"""Backward by blocks of rows: dQ, and the gradients of whatever belongs to each row."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from whence.kernels.fused.device.arguments import VARYING, QueryGradients
from whence.kernels.fused.device.d_logits import MassGradient, Queries, tile_gradient
from whence.kernels.fused.device.forward import far_state
from whence.kernels.fused.device.tile import (
    RESIDUAL_SCALE,
    Place,
    RowBlock,
    columns,
    head_from,
    head_of,
    head_rows,
    key_range,
    load_far,
    load_rows,
    load_tails,
    near_reach_of,
    packed_row,
    region_of,
    sizes_of,
    skewed,
    within,
)
from whence.kernels.fused.device.value_table import mass_gradients


class RowSums(NamedTuple):
    """Sums over the keys of every row."""

    d_q: Any  # [m, d]
    d_left: Any  # [m]: dS in the left tail, and so on
    d_right: Any
    d_left_slope: Any  # dS * |lag|
    d_right_slope: Any
    imbalance: Any  # dS of the whole row
    left_mass: Any  # weights in the left tail
    right_mass: Any
    left_distance: Any  # weights * |lag|
    right_distance: Any


@triton.jit(do_not_specialize=[*VARYING])
def query_kernel(
    q,
    k,
    v,
    d_out,
    output,
    bias,
    visible,
    seed,
    table,
    far,
    gradients,
    statistics,
    numbers,
    n_q,
    n_k,
    q_start,
    reach,
    edge,
    KIND: tl.constexpr,
    TILE: tl.constexpr,
    BALANCED: tl.constexpr,  # dS of every row is made to sum to zero
    TWICE: tl.constexpr,  # ... before any gradient is taken of it, by a first pass over the keys
):
    """One block of query rows (program 0) of one head (program 1).

    It also writes the row statistics that the kernels after it read.

    dS of a row sums to zero in exact arithmetic. Forward multiplies rounded weights with the
    values, so that delta, which comes from its output, is not quite the sum of the exact weights:
    dS then sums to a small number, which a sum over rows, a tail that holds most of a row, or a
    slope's distances would magnify. BALANCED adds that number to the delta of the kernels that
    follow. Where rows are few a second pass costs little, and the gradients of the rows are exact
    too.
    """
    sizes = sizes_of(numbers, n_q, n_k, q_start, reach, edge)
    ROWS: tl.constexpr = TILE.ROWS
    TAIL_SUMS: tl.constexpr = gradients.d_tails is not None
    block = tl.program_id(0)
    bh = tl.program_id(1).to(tl.int64)
    b = bh // sizes.n_heads
    h = bh % sizes.n_heads
    r = tl.arange(0, ROWS)
    index = block * ROWS + r
    row = index.to(tl.int64)
    first_row = block.to(tl.int64) * ROWS
    there = index < sizes.n_q
    place = bh * sizes.n_q + row
    d = tl.arange(0, KIND.BLOCK_D)
    d_v = tl.arange(0, KIND.BLOCK_DV)
    on_q = there[:, None] & (d < KIND.D)[None, :]
    on_out = there[:, None] & (d_v < KIND.D_V)[None, :]
    q_rows = head_rows(q, b, h).ptr + row[:, None] * q.stride_n
    q_tile = tl.load(q_rows + d[None, :], mask=on_q, other=0.0)
    d_rows = head_rows(d_out, b, h).ptr + row[:, None] * d_out.stride_n
    d_tile = tl.load(d_rows + d_v[None, :], mask=on_out, other=0.0)
    lse = tl.load(output.lse + place, mask=there, other=0.0)
    packed = packed_row(b, h, row, sizes.n_q, sizes.n_heads, KIND.TOKENS)[:, None]
    delta = delta_of(output, d_tile, packed * KIND.D_V + d_v[None, :], on_out)
    pair = statistics.lse_delta + place * 2
    tl.store(pair, lse, mask=there)
    tl.store(pair + 1, delta, mask=there)
    tails = load_tails(bias, b, h, index, there, KIND)
    head = head_of(bias, visible, seed, b, h, sizes, KIND)
    head = head_from(head, first_row, index, columns(tails, KIND), sizes, KIND, False)
    rows = RowBlock(block * ROWS, r, there, tails)
    d_mass_ptr = statistics.d_mass
    d_left_mass = 0.0
    d_right_mass = 0.0
    if KIND.VALUES:
        d_mass_ptr += (bh * sizes.n_q + first_row) * (2 * sizes.value_reach + 1)
        of_head = table.ptr + h * table.stride_h
        d_left_mass, d_right_mass = mass_gradients(d_mass_ptr, of_head, d_tile, rows, sizes, KIND)
    if statistics.far_lse_delta is not None:
        # What far tiles subtract from the logits and from dP, with the constants of their side.
        side = statistics.far_lse_delta + place * 2
        tl.store(side, lse - tails.left, mask=there)
        tl.store(side + 1, delta - d_left_mass, mask=there)
        side += tl.num_programs(1).to(tl.int64) * sizes.n_q * 2
        tl.store(side, lse - tails.right, mask=there)
        tl.store(side + 1, delta - d_right_mass, mask=there)
    keys = key_range(block, near_reach_of(bias, h, sizes, KIND), sizes, KIND, TILE)
    d_band = gradients.d_band
    if d_band is not None:
        d_band += (bh * sizes.n_q + first_row) * (2 * sizes.reach + 1)
    d_mass = MassGradient(d_mass_ptr, d_left_mass, d_right_mass)
    if KIND.VALUES:
        d_left, d_right = tl.expand_dims(d_left_mass, 1), tl.expand_dims(d_right_mass, 1)
        d_mass = MassGradient(d_mass_ptr, d_left, d_right)
    of_rows = QueryGradients(gradients.d_q, d_band, gradients.d_tails)
    k_head = head_rows(k, b, h // KIND.GROUPS)
    v_head = head_rows(v, b, h // KIND.GROUPS)
    sums = empty_sums(ROWS, KIND)
    for _ in tl.static_range(1 + TWICE):
        delta += sums.imbalance  # what the pass before has found
        sums = empty_sums(ROWS, KIND)
        if KIND.FAR and TAIL_SUMS:
            parts = far_state(far, b, h, index, tails, sizes, KIND)
            sums = with_far(sums, parts, d_tile, lse, delta, d_left_mass, d_right_mass, KIND)
        queries = Queries(q_tile, d_tile, lse[:, None], delta[:, None])
        for REGION in tl.static_range(3):
            if REGION == 1 or not (KIND.FAR or (KIND.CAUSAL and REGION == 2)):
                sums = summed_keys(
                    sums,
                    queries,
                    k_head,
                    v_head,
                    head,
                    d_mass,
                    of_rows,
                    rows,
                    keys,
                    sizes,
                    KIND,
                    TILE,
                    BALANCED,
                    REGION,
                )
    if BALANCED:
        tl.store(pair + 1, delta + sums.imbalance, mask=there)
    d_q = sums.d_q * sizes.scale
    if KIND.FAR:
        m = sizes.n_q - sizes.far_start
        of_left = index - sizes.far_start
        d_q += load_far(far.left.d_q, b, h, of_left, m, sizes.n_heads, d, KIND.D, KIND.TOKENS)
        if not KIND.CAUSAL:
            of_right = m - 1 - index
            d_q += load_far(far.right.d_q, b, h, of_right, m, sizes.n_heads, d, KIND.D, KIND.TOKENS)
    cells = gradients.d_q + packed * KIND.D + d[None, :]
    tl.store(cells, d_q.to(gradients.d_q.dtype.element_ty), mask=on_q)
    if TAIL_SUMS:
        d_left = sums.d_left - sums.imbalance * sums.left_mass
        d_right = sums.d_right - sums.imbalance * sums.right_mass
        d_left_slope = sums.d_left_slope
        d_right_slope = sums.d_right_slope
        if KIND.SLOPES:
            d_left_slope -= sums.imbalance * sums.left_distance
            d_right_slope -= sums.imbalance * sums.right_distance
        kind = tl.num_programs(1).to(tl.int64) * sizes.n_q
        d_tails = gradients.d_tails + place
        tl.store(d_tails, d_left, mask=there)
        tl.store(d_tails + kind, d_left_slope, mask=there)
        tl.store(d_tails + 2 * kind, d_right, mask=there)
        tl.store(d_tails + 3 * kind, d_right_slope, mask=there)


@triton.jit
def delta_of(output, d_out, cells, there):
    """rowsum(out * d_out), with the digits of out that rounding took."""
    out = tl.load(output.out + cells, mask=there, other=0.0).to(tl.float32)
    if output.residual is not None:
        residual = tl.load(output.residual + cells, mask=there, other=0.0)
        out += residual.to(tl.float32) / RESIDUAL_SCALE
    return tl.sum(out * d_out.to(tl.float32), 1)


@triton.jit
def empty_sums(ROWS: tl.constexpr, KIND: tl.constexpr):
    """The sums before any key."""
    WIDTH: tl.constexpr = KIND.BLOCK_D
    return RowSums(
        tl.zeros([ROWS, WIDTH], dtype=tl.float32),
        tl.zeros([ROWS], dtype=tl.float32),
        tl.zeros([ROWS], dtype=tl.float32),
        tl.zeros([ROWS], dtype=tl.float32),
        tl.zeros([ROWS], dtype=tl.float32),
        tl.zeros([ROWS], dtype=tl.float32),
        tl.zeros([ROWS], dtype=tl.float32),
        tl.zeros([ROWS], dtype=tl.float32),
        tl.zeros([ROWS], dtype=tl.float32),
        tl.zeros([ROWS], dtype=tl.float32),
    )


@triton.jit
def with_far(sums, far, d_out, lse, delta, d_left_mass, d_right_mass, KIND: tl.constexpr):
    """The sums of the tails after the far keys, from the far keys' outputs and log-sum-exps."""
    d_end = tl.sum(far.out_left * d_out.to(tl.float32), 1) - delta + d_left_mass
    left_mass = sums.left_mass + tl.exp2(far.lse_left - lse)
    d_left = sums.d_left + left_mass * d_end
    right_mass = sums.right_mass
    d_right = sums.d_right
    if not KIND.CAUSAL:
        d_end = tl.sum(far.out_right * d_out.to(tl.float32), 1) - delta + d_right_mass
        right_mass += tl.exp2(far.lse_right - lse)
        d_right += right_mass * d_end
    return RowSums(
        sums.d_q,
        d_left,
        d_right,
        sums.d_left_slope,
        sums.d_right_slope,
        sums.imbalance + (d_left + d_right),
        left_mass,
        right_mass,
        sums.left_distance,
        sums.right_distance,
    )


@triton.jit
def summed_keys(
    sums,
    queries,
    k,
    v,
    head,
    d_mass,
    gradients,
    rows,
    keys,
    sizes,
    KIND: tl.constexpr,
    TILE: tl.constexpr,
    BALANCED: tl.constexpr,
    REGION: tl.constexpr,
):
    """The sums after the keys of one region; near tiles store dS by lag if every row has a band."""
    BLOCK: tl.constexpr = TILE.NEAR if REGION == 1 else TILE.KEYS
    TAIL_SUMS: tl.constexpr = gradients.d_tails is not None
    (
        d_q,
        d_left,
        d_right,
        d_left_slope,
        d_right_slope,
        imbalance,
        left_mass,
        right_mass,
        left_distance,
        right_distance,
    ) = sums
    start, stop = region_of(keys, REGION)
    reach = sizes.reach
    c = tl.arange(0, BLOCK)
    d = tl.arange(0, KIND.BLOCK_D)
    d_v = tl.arange(0, KIND.BLOCK_DV)
    r = rows.r[:, None]
    first_row = rows.first_row
    for block in tl.range(start, stop, BLOCK, num_stages=TILE.STAGES):
        cols = block + c
        k_tile = load_rows(k, block, c[:, None], d[None, :], sizes.n_k, KIND.D, TILE.EVEN)
        v_tile = load_rows(v, block, c[:, None], d_v[None, :], sizes.n_k, KIND.D_V, TILE.EVEN)
        place = Place(first_row, r, block, c[None, :])
        _, weights, d_logits = tile_gradient(
            queries,
            k_tile,
            v_tile,
            place,
            head,
            d_mass,
            sizes,
            KIND,
            REGION,
            TILE.EVEN,
            False,
            False,
            False,
        )
        d_q = tl.dot(d_logits.to(k_tile.dtype), k_tile, d_q, input_precision=KIND.PRECISION)
        lag = cols[None, :] - (first_row + r + sizes.q_start)
        if gradients.d_band is not None and REGION == 1:
            inside = within(lag, reach) & (first_row + r < sizes.n_q)
            zero = block - (first_row + sizes.q_start) + reach
            cells = skewed(gradients.d_band, zero, r, c[None, :], 2 * reach + 1)
            tl.store(cells, d_logits, mask=inside & (cols < sizes.n_k)[None, :])
        d_row = imbalance
        if BALANCED:
            d_row = tl.sum(d_logits, 1)
            imbalance += d_row
        if TAIL_SUMS:
            if REGION == 1:
                d_left += tl.sum(tl.where(lag < -reach, d_logits, 0.0), 1)
                left_mass += tl.sum(tl.where(lag < -reach, weights, 0.0), 1)
                if not KIND.CAUSAL:
                    d_right += tl.sum(tl.where(lag > reach, d_logits, 0.0), 1)
                    right_mass += tl.sum(tl.where(lag > reach, weights, 0.0), 1)
            elif REGION == 0:
                d_left += d_row
                left_mass += tl.sum(weights, 1)
            else:
                d_right += d_row
                right_mass += tl.sum(weights, 1)
        if TAIL_SUMS and KIND.SLOPES:
            distance = tl.abs(lag).to(tl.float32)
            in_left = lag < -reach
            left_distance += tl.sum(tl.where(in_left, weights * distance, 0.0), 1)
            d_left_slope += tl.sum(tl.where(in_left, d_logits * distance, 0.0), 1)
            if not KIND.CAUSAL:
                in_right = lag > reach
                right_distance += tl.sum(tl.where(in_right, weights * distance, 0.0), 1)
                d_right_slope += tl.sum(tl.where(in_right, d_logits * distance, 0.0), 1)
    return RowSums(
        d_q,
        d_left,
        d_right,
        d_left_slope,
        d_right_slope,
        imbalance,
        left_mass,
        right_mass,
        left_distance,
        right_distance,
    )
