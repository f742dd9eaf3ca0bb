"""The steps that the kernels are written with: ranges of tiles, a tile of logits, loads, rounding.

A quantity of each row is [m, 1], one of each key [1, n], and both broadcast to the tile. The key
kernel works with transposed tiles, [keys, queries], and passes [1, m] and [n, 1].
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from whence.kernels.fused.device.arguments import Rows, Sizes

LOG2E = tl.constexpr(1.4426950408889634)
# The rounding error of the output is stored times this, so that it is no subnormal float16.
RESIDUAL_SCALE = tl.constexpr(256.0)
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)  # by Triton's interpreter, on a CPU


class Tails(NamedTuple):
    """The two tails of a head or of each row: constant + slope * |lag|, in the logits' base."""

    left: Any
    left_slope: Any
    right: Any
    right_slope: Any


class Head(NamedTuple):
    """One head of one sequence, for a block of its rows."""

    band: Any  # address of the head's band, or of the first row's if every row has its own
    band_q: Any  # stride from row to row, or 0
    tails: Tails  # like q_segment, they broadcast to a tile
    keys: Any  # address of the sequence's padding mask
    q_segment: Any
    k_segment: Any  # address of the keys' segments
    seed: Any  # of this head's dropout


class RowBlock(NamedTuple):
    """A block of query rows first_row + r, [m]."""

    first_row: Any
    r: Any
    there: Any  # whether the row exists
    tails: Tails


class Place(NamedTuple):
    """Where a tile lies: its rows are first_row + r, its keys first_key + c."""

    first_row: Any
    r: Any
    first_key: Any
    c: Any


class Line(NamedTuple):
    """The bias of a far tile: shift + level + tilt * c; the shift belongs to a row."""

    shift: Any
    level: Any
    tilt: Any


class Range(NamedTuple):
    """The keys (or rows) low..high of a block, of which near_start..near_stop are near."""

    low: Any
    near_start: Any
    near_stop: Any
    high: Any


@triton.jit
def pdl_wait(CHAINED: tl.constexpr):
    """With CHAINED, waits until the previous kernel has ended, then lets the next kernel start.

    Until then, nothing that the previous kernel writes may be read, and nothing that it reads may
    be overwritten. Programs of the next kernel take multiprocessors that become idle and wait in
    this same function, so that the GPU is idle for less time between two kernels (CUDA's
    programmatic dependent launch, on Hopper GPUs).
    """
    if CHAINED:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def sizes_of(numbers, n_q, n_k, q_start, reach, edge):
    """All numbers of a call in one group."""
    return Sizes(
        n_q,
        n_k,
        q_start,
        reach,
        edge,
        numbers.n_heads,
        numbers.value_reach,
        numbers.before,
        numbers.after,
        numbers.far_start,
        numbers.scale,
        numbers.dropout,
    )


@triton.constexpr_function
def in_base_e(kind):
    """Whether logits are in base e and every row has a norm (row_lse).

    So it is in float32, unless a plain kernel takes the far keys: it knows only a log-sum-exp.
    """
    return kind.PRECISION == "ieee" and not kind.FAR


@triton.constexpr_function
def unit_of(kind):
    """1 where logits are in base e, and log2(e) where they are in base 2.

    It repeats the condition of in_base_e: in Triton 3.6 a group that one constexpr_function passes
    to another arrives as a plain tuple, without the names of its fields.
    """
    return 1.0 if kind.PRECISION == "ieee" and not kind.FAR else LOG2E.value


@triton.jit
def exponential(x, KIND: tl.constexpr):
    """e^x where logits are in base e, else 2^x, which is one instruction.

    In float32 the rounding of a logit times log2(e) would double the error of its weight.
    """
    return exact_exp(x) if in_base_e(KIND) else tl.exp2(x)


@triton.jit
def exact_exp(x):
    """exp(x) with a relative error of about 1e-7.

    The GPU's instruction computes 2^y, and the rounding error of y = x log2(e) becomes a relative
    error of the result, 1e-6 at x = -18. All rows of a head share a curve, so that error is the
    same in all of them and does not cancel in a sum over rows. Here exp(x) is a whole power of two
    times a series in what is left of x, at most 0.35.
    """
    inside = tl.abs(x) < 80.0  # where 2^whole is a normal number; not NaN
    y = tl.where(inside, x, 0.0)
    whole = tl.floor(y * LOG2E + 0.5)
    rest = y - whole * 0.693359375  # log(2) in two parts, of which this one has ten bits
    rest = rest + whole * 2.12194440e-4
    series = rest * (1.0 / 5040.0) + 1.0 / 720.0
    series = series * rest + 1.0 / 120.0
    series = series * rest + 1.0 / 24.0
    series = series * rest + 1.0 / 6.0
    series = series * rest + 0.5
    series = series * (rest * rest) + rest
    return tl.where(inside, (series + 1.0) * tl.exp2(whole), tl.exp(x))


@triton.jit
def row_lse(top, total, KIND: tl.constexpr):
    """lse and norm of each row: a weight is norm * exponential(logit - lse).

    In base 2 lse is the log-sum-exp, and there is no norm. In base e (in_base_e) the rounding of a
    log-sum-exp would show where it is the same in all rows. There lse is the largest logit, and
    norm is 1 divided by the sum of the weights relative to it. A row without keys has an infinite
    lse, with which its weights are 0.
    """
    safe = tl.where(total == 0.0, 1.0, total)
    lse = top
    norm = 1.0 / safe
    if not in_base_e(KIND):
        lse = top + tl.log2(safe)
        norm = 1.0
    return tl.where(total == 0.0, float("inf"), lse), norm


@triton.jit
def head_rows(x, b, h):
    """The rows of one head."""
    return Rows(x.ptr + b * x.stride_b + h * x.stride_h, x.stride_b, x.stride_h, x.stride_n)


@triton.jit
def load_tails(bias, b, h, row, there, KIND: tl.constexpr):
    """The tails of these rows, or of the head."""
    left = 0.0
    left_slope = 0.0
    right = 0.0
    right_slope = 0.0
    stride = bias.tail_kind
    if KIND.TAILS:
        tails = bias.tails + b * bias.tail_b + h * bias.tail_h
        if KIND.PER_ROW or KIND.RAW_BAND:
            place = tails + row.to(tl.int64) * bias.tail_q
            left = tl.load(place, mask=there, other=0.0) * unit_of(KIND)
            right = left
            if not (KIND.CAUSAL and KIND.ENDS):  # that call has no right tail
                right = tl.load(place + 2 * stride, mask=there, other=0.0) * unit_of(KIND)
            if KIND.SLOPES:
                left_slope = tl.load(place + stride, mask=there, other=0.0) * unit_of(KIND)
                right_slope = tl.load(place + 3 * stride, mask=there, other=0.0) * unit_of(KIND)
        else:
            left = tl.load(tails) * unit_of(KIND)
            right = tl.load(tails + 2 * stride) * unit_of(KIND)
            if KIND.SLOPES:
                left_slope = tl.load(tails + stride) * unit_of(KIND)
                right_slope = tl.load(tails + 3 * stride) * unit_of(KIND)
    return Tails(left, left_slope, right, right_slope)


@triton.jit
def columns(tails, KIND: tl.constexpr):
    """Tails of rows [m] as [m, 1]."""
    if KIND.TAILS and (KIND.PER_ROW or KIND.RAW_BAND):
        if KIND.SLOPES:
            tails = Tails(
                tails.left[:, None],
                tails.left_slope[:, None],
                tails.right[:, None],
                tails.right_slope[:, None],
            )
        else:
            tails = Tails(tails.left[:, None], 0.0, tails.right[:, None], 0.0)
    return tails


@triton.jit
def head_of(bias, visible, seed, b, h, sizes, KIND: tl.constexpr):
    """A head from its row 0 on, without its tails; q_segment is an address.

    0 stands for the address of what a call does not have: a function in Triton cannot return None.
    """
    band = 0
    if KIND.BAND:
        band = bias.band + b * bias.band_b + h * bias.band_h
        if KIND.PER_ROW and not KIND.RAW_BAND:
            band += KIND.MARGIN
    keys = 0
    if KIND.KEYS:
        keys = visible.keys + b * visible.keys_b
    q_segment = 0
    k_segment = 0
    if KIND.SEGMENTS:
        q_segment = visible.q_segment + b * visible.q_segment_b
        k_segment = visible.k_segment + b * visible.k_segment_b
    seeded = 0
    if KIND.DROPOUT:
        seeded = tl.load(seed) + (b * sizes.n_heads + h)
    return Head(band, bias.band_q, Tails(0.0, 0.0, 0.0, 0.0), keys, q_segment, k_segment, seeded)


@triton.jit
def head_from(head, first_row, rows, tails, sizes, KIND: tl.constexpr, BY_KEYS: tl.constexpr):
    """A head for the rows [m] from first_row on; their tails broadcast to the tile already."""
    band = head.band
    if KIND.BAND and KIND.PER_ROW:
        band += first_row * head.band_q
    q_segment = rows
    if KIND.SEGMENTS:
        q_segment = tl.load(head.q_segment + rows, mask=rows < sizes.n_q, other=-2)
    q_segment = q_segment[None, :] if BY_KEYS else q_segment[:, None]
    return Head(band, head.band_q, tails, head.keys, q_segment, head.k_segment, head.seed)


@triton.jit
def near_reach_of(bias, h, sizes, KIND: tl.constexpr):
    """The |lag| within which a head's bias, or its value table, has to be looked up."""
    reach = sizes.n_k * 0
    if KIND.BAND:
        reach = sizes.reach
        if KIND.EXTENT:
            reach = tl.maximum(tl.minimum(reach, tl.load(bias.extent + h)), 0)
    if KIND.VALUES:
        reach = tl.maximum(reach, sizes.value_reach)
    if KIND.FAR:
        reach = tl.maximum(reach, sizes.far_start - 1)
    return reach


class Program(NamedTuple):
    """What a program computes: one block of rows or keys of one head, and how many there are."""

    block: Any
    blocks: Any
    head: Any  # counted over all sequences
    heads: Any


@triton.jit
def program_of(TILE: tl.constexpr):
    """This program's part of the work, in a grid made by `grid_of` (launch.py).

    Programs start in the order of their ids, with program_id(0) changing fastest.
    """
    if TILE.TURNS:
        in_turn = tl.num_programs(0)
        head = tl.program_id(2) * in_turn + tl.program_id(0)
        heads = tl.num_programs(2) * in_turn
        return Program(tl.program_id(1), tl.num_programs(1), head, wide(heads))
    return Program(tl.program_id(0), tl.num_programs(0), tl.program_id(1), wide(tl.num_programs(1)))


@triton.jit
def longest_first(program, KIND: tl.constexpr):
    """The program's block of rows. A causal call begins with the last, which has the most keys."""
    block = program.block
    if KIND.CAUSAL:
        block = program.blocks - 1 - block
    return block


@triton.jit
def rows_there(index, r, sizes, KIND: tl.constexpr, TILE: tl.constexpr):
    """Which rows of a block exist."""
    there = index < sizes.n_q
    if TILE.EVEN and KIND.VALUES:
        there = r >= 0  # all of them: the compiler knows that this is true, and masks nothing
    return there


@triton.jit
def near_range(first, last, reach, low, high, BLOCK: tl.constexpr):
    """The whole blocks of low..high that hold something within `reach` of positions first..last."""
    start = (tl.maximum(first - reach, 0) // BLOCK) * BLOCK
    stop = ((tl.maximum(last + reach + 1, 0) + BLOCK - 1) // BLOCK) * BLOCK
    start = tl.minimum(tl.maximum(start, low), high)
    return start, tl.minimum(tl.maximum(stop, start), high)


@triton.jit
def whole_blocks(low, high, n, BLOCK: tl.constexpr):
    """low..high cut to 0..n and widened to whole blocks."""
    low = (tl.minimum(tl.maximum(low, 0), n) // BLOCK) * BLOCK
    high = ((tl.minimum(tl.maximum(high, 0), n) + BLOCK - 1) // BLOCK) * BLOCK
    return low, tl.maximum(low, high)


@triton.jit
def key_range(block, near_reach, sizes, KIND: tl.constexpr, TILE: tl.constexpr):
    """The keys that a block of rows touches: those in its window, in whole tiles."""
    first = block * TILE.ROWS + sizes.q_start
    last = tl.minimum((block + 1) * TILE.ROWS, sizes.n_q) - 1 + sizes.q_start
    low, high = sizes.n_k * 0, sizes.n_k
    if KIND.BEFORE:
        low = first - sizes.before
    if KIND.AFTER:
        high = last + sizes.after + 1
    low, high = whole_blocks(low, high, sizes.n_k, TILE.KEYS)
    SIDE: tl.constexpr = KIND.GRAIN if KIND.GRAIN > 0 else TILE.KEYS
    if KIND.GRAIN > 0:
        first = block * TILE.ROWS // SIDE * SIDE + sizes.q_start
        last = first + (SIDE - 1)
    near_start, near_stop = near_range(first, last, near_reach, low, high, SIDE)
    if TILE.ALL_NEAR:
        near_start, near_stop = low, high
    return Range(low, near_start, near_stop, high)


@triton.jit
def row_range(block, near_reach, sizes, KIND: tl.constexpr, TILE: tl.constexpr):
    """The rows that touch a block of keys: those whose window holds some of it, in whole tiles.

    `near_rows` in d_band.py repeats what is near with KIND.GRAIN.
    """
    first = block * TILE.KEYS - sizes.q_start
    last = tl.minimum((block + 1) * TILE.KEYS, sizes.n_k) - 1 - sizes.q_start
    low, high = sizes.n_q * 0, sizes.n_q
    if KIND.AFTER:
        low = first - sizes.after
    if KIND.BEFORE:
        high = last + sizes.before + 1
    low, high = whole_blocks(low, high, sizes.n_q, TILE.ROWS)
    SIDE: tl.constexpr = KIND.GRAIN if KIND.GRAIN > 0 else TILE.ROWS
    if KIND.GRAIN > 0:
        first = block * TILE.KEYS // SIDE * SIDE - sizes.q_start
        last = first + (SIDE - 1)
    near_start, near_stop = near_range(first, last, near_reach, low, high, SIDE)
    if TILE.ALL_NEAR:
        near_start, near_stop = low, high
    return Range(low, near_start, near_stop, high)


@triton.jit
def region_of(keys, REGION: tl.constexpr):
    """Start and stop of a region: 0 is far to the left, 1 near, 2 far to the right."""
    start = keys.near_stop
    stop = keys.high
    if REGION == 0:
        start = keys.low
        stop = keys.near_start
    if REGION == 1:
        start = keys.near_start
        stop = keys.near_stop
    return start, stop


@triton.constexpr_function
def masked_left(kind, region):
    """Whether each cell is compared with the left end of the window; region 1 is near.

    A band laid out for a head has both ends built in: it is -inf outside the window. One of a row
    has the right end built in if the call is causal.
    """
    built_in = kind.BAND and not kind.PER_ROW and not kind.RAW_BAND
    return kind.BEFORE and region < 2 and not (built_in and region == 1)


@triton.constexpr_function
def masked_right(kind, region):
    """Whether each cell is compared with the right end of the window (see masked_left)."""
    built_in = kind.BAND and (kind.CAUSAL or not kind.PER_ROW) and not kind.RAW_BAND
    return kind.AFTER and region > 0 and not (built_in and region == 1)


@triton.jit
def visible_cells(
    row,
    col,
    head,
    sizes,
    KIND: tl.constexpr,
    LEFT_EDGE: tl.constexpr,  # the tile may hold cells to the left of the window
    RIGHT_EDGE: tl.constexpr,
    EVEN: tl.constexpr,  # no tile extends beyond the last key
):
    """Which cells count: within the keys, the window, the padding mask and the segment."""
    lag = col - (row + sizes.q_start)
    seen = row >= 0
    if not EVEN:
        seen = seen & (col < sizes.n_k)
    if LEFT_EDGE:
        seen = seen & (lag >= -sizes.before)
    if RIGHT_EDGE:
        seen = seen & (lag <= sizes.after)
    if KIND.KEYS:
        seen = seen & (tl.load(head.keys + col, mask=col < sizes.n_k, other=0) != 0)
    if KIND.SEGMENTS:
        k_segment = tl.load(head.k_segment + col, mask=col < sizes.n_k, other=-1)
        seen = seen & (head.q_segment == k_segment)
    return seen


@triton.jit
def far_line(
    tails,
    ahead,  # the position of r = 0 minus that of the tile's first key
    r,
    REGION: tl.constexpr,
    SLOPES: tl.constexpr,
    LEVEL: tl.constexpr,
):
    """The bias of a far tile as a line in its column c, counted from the tile's first key.

    The shift is added to the number that is subtracted from the logits of a row in any case, so a
    constant tail costs no work in a cell. A constant of the whole tile goes into the shift or, with
    LEVEL, into the level: in a transposed tile a thread has few keys and many rows, and there the
    level is cheaper.
    """
    level = 0.0
    if REGION == 0:
        shift = tails.left
        tilt = -tails.left_slope
        if SLOPES:
            if LEVEL:
                level = tails.left + tails.left_slope * (ahead * 1.0)
                shift = tails.left_slope * r.to(tl.float32)
            else:
                shift = tails.left + tails.left_slope * (ahead * 1.0)
                shift += tails.left_slope * r.to(tl.float32)
    else:
        shift = tails.right
        tilt = tails.right_slope
        if SLOPES:
            if LEVEL:
                level = tails.right - tails.right_slope * (ahead * 1.0)
                shift = -tails.right_slope * r.to(tl.float32)
            else:
                shift = tails.right - tails.right_slope * (ahead * 1.0)
                shift -= tails.right_slope * r.to(tl.float32)
    return Line(shift, level, tilt)


@triton.constexpr_function
def slopes_by_cell(kind):
    """Whether the bias of a far tile is computed for each cell (far_cells), not along a line.

    So it is in float32 with slopes, which make logits far from the diagonal large: each is then
    rounded as often as in PyTorch. Along a line it would be rounded four or five times, and
    differently in the key kernel. The condition of in_base_e is repeated, as in unit_of.
    """
    return kind.SLOPES and kind.PRECISION == "ieee" and not kind.FAR


@triton.jit
def far_cells(tails, place, sizes, REGION: tl.constexpr):
    """The bias of every cell of a far tile."""
    distance = tl.abs(lags_of(place, sizes)).to(tl.float32)
    if REGION == 0:
        cells = tails.left + tails.left_slope * distance
    else:
        cells = tails.right + tails.right_slope * distance
    return cells


@triton.jit
def within(lag, reach):
    """-reach <= lag <= reach, in one comparison."""
    return (lag + reach).to(tl.uint32) <= (2 * reach).to(tl.uint32)


@triton.jit
def skewed(ptr, zero, r, c, last):
    """The address at which row r holds lag = c - r + const; `zero` is that of r = c = 0.

    In a matrix [row, lag] with places 0 to `last` in a row, a tile of [row, key] is a plain tile
    whose rows are `last` apart.
    """
    return (ptr + zero + c) + r * last


@triton.constexpr_function
def reach_of(last, causal):
    """The largest |lag| of a row with places 0 to `last`, the last of which is lag 0 if causal."""
    return last if causal else last // 2


@triton.constexpr_function
def left_end(last, causal):
    """The largest lag of a left tail that begins with the row's first lag."""
    return -reach_of(last, causal)


@triton.constexpr_function
def right_end(last, causal):
    """The smallest lag of a right tail that begins with the row's last, or 1 in a causal call."""
    return 1 if causal else max(reach_of(last, causal), 1)


@triton.jit
def between_ends(lag, LAST: tl.constexpr, CAUSAL: tl.constexpr):
    """Whether a lag lies between a row's two ends, each of which stands for all lags beyond it."""
    return (lag > left_end(LAST, CAUSAL)) & (lag < right_end(LAST, CAUSAL))


@triton.jit
def lags_of(place, sizes):
    """The lag of every cell of a tile, as a number of the thread plus one of the register.

    In tensor cores' layout of a tile, the cells of a thread differ by 8 on the first axis, and on
    the second axis in all bits but two. Told so, the compiler sees which cells of a thread have the
    same lag, and compares it once for them.
    """
    ahead = place.first_key - (place.first_row + sizes.q_start)
    r, c = place.r, place.c
    if r.shape[0] == 1:
        of_thread = (c & ~8) - (r & 6)
        of_register = (c & 8) - (r & ~6)
    else:
        of_thread = (c & 6) - (r & ~8)
        of_register = (c & ~6) - (r & 8)
    return (ahead + of_thread) + of_register


@triton.jit
def store_between_ends(
    ptr, cells, lag, zero, r, c, there, LAST: tl.constexpr, CAUSAL: tl.constexpr, EVEN: tl.constexpr
):
    """Stores those cells of a near tile, by row and lag, that lie between the ends of their row."""
    FIRST: tl.constexpr = left_end(LAST, CAUSAL) + 1
    COUNT: tl.constexpr = right_end(LAST, CAUSAL) - FIRST
    target = skewed(ptr, zero, r, c, LAST)
    place = lag - FIRST
    if not EVEN:
        place = tl.where(there, place, -1)
    store_in_place(target, cells, place, COUNT)


@triton.jit
def load_between_ends(
    ptr,
    place,
    left,  # the number of a cell beyond the left end, [m, 1]
    right,
    sizes,
    LAST: tl.constexpr,
    CAUSAL: tl.constexpr,
    EVEN: tl.constexpr,
    OWN: tl.constexpr,  # they may be written while this kernel runs: by it, or by one before it
    # that it is chained to
):
    """Numbers that belong to a row and a lag between its ends, for the cells of a near tile.

    They lie in a matrix [row, lag] that begins at `ptr`, with places 0 to LAST in a row.
    """
    FIRST: tl.constexpr = left_end(LAST, CAUSAL) + 1
    COUNT: tl.constexpr = right_end(LAST, CAUSAL) - FIRST
    zero = place.first_key - (place.first_row + sizes.q_start) + reach_of(LAST, CAUSAL)
    source = skewed(ptr, zero, place.r, place.c, LAST)
    index = lags_of(place, sizes) - FIRST
    if not EVEN:  # a row that does not exist has the number of its tail
        index = tl.where(place.first_row + place.r < sizes.n_q, index, -1)
    return load_in_place(source, left, right, index, COUNT, OWN)


@triton.jit
def row_numbers(
    ptr,
    place,
    left,  # the number of every lag in the left tail, [m, 1]
    right,
    sizes,
    KIND: tl.constexpr,
    EVEN: tl.constexpr,
):
    """Numbers that belong to a row and a lag, of a caller's band, for the cells of a near tile.

    They lie in a matrix [row, lag] that begins at `ptr`. Its reach may change with the length. A
    cell whose lag is not among them first gets a number of another row, or of the margin around the
    matrix.
    """
    ahead = place.first_key - (place.first_row + sizes.q_start)
    r = place.r
    lag = ahead + (place.c - r)
    if not EVEN:  # a row that does not exist reads in the last one, and has the number of its tail
        last_row = sizes.n_q - 1 - place.first_row
        lag = ahead + (place.c - tl.where(r <= last_row, r, 2**30))
        r = tl.minimum(r, last_row)
    last = sizes.reach if KIND.CAUSAL else 2 * sizes.reach
    cells = skewed(ptr, ahead + sizes.reach, r, place.c, last)
    numbers = tl.where(lag < -sizes.reach, left, read_in_place(cells))
    return tl.where(lag > 0 if KIND.CAUSAL else lag > sizes.reach, right, numbers)


@triton.jit
def near_bias(
    head,
    place,
    there,
    sizes,
    KIND: tl.constexpr,
    EVEN: tl.constexpr,  # all rows of the tile exist
    OWN_BAND: tl.constexpr,  # this program computed the bands of its rows
):
    """The bias of every cell of a near tile, as logits are or, if KIND.STARTED, in units of q.k.

    The look-up in a laid-out band needs no comparison (band.py). A raw band is one that was not
    laid out: for few queries, comparisons cost less.
    """
    ahead = place.first_key - (place.first_row + sizes.q_start)
    lag = ahead + (place.c - place.r)
    tails = head.tails
    if KIND.RAW_BAND:
        inside = within(lag, sizes.reach)
        index = lag + sizes.reach
        if KIND.PER_ROW:
            index += place.r * head.band_q
        bias = tl.load(head.band + index, mask=inside & there, other=0.0) * unit_of(KIND)
        if KIND.TAILS:
            line = tl.where(lag < 0, tails.left, tails.right)
            if KIND.SLOPES:
                slope = tl.where(lag < 0, tails.left_slope, tails.right_slope)
                line += slope * tl.abs(lag).to(tl.float32)
            bias = tl.where(inside, bias, line)
    elif KIND.PER_ROW:
        left = tails.left
        right = float("-inf") if KIND.CAUSAL else tails.right
        if KIND.SLOPES:
            distance = tl.abs(lag).to(tl.float32)
            left += tails.left_slope * distance
            if not KIND.CAUSAL:
                right += tails.right_slope * distance
        if KIND.ENDS:
            bias = load_between_ends(
                *(head.band, place, left, right, sizes),
                *(KIND.LAST, KIND.CAUSAL, EVEN, OWN_BAND or KIND.CHAINED),
            )
        else:
            bias = row_numbers(head.band, place, left, right, sizes, KIND, EVEN)
    else:
        # Rows are counted from the last, so that both terms grow with the index of a register. Then
        # the compiler sees which cells of a thread have the same lag, and reads it once for them.
        LAST: tl.constexpr = place.r.shape[0] * place.r.shape[1] - 1
        line = head.band + wide(ahead + sizes.edge - LAST) + (LAST - place.r)
        bias = read_in_place(line + place.c)
    return bias


@triton.jit
def read_in_place(ptr):
    """The float32 at each of these addresses, which no program of this kernel writes.

    A thread reads the cells that it needs. tl.load would let it read cells that lie side by side in
    memory, and move each cell to the thread that needs it through shared memory.
    """
    if INTERPRETED:
        cells = tl.load(ptr)
    else:
        cells = tl.inline_asm_elementwise(
            *("ld.global.f32 $0, [$1];", "=f,l", [ptr.to(tl.int64)]),
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
    return cells


@triton.constexpr_function
def reserve(name, bytes):
    """Instructions that reserve shared memory; $0 is its address.

    Triton's own memory begins behind it, and tensor cores want tiles at multiples of 1,024 bytes.
    """
    assert bytes % 1024 == 0
    return f"{{ .shared .align 16 .b8 {name}[{bytes}]; mov.u32 $0, {name}; }}"


@triton.jit
def thread_number():
    """The number of this thread. To Triton it is a scalar: it may be used in assembly alone."""
    return tl.inline_asm_elementwise(
        *("mov.u32 $0, %tid.x;", "=r,r", [0]), dtype=tl.int32, is_pure=True, pack=1
    )


@triton.constexpr_function
def predicated_load(own):
    """The instructions that load $0 from address $1 if 0 <= $4 < $5.

    Below that they copy $2, above it $3. The cache behind ld.global.nc may hold what was there when
    the kernel started, so it is not for numbers that are written while it runs (`own`).
    """
    load = "ld.global.f32" if own else "ld.global.nc.f32"
    beyond = "setp.lt.s32 p, $4, 0; selp.f32 $0, $2, $3, p;"
    return f"{{ .reg .pred p; {beyond} setp.lt.u32 p, $4, $5; @p {load} $0, [$1]; }}"


@triton.jit
def load_in_place(ptr, left, right, place, count, OWN: tl.constexpr):
    """The float32 cells with 0 <= place < count, each loaded by the thread that needs it.

    Others are `left` or `right`. Few cells of a near tile are loaded, and a warp without any reads
    nothing. Without OWN they must be written before this kernel starts. See read_in_place.
    """
    if INTERPRETED:
        other = tl.where(place < 0, left, right)
        cells = tl.load(ptr, mask=(place >= 0) & (place < count), other=other)
    else:
        cells = tl.inline_asm_elementwise(
            predicated_load(OWN),
            "=f,l,f,f,r,r",
            [ptr.to(tl.int64), left, right, place, count],
            dtype=tl.float32,
            is_pure=not OWN,
            pack=1,
        )
    return cells


@triton.jit
def read_by_now(cells):
    """The same cells, which are now certain to be loaded before the next product is started.

    It is a move that does nothing, and past which the compiler moves no product. The load of
    read_in_place alone would be moved to where its result is first used.
    """
    if not INTERPRETED:
        cells = tl.inline_asm_elementwise(
            *("mov.f32 $0, $1;", "=f,f", [cells]), dtype=tl.float32, is_pure=False, pack=1
        )
    return cells


@triton.jit
def store_in_place(ptr, cells, place, count):
    """Stores the float32 cells with 0 <= place < count, each by the thread that has it.

    tl.store would first move cells through shared memory, to threads that store them side by side.
    """
    if INTERPRETED:
        tl.store(ptr, cells, mask=(place >= 0) & (place < count))
    else:
        tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.lt.u32 p, $3, $4; @p st.global.f32 [$1], $2; mov.u32 $0, 0; }",
            "=r,l,f,r,r",
            [ptr.to(tl.int64), cells, place, count],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def store_where(ptr, cells, mask):
    """Stores the float32 cells of a mask, each by the thread that has it."""
    store_in_place(ptr, cells, tl.where(mask, 0, 1), 1)


@triton.jit
def where_negative(x, y):
    """The float32 y where the whole number x is negative, and 0 elsewhere.

    Without a comparison: a near tile compares so much that the compiler runs out of predicates, and
    packing them into registers costs more than the comparisons.
    """
    if INTERPRETED:
        cells = tl.where(x < 0, y, 0.0)
    else:
        cells = tl.inline_asm_elementwise(
            "{ .reg .b32 sign; shr.s32 sign, $1, 31; and.b32 $0, sign, $2; }",
            *("=f,r,f", [x, y]),
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
    return cells


@triton.jit
def wide(place):
    """An index that is not negative, such as the first row or key of a tile, in 64 bits.

    It is zero-extended, so that a loop variable stays in 32 bits. With sign extension the compiler
    would count in 64 bits, and multiply every row of the tile in 64 bits.
    """
    return (tl.zeros([], tl.uint32) + place).to(tl.int64)


@triton.jit
def logits_of(x, y, bias, STARTED: tl.constexpr, KIND: tl.constexpr):
    """x @ y, or if STARTED bias + x @ y: what a tensor core adds to costs nothing."""
    if STARTED:
        logits = tl.dot(x, y, bias, input_precision=KIND.PRECISION)
    else:
        logits = tl.dot(x, y, input_precision=KIND.PRECISION)
    return logits


@triton.jit
def load_rows(
    x,
    first,
    r,  # [m, 1] with d [1, D]; or [1, m] with d [D, 1] for the transposed tile
    d,
    n,
    D: tl.constexpr,
    EVEN: tl.constexpr,
):
    """Rows first + r of a head as a tile, zeros beyond its edges.

    Only the first row is multiplied in 64 bits, once for the whole tile.
    """
    WHOLE: tl.constexpr = d.shape[0] * d.shape[1] == D
    place = (x.ptr + wide(first) * x.stride_n) + (r * x.stride_n + d)
    if EVEN and WHOLE:
        tile = tl.load(place)
    else:
        tile = tl.load(place, mask=(first + r < n) & (d < D), other=0.0)
    return tile


@triton.jit
def leading_bits(x):
    """x in float32, cut to the leading bits, which tensor cores read (TF32).

    A product of x with a factor in half precision, which tensor cores read without loss, is exact
    to float32 as the sum of two products: with the leading bits of x, and with the remainder.
    """
    return (x.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)


@triton.jit
def table_product(x, table, acc, KIND: tl.constexpr):
    """acc + x @ table^T; x has the dtype of the call, the table float32.

    The table keeps float32's 24 bits, or 16 with queries in bfloat16, which themselves have 8.
    """
    if x.dtype == tl.bfloat16 and not INTERPRETED:
        leading, lower = in_two(table, tl.bfloat16)
        acc = tl.dot(x, tl.trans(lower), acc)
        acc = tl.dot(x, tl.trans(leading), acc)
    else:
        x = x.to(tl.float32)
        if KIND.PRECISION != "ieee":
            lower_bits = table - leading_bits(table)
            acc = tl.dot(x, tl.trans(lower_bits), acc, input_precision=KIND.PRECISION)
            table -= lower_bits
        acc = tl.dot(x, tl.trans(table), acc, input_precision=KIND.PRECISION)
    return acc


@triton.jit
def in_two(x, dtype: tl.constexpr):
    """A float32 tile as the sum of two in a dtype: its leading bits, and the next ones."""
    leading = rounded_to(x, dtype)
    return leading, rounded_to(x - leading.to(tl.float32), dtype)


@triton.jit
def third_part(x, leading, lower):
    """What two parts leave of a float32 tile: in bfloat16, the last 8 of its 24 bits."""
    return rounded_to(x - leading.to(tl.float32) - lower.to(tl.float32), leading.dtype)


@triton.jit
def product_in_parts(x, leading, lower, acc, KIND: tl.constexpr):
    """acc + x @ y of float32 tiles, of which y is given in two parts of the call's dtype.

    A product in TF32, which truncates, would add an error that always has the same sign.
    """
    x_leading, x_lower = in_two(x, leading.dtype)
    if KIND.PRECISION != "ieee":
        acc = tl.dot(x_lower, leading, acc)
        acc = tl.dot(x_leading, lower, acc)
    return tl.dot(x_leading, leading, acc, input_precision=KIND.PRECISION)


@triton.jit
def packed_row(b, h, row, n, n_heads, TOKENS: tl.constexpr):
    """The index of a row in packed [b, h, n, d], or with TOKENS in [b, n, h, d]."""
    place = (b * n_heads + h) * n + row
    if TOKENS:
        place = (b * n + row) * n_heads + h
    return place


@triton.jit
def load_far(ptr, b, h, index, m, n_heads, d, D: tl.constexpr, TOKENS: tl.constexpr):
    """Rows `index` of the m packed rows of one head, in float32; zeros beyond them."""
    there = (index >= 0) & (index < m)
    place = packed_row(b, h, index.to(tl.int64), m, n_heads, TOKENS)
    place = ptr + place[:, None] * D + d[None, :]
    part = tl.load(place, mask=there[:, None] & (d < D)[None, :], other=0.0)
    return part.to(tl.float32)


@triton.jit
def dropout_keeps(seed, row, col, dropout):
    """Whether dropout keeps a weight: a function of seed, row and key alone."""
    first = col + 0 * row
    zero = 0 * first
    random, _, _, _ = tl.philox(seed, first, row + zero, zero, zero)
    return tl.uint_to_uniform_float(random) >= dropout


@triton.jit
def after_dropout(cells, kept, dropout):
    """The cells that dropout keeps, divided by 1 - dropout, and 0 in place of the others.

    The selection comes after the product, so that the compiler cannot fuse this product and the
    dP - delta that follows into one FMA. An FMA would not round dP, but delta is a sum of rounded
    dP: where both are equal, their difference would be the rounding error and not 0.
    """
    return tl.where(kept, cells * (1.0 / (1.0 - dropout)), 0.0)


@triton.jit
def rounded_to(x, dtype: tl.constexpr):
    """x in float32 rounded to a dtype.

    Two numbers take one instruction. x.to(dtype) takes three where the result is converted back.
    """
    if dtype == tl.float32 or INTERPRETED:
        result = x.to(dtype)
    elif dtype == tl.bfloat16:
        result = tl.inline_asm_elementwise(
            *("cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [x]),
            dtype=tl.bfloat16,
            is_pure=True,
            pack=2,
        )
    else:
        result = tl.inline_asm_elementwise(
            *("cvt.rn.f16x2.f32 $0, $2, $1;", "=r,f,f", [x]),
            dtype=tl.float16,
            is_pure=True,
            pack=2,
        )
    return result


@triton.jit
def rounding_residual(exact, rounded):
    """The rounding error exact - rounded, times RESIDUAL_SCALE, clipped to float16's range."""
    residual = (exact - rounded.to(tl.float32)) * RESIDUAL_SCALE
    if INTERPRETED:
        residual = tl.minimum(tl.maximum(residual, -65504.0), 65504.0).to(tl.float16)
    else:
        residual = tl.inline_asm_elementwise(
            *("cvt.rn.satfinite.f16x2.f32 $0, $2, $1;", "=r,f,f", [residual]),
            dtype=tl.float16,
            is_pure=True,
            pack=2,
        )
    return residual
