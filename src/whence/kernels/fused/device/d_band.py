"""The gradient of a band that all rows of a head share, without atomics.

**Up to 2,048 tokens, or in a window of up to 752 lags.** The key kernel has dS of every near tile
in registers already. It sums the diagonals of dS within each *stripe* of 16 keys, or of 64 where it
can hold them (HELD), and stores them; `stripe_kernel` adds up stripes and sequences. A head has
n_q * n_k / 16 or / 64 such sums, which is too much memory for long sequences, unless a window, or
the split, limits the rows that a block of keys meets (stripe_base in backward.py).

**Otherwise.** All tiles on one block-diagonal have the same lag in the same cell. So a program
walks along a share of a block-diagonal, sums the tiles' dS in registers, and at the end sums the
diagonals of that one tile; a second small kernel adds up the shares. Only block-diagonals that
touch the band are visited.
"""

import triton
import triton.language as tl

from whence.kernels.fused.device.arguments import VARYING
from whence.kernels.fused.device.backward import (
    MassGradient,
    Queries,
    end_gradients,
    mass_rows,
    stripe_base,
    stripe_length,
    stripe_place,
    stripe_width,
    tile_gradient,
)
from whence.kernels.fused.device.tile import (
    Place,
    columns,
    head_from,
    head_of,
    head_rows,
    in_base_e,
    load_rows,
    load_tails,
    near_bias,
    near_reach_of,
    pdl_wait,
    read_by_now,
    sizes_of,
)


@triton.jit
def floor_div(x, BLOCK: tl.constexpr):
    """x // BLOCK rounded down also for negative x; // in Triton rounds towards zero."""
    return tl.where(x >= 0, x // BLOCK, -((-x + BLOCK - 1) // BLOCK))


@triton.jit
def visited(extent, h, sizes, KIND: tl.constexpr, BLOCK: tl.constexpr):
    """The first and last block-diagonal (key block - query block) with a cell in the band."""
    left = sizes.reach
    if KIND.EXTENT:
        left = tl.minimum(left, tl.load(extent + h))
    right = left
    if KIND.BEFORE:
        left = tl.minimum(left, sizes.before)
    if KIND.AFTER:
        right = tl.minimum(right, sizes.after)
    low = floor_div(sizes.q_start - left, BLOCK)
    high = floor_div(sizes.q_start + right + BLOCK - 1, BLOCK)
    low = tl.maximum(low, 1 - (sizes.n_q + BLOCK - 1) // BLOCK)
    return low, tl.minimum(high, (sizes.n_k + BLOCK - 1) // BLOCK - 1)


@triton.jit
def parts_of(low, high, most, capacity):
    """The number of shares of each of these block-diagonals, given the room for all shares."""
    return tl.minimum(most, tl.maximum(capacity // tl.maximum(high - low + 1, 1), 1))


@triton.jit(do_not_specialize=["capacity", *VARYING])
def band_kernel(
    q,
    k,
    v,
    d_out,
    statistics,
    bias,
    visible,
    seed,
    sums,  # float32 [batches of the band, heads, capacity, 2, block]
    capacity,  # the number of shares of a head that `sums` has room for
    batches,  # sequences of one program: all of them where they share the band, else one
    numbers,
    n_q,
    n_k,
    q_start,
    reach,
    edge,
    KIND: tl.constexpr,
    TILE: tl.constexpr,  # as many rows as keys
):
    """A share (program 1) of every n-th block-diagonal (program 0) of one head (program 2)."""
    sizes = sizes_of(numbers, n_q, n_k, q_start, reach, edge)
    BLOCK: tl.constexpr = TILE.ROWS
    bh = tl.program_id(2).to(tl.int64)
    h = bh % sizes.n_heads
    first_batch = (bh // sizes.n_heads) * batches
    row_blocks = (sizes.n_q + BLOCK - 1) // BLOCK
    key_blocks = (sizes.n_k + BLOCK - 1) // BLOCK
    low, high = visited(bias.extent, h, sizes, KIND, BLOCK)
    parts = parts_of(low, high, tl.num_programs(1), capacity)
    if tl.program_id(1) >= parts:
        return
    r = tl.arange(0, BLOCK)
    d = tl.arange(0, KIND.BLOCK_D)[None, :]
    d_v = tl.arange(0, KIND.BLOCK_DV)[None, :]
    for diagonal in range(low + tl.program_id(0), high + 1, tl.num_programs(0)):
        row_low = tl.maximum(0, -diagonal)
        count = tl.minimum(row_blocks, key_blocks - diagonal) - row_low
        share = (count * batches + parts - 1) // parts
        start = tl.minimum(tl.program_id(1) * share, count * batches)
        stop = tl.minimum(start + share, count * batches)
        total = tl.zeros([BLOCK, BLOCK], dtype=tl.float32)
        for tile in range(start, stop):
            b = first_batch + tile // count
            row_block = row_low + tile % count
            first, first_key = row_block * BLOCK, (row_block + diagonal) * BLOCK
            rows = first + r
            there = rows < sizes.n_q
            q_tile = load_rows(
                head_rows(q, b, h), first, r[:, None], d, sizes.n_q, KIND.D, TILE.EVEN
            )
            d_tile = load_rows(
                head_rows(d_out, b, h), first, r[:, None], d_v, sizes.n_q, KIND.D_V, TILE.EVEN
            )
            k_head = head_rows(k, b, h // KIND.GROUPS)
            v_head = head_rows(v, b, h // KIND.GROUPS)
            k_tile = load_rows(k_head, first_key, r[:, None], d, sizes.n_k, KIND.D, TILE.EVEN)
            v_tile = load_rows(v_head, first_key, r[:, None], d_v, sizes.n_k, KIND.D_V, TILE.EVEN)
            first_of_head = (b * sizes.n_heads + h) * sizes.n_q
            pair = statistics.lse_delta + (first_of_head + rows.to(tl.int64)) * 2
            lse = tl.load(pair, mask=there, other=0.0)
            delta = tl.load(pair + 1, mask=there, other=0.0)
            norm = 1.0
            if in_base_e(KIND):
                norms = statistics.norm + first_of_head
                norm = tl.load(norms + rows, mask=there, other=0.0)[:, None]
            first_row = row_block.to(tl.int64) * BLOCK
            tails = columns(load_tails(bias, b, h, rows, there, KIND), KIND)
            head = head_of(bias, visible, seed, b, h, sizes, KIND)
            d_mass = MassGradient(statistics.d_mass, 0.0, 0.0)
            if KIND.VALUES:
                of_rows = mass_rows(d_mass.ptr, b * sizes.n_heads + h, first_row, sizes, KIND)
                left, right = end_gradients(of_rows, r[:, None], there[:, None], KIND)
                d_mass = MassGradient(of_rows, left, right)
            place = Place(first, r[:, None], first_key, r[None, :])
            head = head_from(head, first_row, rows, tails, sizes, KIND, BY_KEYS=False)
            bias_of_tile = near_bias(
                head, place, there[:, None], sizes, KIND, TILE.EVEN, OWN_BAND=False
            )
            _, _, d_logits = tile_gradient(
                Queries(q_tile, d_tile, lse[:, None], norm, delta[:, None]),
                k_tile,
                v_tile,
                read_by_now(bias_of_tile),
                place,
                head,
                d_mass,
                sizes,
                KIND,
                1,  # near
                TILE.EVEN,
                BY_KEYS=False,
                PREPARED=False,
            )
            total += d_logits
        # Cell (r, c) has lag lag_0 + c - r. With row r rotated by r places, column t holds every
        # cell with c - r = t and, below them, those with c - r = t - BLOCK.
        wrap = r[None, :] + r[:, None]
        turned = tl.gather(total, wrap % BLOCK, 1)
        upper = tl.sum(tl.where(wrap < BLOCK, turned, 0.0), 0)
        lower = tl.sum(tl.where(wrap < BLOCK, 0.0, turned), 0)
        index = bh * capacity + (diagonal - low) * parts + tl.program_id(1)
        out = sums + index * (2 * BLOCK)
        tl.store(out + r, upper)
        tl.store(out + BLOCK + r, lower)


@triton.jit(do_not_specialize=["capacity", "first", "most", *VARYING])
def collect_kernel(
    sums,
    d_band,  # float32 [batches of the band, heads, 2 * reach + 1]
    extent,
    capacity,
    first,  # the block-diagonal whose lags program 0 collects
    most,  # the most shares of a block-diagonal
    numbers,
    n_q,
    n_k,
    q_start,
    reach,
    edge,
    KIND: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One block of lags (program 0) of one head, from the two block-diagonals that hold them."""
    sizes = sizes_of(numbers, n_q, n_k, q_start, reach, edge)
    bh = tl.program_id(1).to(tl.int64)
    diagonal = first + tl.program_id(0)
    low, high = visited(extent, bh % sizes.n_heads, sizes, KIND, BLOCK)
    parts = parts_of(low, high, most, capacity)
    t = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for part in range(0, parts):
        for STEP in tl.static_range(2):
            at = diagonal + STEP
            lane = at + 0 * t
            index = bh * capacity + (at - low) * parts + part
            place = index * (2 * BLOCK) + STEP * BLOCK + t
            total += tl.load(sums + place, mask=(lane >= low) & (lane <= high), other=0.0)
    reach = sizes.reach
    lag = diagonal * BLOCK - sizes.q_start + t
    cells = d_band + bh * (2 * reach + 1) + lag + reach
    tl.store(cells, total, mask=(lag >= -reach) & (lag <= reach))


@triton.jit
def near_rows(stripe, sizes, KIND: tl.constexpr, WIDTH: tl.constexpr):
    """The near rows of a stripe's keys, in squares of KIND.GRAIN, as `row_range` finds them."""
    SIDE: tl.constexpr = KIND.GRAIN
    first = stripe * WIDTH // SIDE * SIDE - sizes.q_start
    low = tl.maximum(first - sizes.reach, 0) // SIDE * SIDE
    high = tl.maximum(first + (sizes.reach + 2 * SIDE - 1), 0) // SIDE * SIDE
    return low, tl.minimum(high, sizes.n_q)


@triton.jit(do_not_specialize=["beyond", "batches", "stripes", *VARYING])
def stripe_kernel(
    sums,  # float32 [b, heads, stripes, stripe_length]
    d_band,  # float32 [batches of the band, heads, 2 * (reach + beyond) + 1]
    bias,
    beyond,  # lags of the tails on either side that near tiles hold; only with KIND.GRAIN, else 0
    batches,  # sequences that share the band
    stripes,  # of a head
    numbers,
    n_q,
    n_k,
    q_start,
    reach,
    edge,
    KIND: tl.constexpr,
    TILE: tl.constexpr,  # of the key kernel
    LAGS: tl.constexpr,
    STRIPES: tl.constexpr,  # of a step
    BATCHES: tl.constexpr,
):
    """A block of lags (program 0) of one head (program 1), summed in a fixed order.

    Lags that no near tile holds get 0.
    """
    pdl_wait(KIND.CHAINED)
    sizes = sizes_of(numbers, n_q, n_k, q_start, reach, edge)
    bh = tl.program_id(1).to(tl.int64)
    h = bh % sizes.n_heads
    first = bh // sizes.n_heads * batches
    # In descending order the lags are consecutive places of a stripe: loads are contiguous.
    last = sizes.reach + beyond
    top = last - tl.program_id(0) * LAGS
    t = tl.arange(0, LAGS)
    lag = top - t
    near_reach = near_reach_of(bias, h, sizes, KIND) + beyond
    length = stripe_length(sizes, KIND, TILE)
    of_head = sums + (first * sizes.n_heads + h) * stripes * length
    stride = sizes.n_heads * stripes * length.to(tl.int64)
    # The key kernel stored nothing for other lags than these.
    low_lag, high_lag = -near_reach, near_reach
    if KIND.BEFORE:
        low_lag = tl.maximum(low_lag, -sizes.before)
    if KIND.AFTER:
        high_lag = tl.minimum(high_lag, sizes.after)
    # The stripes that some row meets at one of the lags.
    ahead = sizes.q_start + top
    WIDTH: tl.constexpr = stripe_width(TILE)
    start = tl.maximum(ahead - (LAGS + WIDTH), 0) // WIDTH
    stop = tl.minimum(tl.maximum(ahead + sizes.n_q, 0) + WIDTH, sizes.n_k + WIDTH - 1) // WIDTH
    stop = tl.where((top >= low_lag) & (top - LAGS < high_lag), stop, 0)
    # Stripes come first, so that the compiler gives a thread few of them, and all sequences.
    total = tl.zeros([STRIPES, BATCHES, LAGS], dtype=tl.float32)
    for first_stripe in range(start, stop, STRIPES):
        stripe = first_stripe + tl.arange(0, STRIPES)
        diagonal = (stripe * WIDTH - ahead)[:, None] + t[None, :]
        # Of these lags the key kernel stored the diagonals that have a row in its near tiles: all
        # that have a row, unless near tiles are chosen by GRAIN.
        low, high = sizes.n_q * 0, sizes.n_q
        if KIND.GRAIN > 0:
            low, high = near_rows(stripe, sizes, KIND, WIDTH)
            low, high = low[:, None], high[:, None]
        there = (stripe < stop)[:, None] & (diagonal > low - WIDTH) & (diagonal < high)
        base = stripe_base(stripe * WIDTH // TILE.KEYS * TILE.KEYS, sizes, KIND, TILE)
        cell = stripe[:, None] * length + stripe_place(diagonal - base[:, None], TILE)
        for first_batch in range(0, batches, BATCHES):
            each = first_batch + tl.arange(0, BATCHES)
            total += tl.load(
                of_head + (each * stride)[None, :, None] + cell[:, None, :],
                mask=(each < batches)[None, :, None] & there[:, None, :],
                other=0.0,
            )
    stored = (lag >= low_lag) & (lag <= high_lag)
    found = tl.where(stored, tl.sum(tl.sum(total, 1), 0), 0.0)
    cells = d_band + bh * (2 * last + 1) + (lag + last)
    tl.store(cells, found, mask=lag >= -last)
