"""The forward kernel: one online softmax over the keys, the bias looked up in near tiles alone."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from whence.kernels.fused.device.arguments import VARYING
from whence.kernels.fused.device.tile import (
    LOG2E,
    Place,
    RowBlock,
    columns,
    dropout_keeps,
    exponential,
    far_cells,
    far_line,
    head_from,
    head_of,
    head_rows,
    in_base_e,
    in_two,
    key_range,
    lags_of,
    left_end,
    load_far,
    load_in_place,
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
    product_in_parts,
    program_of,
    region_of,
    right_end,
    rounded_to,
    rounding_residual,
    row_lse,
    rows_there,
    sizes_of,
    slopes_by_cell,
    store_between_ends,
    store_where,
    table_product,
    unit_of,
    visible_cells,
    wide,
)


class Softmax(NamedTuple):
    """The state of an online softmax: sums over the keys so far, relative to exponential(top)."""

    acc: Any  # [m, d_v]: weighted values
    top: Any  # [m]: the largest logit
    total: Any  # [m]: weights
    left_mass: Any  # [m]: weights beyond the left end of the value table
    right_mass: Any


class FarState(NamedTuple):
    """Output and log-sum-exp, in base 2, of the far keys of both sides."""

    out_left: Any
    lse_left: Any
    out_right: Any
    lse_right: Any


@triton.jit(do_not_specialize=[*VARYING])
def forward_kernel(
    q,
    k,
    v,
    bias,
    visible,
    seed,
    table,
    far,
    product,
    result,
    numbers,
    n_q,
    n_k,
    q_start,
    reach,
    edge,
    KIND: tl.constexpr,
    TILE: tl.constexpr,
    PRODUCT_D: tl.constexpr,  # head size of the product that the band is; 0 if the band is given
):
    """One block of query rows of one head."""
    pdl_wait(KIND.CHAINED)
    sizes = sizes_of(numbers, n_q, n_k, q_start, reach, edge)
    ROWS: tl.constexpr = TILE.ROWS
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
    d = tl.arange(0, KIND.BLOCK_D)
    d_v = tl.arange(0, KIND.BLOCK_DV)
    queries = tl.load(
        head_rows(q, b, h).ptr + row[:, None] * q.stride_n + d[None, :],
        mask=there[:, None] & (d < KIND.D)[None, :],
        other=0.0,
    )
    k_head = head_rows(k, b, h // KIND.GROUPS)
    v_head = head_rows(v, b, h // KIND.GROUPS)
    if PRODUCT_D > 0:
        tails = product_band(
            product, queries, bias, b, h, first_row, r, there, sizes, KIND, PRODUCT_D
        )
    else:
        tails = load_tails(bias, b, h, index, there, KIND)
    head = head_of(bias, visible, seed, b, h, sizes, KIND)
    head = head_from(head, first_row, index, columns(tails, KIND), sizes, KIND, BY_KEYS=False)
    rows = RowBlock(block * ROWS, r, there, tails)
    mass = result.mass
    if KIND.VALUES:
        mass += (bh * sizes.n_q + first_row) * (KIND.VALUE_LAST + 1)
    keys = key_range(block, near_reach_of(bias, h, sizes, KIND), sizes, KIND, TILE)
    state = empty_softmax(ROWS, KIND)
    if KIND.FAR:
        state = far_softmax(far_state(far, b, h, index, tails, sizes, KIND))
    for REGION in tl.static_range(3):
        if REGION == 1 or not (KIND.FAR or TILE.ALL_NEAR or (KIND.CAUSAL and REGION == 2)):
            state = attended(
                state, queries, k_head, v_head, head, mass, rows, keys, sizes, KIND, TILE, REGION
            )
    safe = tl.where(state.total == 0.0, 1.0, state.total)
    divisor = safe
    if KIND.DROPOUT:
        divisor = safe * (1.0 - sizes.dropout)
    out = state.acc * (1.0 / divisor)[:, None]
    lse, norm = row_lse(state.top, state.total, KIND)
    if KIND.VALUES:
        of_head = table.ptr + h * table.stride_h
        left_mass = state.left_mass / divisor
        right_mass = state.right_mass / divisor
        if left_is_rest(KIND):
            left_mass = tl.where(state.total == 0.0, 0.0, 1.0)
        out = with_table(
            *(out, v.ptr.dtype.element_ty, mass, of_head, lse, norm, left_mass, right_mass),
            *(rows, keys, sizes, KIND),
        )
    of_rows = result.lse + bh * sizes.n_q + row
    tl.store(of_rows, lse, mask=there)
    if in_base_e(KIND):
        tl.store(of_rows + program.heads * sizes.n_q, norm, mask=there)
    on_out = there[:, None] & (d_v < KIND.D_V)[None, :]
    packed = packed_row(b, h, row, sizes.n_q, sizes.n_heads, KIND.TOKENS)
    cells = packed[:, None] * KIND.D_V + d_v[None, :]
    rounded = rounded_to(out, result.out.dtype.element_ty)
    tl.store(result.out + cells, rounded, mask=on_out)
    if result.residual is not None:
        residual = rounding_residual(out, rounded)
        tl.store(result.residual + cells, residual, mask=on_out)


@triton.constexpr_function
def left_is_rest(kind):
    """Whether the mass at the left end is computed as 1 minus the masses of all other lags.

    Not in float32, where the rounding of that difference would show.
    """
    exact = kind.PRECISION == "ieee"
    return kind.CAUSAL and not (kind.DROPOUT or kind.RAW_BAND or exact)


@triton.jit
def empty_softmax(ROWS: tl.constexpr, KIND: tl.constexpr):
    """The state before any key."""
    WIDTH: tl.constexpr = KIND.BLOCK_DV
    return Softmax(
        tl.zeros([ROWS, WIDTH], dtype=tl.float32),
        tl.full([ROWS], float("-inf"), dtype=tl.float32),
        tl.zeros([ROWS], dtype=tl.float32),
        tl.zeros([ROWS], dtype=tl.float32),
        tl.zeros([ROWS], dtype=tl.float32),
    )


@triton.jit
def attended(
    state,
    q,  # [m, d]
    k,
    v,
    head,
    mass,
    rows,
    keys,
    sizes,
    KIND: tl.constexpr,
    TILE: tl.constexpr,
    REGION: tl.constexpr,  # 0 far to the left, 1 near, 2 far to the right
):
    """The softmax after the keys of one region.

    With a value table, the near tiles also store their logits at `mass`, by lag.
    """
    BLOCK: tl.constexpr = TILE.NEAR if REGION == 1 else TILE.KEYS
    NEAR_BAND: tl.constexpr = KIND.BAND and REGION == 1
    LEFT_EDGE: tl.constexpr = masked_left(KIND, REGION)
    RIGHT_EDGE: tl.constexpr = masked_right(KIND, REGION)
    MASKED: tl.constexpr = KIND.KEYS or KIND.SEGMENTS or LEFT_EDGE or RIGHT_EDGE or not TILE.EVEN
    acc, top, total, left_mass, right_mass = state
    start, stop = region_of(keys, REGION)
    d = tl.arange(0, KIND.BLOCK_D)
    d_v = tl.arange(0, KIND.BLOCK_DV)
    c = tl.arange(0, BLOCK)
    r = rows.r
    there = rows.there[:, None]
    row = (rows.first_row + r)[:, None]
    first = rows.first_row + sizes.q_start
    scale = sizes.scale * unit_of(KIND)
    STARTED: tl.constexpr = KIND.STARTED and REGION == 1
    # Where nothing is added to the products, scaling them and subtracting the maximum is one FMA,
    # which saves an operation in each cell. The maximum is then found among the products. A value
    # table needs the logits of near tiles.
    ADDED: tl.constexpr = (not STARTED or KIND.VALUES) if REGION == 1 else KIND.SLOPES
    PLAIN: tl.constexpr = not (ADDED or MASKED or KIND.NEGATIVE)
    for block in tl.range(start, stop, BLOCK, num_stages=TILE.STAGES):
        col = (block + c)[None, :]
        k_tile = load_rows(k, block, c[None, :], d[:, None], sizes.n_k, KIND.D, TILE.EVEN)
        place = Place(rows.first_row, r[:, None], block, c[None, :])
        bias = 0.0
        if NEAR_BAND:
            bias = near_bias(head, place, there, sizes, KIND, TILE.EVEN, OWN_BAND=True)
        logits = logits_of(q, k_tile, bias, STARTED, KIND)
        factor = scale  # by which the logits are still to be multiplied
        if not PLAIN:
            logits *= scale
            factor = 1.0
        shift = 0.0
        if NEAR_BAND and not STARTED:
            logits += bias
        if KIND.TAILS and REGION != 1 and slopes_by_cell(KIND):
            logits += far_cells(head.tails, place, sizes, REGION)
        elif KIND.TAILS and REGION != 1:
            line = far_line(rows.tails, first - block, r, REGION, KIND.SLOPES, LEVEL=False)
            shift = line.shift
            if KIND.SLOPES and (KIND.PER_ROW or KIND.RAW_BAND):
                logits += line.tilt[:, None] * c.to(tl.float32)[None, :]
            elif KIND.SLOPES:
                logits += (line.tilt * c.to(tl.float32))[None, :]
        if MASKED:
            seen = visible_cells(row, col, head, sizes, KIND, LEFT_EDGE, RIGHT_EDGE, TILE.EVEN)
            logits = tl.where(seen, logits, float("-inf"))
        higher = tl.maximum(top, tl.max(logits, 1) * factor + shift)
        base = tl.where(higher == float("-inf"), 0.0, higher)
        weights = exponential(logits * factor - (base - shift)[:, None], KIND)
        shrink = exponential(top - base, KIND)
        weight = tl.sum(weights, 1)
        total = total * shrink + weight
        top = higher
        if KIND.DROPOUT:
            # The factor 1 / (1 - dropout) is applied after the last key. Here the highest weight of
            # a row is 1, which half precision represents exactly, unlike that factor.
            kept = dropout_keeps(head.seed, row, col, sizes.dropout)
            weights = tl.where(kept, weights, 0.0)
            if KIND.VALUES and REGION != 1:
                weight = tl.sum(weights, 1)
        if KIND.VALUES:
            lag = lags_of(place, sizes)
            if not left_is_rest(KIND):
                left_mass = left_mass * shrink
                if REGION == 0:
                    left_mass += weight
                if REGION == 1:
                    in_left = lag <= left_end(KIND.VALUE_LAST, KIND.CAUSAL)
                    left_mass += tl.sum(tl.where(in_left, weights, 0.0), 1)
            if not KIND.CAUSAL:
                right_mass = right_mass * shrink
                if REGION == 2:
                    right_mass += weight
                if REGION == 1:
                    in_right = lag >= right_end(KIND.VALUE_LAST, KIND.CAUSAL)
                    right_mass += tl.sum(tl.where(in_right, weights, 0.0), 1)
            if REGION == 1:
                if KIND.DROPOUT:
                    logits = tl.where(weights > 0.0, logits, float("-inf"))
                zero = block - first + sizes.value_reach
                # In decoding a tile has rows that do not exist.
                store_between_ends(
                    *(mass, logits, lag, zero, r[:, None], c[None, :], there & (col < sizes.n_k)),
                    *(KIND.VALUE_LAST, KIND.CAUSAL, TILE.EVEN and not KIND.RAW_BAND),
                )
        v_tile = load_rows(v, block, c[:, None], d_v[None, :], sizes.n_k, KIND.D_V, TILE.EVEN)
        acc = acc * shrink[:, None]
        acc = tl.dot(weights.to(v_tile.dtype), v_tile, acc, input_precision=KIND.PRECISION)
    return Softmax(acc, top, total, left_mass, right_mass)


@triton.jit
def far_state(far, b, h, rows, tails, sizes, KIND: tl.constexpr):
    """What a plain kernel computed for the far keys of these rows.

    On the left, row i of the call is row i - far_start of the results; on the right, the order of
    all rows is reversed.
    """
    m = sizes.n_q - sizes.far_start
    d_v = tl.arange(0, KIND.BLOCK_DV)
    index = rows - sizes.far_start
    out_left = load_far(far.left.out, b, h, index, m, sizes.n_heads, d_v, KIND.D_V, KIND.TOKENS)
    out_right = out_left * 0.0
    if not KIND.CAUSAL:
        index = m - 1 - rows
        out_right = load_far(
            far.right.out, b, h, index, m, sizes.n_heads, d_v, KIND.D_V, KIND.TOKENS
        )
    lse_left, lse_right = far_lse(far, b, h, rows, tails, sizes, KIND)
    return FarState(out_left, lse_left, out_right, lse_right)


@triton.jit
def far_lse(far, b, h, rows, tails, sizes, KIND: tl.constexpr):
    """The log-sum-exps of both sides in base 2, with the tails; -inf for rows without far keys."""
    m = sizes.n_q - sizes.far_start
    lse_row = (b * sizes.n_heads + h) * m
    index = rows - sizes.far_start
    there = (index >= 0) & (index < m)
    left = tl.load(far.left.lse + lse_row + index, mask=there, other=float("-inf"))
    left = left * LOG2E + tails.left
    right = tl.full(left.shape, float("-inf"), dtype=tl.float32)
    if not KIND.CAUSAL:
        index = m - 1 - rows
        there = (index >= 0) & (index < m)
        right = tl.load(far.right.lse + lse_row + index, mask=there, other=float("-inf"))
        right = right * LOG2E + tails.right
    return left, right


@triton.jit
def far_softmax(far):
    """The state after the far keys of both sides."""
    top = tl.maximum(far.lse_left, far.lse_right)
    base = tl.where(top == float("-inf"), 0.0, top)
    left = tl.exp2(far.lse_left - base)
    right = tl.exp2(far.lse_right - base)
    acc = left[:, None] * far.out_left + right[:, None] * far.out_right
    return Softmax(acc, top, left + right, left, right)


@triton.jit
def product_band(
    product, q, bias, b, h, first_row, r, there, sizes, KIND: tl.constexpr, D: tl.constexpr
):
    """Stores scale * query @ factor^T of a block of rows, laid out, and returns its tails.

    The tails are the constants at the ends of the table, stored as the caller would give them, in
    base e. They are computed separately and are not in the band: without them, a table whose reach
    is a power of two needs no further step of the product for a single lag.
    """
    LAGS: tl.constexpr = KIND.LAGS
    OF_Q: tl.constexpr = product.query.ptr is None  # the query is q
    PIECE: tl.constexpr = KIND.BLOCK_D if OF_Q else (64 if D > 32 else 32)
    stride = product.query.stride_n
    if not OF_Q:
        query = head_rows(product.query, b, h).ptr + first_row * stride
    factor = product.factor.ptr + h * product.factor.stride_h
    LAST: tl.constexpr = KIND.LAST
    left = tl.zeros(r.shape, dtype=tl.float32)
    right = tl.zeros(r.shape, dtype=tl.float32)
    for start in tl.static_range(0, D, PIECE):
        d = start + tl.arange(0, PIECE)
        on = there[:, None] & (d < D)[None, :]
        piece = q
        if not OF_Q:
            piece = tl.load(query + r[:, None] * stride + d[None, :], mask=on, other=0.0)
        whole = piece.to(tl.float32)
        first_lag = tl.load(factor + d, mask=d < D, other=0.0)
        left += tl.sum(whole * first_lag[None, :], 1)
        if not KIND.CAUSAL:
            last_lag = tl.load(factor + LAST * D + d, mask=d < D, other=0.0)
            right += tl.sum(whole * last_lag[None, :], 1)
    left *= product.scale
    right *= product.scale
    tails = bias.tails + b * bias.tail_b + h * bias.tail_h + first_row * bias.tail_q
    tl.store(tails + r * bias.tail_q, left, mask=there)
    if not KIND.CAUSAL:
        tl.store(tails + r * bias.tail_q + 2 * bias.tail_kind, right, mask=there)
    band = bias.band + KIND.MARGIN + b * bias.band_b + h * bias.band_h + first_row * bias.band_q
    STOP: tl.constexpr = LAST + 1 if KIND.CAUSAL else LAST  # of the lags between the ends
    for lag_start in tl.range(1, STOP, LAGS, num_stages=1):
        lag = lag_start + tl.arange(0, LAGS)
        total = tl.zeros([r.shape[0], LAGS], dtype=tl.float32)
        for start in tl.static_range(0, D, PIECE):
            column = start + tl.arange(0, PIECE)[None, :]
            part = piece  # the only one, which the loop above loaded
            if D > PIECE:
                row = query + r[:, None] * stride + column
                part = tl.load(row, mask=there[:, None] & (column < D), other=0.0)
            entry = factor + lag[:, None] * D + column
            entries = tl.load(entry, mask=(lag < STOP)[:, None] & (column < D), other=0.0)
            total = table_product(part, entries, total, KIND)
        inside = there[:, None] & (lag < STOP)[None, :]
        cells = (band + lag[None, :]) + r[:, None] * (LAST + 1)
        store_where(cells, total * (product.scale * unit_of(KIND)), inside)
    tl.debug_barrier()  # threads read what other threads of this program wrote
    # A load delivers numbers to the threads that need them; sums would have to be exchanged.
    return load_tails(bias, b, h, first_row + r, there, KIND)


@triton.jit
def with_table(
    out,
    dtype: tl.constexpr,  # of the call
    mass,  # address of the first row's masses
    table,  # address of the head's table
    lse,
    norm,
    left_mass,
    right_mass,
    rows,
    keys,
    sizes,
    KIND: tl.constexpr,
):
    """out + mass @ table: the output with the part of the value table.

    At `mass` there are the logits that near tiles stored; the masses replace them. The mass of a
    lag is the probability at that lag, and at the table's two ends also that of all lags beyond. If
    `left_is_rest`, left_mass is given as the mass of all lags, from which the others are taken.
    """
    LAGS: tl.constexpr = KIND.LAGS
    LAST: tl.constexpr = KIND.VALUE_LAST
    STOP: tl.constexpr = LAST + 1 if KIND.CAUSAL else LAST  # of the lags between the ends
    first = rows.first_row + sizes.q_start
    low = keys.low
    high = tl.minimum(keys.high, sizes.n_k)
    r = rows.r
    there = rows.there
    d_v = tl.arange(0, KIND.BLOCK_DV)
    tl.debug_barrier()  # threads read what other threads of this program wrote
    for start in tl.range(1, STOP, LAGS, num_stages=1):
        lag = start + tl.arange(0, LAGS)
        cols = first + r[:, None] + (lag - sizes.value_reach)[None, :]
        places = (mass + lag[None, :]) + r[:, None] * (LAST + 1)
        inside = there[:, None] & (lag < STOP)[None, :]
        nothing = float("-inf")
        index = tl.where(inside, cols - low, -1)
        tile = load_in_place(places, nothing, nothing, index, high - low, True)
        masses = exponential(tile - lse[:, None], KIND)
        if in_base_e(KIND):
            masses *= norm[:, None]
        if KIND.DROPOUT:
            masses = masses / (1.0 - sizes.dropout)
        if left_is_rest(KIND):
            left_mass -= tl.sum(masses, 1)
        tl.debug_barrier()  # a cell may be loaded by several threads
        store_where(places, masses, inside)
        vectors = tl.load(
            table + lag[:, None] * KIND.D_V + d_v[None, :],
            mask=(lag < STOP)[:, None] & (d_v < KIND.D_V)[None, :],
            other=0.0,
        )
        leading, lower = in_two(vectors, dtype)
        out = product_in_parts(masses, leading, lower, out, KIND)
    vector = tl.load(table + d_v, mask=d_v < KIND.D_V, other=0.0)
    out += left_mass[:, None] * vector[None, :]
    if not KIND.CAUSAL:
        vector = tl.load(table + LAST * KIND.D_V + d_v, mask=d_v < KIND.D_V, other=0.0)
        out += right_mass[:, None] * vector[None, :]
        if LAST == 0:
            left_mass += right_mass
        else:
            tl.store(mass + r * (LAST + 1) + LAST, right_mass, mask=there)
    tl.store(mass + r * (LAST + 1), left_mass, mask=there)
    return out
