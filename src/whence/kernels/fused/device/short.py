"""Short sequences: one tile holds all keys of a head, so a row's softmax needs a single step.

The forward kernel reads q, k and v and keeps nothing for backward. The backward kernel computes
the softmax again from q, k and v, so that it needs neither the output nor the log-sum-exp: with a
whole row in hand, delta = rowsum(P * dP) is one sum in float32.

lag = key - query; query row i stands at key position q_start + i. The band of a head is laid out
from lag -edge to lag edge, in the base of the logits, with its tails beyond its reach and -inf
outside of the window, so a cell needs one load.

The gradient of a band is the sum of each diagonal of dS. A program stores the sums of its own tile,
and further kernels add them up over the batch in a fixed order, without atomics.

A band may also be a product of q with a table of vectors, one for each lag, and a second table may
add its vectors to the values. Both are clipped: their ends serve all lags beyond. Two functions
then go between a row's cells, one for each key, and its places in a table, one for each lag:
`spread_over_keys`, and `summed_by_lag`, which is its transpose.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from whence.kernels.fused.device.arguments import VARYING
from whence.kernels.fused.device.tile import (
    after_dropout,
    dropout_keeps,
    exponential,
    in_two,
    packed_row,
    product_in_parts,
    sizes_of,
    third_part,
    unit_of,
)


class Operands(NamedTuple):
    """The inputs of both kernels."""

    q: Any  # Rows
    k: Any
    v: Any
    bias: Any  # Bias: the laid-out band
    visible: Any  # Visible
    seed: Any  # of dropout
    product: Any  # Product, of q with a table; or None
    table: Any  # Table of values; or None


class Sums(NamedTuple):
    """What the backward kernel sums over its steps; 0.0 for a sum that is not wanted."""

    d_k: Any  # [key, d], not yet multiplied by the scale
    d_v: Any  # [key, d_v]
    right: Any  # [key]: diagonals c - r = 0..N - 1 of dS
    left: Any  # [key]: diagonals c - r = -N..-1
    d_factor: Any  # [lag, d]: the gradient of the product's table
    d_table: Any  # [lag, d_v]


class HeadGradients(NamedTuple):
    """The gradients that the backward kernel writes, [b, h, n, d]."""

    d_q: Any
    d_k: Any
    d_v: Any
    d_factor: Any  # float32 [runs, h, lag, d]: the table's of every run of sequences; or None
    d_table: Any


class Short(NamedTuple):
    """The compile-time constants of these kernels besides KIND and TILE."""

    ROW_BLOCKS: int  # of a sequence
    RUN: int  # sequences of one program (the last program may have fewer); more than one only if
    # GROUPS is 1, and with DIAGONALS only if ROW_BLOCKS is 1
    DIAGONALS: bool  # the sums of diagonals are wanted
    TRIANGLE: bool  # row i attends to no key beyond i: read by the forward kernel alone
    FACTOR: bool = False  # the gradient of a product is wanted; GROUPS is 1 if there is a table
    PARTS: int = 2  # numbers of the call's dtype that represent a float32 mass (mass_parts)


@triton.jit
def load_head(
    x,
    b,
    h,
    first,
    n,
    LENGTH: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    EVEN: tl.constexpr,
):
    """Rows of one head from `first` on as a tile [LENGTH, BLOCK_D], zeros beyond its edges."""
    r = first + tl.arange(0, LENGTH)[:, None]
    d = tl.arange(0, BLOCK_D)[None, :]
    place = x.ptr + b * x.stride_b + h * x.stride_h + r.to(tl.int64) * x.stride_n + d
    if EVEN and D == BLOCK_D:
        tile = tl.load(place)
    else:
        tile = tl.load(place, mask=(r < n) & (d < D), other=0.0)
    return tile


@triton.jit
def store_head(
    ptr, tile, b, h, first, n, n_heads, D: tl.constexpr, TOKENS: tl.constexpr, EVEN: tl.constexpr
):
    """Store a tile as rows of one head, packed as [b, h, n, d] or with TOKENS as [b, n, h, d]."""
    r = first + tl.arange(0, tile.shape[0])[:, None]
    d = tl.arange(0, tile.shape[1])[None, :]
    # Offsets within a sequence are small: 64 bits for the head's start alone save registers.
    step = n_heads * D if TOKENS else D
    place = ptr + packed_row(b, h, 0, n, n_heads, TOKENS) * D + (r * step + d)
    if EVEN and tile.shape[1] == D:
        tl.store(place, tile.to(ptr.dtype.element_ty))
    else:
        tl.store(place, tile.to(ptr.dtype.element_ty), mask=(r < n) & (d < D))


@triton.jit
def store_keys(ptr, tile, b, h, D: tl.constexpr, sizes, KIND: tl.constexpr, TILE: tl.constexpr):
    """Store a gradient of all keys of one key head."""
    n_kv = sizes.n_heads // KIND.GROUPS
    store_head(ptr, tile, b, h, 0, sizes.n_k, n_kv, D, KIND.TOKENS, TILE.EVEN)


@triton.jit
def load_table(
    x, h, LAST: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, KIND: tl.constexpr
):
    """The table of one head [lag, d] in float32, zeros beyond its edges."""
    lag = tl.arange(0, KIND.LAGS)[:, None]
    d = tl.arange(0, BLOCK_D)[None, :]
    place = x.ptr + h * x.stride_h + lag * D + d
    return tl.load(place, mask=(lag <= LAST) & (d < D), other=0.0)


@triton.jit
def load_tables(operands, h, DTYPE: tl.constexpr, KIND: tl.constexpr):
    """The product's table and the value table, in two parts; 0 for one that a call does not have.

    The product's table needs both parts. The value table needs only the first, except for the
    gradient of a shared band.
    """
    factor = 0
    values = 0
    if KIND.ENDS:
        x = operands.product.factor
        factor = in_two(load_table(x, h, KIND.LAST, KIND.D, KIND.BLOCK_D, KIND), DTYPE)
    if KIND.VALUES:
        x = operands.table
        table = load_table(x, h, KIND.VALUE_LAST, KIND.D_V, KIND.BLOCK_DV, KIND)
        values = in_two(table, DTYPE)
    return factor, values


@triton.jit
def store_table(ptr, tile, part, LAST: tl.constexpr, D: tl.constexpr):
    """Store the gradient of a table that one program summed."""
    lag = tl.arange(0, tile.shape[0])[:, None]
    d = tl.arange(0, tile.shape[1])[None, :]
    place = ptr + part * ((LAST + 1) * D) + (lag * D + d)
    tl.store(place, tile, mask=(lag <= LAST) & (d < D))


@triton.jit
def transposed_product_in_parts(numbers, rows, sums, KIND: tl.constexpr, PARTS: tl.constexpr):
    """sums + numbers^T @ rows, of a number in float32 for each row and lag."""
    leading, lower = in_two(numbers, rows.dtype)
    if PARTS == 3:
        sums = tl.dot(tl.trans(third_part(numbers, leading, lower)), rows, sums)
    if KIND.PRECISION != "ieee":
        sums = tl.dot(tl.trans(lower), rows, sums)
    return tl.dot(tl.trans(leading), rows, sums, input_precision=KIND.PRECISION)


@triton.jit
def spread_over_keys(numbers, r, c, reach, sizes, LAST: tl.constexpr):
    """For each cell the number of its row and its clipped lag, from numbers [m, lag]."""
    place = c - r + (reach - sizes.q_start)
    return tl.gather(numbers, tl.minimum(tl.maximum(place, 0), LAST), 1)


@triton.jit
def end_sums(
    cells, AT: tl.constexpr, found, DTYPE: tl.constexpr, KIND: tl.constexpr, PARTS: tl.constexpr
):
    """Adds the sum of each row of cells to column AT of `found` [m, lag].

    This is a product with a matrix that has ones in one column; sums of rows would exchange numbers
    between all threads. The matrix is built transposed; otherwise ptxas 12.8 reads a register that
    is never set.
    """
    column = tl.arange(0, found.shape[1])[:, None] + tl.zeros([1, cells.shape[1]], dtype=tl.int32)
    ones = tl.trans((column == AT).to(DTYPE))
    leading, lower = in_two(cells, DTYPE)
    if PARTS == 3:
        found = tl.dot(third_part(cells, leading, lower), ones, found)
    if PARTS >= 2 and KIND.PRECISION != "ieee":
        found = tl.dot(lower, ones, found)
    return tl.dot(leading, ones, found, input_precision=KIND.PRECISION)


@triton.jit
def summed_by_lag(
    cells,
    DTYPE: tl.constexpr,
    r,
    c,
    reach,
    sizes,
    LAST: tl.constexpr,
    KIND: tl.constexpr,
    PARTS: tl.constexpr,  # numbers of DTYPE that represent a float32 cell in the sums
):
    """The sum of the cells of each row that have the same clipped lag, [m, lag].

    Of the lags between the two ends, a row has one cell each.
    """
    N: tl.constexpr = cells.shape[1]
    lag = c - r - sizes.q_start
    place = tl.arange(0, KIND.LAGS)[None, :]
    key = r + place + (sizes.q_start - reach)
    found = tl.gather(cells, tl.minimum(tl.maximum(key, 0), N - 1), 1)
    within = (key >= 0) & (key < N) & (place > 0) & (place < LAST + KIND.CAUSAL)
    found = tl.where(within, found, 0.0)
    # A table of one place holds all lags there: lag == lag is true in every cell.
    left = tl.where(lag <= -reach if LAST > 0 else lag == lag, cells, 0.0)
    found = end_sums(left, 0, found, DTYPE, KIND, PARTS)
    if LAST > 0 and not KIND.CAUSAL:
        right = tl.where(lag >= reach, cells, 0.0)
        found = end_sums(right, LAST, found, DTYPE, KIND, PARTS)
    return found


@triton.jit
def masked(logits, visible, b, r, c, sizes, KIND: tl.constexpr, TILE: tl.constexpr):
    """The logits with -inf at masked cells; a laid-out band has the window built in already."""
    WINDOW: tl.constexpr = (KIND.BEFORE or KIND.AFTER) and not KIND.BAND
    if KIND.KEYS or KIND.SEGMENTS or WINDOW or not TILE.EVEN:
        seen = (c < sizes.n_k) & (r < sizes.n_q)
        if KIND.BEFORE and WINDOW:
            seen = seen & (c >= r + (sizes.q_start - sizes.before))
        if KIND.AFTER and WINDOW:
            seen = seen & (c <= r + (sizes.q_start + sizes.after))
        if KIND.KEYS:
            keys = visible.keys + b * visible.keys_b + c
            seen = seen & (tl.load(keys, mask=c < sizes.n_k, other=0) != 0)
        if KIND.SEGMENTS:
            of_row = visible.q_segment + b * visible.q_segment_b + r
            of_key = visible.k_segment + b * visible.k_segment_b + c
            segment = tl.load(of_row, mask=r < sizes.n_q, other=-2)
            seen = seen & (segment == tl.load(of_key, mask=c < sizes.n_k, other=-1))
        logits = tl.where(seen, logits, float("-inf"))
    return logits


@triton.jit
def masked_logits(
    q, k, factor, operands, b, h, r, c, sizes, KIND: tl.constexpr, TILE: tl.constexpr
):
    """The logits of rows r and keys c, in base 2 or e (unit_of), with -inf at masked cells."""
    logits = tl.dot(q, tl.trans(k), input_precision=KIND.PRECISION) * (sizes.scale * unit_of(KIND))
    if KIND.BAND:
        bias = operands.bias
        band = bias.band + b * bias.band_b + h * bias.band_h + (sizes.edge - sizes.q_start)
        logits += tl.load(band + (c - r))
    if KIND.ENDS:
        leading, lower = factor
        rows = tl.dot(q, tl.trans(leading), input_precision=KIND.PRECISION)
        if KIND.PRECISION != "ieee":
            rows = tl.dot(q, tl.trans(lower), rows)
        rows = rows * (operands.product.scale * unit_of(KIND))
        logits += spread_over_keys(rows, r, c, sizes.reach, sizes, KIND.LAST)
    return masked(logits, operands.visible, b, r, c, sizes, KIND, TILE)


@triton.jit
def reciprocal(total):
    """1 / total [row, 1], and 1 for a row whose keys are all masked."""
    return (1.0 / tl.where(total == 0.0, 1.0, total))[:, None]


@triton.jit
def exponentials(q, k, factor, operands, b, h, r, c, sizes, KIND: tl.constexpr, TILE: tl.constexpr):
    """exponential(logit - row maximum), and the sum of each row."""
    logits = masked_logits(q, k, factor, operands, b, h, r, c, sizes, KIND, TILE)
    top = tl.max(logits, 1)
    top = tl.where(top == float("-inf"), 0.0, top)
    weights = exponential(logits - top[:, None], KIND)
    return weights, tl.sum(weights, 1)


@triton.jit
def forward_block(
    operands,
    factor,
    values,
    out,
    b,
    h,
    first,
    sizes,
    KEYS: tl.constexpr,
    KIND: tl.constexpr,
    TILE: tl.constexpr,
):
    """Store the output of a block of rows, which attend to the first KEYS keys only."""
    h_kv = h // KIND.GROUPS
    r = first + tl.arange(0, TILE.ROWS)[:, None]
    c = tl.arange(0, KEYS)[None, :]
    q_tile = load_head(
        operands.q, b, h, first, sizes.n_q, TILE.ROWS, KIND.D, KIND.BLOCK_D, TILE.EVEN
    )
    k_tile = load_head(operands.k, b, h_kv, 0, sizes.n_k, KEYS, KIND.D, KIND.BLOCK_D, TILE.EVEN)
    v_tile = load_head(operands.v, b, h_kv, 0, sizes.n_k, KEYS, KIND.D_V, KIND.BLOCK_DV, TILE.EVEN)
    weights, total = exponentials(q_tile, k_tile, factor, operands, b, h, r, c, sizes, KIND, TILE)
    if KIND.DROPOUT:
        seed = tl.load(operands.seed) + (b * sizes.n_heads + h)
        weights = tl.where(dropout_keeps(seed, r, c, sizes.dropout), weights, 0.0)
        total = total * (1.0 - sizes.dropout)  # see `attended` in forward.py
    rows = tl.dot(weights.to(v_tile.dtype), v_tile, input_precision=KIND.PRECISION)
    if KIND.VALUES:
        table, _ = values
        masses = summed_by_lag(
            *(weights, table.dtype, r, c, sizes.value_reach, sizes, KIND.VALUE_LAST, KIND, 1)
        )
        leading, lower = in_two(masses, table.dtype)
        rows = tl.dot(leading, table, rows, input_precision=KIND.PRECISION)
        if KIND.PRECISION != "ieee":
            rows = tl.dot(lower, table, rows)
    rows = rows * reciprocal(total)
    store_head(out, rows, b, h, first, sizes.n_q, sizes.n_heads, KIND.D_V, KIND.TOKENS, TILE.EVEN)


@triton.jit
def run_length(run, batch, SHORT: tl.constexpr):
    """How many sequences a program takes."""
    length = SHORT.RUN
    if SHORT.RUN > 1:
        length = tl.minimum(batch - run * SHORT.RUN, SHORT.RUN)
    return length


@triton.jit(do_not_specialize=["batch", *VARYING])
def short_forward_kernel(
    operands,
    out,
    batch,
    numbers,
    n_q,
    n_k,
    q_start,
    reach,
    edge,
    KIND: tl.constexpr,
    TILE: tl.constexpr,
    SHORT: tl.constexpr,
):
    """The output of one head of a run of sequences (program 0), a block of its rows (program 1)."""
    sizes = sizes_of(numbers, n_q, n_k, q_start, reach, edge)
    run = tl.program_id(0).to(tl.int64) // sizes.n_heads
    h = tl.program_id(0) % sizes.n_heads
    first = tl.program_id(1) * TILE.ROWS
    factor, values = load_tables(operands, h, operands.q.ptr.dtype.element_ty, KIND)
    for each in tl.range(0, run_length(run, batch, SHORT), num_stages=TILE.STAGES):
        b = run * SHORT.RUN + each
        if SHORT.TRIANGLE and TILE.ROWS < TILE.KEYS:
            if first == 0:
                forward_block(
                    operands, factor, values, out, b, h, first, sizes, TILE.ROWS, KIND, TILE
                )
            else:
                forward_block(
                    operands, factor, values, out, b, h, first, sizes, TILE.KEYS, KIND, TILE
                )
        else:
            forward_block(operands, factor, values, out, b, h, first, sizes, TILE.KEYS, KIND, TILE)


@triton.jit
def diagonal_sums(tile):
    """The sums of the diagonals c - r = 0..N - 1 and c - r = -N..-1 of a tile [M, N], M <= N.

    The tile is divided into blocks of STEP x STEP cells. Within a block, row r is rotated by r
    places, so that column t holds the cells with c - r = t and, below them, those with
    c - r = t - STEP; this takes one exchange between neighbouring threads for each cell. The sums
    [block row, block column, t] are few, and the diagonals of blocks are summed in the same way.
    """
    M: tl.constexpr = tile.shape[0]
    N: tl.constexpr = tile.shape[1]
    STEP: tl.constexpr = 32 if M >= 32 else M
    ROW_STEPS: tl.constexpr = M // STEP
    KEY_STEPS: tl.constexpr = N // STEP
    blocks = tl.reshape(tile, [ROW_STEPS, STEP, KEY_STEPS, STEP])
    r = tl.arange(0, STEP)[None, :, None, None]
    t = tl.arange(0, STEP)[None, None, None, :]
    turn = tl.broadcast_to(r + t, [ROW_STEPS, STEP, KEY_STEPS, STEP])
    turned = tl.gather(blocks, turn % STEP, 3)
    upper = tl.sum(tl.where(turn < STEP, turned, 0.0), 1)
    lower = tl.sum(tl.where(turn < STEP, 0.0, turned), 1)
    # upper[i, j, t] belongs to c - r = (j - i) STEP + t, lower[i, j, t] to (j - i - 1) STEP + t.
    i = tl.arange(0, ROW_STEPS)[:, None, None]
    j = tl.arange(0, KEY_STEPS)[None, :, None]
    t = tl.arange(0, STEP)[None, None, :]
    turn = tl.broadcast_to(i + j + 0 * t, [ROW_STEPS, KEY_STEPS, STEP])
    upper = tl.gather(upper, turn % KEY_STEPS, 1)
    lower = tl.gather(lower, (turn + 1) % KEY_STEPS, 1)
    right = tl.where(turn < KEY_STEPS, upper, 0.0) + tl.where(turn + 1 < KEY_STEPS, lower, 0.0)
    left = tl.where(turn < KEY_STEPS, 0.0, upper) + tl.where(turn + 1 < KEY_STEPS, 0.0, lower)
    return tl.reshape(tl.sum(right, 0), [N]), tl.reshape(tl.sum(left, 0), [N])


@triton.jit
def store_diagonals(ptr, part, right, left):
    """Store a program's sums of diagonals: that of c - r = t at place t modulo 2 N."""
    N: tl.constexpr = right.shape[0]
    place = ptr + part * (2 * N) + tl.arange(0, N)
    tl.store(place, right)
    tl.store(place + N, left)


@triton.jit
def zero_sums(KIND: tl.constexpr, TILE: tl.constexpr, SHORT: tl.constexpr):
    """The sums before the first step."""
    KEYS: tl.constexpr = TILE.KEYS
    BLOCK_D: tl.constexpr = KIND.BLOCK_D
    BLOCK_DV: tl.constexpr = KIND.BLOCK_DV
    LAGS: tl.constexpr = KIND.LAGS
    right = 0.0
    left = 0.0
    if SHORT.DIAGONALS:
        right = tl.zeros([KEYS], dtype=tl.float32)
        left = tl.zeros([KEYS], dtype=tl.float32)
    d_factor = 0.0
    if SHORT.FACTOR:
        d_factor = tl.zeros([LAGS, BLOCK_D], dtype=tl.float32)
    d_table = 0.0
    if KIND.VALUES:
        d_table = tl.zeros([LAGS, BLOCK_DV], dtype=tl.float32)
    d_k = tl.zeros([KEYS, BLOCK_D], dtype=tl.float32)
    d_v = tl.zeros([KEYS, BLOCK_DV], dtype=tl.float32)
    return Sums(d_k, d_v, right, left, d_factor, d_table)


@triton.jit
def transposed_product(cells, rows, sums, KIND: tl.constexpr):
    """sums + cells^T @ rows: what rows add to dK, to dV or to the gradient of a table."""
    return tl.dot(tl.trans(cells), rows, sums, input_precision=KIND.PRECISION)


@triton.jit
def block_gradients(
    sums,
    k_tile,
    v_tile,
    factor,
    values,
    operands,
    d_out,
    gradients,
    diagonals,
    b,
    h,
    block,
    sizes,
    KIND: tl.constexpr,
    TILE: tl.constexpr,
    SHORT: tl.constexpr,
):
    """Store dQ of a block of rows; add its terms to dK / scale, dV and the other sums.

    A complete gradient is stored at once, which frees its registers: dK and dV if there is a single
    block, and the sums of diagonals if a program has one sequence.
    """
    d_k, d_v, right, left, d_factor, d_table = sums
    SINGLE: tl.constexpr = KIND.GROUPS * SHORT.ROW_BLOCKS == 1
    first = block * TILE.ROWS
    r = first + tl.arange(0, TILE.ROWS)[:, None]
    c = tl.arange(0, TILE.KEYS)[None, :]
    bh = b * sizes.n_heads + h
    q_tile = load_head(
        operands.q, b, h, first, sizes.n_q, TILE.ROWS, KIND.D, KIND.BLOCK_D, TILE.EVEN
    )
    d_rows = load_head(d_out, b, h, first, sizes.n_q, TILE.ROWS, KIND.D_V, KIND.BLOCK_DV, TILE.EVEN)
    weights, total = exponentials(q_tile, k_tile, factor, operands, b, h, r, c, sizes, KIND, TILE)
    if KIND.DROPOUT:
        kept = dropout_keeps(tl.load(operands.seed) + bh, r, c, sizes.dropout)
    weights = weights * reciprocal(total)
    dropped = weights
    if KIND.DROPOUT:
        dropped = after_dropout(weights, kept, sizes.dropout)
    d_v = transposed_product(dropped.to(d_rows.dtype), d_rows, d_v, KIND)
    if SINGLE:
        store_keys(gradients.d_v, d_v, b, h, KIND.D_V, sizes, KIND, TILE)
    d_weights = tl.dot(d_rows, tl.trans(v_tile), input_precision=KIND.PRECISION)
    if KIND.VALUES:
        masses = summed_by_lag(
            *(dropped, d_rows.dtype, r, c, sizes.value_reach, sizes, KIND.VALUE_LAST, KIND),
            SHORT.PARTS,
        )
        d_table = transposed_product_in_parts(masses, d_rows, d_table, KIND, SHORT.PARTS)
        table, table_lower = values
        d_masses = tl.dot(d_rows, tl.trans(table), input_precision=KIND.PRECISION)
        if KIND.BAND and KIND.PRECISION != "ieee":
            # The gradient of a shared band sums dS over all rows, where an error of the table, the
            # same in all of them, would grow faster than the others.
            d_masses = tl.dot(d_rows, tl.trans(table_lower), d_masses)
        d_weights += spread_over_keys(d_masses, r, c, sizes.value_reach, sizes, KIND.VALUE_LAST)
    if KIND.DROPOUT:
        d_weights = after_dropout(d_weights, kept, sizes.dropout)
    delta = tl.sum(weights * d_weights, 1)
    d_logits = weights * (d_weights - delta[:, None])
    rounded = d_logits.to(q_tile.dtype)
    d_k = transposed_product(rounded, q_tile, d_k, KIND)
    if SINGLE:
        store_keys(gradients.d_k, d_k * sizes.scale, b, h, KIND.D, sizes, KIND, TILE)
    d_q = tl.dot(rounded, k_tile, input_precision=KIND.PRECISION) * sizes.scale
    if SHORT.FACTOR:
        d_band = summed_by_lag(
            *(d_logits, q_tile.dtype, r, c, sizes.reach, sizes, KIND.LAST, KIND, 1)
        )
        d_band = d_band * operands.product.scale
        d_factor = transposed_product_in_parts(d_band, q_tile, d_factor, KIND, 2)
        leading, lower = factor
        d_q = product_in_parts(d_band, leading, lower, d_q, KIND)
    store_head(
        *(gradients.d_q, d_q, b, h, first, sizes.n_q, sizes.n_heads),
        *(KIND.D, KIND.TOKENS, TILE.EVEN),
    )
    if SHORT.DIAGONALS:
        more_right, more_left = diagonal_sums(d_logits)
        right += more_right
        left += more_left
        if SHORT.RUN == 1:
            store_diagonals(diagonals, bh * SHORT.ROW_BLOCKS + block, right, left)
    return Sums(d_k, d_v, right, left, d_factor, d_table)


@triton.jit(do_not_specialize=["batch", *VARYING])
def short_backward_kernel(
    operands,
    d_out,
    gradients,
    diagonals,
    batch,
    numbers,
    n_q,
    n_k,
    q_start,
    reach,
    edge,
    KIND: tl.constexpr,
    TILE: tl.constexpr,
    SHORT: tl.constexpr,
):
    """All gradients of one key head of a run of sequences, and of the query heads that share it.

    diagonals: float32 [runs, h, row blocks, 2 * keys], the sums of dS over each diagonal.
    """
    sizes = sizes_of(numbers, n_q, n_k, q_start, reach, edge)
    KEYS: tl.constexpr = TILE.KEYS
    BLOCK_D: tl.constexpr = KIND.BLOCK_D
    BLOCK_DV: tl.constexpr = KIND.BLOCK_DV
    ROW_BLOCKS: tl.constexpr = SHORT.ROW_BLOCKS
    n_kv = sizes.n_heads // KIND.GROUPS
    run = tl.program_id(0).to(tl.int64) // n_kv
    h_kv = tl.program_id(0) % n_kv
    sums = zero_sums(KIND, TILE, SHORT)
    factor, values = load_tables(operands, h_kv, operands.q.ptr.dtype.element_ty, KIND)
    for each in tl.range(0, run_length(run, batch, SHORT), num_stages=TILE.STAGES):
        b = run * SHORT.RUN + each
        k_tile = load_head(operands.k, b, h_kv, 0, sizes.n_k, KEYS, KIND.D, BLOCK_D, TILE.EVEN)
        v_tile = load_head(operands.v, b, h_kv, 0, sizes.n_k, KEYS, KIND.D_V, BLOCK_DV, TILE.EVEN)
        start = zero_sums(KIND, TILE, SHORT)
        sums = Sums(start.d_k, start.d_v, *sums[2:])
        for step in tl.range(0, KIND.GROUPS * ROW_BLOCKS, num_stages=1):
            h = h_kv * KIND.GROUPS + step // ROW_BLOCKS
            if SHORT.RUN == 1:  # the sums of diagonals are stored after each step
                sums = Sums(sums.d_k, sums.d_v, start.right, start.left, *sums[4:])
            sums = block_gradients(
                *(sums, k_tile, v_tile, factor, values, operands, d_out, gradients, diagonals),
                *(b, h, step % ROW_BLOCKS, sizes, KIND, TILE, SHORT),
            )
        if KIND.GROUPS * ROW_BLOCKS > 1:
            d_k = sums.d_k * sizes.scale
            store_keys(gradients.d_v, sums.d_v, b, h_kv, KIND.D_V, sizes, KIND, TILE)
            store_keys(gradients.d_k, d_k, b, h_kv, KIND.D, sizes, KIND, TILE)
    part = run * sizes.n_heads + h_kv
    if SHORT.RUN > 1 and SHORT.DIAGONALS:  # then a program has one head and one block of rows
        store_diagonals(diagonals, part, sums.right, sums.left)
    if SHORT.FACTOR:
        store_table(gradients.d_factor, sums.d_factor, part, KIND.LAST, KIND.D)
    if KIND.VALUES:
        store_table(gradients.d_table, sums.d_table, part, KIND.VALUE_LAST, KIND.D_V)


@triton.jit
def sums_at(
    diagonals,
    lag,
    first,
    h,
    batches,
    sizes,
    TILE: tl.constexpr,
    ROW_BLOCKS: tl.constexpr,
    BATCHES: tl.constexpr,
):
    """The sum of dS at these lags over `batches` sequences from `first` on, in a fixed order."""
    WIDTH: tl.constexpr = 2 * TILE.KEYS
    sums = tl.zeros([BATCHES, lag.shape[0]], dtype=tl.float32)
    for block in range(0, ROW_BLOCKS):
        diagonal = lag + sizes.q_start + block * TILE.ROWS
        there = (diagonal >= -TILE.KEYS) & (diagonal < TILE.KEYS)
        place = (diagonal + WIDTH) % WIDTH
        for start in range(0, batches, BATCHES):
            each = start + tl.arange(0, BATCHES)
            row = ((first + each).to(tl.int64) * sizes.n_heads + h) * ROW_BLOCKS + block
            sums += tl.load(
                diagonals + row[:, None] * WIDTH + place[None, :],
                mask=(each < batches)[:, None] & there[None, :],
                other=0.0,
            )
    return tl.sum(sums, 0)


@triton.jit(do_not_specialize=["batches", *VARYING])
def short_band_kernel(
    diagonals,
    d_band,
    batches,
    numbers,
    n_q,
    n_k,
    q_start,
    reach,
    edge,
    TILE: tl.constexpr,
    ROW_BLOCKS: tl.constexpr,
    LAGS: tl.constexpr,
    BATCHES: tl.constexpr,
):
    """A block of lags (program 0) of d_band [b|1, h, 2 * reach + 1], one head (program 1)."""
    sizes = sizes_of(numbers, n_q, n_k, q_start, reach, edge)
    bh = tl.program_id(1).to(tl.int64)
    first = bh // sizes.n_heads * batches
    h = bh % sizes.n_heads
    place = tl.program_id(0) * LAGS + tl.arange(0, LAGS)
    lag = place - sizes.reach
    sums = sums_at(diagonals, lag, first, h, batches, sizes, TILE, ROW_BLOCKS, BATCHES)
    width = 2 * sizes.reach + 1
    tl.store(d_band + bh * width + place, sums, mask=place < width)


@triton.jit(do_not_specialize=["batches", *VARYING])
def short_tails_kernel(
    diagonals,
    d_tails,
    batches,
    numbers,
    n_q,
    n_k,
    q_start,
    reach,
    edge,
    TILE: tl.constexpr,
    ROW_BLOCKS: tl.constexpr,
    LAGS: tl.constexpr,
    BATCHES: tl.constexpr,
):
    """d_tails [4, b|1, h] of one head: left constant and slope, right constant and slope."""
    sizes = sizes_of(numbers, n_q, n_k, q_start, reach, edge)
    bh = tl.program_id(0).to(tl.int64)
    first = bh // sizes.n_heads * batches
    h = bh % sizes.n_heads
    lag = tl.arange(0, LAGS) - (LAGS // 2 + sizes.q_start)
    sums = sums_at(diagonals, lag, first, h, batches, sizes, TILE, ROW_BLOCKS, BATCHES)
    stride = tl.num_programs(0).to(tl.int64)
    distance = tl.abs(lag).to(tl.float32)
    left = tl.where(lag < -sizes.reach, sums, 0.0)
    right = tl.where(lag > sizes.reach, sums, 0.0)
    tl.store(d_tails + bh, tl.sum(left, 0))
    tl.store(d_tails + stride + bh, tl.sum(left * distance, 0))
    tl.store(d_tails + 2 * stride + bh, tl.sum(right, 0))
    tl.store(d_tails + 3 * stride + bh, tl.sum(right * distance, 0))
