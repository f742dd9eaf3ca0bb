"""The backward kernels: dS, the gradient of the logits, summed over keys and over query rows.

The weights are recomputed from the log-sum-exp, and dS = P * (dP - delta), with dP = d_out v^T and
delta = rowsum(out * d_out). The query kernel sums dS over the keys: dQ, and the gradients of
whatever belongs to each row. The key kernel sums it over the rows: dK and dV, and where it is asked
to, the diagonals of dS for a shared band (d_band.py).
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from whence.kernels.fused.device.arguments import VARYING, QueryGradients, Rows
from whence.kernels.fused.device.band import first_line, line_bias, next_line
from whence.kernels.fused.device.forward import far_lse
from whence.kernels.fused.device.tile import (
    RESIDUAL_SCALE,
    Head,
    Place,
    RowBlock,
    Tails,
    after_dropout,
    columns,
    dropout_keeps,
    exponential,
    far_cells,
    far_line,
    head_from,
    head_of,
    head_rows,
    in_base_e,
    key_range,
    lags_of,
    load_between_ends,
    load_far,
    load_rows,
    load_tails,
    logits_of,
    longest_first,
    masked_left,
    masked_right,
    near_bias,
    near_reach_of,
    packed_row,
    pdl_wait,
    program_of,
    reach_of,
    read_by_now,
    region_of,
    reserve,
    row_range,
    rows_there,
    sizes_of,
    skewed,
    slopes_by_cell,
    store_between_ends,
    store_where,
    table_product,
    thread_number,
    unit_of,
    visible_cells,
    where_negative,
    whole_blocks,
    wide,
    within,
)

# Keys of a stripe: each of four warps holds this many keys of a tile [64 keys, rows]. In tensor
# cores' layout of a tile, a thread has two keys of a stripe, which are HALF apart, and of every
# HALF rows two that are adjacent.
STRIPE = tl.constexpr(16)
HALF = tl.constexpr(8)
WARPS = tl.constexpr(4)  # of a program whose warps sum the diagonals of a stripe each


class Queries(NamedTuple):
    """A block of rows: q [m, d], d_out [m, d_v], and what broadcasts to the tile."""

    q: Any
    d_out: Any
    lse: Any
    norm: Any  # see row_lse in tile.py
    delta: Any


class MassGradient(NamedTuple):
    """The gradient of a value table's masses: its address, and those at the table's two ends."""

    ptr: Any
    left: Any
    right: Any


class TileGradient(NamedTuple):
    """The weights that multiplied the values (after dropout), the softmax's weights, and dS."""

    dropped: Any
    weights: Any
    d_logits: Any


@triton.jit
def tile_gradient(
    queries,
    k,  # [n, d]
    v,  # [n, d_v]
    tile_bias,  # of every cell of a near tile, if there is a band
    place,
    head,
    d_mass,
    sizes,
    KIND: tl.constexpr,
    REGION: tl.constexpr,
    EVEN: tl.constexpr,  # no tile extends beyond the last row or key
    BY_KEYS: tl.constexpr,  # the tile is [keys, queries], not [queries, keys]
    PREPARED: tl.constexpr,  # lse and delta include what a row adds on the far side already
):
    """Weights and dS of one tile."""
    row = place.first_row + place.r
    col = place.first_key + place.c
    there = row < sizes.n_q
    STARTED: tl.constexpr = KIND.STARTED and REGION == 1
    if BY_KEYS:
        logits = logits_of(k, tl.trans(queries.q), tile_bias, STARTED, KIND)
        logits = logits * (sizes.scale * unit_of(KIND))
        d_weights = tl.dot(v, tl.trans(queries.d_out), input_precision=KIND.PRECISION)
    else:
        logits = logits_of(queries.q, tl.trans(k), tile_bias, STARTED, KIND)
        logits = logits * (sizes.scale * unit_of(KIND))
        d_weights = tl.dot(queries.d_out, tl.trans(v), input_precision=KIND.PRECISION)
    lse = queries.lse
    delta = queries.delta
    LEFT_EDGE: tl.constexpr = masked_left(KIND, REGION)
    RIGHT_EDGE: tl.constexpr = masked_right(KIND, REGION)
    if KIND.BAND and REGION == 1 and not STARTED:
        logits += tile_bias
    if KIND.TAILS and REGION != 1 and slopes_by_cell(KIND):
        logits += far_cells(head.tails, place, sizes, REGION)
    elif KIND.TAILS and REGION != 1 and (KIND.SLOPES or not PREPARED):
        ahead = place.first_row + sizes.q_start - place.first_key
        LEVEL: tl.constexpr = BY_KEYS and not KIND.PER_ROW
        line = far_line(head.tails, ahead, place.r, REGION, KIND.SLOPES, LEVEL)
        if not PREPARED:
            lse = lse - line.shift
        if KIND.SLOPES:
            logits += line.level + line.tilt * place.c.to(tl.float32)
    weights = exponential(logits - lse, KIND)
    if KIND.KEYS or KIND.SEGMENTS or LEFT_EDGE or RIGHT_EDGE or not EVEN:
        seen = visible_cells(row, col, head, sizes, KIND, LEFT_EDGE, RIGHT_EDGE, EVEN)
        if not EVEN:
            seen = seen & there
        weights = tl.where(seen, weights, 0.0)
    if in_base_e(KIND):
        weights *= queries.norm
    if KIND.VALUES and not PREPARED:
        if REGION == 1:
            # In a causal call the weights to the right are 0, and any finite number will do there.
            d_right = d_mass.left if KIND.CAUSAL else d_mass.right
            d_weights += load_between_ends(
                *(d_mass.ptr, place, d_mass.left, d_right, sizes),
                *(KIND.VALUE_LAST, KIND.CAUSAL, EVEN, not BY_KEYS or KIND.CHAINED),
            )
        else:  # all keys of a far tile share an end row of the table: one number for each query row
            d_end = d_mass.left
            if REGION == 2:
                d_end = d_mass.right
            if KIND.DROPOUT:
                d_weights += d_end
            else:
                delta = delta - d_end
    dropped = weights
    if KIND.DROPOUT:
        kept = dropout_keeps(head.seed, row, col, sizes.dropout)
        dropped = after_dropout(weights, kept, sizes.dropout)
        d_weights = after_dropout(d_weights, kept, sizes.dropout)
    return TileGradient(dropped, weights, weights * (d_weights - delta))


class RowSums(NamedTuple):
    """Sums over the keys of every row. Those after d_q are [m, 4] before `whole_sums`, then [m]."""

    d_q: Any  # [m, d]
    d_left: Any  # dS in the left tail
    d_right: Any
    d_left_slope: Any  # dS * |lag|
    d_right_slope: Any
    imbalance: Any  # dS of the whole row
    left_mass: Any  # weights in the left tail
    right_mass: Any
    left_distance: Any  # weights * |lag|
    right_distance: Any


class FarRows(NamedTuple):
    """out . d_out and the log-sum-exp in base 2 of every row, over the far keys of each side."""

    d_left: Any
    lse_left: Any
    d_right: Any
    lse_right: Any


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
    BALANCED: tl.constexpr,  # correct dS so that every row sums to zero
    TWICE: tl.constexpr,  # ... in this kernel too, by an additional first pass over the keys
    D_LAST: tl.constexpr,  # the last place of a row of d_band, with D_ENDS
    D_ENDS: tl.constexpr,  # the tails are the ends of the band: their gradient goes there
    KEY_ROWS: tl.constexpr,  # rows of a far tile of the key kernel
):
    """One block of query rows of one head.

    It also writes the row statistics that the kernels after it read.

    In exact arithmetic dS sums to zero over each row. But delta is computed from the output, for
    which forward multiplied rounded weights with the values, so that it differs slightly from the
    sum over the exact weights, and dS sums to a small number instead. A sum over many rows, a tail
    that holds most of a row, or the distances of a slope would magnify it; and in the gradient of a
    wide Gaussian, which is nearly constant over a row, dS cancels and only this error is left.
    BALANCED corrects the gradients of the tails for it, and adds it to delta for the kernels that
    follow. What a plain kernel's keys add to the sum follows from their output (with_far). TWICE
    finds it in a first pass over the keys, so that the other gradients of this kernel are corrected
    too; it is used for few rows, and for rows of one key, where that costs little.
    """
    pdl_wait(KIND.CHAINED)
    sizes = sizes_of(numbers, n_q, n_k, q_start, reach, edge)
    ROWS: tl.constexpr = TILE.ROWS
    TAIL_SUMS: tl.constexpr = D_ENDS or gradients.d_tails is not None
    program = program_of(TILE)
    block = longest_first(program, KIND)
    bh = wide(program.head)
    b = wide(program.head // sizes.n_heads)
    h = wide(program.head % sizes.n_heads)
    r = tl.arange(0, ROWS)
    index = block * ROWS + r
    row = index.to(tl.int64)
    first_row = block.to(tl.int64) * ROWS
    there = rows_there(index, r, sizes, KIND, TILE)
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
    norm = 1.0
    if in_base_e(KIND):
        norm_ptr = output.lse + program.heads * sizes.n_q + place
        norm = tl.load(norm_ptr, mask=there, other=0.0)
        tl.store(statistics.norm + place, norm, mask=there)
        norm = norm[:, None]
    if KIND.PER_ROW or KIND.VALUES:
        # A row without keys has an infinite lse, and the key kernel takes differences of it.
        lse = tl.minimum(lse, 1e30)
    packed = packed_row(b, h, row, sizes.n_q, sizes.n_heads, KIND.TOKENS)[:, None]
    delta = delta_of(output, d_tile, packed * KIND.D_V + d_v[None, :], on_out)
    pair = statistics.lse_delta + place * 2
    tl.store(pair, lse, mask=there)
    tl.store(pair + 1, delta, mask=there)
    tails = load_tails(bias, b, h, index, there, KIND)
    head = head_of(bias, visible, seed, b, h, sizes, KIND)
    head = head_from(head, first_row, index, columns(tails, KIND), sizes, KIND, BY_KEYS=False)
    rows = RowBlock(block * ROWS, r, there, tails)
    d_mass_ptr = statistics.d_mass
    d_left_mass = 0.0
    d_right_mass = 0.0
    if KIND.VALUES:
        d_mass_ptr = mass_rows(d_mass_ptr, bh, first_row, sizes, KIND)
        of_head = table.ptr + h * table.stride_h
        d_left_mass, d_right_mass = mass_gradients(d_mass_ptr, of_head, d_tile, rows, sizes, KIND)
    if statistics.far_lse_delta is not None:
        # lse and delta for the far tiles of each side, with what a row adds there included. With
        # slopes that is the part of the line within a tile of the key kernel (far_line).
        left_shift = tails.left
        right_shift = tails.right
        if KIND.SLOPES:
            within_tile = (index % KEY_ROWS).to(tl.float32)
            left_shift = tails.left_slope * within_tile
            right_shift = -tails.right_slope * within_tile
        side = statistics.far_lse_delta + place * 2
        other_side = side + program.heads * sizes.n_q * 2
        tl.store(side, lse - left_shift, mask=there)
        tl.store(side + 1, delta - d_left_mass, mask=there)
        tl.store(other_side, lse - right_shift, mask=there)
        tl.store(other_side + 1, delta - d_right_mass, mask=there)
    keys = key_range(block, near_reach_of(bias, h, sizes, KIND), sizes, KIND, TILE)
    d_band = gradients.d_band
    if d_band is not None:
        d_band += (bh * sizes.n_q + first_row) * (D_LAST + 1 if D_ENDS else 2 * sizes.reach + 1)
    d_mass = MassGradient(d_mass_ptr, d_left_mass, d_right_mass)
    if KIND.VALUES:
        d_left, d_right = tl.expand_dims(d_left_mass, 1), tl.expand_dims(d_right_mass, 1)
        d_mass = MassGradient(d_mass_ptr, d_left, d_right)
    of_rows = QueryGradients(gradients.d_q, d_band, gradients.d_tails)
    k_head = head_rows(k, b, h // KIND.GROUPS)
    v_head = head_rows(v, b, h // KIND.GROUPS)
    sums = whole_sums(empty_sums(ROWS, KIND))
    for _ in tl.static_range(1 + TWICE):
        delta += sums.imbalance  # found by the first pass
        sums = empty_sums(ROWS, KIND)
        queries = Queries(q_tile, d_tile, lse[:, None], norm, delta[:, None])
        for REGION in tl.static_range(3):
            if REGION == 1 or not (KIND.FAR or TILE.ALL_NEAR or (KIND.CAUSAL and REGION == 2)):
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
                    D_LAST,
                    D_ENDS,
                    output.mass is None,
                    REGION,
                )
        sums = whole_sums(sums)
        if KIND.FAR and BALANCED:
            elsewhere = far_rows(far, d_rows, b, h, index, there, tails, sizes, KIND)
            sums = with_far(sums, elsewhere, lse, delta, d_left_mass, d_right_mass, KIND)
    if BALANCED:
        tl.store(pair + 1, delta + sums.imbalance, mask=there)
        if statistics.far_lse_delta is not None:
            d_left, d_right = 0.0, 0.0
            if KIND.VALUES:  # loaded again: registers are few in the loops above
                d_left, d_right = end_gradients(d_mass_ptr, r, there, KIND)
            tl.store(side + 1, delta + sums.imbalance - d_left, mask=there)
            tl.store(other_side + 1, delta + sums.imbalance - d_right, mask=there)
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
        store_tail_gradients(
            *(of_rows, sums, output.mass, bh, block, place, r, there, program, sizes),
            *(KIND, D_LAST, D_ENDS),
        )


@triton.jit
def store_tail_gradients(
    gradients,
    sums,
    mass,  # of forward's value table, whose ends are the tails; or None
    bh,
    block,
    place,
    r,
    there,
    program,
    sizes,
    KIND: tl.constexpr,
    D_LAST: tl.constexpr,
    D_ENDS: tl.constexpr,
):
    """Stores the gradients of the tails, corrected for the imbalance of dS, of a block of rows."""
    left_mass, right_mass = sums.left_mass, sums.right_mass
    if mass is not None:
        end = mass + place * (KIND.VALUE_LAST + 1)
        left_mass = tl.load(end, mask=there, other=0.0)
        right_mass = tl.load(end + KIND.VALUE_LAST, mask=there, other=0.0)
    d_left = sums.d_left - sums.imbalance * left_mass
    d_right = sums.d_right - sums.imbalance * right_mass
    d_left_slope = sums.d_left_slope
    d_right_slope = sums.d_right_slope
    if KIND.SLOPES:
        d_left_slope -= sums.imbalance * sums.left_distance
        d_right_slope -= sums.imbalance * sums.right_distance
    if D_ENDS:
        end = gradients.d_band + r * (D_LAST + 1)
        tl.store(end, d_left, mask=there)
        if not KIND.CAUSAL:
            tl.store(end + D_LAST, d_right, mask=there)
    elif KIND.PER_ROW:
        stride = program.heads * sizes.n_q
        d_tails = gradients.d_tails + place
        tl.store(d_tails, d_left, mask=there)
        tl.store(d_tails + stride, d_left_slope, mask=there)
        tl.store(d_tails + 2 * stride, d_right, mask=there)
        tl.store(d_tails + 3 * stride, d_right_slope, mask=there)
    else:
        stride = program.heads * program.blocks
        d_tails = gradients.d_tails + bh * program.blocks + block
        tl.store(d_tails, tl.sum(d_left, 0))
        tl.store(d_tails + stride, tl.sum(d_left_slope, 0))
        tl.store(d_tails + 2 * stride, tl.sum(d_right, 0))
        tl.store(d_tails + 3 * stride, tl.sum(d_right_slope, 0))


@triton.jit
def delta_of(output, d_out, cells, there):
    """rowsum(out * d_out), where out includes its stored rounding error."""
    out = tl.load(output.out + cells, mask=there, other=0.0).to(tl.float32)
    if output.residual is not None:
        residual = tl.load(output.residual + cells, mask=there, other=0.0)
        out += residual.to(tl.float32) / RESIDUAL_SCALE
    return tl.sum(out * d_out.to(tl.float32), 1)


@triton.jit
def empty_sums(ROWS: tl.constexpr, KIND: tl.constexpr):
    """The sums before any key.

    The mass of the left tail is 1 minus that of all other keys, which are few in a causal call.
    """
    WIDTH: tl.constexpr = KIND.BLOCK_D
    nothing = tl.zeros([ROWS, 4], dtype=tl.float32)
    left_mass = nothing
    if not KIND.FAR:
        left_mass = nothing + 0.25  # four of them make 1
    d_q = tl.zeros([ROWS, WIDTH], dtype=tl.float32)
    return RowSums(
        *(d_q, nothing, nothing, nothing, nothing, nothing, left_mass, nothing, nothing, nothing)
    )


@triton.jit
def part_sums(x):
    """The sums over the keys of a tile [m, n] in four parts, [m, 4].

    In tensor cores' layout of a tile, four threads share a row: each has two of every eight keys.
    So each adds up its own cells, and whole_sums adds the four parts after the last tile.
    """
    cells = tl.reshape(x, [x.shape[0], x.shape[1] // 8, 4, 2])
    return tl.sum(tl.sum(cells, 3), 1)


@triton.jit
def whole_sums(sums):
    """The sums of every row, [m], from their four parts."""
    return RowSums(
        sums.d_q,
        tl.sum(sums.d_left, 1),
        tl.sum(sums.d_right, 1),
        tl.sum(sums.d_left_slope, 1),
        tl.sum(sums.d_right_slope, 1),
        tl.sum(sums.imbalance, 1),
        tl.sum(sums.left_mass, 1),
        tl.sum(sums.right_mass, 1),
        tl.sum(sums.left_distance, 1),
        tl.sum(sums.right_distance, 1),
    )


@triton.jit
def far_rows(far, d_out, b, h, rows, there, tails, sizes, KIND: tl.constexpr):
    """What with_far needs of the far keys.

    The columns are taken in pieces, and d_out is loaded again: with whole tiles beside d_q a thread
    would need more registers than in the loop over the keys, and fewer programs would run at once.
    """
    PIECE: tl.constexpr = 16
    m = sizes.n_q - sizes.far_start
    of_left = rows - sizes.far_start
    of_right = m - 1 - rows
    n_heads = sizes.n_heads
    d_left = tl.zeros(rows.shape, dtype=tl.float32)
    d_right = tl.zeros(rows.shape, dtype=tl.float32)
    for start in tl.range(0, KIND.BLOCK_DV, PIECE, num_stages=1):
        d = start + tl.arange(0, PIECE)
        on = there[:, None] & (d < KIND.D_V)[None, :]
        whole = tl.load(d_out + d[None, :], mask=on, other=0.0).to(tl.float32)
        out = load_far(far.left.out, b, h, of_left, m, n_heads, d, KIND.D_V, KIND.TOKENS)
        d_left += tl.sum(out * whole, 1)
        if not KIND.CAUSAL:
            out = load_far(far.right.out, b, h, of_right, m, n_heads, d, KIND.D_V, KIND.TOKENS)
            d_right += tl.sum(out * whole, 1)
    lse_left, lse_right = far_lse(far, b, h, rows, tails, sizes, KIND)
    return FarRows(d_left, lse_left, d_right, lse_right)


@triton.jit
def with_far(sums, far, lse, delta, d_left_mass, d_right_mass, KIND: tl.constexpr):
    """The sums of rows and tails with the far keys, from their outputs and log-sum-exps."""
    left_mass = tl.exp2(far.lse_left - lse)
    d_left = left_mass * (far.d_left - delta + d_left_mass)
    right_mass = tl.zeros_like(left_mass)
    d_right = tl.zeros_like(d_left)
    if not KIND.CAUSAL:
        right_mass = tl.exp2(far.lse_right - lse)
        d_right = right_mass * (far.d_right - delta + d_right_mass)
    return RowSums(
        sums.d_q,
        sums.d_left + d_left,
        sums.d_right + d_right,
        sums.d_left_slope,
        sums.d_right_slope,
        sums.imbalance + (d_left + d_right),
        sums.left_mass + left_mass,
        sums.right_mass + right_mass,
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
    D_LAST: tl.constexpr,
    D_ENDS: tl.constexpr,
    MASSES: tl.constexpr,  # the masses of the tails are not known from forward
    REGION: tl.constexpr,
):
    """The sums after the keys of one region; near tiles store dS by lag if every row has a band."""
    BLOCK: tl.constexpr = TILE.NEAR if REGION == 1 else TILE.KEYS
    TAIL_SUMS: tl.constexpr = D_ENDS or gradients.d_tails is not None
    LEFT_REST: tl.constexpr = not KIND.FAR  # see empty_sums
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
    reach = sizes.reach  # within it there is no tail
    if D_ENDS:
        reach = reach_of(D_LAST, KIND.CAUSAL) - 1
    c = tl.arange(0, BLOCK)
    d = tl.arange(0, KIND.BLOCK_D)
    d_v = tl.arange(0, KIND.BLOCK_DV)
    r = rows.r[:, None]
    first_row = rows.first_row
    # dS and weights of a far tile belong to the row and to its tail. They are summed here and added
    # to both after the last tile.
    mass = tl.zeros_like(imbalance)
    d_row = imbalance
    if REGION != 1:
        d_row = tl.zeros_like(imbalance)
    NEAR_BAND: tl.constexpr = KIND.BAND and REGION == 1
    LINES: tl.constexpr = NEAR_BAND and TILE.LINES
    first = first_row + sizes.q_start
    if LINES:
        line = first_line(head, start - (first + 15), sizes, TILE.ROWS, False)
    for block in tl.range(start, stop, BLOCK, num_stages=TILE.STAGES):
        cols = block + c
        k_tile = load_rows(k, block, c[:, None], d[None, :], sizes.n_k, KIND.D, TILE.EVEN)
        v_tile = load_rows(v, block, c[:, None], d_v[None, :], sizes.n_k, KIND.D_V, TILE.EVEN)
        place = Place(first_row, r, block, c[None, :])
        tile_bias = 0.0
        if LINES:
            tile_bias = line_bias(line, place, False)
            line = next_line(line, BLOCK)
        elif NEAR_BAND:  # loaded before the products, so weights overlap with the second product
            there = first_row + r < sizes.n_q
            tile_bias = near_bias(head, place, there, sizes, KIND, TILE.EVEN, OWN_BAND=False)
            tile_bias = read_by_now(tile_bias)
        _, weights, d_logits = tile_gradient(
            queries,
            k_tile,
            v_tile,
            tile_bias,
            place,
            head,
            d_mass,
            sizes,
            KIND,
            REGION,
            TILE.EVEN,
            BY_KEYS=False,
            PREPARED=False,
        )
        d_q = tl.dot(d_logits.to(k_tile.dtype), k_tile, d_q, input_precision=KIND.PRECISION)
        lag = lags_of(place, sizes)
        if gradients.d_band is not None and REGION == 1:
            zero = block - (first_row + sizes.q_start) + sizes.reach
            there = (first_row + r < sizes.n_q) & (cols < sizes.n_k)[None, :]
            if D_ENDS:
                store_between_ends(
                    *(gradients.d_band, d_logits, lag, zero, r, c[None, :], there),
                    *(D_LAST, KIND.CAUSAL, TILE.EVEN),
                )
            else:
                cells = skewed(gradients.d_band, zero, r, c[None, :], 2 * sizes.reach)
                tl.store(cells, d_logits, mask=there & within(lag, sizes.reach))
        if BALANCED:
            d_row += part_sums(d_logits)
        if TAIL_SUMS and MASSES and (REGION == 2 or (REGION == 1 and KIND.GRAIN > 0)):
            mass += part_sums(weights)
        if TAIL_SUMS and REGION == 1 and KIND.GRAIN == 0:
            in_left = lag < -reach
            if D_ENDS:
                d_left += part_sums(where_negative(lag + reach, d_logits))
            else:
                d_left += part_sums(tl.where(in_left, d_logits, 0.0))
            if MASSES and LEFT_REST:
                left_mass -= part_sums(tl.where(in_left, 0.0, weights))
            elif MASSES:
                left_mass += part_sums(tl.where(in_left, weights, 0.0))
            if not KIND.CAUSAL:
                d_right += part_sums(tl.where(lag > reach, d_logits, 0.0))
                if MASSES:
                    right_mass += part_sums(tl.where(lag > reach, weights, 0.0))
        if TAIL_SUMS and KIND.SLOPES:
            distance = tl.abs(lag).to(tl.float32)
            in_left = lag < -reach
            left_distance += part_sums(tl.where(in_left, weights * distance, 0.0))
            d_left_slope += part_sums(tl.where(in_left, d_logits * distance, 0.0))
            if not KIND.CAUSAL:
                in_right = lag > reach
                right_distance += part_sums(tl.where(in_right, weights * distance, 0.0))
                d_right_slope += part_sums(tl.where(in_right, d_logits * distance, 0.0))
    left_mass -= mass
    if REGION == 1:
        imbalance = d_row
    else:
        imbalance += d_row
    if TAIL_SUMS and REGION == 0:
        d_left += d_row
    elif TAIL_SUMS and REGION == 2:
        d_right += d_row
        right_mass += mass
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


@triton.jit
def mass_gradients(d_mass, table, d_out, rows, sizes, KIND: tl.constexpr):
    """Stores d_mass = d_out @ table^T; returns those of the table's two ends."""
    LAGS: tl.constexpr = KIND.LAGS
    LAST: tl.constexpr = KIND.VALUE_LAST
    there = rows.there
    d_v = tl.arange(0, KIND.BLOCK_DV)
    whole = d_out.to(tl.float32)
    vector = tl.load(table + d_v, mask=d_v < KIND.D_V, other=0.0)
    d_left = tl.sum(whole * vector[None, :], 1)
    d_right = d_left
    end = d_mass + rows.r * (LAST + 1)
    tl.store(end, d_left, mask=there)
    if LAST > 0 and not KIND.CAUSAL:
        vector = tl.load(table + LAST * KIND.D_V + d_v, mask=d_v < KIND.D_V, other=0.0)
        d_right = tl.sum(whole * vector[None, :], 1)
        tl.store(end + LAST, d_right, mask=there)
    STOP: tl.constexpr = LAST + 1 if KIND.CAUSAL else LAST  # of the lags between the ends
    for start in tl.range(1, STOP, LAGS, num_stages=1):
        lag = start + tl.arange(0, LAGS)
        vectors = tl.load(
            table + lag[:, None] * KIND.D_V + d_v[None, :],
            mask=(lag < STOP)[:, None] & (d_v < KIND.D_V)[None, :],
            other=0.0,
        )
        part = tl.zeros([d_out.shape[0], LAGS], dtype=tl.float32)
        part = table_product(d_out, vectors, part, KIND)
        inside = there[:, None] & (lag < STOP)[None, :]
        cells = (d_mass + lag[None, :]) + rows.r[:, None] * (LAST + 1)
        store_where(cells, part, inside)
    tl.debug_barrier()  # threads read what other threads of this program wrote
    # A load delivers numbers to the threads that need them; sums would have to be exchanged.
    return end_gradients(d_mass, rows.r, there, KIND)


class KeyBlock(NamedTuple):
    """A block of keys: k [n, d], v [n, d_v] and the index of its first key."""

    k: Any
    v: Any
    first: Any


class KeySums(NamedTuple):
    """Sums over the query rows: [n, d] and [n, d_v]."""

    d_k: Any
    d_v: Any


class QueryHead(NamedTuple):
    """One query head h of sequence b."""

    q: Rows
    d_out: Rows
    head: Head
    tails: Any  # Tails of the head; tails of rows are loaded with each tile
    b: Any
    h: Any
    groups: Any  # query heads of one key head


@triton.jit(do_not_specialize=["groups", *VARYING])
def key_kernel(
    q,
    k,
    v,
    d_out,
    statistics,
    bias,
    visible,
    seed,
    far,
    gradients,
    groups,  # not a constant: the compiler would unroll a loop of one and serialise the products
    numbers,
    n_q,
    n_k,
    q_start,
    reach,
    edge,
    KIND: tl.constexpr,
    TILE: tl.constexpr,  # here NEAR is a number of rows
    BY_WARP: tl.constexpr,  # each of four warps holds one stripe of a tile, on a Hopper GPU
):
    """One block of keys of one key head, all query heads of its group."""
    pdl_wait(KIND.CHAINED)
    sizes = sizes_of(numbers, n_q, n_k, q_start, reach, edge)
    rooms = stripe_rooms(TILE.ROWS, TILE.HELD, BY_WARP)
    BLOCK: tl.constexpr = TILE.KEYS
    WIDTH: tl.constexpr = KIND.BLOCK_D
    WIDTH_V: tl.constexpr = KIND.BLOCK_DV
    program = program_of(TILE)
    block = program.block
    n_kv = sizes.n_heads // groups
    b = wide(program.head // n_kv)
    h_kv = wide(program.head % n_kv)
    cols = block * BLOCK + tl.arange(0, BLOCK)
    column = cols.to(tl.int64)
    d = tl.arange(0, WIDTH)
    d_v = tl.arange(0, WIDTH_V)
    on_k = (cols < sizes.n_k)[:, None] & (d < KIND.D)[None, :]
    on_v = (cols < sizes.n_k)[:, None] & (d_v < KIND.D_V)[None, :]
    k_rows = head_rows(k, b, h_kv).ptr + column[:, None] * k.stride_n
    v_rows = head_rows(v, b, h_kv).ptr + column[:, None] * v.stride_n
    k_tile = tl.load(k_rows + d[None, :], mask=on_k, other=0.0)
    v_tile = tl.load(v_rows + d_v[None, :], mask=on_v, other=0.0)
    d_k = tl.zeros([BLOCK, WIDTH], dtype=tl.float32)
    d_value = tl.zeros([BLOCK, WIDTH_V], dtype=tl.float32)
    keys = KeyBlock(k_tile, v_tile, block * BLOCK)
    for g in range(0, groups):
        h = h_kv * groups + g
        rows = row_range(block, near_reach_of(bias, h, sizes, KIND), sizes, KIND, TILE)
        head = head_of(bias, visible, seed, b, h, sizes, KIND)
        tails = head.tails
        if not KIND.PER_ROW:
            tails = load_tails(bias, b, h, 0, True, KIND)
        queries = QueryHead(head_rows(q, b, h), head_rows(d_out, b, h), head, tails, b, h, groups)
        for STEP in tl.static_range(3):
            # First the rows before these keys, for which the keys lie far to the right.
            if STEP == 1 or not (KIND.FAR or TILE.ALL_NEAR or (KIND.CAUSAL and STEP == 0)):
                d_k, d_value = summed_rows(
                    KeySums(d_k, d_value),
                    keys,
                    queries,
                    statistics,
                    bias,
                    gradients.stripes,
                    rooms,
                    rows,
                    program,
                    sizes,
                    KIND,
                    TILE,
                    BY_WARP,
                    2 - STEP,
                )
    d_k *= sizes.scale
    if KIND.FAR:
        m = sizes.n_k - sizes.far_start
        d_k += load_far(far.left.d_k, b, h_kv, cols, m, n_kv, d, KIND.D, KIND.TOKENS)
        d_value += load_far(far.left.d_v, b, h_kv, cols, m, n_kv, d_v, KIND.D_V, KIND.TOKENS)
        if not KIND.CAUSAL:
            back = sizes.n_k - 1 - cols
            d_k += load_far(far.right.d_k, b, h_kv, back, m, n_kv, d, KIND.D, KIND.TOKENS)
            d_value += load_far(far.right.d_v, b, h_kv, back, m, n_kv, d_v, KIND.D_V, KIND.TOKENS)
    place = packed_row(b, h_kv, column, sizes.n_k, n_kv, KIND.TOKENS)[:, None]
    to_k = gradients.d_k + place * KIND.D + d[None, :]
    to_v = gradients.d_v + place * KIND.D_V + d_v[None, :]
    tl.store(to_k, d_k.to(gradients.d_k.dtype.element_ty), mask=on_k)
    tl.store(to_v, d_value.to(gradients.d_v.dtype.element_ty), mask=on_v)


@triton.jit
def summed_rows(
    sums,
    keys,
    queries,
    statistics,
    bias,
    stripes,
    rooms,
    rows,
    program,
    sizes,
    KIND: tl.constexpr,
    TILE: tl.constexpr,
    BY_WARP: tl.constexpr,
    REGION: tl.constexpr,  # where these keys lie as seen from the rows
):
    """dK and dV of a block of keys after the rows of one region of one query head."""
    BLOCK: tl.constexpr = TILE.NEAR if REGION == 1 else TILE.ROWS
    PREPARED: tl.constexpr = statistics.far_lse_delta is not None and REGION != 1
    STRIPED: tl.constexpr = stripes is not None and REGION == 1
    d_k, d_v = sums
    head = queries.head
    bh = queries.b * sizes.n_heads + queries.h
    start, stop = region_of(rows, 2 - REGION)  # rows after these keys see them far to the left
    pairs = statistics.lse_delta + bh * sizes.n_q * 2
    if PREPARED:  # the query kernel included the constants of the tails and the table's ends
        count = program.heads * queries.groups * sizes.n_q
        pairs = statistics.far_lse_delta + ((REGION // 2) * count + bh * sizes.n_q) * 2
    r = tl.arange(0, BLOCK)
    c = tl.arange(0, TILE.KEYS)[:, None]
    d = tl.arange(0, KIND.BLOCK_D)[None, :]
    d_value = tl.arange(0, KIND.BLOCK_DV)[None, :]
    if STRIPED:
        STRIPES: tl.constexpr = TILE.KEYS // STRIPE
        WIDTH: tl.constexpr = stripe_width(TILE)
        length = stripe_length(sizes, KIND, TILE)
        of_head = bh * program.blocks * (TILE.KEYS // WIDTH) * length
        base = stripe_base(keys.first, sizes, KIND, TILE)
        last_rows = tl.zeros([STRIPES, HALF, HALF, 1], dtype=tl.float32)
        if BY_WARP:
            lane, warp = thread_number() % 32, thread_number() // 32
            lane_room = rooms.pairs + (warp * (HALF * stripe_pitch(BLOCK)) + lane) * 4
            if TILE.HELD > 0:
                lane_sums = rooms.held + (warp * TILE.HELD + lane - start) * 4
            else:
                lane_sums = stripes + of_head + (keys.first // STRIPE + warp) * length
                lane_sums += (BLOCK - HALF) + lane - base
            last_even = tl.zeros([STRIPES, HALF, HALF // 2, 1], dtype=tl.float32)
            last_odd = last_even
        else:
            stripe = keys.first // STRIPE + tl.arange(0, STRIPES)[:, None]
            diagonals = stripes + of_head + (stripe * length + r[None, :] - base)
            unfinished = tl.zeros([STRIPES, BLOCK], dtype=tl.float32)
    NEAR_BAND: tl.constexpr = KIND.BAND and REGION == 1
    LINES: tl.constexpr = NEAR_BAND and TILE.LINES
    first_lag = keys.first - (sizes.q_start + (BLOCK - 1))
    if LINES:
        line = first_line(head, first_lag - start, sizes, TILE.KEYS, True)
    for block in tl.range(start, stop, BLOCK, num_stages=TILE.STAGES):
        index = block + r
        first_row = wide(block)
        there = index < sizes.n_q
        q_tile = load_rows(queries.q, block, r[:, None], d, sizes.n_q, KIND.D, TILE.EVEN)
        d_tile = load_rows(
            queries.d_out, block, r[:, None], d_value, sizes.n_q, KIND.D_V, TILE.EVEN
        )
        lse, delta = lse_and_delta(pairs + first_row * 2, r, there, TILE.EVEN)
        norm = 1.0
        if in_base_e(KIND):
            norms = statistics.norm + bh * sizes.n_q + first_row
            norm = tl.load(norms + r, mask=there, other=0.0)[None, :]
        of_tile = Queries(q_tile, d_tile, lse[None, :], norm, delta[None, :])
        tails = queries.tails
        d_mass = MassGradient(statistics.d_mass, 0.0, 0.0)
        if KIND.VALUES and not PREPARED:
            d_mass = MassGradient(mass_rows(d_mass.ptr, bh, first_row, sizes, KIND), 0.0, 0.0)
        OF_ROW: tl.constexpr = (KIND.PER_ROW or KIND.VALUES) and KIND.PRECISION != "ieee"
        if statistics.far_lse_delta is not None and REGION == 1 and OF_ROW:
            # What a row adds on its far sides is what the query kernel subtracted there. In float32
            # the rounding of that difference would show.
            sides = statistics.far_lse_delta + (bh * sizes.n_q + first_row) * 2
            far_lse, far_delta = lse_and_delta(sides, r, there, TILE.EVEN)
            left, d_left = (lse - far_lse)[None, :], (delta - far_delta)[None, :]
            right, d_right = left, d_left
            if not KIND.CAUSAL:
                count = program.heads * queries.groups * sizes.n_q
                far_lse, far_delta = lse_and_delta(sides + count * 2, r, there, TILE.EVEN)
                right = (lse - far_lse)[None, :]
                d_right = (delta - far_delta)[None, :]
            if KIND.PER_ROW:
                tails = Tails(left, 0.0, right, 0.0)
            d_mass = MassGradient(d_mass.ptr, d_left, d_right)
        elif not PREPARED:
            if KIND.PER_ROW:
                tails = load_tails(bias, queries.b, queries.h, index[None, :], there[None, :], KIND)
            if KIND.VALUES:
                left, right = end_gradients(d_mass.ptr, r[None, :], there[None, :], KIND)
                d_mass = MassGradient(d_mass.ptr, left, right)
        place = Place(block, r[None, :], keys.first, c)
        of_rows = head_from(head, first_row, index, tails, sizes, KIND, BY_KEYS=True)
        tile_bias = 0.0
        if LINES:
            tile_bias = line_bias(line, place, True)
            line = next_line(line, -BLOCK)
        elif NEAR_BAND:  # loaded before the products, as in summed_keys
            tile_bias = near_bias(
                of_rows, place, there[None, :], sizes, KIND, TILE.EVEN, OWN_BAND=False
            )
            tile_bias = read_by_now(tile_bias)
        dropped, _, d_logits = tile_gradient(
            of_tile,
            keys.k,
            keys.v,
            tile_bias,
            place,
            of_rows,
            d_mass,
            sizes,
            KIND,
            REGION,
            TILE.EVEN,
            BY_KEYS=True,
            PREPARED=PREPARED,
        )
        d_v = tl.dot(dropped.to(d_tile.dtype), d_tile, d_v, input_precision=KIND.PRECISION)
        d_k = tl.dot(d_logits.to(q_tile.dtype), q_tile, d_k, input_precision=KIND.PRECISION)
        if STRIPED:  # a diagonal of a stripe that starts in one tile ends in the next
            if BY_WARP:
                sums_of_tile = lane_sums + (block * 4 if TILE.HELD > 0 else first_row)
                last_rows, last_even, last_odd = store_stripes(
                    *(sums_of_tile, rooms.pairs, lane_room, d_logits),
                    *(last_rows, last_even, last_odd, TILE.HELD > 0),
                )
            else:
                own, earlier, last_rows = stripe_sums(d_logits, last_rows)
                tl.store(diagonals + block, unfinished + earlier)
                unfinished = own
    if STRIPED:
        nothing = tl.zeros([STRIPES * STRIPE, BLOCK], dtype=tl.float32)
        if BY_WARP:
            store_stripes(
                *(lane_sums + (stop * 4 if TILE.HELD > 0 else stop), rooms.pairs, lane_room),
                *(nothing, last_rows, last_even, last_odd, TILE.HELD > 0),
            )
            if TILE.HELD > 0:
                of_block = stripes + of_head + (keys.first // WIDTH) * length + (start - base)
                store_held(of_block, rooms.held, stop - start + WIDTH, TILE.HELD)
        else:
            own, earlier, last_rows = stripe_sums(nothing, last_rows)
            tl.store(diagonals + stop, unfinished + earlier)
            tl.store(diagonals + (stop + BLOCK), own)
    return KeySums(d_k, d_v)


@triton.jit
def mass_rows(d_mass, bh, first_row, sizes, KIND: tl.constexpr):
    """The address of a block of rows in the gradient of the masses."""
    return d_mass + KIND.MARGIN + (bh * sizes.n_q + first_row) * (KIND.VALUE_LAST + 1)


@triton.jit
def end_gradients(d_mass, r, there, KIND: tl.constexpr):
    """The gradients of the masses at the table's two ends; a causal call has the left one alone."""
    end = d_mass + r * (KIND.VALUE_LAST + 1)
    left = tl.load(end, mask=there, other=0.0)
    right = left
    if not KIND.CAUSAL:
        right = tl.load(end + KIND.VALUE_LAST, mask=there, other=0.0)
    return left, right


@triton.jit
def lse_and_delta(ptr, r, there, EVEN: tl.constexpr):
    """lse and delta of every row of a tile.

    At least 128 numbers are loaded at once, which the compiler distributes over the threads. With
    fewer it lets every thread load all that it needs, which is sixteen times the work; so for few
    rows each number is loaded twice.
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
def stripe_base(first_key, sizes, KIND: tl.constexpr, TILE: tl.constexpr):
    """The row from which the stripes of a block of keys count their diagonals.

    In a window it is the first row of a tile that touches the block (row_range), so that the memory
    of a stripe does not depend on the number of tokens.
    """
    base = first_key * 0
    if KIND.BEFORE and KIND.AFTER:
        first = first_key - sizes.q_start - sizes.after
        base, _ = whole_blocks(first, first, sizes.n_q, TILE.ROWS)
    return base


@triton.jit
def stripe_length(sizes, KIND: tl.constexpr, TILE: tl.constexpr):
    """How many sums a stripe has, in whole tiles; `stripe_length` in launch.py says the same."""
    rows = sizes.n_q
    if KIND.BEFORE and KIND.AFTER:
        rows = tl.minimum(rows, sizes.before + sizes.after + (TILE.KEYS + TILE.ROWS))
    return ((rows + TILE.ROWS - 1) // TILE.ROWS + 2) * TILE.ROWS


@triton.constexpr_function
def stripe_width(tile):
    """Keys of a stripe in memory: those of a warp, or with HELD those of the whole tile."""
    return tile.KEYS if tile.HELD > 0 else STRIPE.value


@triton.jit
def stripe_place(diagonal, TILE: tl.constexpr):
    """The index in a stripe of the sum of diagonal r - c: row stripe_base + r, key c of it."""
    place = diagonal + (TILE.ROWS + HALF)
    if TILE.HELD > 0:
        place = diagonal + stripe_width(TILE)
    return place


@triton.constexpr_function
def stripe_pitch(rows):
    """Numbers from one key's row to the next in a warp's shared memory.

    A row holds HALF numbers of the previous tile, and those of this tile's rows. That is 8 more
    than a multiple of 32, so that a warp's stores of two numbers have no bank conflicts.
    """
    return rows + HALF.value


class StripeRooms(NamedTuple):
    """Addresses of shared memory in which four warps sum the diagonals of their stripes.

    With HELD, the sums of all tiles stay in shared memory until the last one. Then the program adds
    up its four stripes, so that it stores a quarter of what the stripes would store by themselves,
    all of which the stripe kernel reads again.
    """

    pairs: Any  # float32 [warp, key, HALF + rows]: one tile (store_stripes)
    held: Any  # float32 [warp, HELD]: the sums


@triton.jit
def stripe_rooms(ROWS: tl.constexpr, HELD: tl.constexpr, BY_WARP: tl.constexpr):
    """The rooms that a program needs; 0 stands for the address of one that it does not."""
    pairs = 0
    held = 0
    if BY_WARP:
        PAIRS: tl.constexpr = 4 * HALF * WARPS * stripe_pitch(ROWS)
        pairs = tl.inline_asm_elementwise(
            *(reserve("stripes", PAIRS), "=r,r", [0]), dtype=tl.int32, is_pure=False, pack=1
        )
    if HELD > 0:
        held = tl.inline_asm_elementwise(
            *(reserve("sums", 4 * WARPS * HELD), "=r,r", [0]),
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    return StripeRooms(pairs, held)


@triton.constexpr_function
def collect_held(held):
    """Instructions that add up sum $2 of the four stripes, and store it at $4 if it is below $3.

    $1 is the address of sum $2 in the first warp's room. The diagonal with index $2 in the last
    warp's stripe has an index that is smaller by STRIPE for each warp before it, whose keys are
    STRIPE earlier. A stripe in which that index would be negative does not touch the diagonal.
    """
    lines = [
        ".reg .pred p, q; .reg .f32 sum, x;",
        "setp.lt.s32 q, $2, $3; mov.f32 sum, 0f00000000;",
    ]
    for warp in range(WARPS.value):
        before = STRIPE.value * (WARPS.value - 1 - warp)
        lines.append(f"setp.ge.and.s32 p, $2, {before}, q; mov.f32 x, 0f00000000;")
        lines.append(f"@p ld.shared.f32 x, [$1+{4 * (warp * held - before)}];")
        lines.append("add.f32 sum, sum, x;")
    return "{ " + " ".join(lines) + " @q st.global.f32 [$4], sum; mov.u32 $0, 0; }"


@triton.jit
def store_held(target, held, count, HELD: tl.constexpr):
    """Stores the `count` sums of a block of keys, added up over the stripes of all warps."""
    tl.debug_barrier()  # of all warps
    for first in tl.range(0, count, 32 * WARPS, num_stages=1):
        place = first + thread_number()
        tl.inline_asm_elementwise(
            collect_held(HELD),
            "=r,r,r,r,l",
            [held + place * 4, place, count, (target + place).to(tl.int64)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    tl.debug_barrier()  # before another query head's sums are stored there


@triton.constexpr_function
def collect_stripe(rows, held):
    """Instructions by which a warp adds up the diagonals of its stripe and stores the sums.

    $1 is the address at which the warp's room begins, and $2 that of its sums, in shared memory if
    they are `held`, else in global memory. Both include the lane as an offset. Lane l adds up the
    diagonals l, l + 32, ... of the rows.
    """
    pitch, counts = stripe_pitch(rows), range(rows // 32)
    lines = [".reg .f32 x;", *(f".reg .f32 sum{i};" for i in counts), "bar.warp.sync 0xffffffff;"]
    for i in counts:
        lines.append(f"ld.shared.f32 sum{i}, [$1+{128 * i}];")
        for key in range(1, HALF.value):
            place = 4 * key * (pitch + 1) + 128 * i
            lines.append(f"ld.shared.f32 x, [$1+{place}]; add.f32 sum{i}, sum{i}, x;")
    space = "shared" if held else "global"
    lines += [f"st.{space}.f32 [$2+{128 * i}], sum{i};" for i in counts]
    return "{ " + " ".join(lines) + " bar.warp.sync 0xffffffff; mov.u32 $0, 0; }"


@triton.jit
def store_pairs(at, even, odd):
    """Stores two numbers side by side in shared memory, at each of these addresses."""
    tl.inline_asm_elementwise(
        *("st.shared.v2.f32 [$1], {$2, $3}; mov.u32 $0, 0;", "=r,r,f,f", [at, even, odd]),
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def store_stripes(
    lane_sums, room, lane_room, d_logits, last_rows, last_even, last_odd, HELD: tl.constexpr
):
    """Stores the diagonals of a tile [keys, rows] of dS, summed within each stripe, at `lane_sums`.

    Each warp has a stripe and its own room in shared memory, [key, HALF + rows], so that it waits
    for no other warp. As in stripe_sums, pairs of keys are added first, which leaves HALF keys. The
    row of each key begins with the last HALF numbers of the previous tile. A diagonal is then a
    line through the room that moves by one number from each key to the next.
    """
    KEYS: tl.constexpr = d_logits.shape[0]
    ROWS: tl.constexpr = d_logits.shape[1]
    STRIPES: tl.constexpr = KEYS // STRIPE
    PITCH: tl.constexpr = stripe_pitch(ROWS)
    pairs, last_rows = paired(d_logits, last_rows)
    halves = tl.reshape(pairs, [STRIPES, HALF, HALF // 2, 2, ROWS // HALF])
    even, odd = tl.split(tl.permute(halves, [0, 1, 2, 4, 3]))
    key = tl.arange(0, STRIPES * HALF)
    at = tl.reshape(key, [STRIPES, HALF, 1, 1]) * PITCH
    at = at + tl.reshape(tl.arange(0, HALF // 2) * 2, [1, 1, HALF // 2, 1])
    at = room + at * 4
    store_pairs(at, last_even, last_odd)
    step = tl.reshape(tl.arange(0, ROWS // HALF) * HALF + HALF, [1, 1, 1, ROWS // HALF])
    store_pairs(at + step * 4, even, odd)
    ADDRESS: tl.constexpr = "r" if HELD else "l"
    if not HELD:
        lane_sums = lane_sums.to(tl.int64)
    tl.inline_asm_elementwise(
        *(collect_stripe(ROWS, HELD), "=r,r," + ADDRESS, [lane_room, lane_sums]),
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
    _, last_even = delayed(even, last_even)
    _, last_odd = delayed(odd, last_odd)
    return last_rows, last_even, last_odd


@triton.jit
def paired(d_logits, last_rows):
    """The sums of a thread's two keys on each diagonal, [stripes, key, row % HALF, row // HALF].

    On one diagonal, the rows of the lower key are HALF before those of the upper one, so the lower
    key's rows are delayed by so many: `last_rows` are those of the tile before, and those of this
    tile are returned for the next.
    """
    ROWS: tl.constexpr = d_logits.shape[1]
    STRIPES: tl.constexpr = d_logits.shape[0] // STRIPE
    cells = tl.reshape(d_logits, [STRIPES, 2, HALF, ROWS // HALF, HALF])
    lower, upper = tl.split(tl.permute(cells, [0, 2, 4, 3, 1]))
    lower, last_rows = delayed(lower, last_rows)
    return lower + upper, last_rows


@triton.jit
def stripe_sums(d_logits, last_rows):
    """The diagonals of a tile [keys, rows] of dS, summed within each stripe: two [stripes, rows].

    The two keys of a thread are added first (paired). Then the row of key c = 0..7 is rotated by c
    places. At t the first result holds the cells with r - c = t, the second those with
    r - c = t - ROWS, whose diagonals started in the tile before.
    """
    KEYS: tl.constexpr = d_logits.shape[0]
    ROWS: tl.constexpr = d_logits.shape[1]
    STRIPES: tl.constexpr = KEYS // STRIPE
    pairs, last_rows = paired(d_logits, last_rows)
    pairs = tl.reshape(tl.permute(pairs, [0, 1, 3, 2]), [STRIPES * HALF * ROWS])
    # The cells are gathered as one row, [key, stripe, t], of which a thread gets all keys.
    place = tl.arange(0, HALF * STRIPES * ROWS)
    c = place // (STRIPES * ROWS)
    stripe = (place // ROWS) % STRIPES
    t = place % ROWS
    turned = tl.gather(pairs, (stripe * HALF + c) * ROWS + (t + c) % ROWS, 0)
    turned = tl.reshape(turned, [HALF, STRIPES * ROWS])
    is_own = tl.reshape(t + c, [HALF, STRIPES * ROWS]) < ROWS
    earlier = tl.sum(tl.where(is_own, 0.0, turned), 0)
    own = tl.sum(turned, 0) - earlier
    return tl.reshape(own, [STRIPES, ROWS]), tl.reshape(earlier, [STRIPES, ROWS]), last_rows


@triton.jit
def delayed(x, first):
    """x shifted by one along its last axis, with `first` shifted in; and the element shifted out.

    It recurses on the odd elements: they move to the even places, and the even elements to the odd
    places. So a thread that holds the whole last axis exchanges nothing with others.
    """
    moved = first
    last = x
    if x.shape[3] > 1:
        places = tl.reshape(x, [x.shape[0], x.shape[1], x.shape[2], x.shape[3] // 2, 2])
        even, odd = tl.split(places)
        to_even, last = delayed(odd, first)
        moved = tl.reshape(tl.join(to_even, even), x.shape)
    return moved, last
