"""Backward by blocks of keys: dK and dV, each summed by one program.

Where it is asked to, the kernel also sums the diagonals of dS, for a shared band (d_band.py).
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from whence.kernels.fused.device.arguments import VARYING, Rows
from whence.kernels.fused.device.d_band import STRIPE, stripe_length, stripe_sums
from whence.kernels.fused.device.d_logits import MassGradient, Queries, tile_gradient
from whence.kernels.fused.device.tile import (
    Head,
    Place,
    head_from,
    head_of,
    head_rows,
    load_far,
    load_rows,
    load_tails,
    near_reach_of,
    packed_row,
    row_range,
    sizes_of,
)


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
    tails: Any  # Tails of the head; of the rows they are loaded with each tile
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
    groups,  # unknown to the compiler: it would unroll a loop of one, and serialise the products
    numbers,
    n_q,
    n_k,
    q_start,
    reach,
    edge,
    KIND: tl.constexpr,
    TILE: tl.constexpr,  # NEAR counts rows
    UNSTAGED: tl.constexpr,  # the load of a shared band is not staged through shared memory
):
    """One block of keys (program 0) of one key head (program 1), all query heads of its group."""
    sizes = sizes_of(numbers, n_q, n_k, q_start, reach, edge)
    BLOCK: tl.constexpr = TILE.KEYS
    WIDTH: tl.constexpr = KIND.BLOCK_D
    WIDTH_V: tl.constexpr = KIND.BLOCK_DV
    block = tl.program_id(0)
    bkv = tl.program_id(1).to(tl.int64)
    n_kv = sizes.n_heads // groups
    b = bkv // n_kv
    h_kv = bkv % n_kv
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
            # The rows before come first; these keys lie far to their right.
            if STEP == 1 or not (KIND.FAR or (KIND.CAUSAL and STEP == 0)):
                d_k, d_value = summed_rows(
                    KeySums(d_k, d_value),
                    keys,
                    queries,
                    statistics,
                    bias,
                    gradients.stripes,
                    rows,
                    sizes,
                    KIND,
                    TILE,
                    2 - STEP,
                    UNSTAGED,
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
    rows,
    sizes,
    KIND: tl.constexpr,
    TILE: tl.constexpr,
    REGION: tl.constexpr,  # where these keys lie as seen from the rows
    UNSTAGED: tl.constexpr,
):
    """dK and dV of a block of keys after the rows of one region of one query head."""
    BLOCK: tl.constexpr = TILE.NEAR if REGION == 1 else TILE.ROWS
    PREPARED: tl.constexpr = statistics.far_lse_delta is not None and REGION != 1
    HELD: tl.constexpr = KIND.BLOCK_D <= 64
    STRIPED: tl.constexpr = stripes is not None and REGION == 1
    d_k, d_v = sums
    head = queries.head
    bh = queries.b * sizes.n_heads + queries.h
    width = 2 * sizes.value_reach + 1
    start, stop = rows.near_stop, rows.high
    if REGION == 1:
        start, stop = rows.near_start, rows.near_stop
    if REGION == 2:
        start, stop = rows.low, rows.near_start
    pairs = statistics.lse_delta + bh * sizes.n_q * 2
    if PREPARED:  # the query kernel put the constants of the tails and of the table's ends in
        count = (tl.num_programs(1) * queries.groups).to(tl.int64) * sizes.n_q
        pairs = statistics.far_lse_delta + ((REGION // 2) * count + bh * sizes.n_q) * 2
    r = tl.arange(0, BLOCK)
    c = tl.arange(0, TILE.KEYS)[:, None]
    d = tl.arange(0, KIND.BLOCK_D)[None, :]
    d_value = tl.arange(0, KIND.BLOCK_DV)[None, :]
    if STRIPED:
        STRIPES: tl.constexpr = TILE.KEYS // STRIPE
        length = stripe_length(sizes, TILE)
        stripe = keys.first // STRIPE + tl.arange(0, STRIPES)[:, None]
        of_head = bh * tl.num_programs(0) * STRIPES * length
        diagonals = stripes + of_head + (stripe * length + r[None, :])
        unfinished = tl.zeros([STRIPES, BLOCK], dtype=tl.float32)
    for block in tl.range(start, stop, BLOCK, num_stages=TILE.STAGES):
        index = block + r
        first_row = tl.zeros([], tl.int64) + block
        there = index < sizes.n_q
        q_tile = load_rows(queries.q, block, r[:, None], d, sizes.n_q, KIND.D, TILE.EVEN)
        d_tile = load_rows(
            queries.d_out, block, r[:, None], d_value, sizes.n_q, KIND.D_V, TILE.EVEN, HELD
        )
        lse, delta = lse_and_delta(pairs + first_row * 2, r, there, TILE.EVEN)
        of_tile = Queries(q_tile, d_tile, lse[None, :], delta[None, :])
        tails = queries.tails
        if KIND.PER_ROW and not PREPARED:
            tails = load_tails(bias, queries.b, queries.h, index[None, :], there[None, :], KIND)
        d_mass = MassGradient(statistics.d_mass, 0.0, 0.0)
        if KIND.VALUES and not PREPARED:
            of_rows = statistics.d_mass + (bh * sizes.n_q + first_row) * width
            end = of_rows + (r * width)[None, :]
            left = 0.0
            right = 0.0
            if REGION == 0:
                left = tl.load(end, mask=there[None, :], other=0.0)
            if REGION == 2:
                right = tl.load(end + (width - 1), mask=there[None, :], other=0.0)
            d_mass = MassGradient(of_rows, left, right)
        place = Place(block, r[None, :], keys.first, c)
        dropped, _, d_logits = tile_gradient(
            of_tile,
            keys.k,
            keys.v,
            place,
            head_from(head, first_row, index, tails, sizes, KIND, True),
            d_mass,
            sizes,
            KIND,
            REGION,
            TILE.EVEN,
            True,
            PREPARED,
            UNSTAGED,
        )
        d_v = tl.dot(dropped.to(d_tile.dtype), d_tile, d_v, input_precision=KIND.PRECISION)
        d_k = tl.dot(d_logits.to(q_tile.dtype), q_tile, d_k, input_precision=KIND.PRECISION)
        if STRIPED:  # a diagonal that starts in one tile of a stripe ends in the next
            own, earlier = stripe_sums(d_logits)
            tl.store(diagonals + block, unfinished + earlier)
            unfinished = own
    if STRIPED:
        tl.store(diagonals + stop, unfinished)
    return KeySums(d_k, d_v)


@triton.jit
def lse_and_delta(ptr, r, there, EVEN: tl.constexpr):
    """lse and delta of every row of a tile.

    They are loaded as at least 128 numbers, which the compiler spreads over the threads. Of fewer
    it makes every thread load all that it will need, which is sixteen times the work; so for few
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
