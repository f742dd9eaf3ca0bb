"""Which kernels a forward or backward pass launches, in which order and with which arguments.

Nothing here touches data. The functions are written against a `Plan`, which reserves memory and
takes launches; a tensor, or a slot of a plan, is looked at for its shape, strides and dtype alone.

The caller guarantees two things: the last axis of q, k, v, d_out, a band and a product's query is
contiguous, and backward gets the outputs of forward with the strides that they had.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from whence.kernels.fused import short
from whence.kernels.fused import tiles as tiling
from whence.kernels.fused.backend import (
    FEW_ROWS,
    CurveBand,
    Far,
    FarGradients,
    Gradients,
    Kept,
    Numbers,
    Task,
    Wanted,
    by_token,
)
from whence.kernels.fused.device import arguments as a
from whence.kernels.fused.device.backward import STRIPE, key_kernel, query_kernel
from whence.kernels.fused.device.band import (
    CURVES,
    head_layout_kernel,
    row_layout_kernel,
)
from whence.kernels.fused.device.d_band import band_kernel, collect_kernel, stripe_kernel
from whence.kernels.fused.device.decode import merge_kernel, share_kernel
from whence.kernels.fused.device.forward import forward_kernel
from whence.kernels.fused.plan import Plan, Room
from whence.kernels.fused.tables import mass_parts, product_gradients, seen_cells, table_gradient
from whence.kernels.fused.tiles import Tiles, TileSet, ceil_div, narrowest, power_of_two

# How many lags beyond the reach a near tile may touch: 254 at most, since a tile has at most 128
# rows and 128 keys (SIDES in tiles_file.py), and 207 in a line that is loaded ahead (BandLine). The
# other 18 are left over from an older layout of the band.
MARGIN = 272
LEAST_SCALE = 1e-4  # the smallest scale that a band is divided by: a bias up to 1e34 stays finite
BASE_2 = math.log2(math.e)  # the factor that takes logits to base 2
# Up to this many queries and keys the key kernel sums the diagonals of a shared band. The sums take
# queries * keys / STRIPE numbers: about a megabyte for each head of each sequence of this length.
STRIPED = 2048
# In a longer sequence it does so in a window of at most STRIPED_WINDOW - MARGIN lags, also in that
# which a plain kernel for the far keys leaves. A stripe is then as long as the window: about 256
# bytes for each token and head. Its offsets have 32 bits, hence the limit of keys.
STRIPED_WINDOW = 1024
MOST_STRIPED_KEYS = 1 << 24
# Where rows see up to this many keys, they are balanced for the gradient of a band that they share
# (_shows_imbalance). At 2,048 that would take 2% of a layer's time. With heads of up to 64, tiles
# change there too, so that this limit makes no more kernels to compile.
FEW_KEYS = tiling.SHORT
BUSY = 1024  # programs that keep a whole GPU busy
MOST_BLOCKS = 65_535  # CUDA's limit for the second axis of a grid
# The keys and values of the heads that take turns fill at most one CACHE_PARTS-th of the L2 cache.
# On an H200 a quarter was the best, or within 2% of it, at 512, 1,024 and 2,048 tokens.
CACHE_PARTS = 4
LAYOUT_LAGS = 256  # lags that one program lays out
STRIPE_LAGS = 16  # lags that one program sums from the stripes: few, so that many programs run


class Arguments(NamedTuple):
    """The groups of arguments of a call's kernels, and what tiles depend on."""

    q: a.Rows
    k: a.Rows
    v: a.Rows
    bias: a.Bias
    visible: a.Visible | None
    seed: Any
    table: a.Table | None
    far: a.Far | None
    sizes: a.Sizes
    kind: a.Kind
    tile_kind: tiling.TileKind


def forward(plan: Plan, task: Task, tiles: Tiles, *, recorded: bool = True) -> Kept:
    """The launches of the output; returns it with what backward needs.

    `recorded` says whether backward may follow.
    """
    q, k, v = task[:3]
    b, h, n_q, _ = q.shape
    if is_short(task):
        band = extent = tails = None
        if task.product is None:
            band, extent, tails = _laid_out(plan, task, _logit_unit(task))
        in_short = _short_call(_with_made(task, extent, tails), band)
        out = short.forward(plan, q, k, v, in_short, tokens=by_token(q))
        return Kept(out, None, None, None, band, extent, tails)
    rooms = kept_rooms(task)
    out, lse = plan.reserved(rooms.out), plan.reserved(rooms.lse)
    residual = mass = None
    if recorded and rooms.out_residual is not None:
        residual = plan.reserved(rooms.out_residual)
    if rooms.mass is not None:
        mass = plan.reserved(rooms.mass)
    result = a.Output(out, residual, lse, mass)
    if task.few_queries:
        _decode(plan, task, tiles, result)
        return Kept(out, lse, residual, mass, None, None, None)
    band, extent, tails = _laid_out(plan, task, _band_unit(task))
    args = _arguments(_with_made(task, extent, tails), band)
    tiles, near = tiling.forward_tiles(tiles, args.tile_kind)
    even = n_q % tiles.rows == 0 and k.shape[2] % tiles.keys == 0
    alone = _all_near(args, n_q, k.shape[2], tiles.rows, tiles.keys)
    grid = grid_of(plan, args, ceil_div(n_q, tiles.rows), b * h)
    plan.launch(
        forward_kernel,
        grid,
        *(args.q, args.k, args.v, args.bias, args.visible, args.seed, args.table, args.far),
        a.product_of(q, task.product),
        result,
        *a.scalars(args.sizes),
        warps=tiles.warps,
        stages=tiles.stages,
        registers=tiling.forward_registers(args.kind, tiles, even=even, alone=alone),
        chained=args.kind.CHAINED,
        KIND=args.kind,
        TILE=a.Tile(
            *(tiles.rows, tiles.keys, near, tiles.stages, even, alone), TURNS=len(grid) == 3
        ),
        PRODUCT_D=0 if task.product is None else task.product.factor.shape[-1],
    )
    return Kept(out, lse, residual, mass, band, extent, tails)


def backward(
    plan: Plan,
    d_out: Any,
    task: Task,
    kept: Kept,
    tiles: TileSet,
    wanted: Wanted,
    far_gradients: FarGradients | None = None,
) -> Gradients:
    """The launches of every gradient of a call."""
    if is_short(task):
        return _short_backward(plan, d_out, task, kept, wanted)
    band, extent, tails = kept.band, kept.extent, kept.tails
    if band is None:  # forward had few queries and laid no band out
        band, extent, tails = _laid_out(plan, task, _band_unit(task))
    task = _with_made(task, extent, tails)
    args = _arguments(task, band, far_gradients)
    chained, d_rows = args.kind.CHAINED, a.rows_of(d_out)
    d_table = None
    if task.inputs.table is not None:
        parts = mass_parts(task.q, task.k, task.inputs.table, task.numbers)
        d_table = table_gradient(
            *(plan, kept.mass, d_out, task.inputs.table, parts), chained=chained
        )
    sums = _sums_of(task, wanted)
    kind = args.tile_kind._replace(
        tail_sums=sums.tails, striped=sums.striped, limited=tiling.is_limited(args.kind, args.sizes)
    )
    by_rows, near_keys = tiling.query_tiles(tiles.by_rows, kind)
    by_keys, near_rows = tiling.key_tiles(tiles.by_keys, kind)
    args = args._replace(kind=args.kind._replace(GRAIN=_grain(task, sums, by_rows, by_keys)))
    # The query kernel comes first: it writes the row statistics that the other kernels read.
    of_rows, statistics = _query_launch(
        *(plan, task, args, kept, d_rows, sums, by_rows, near_keys), key_rows=by_keys.rows
    )
    # Where a plain kernel takes the far keys, the key kernel leaves much of the GPU idle, so the
    # kernels of the band run beside it on a second stream.
    side = sums.shared and not sums.striped and task.far is not None
    d_band, d_tails = of_rows.d_band, of_rows.d_tails
    if sums.shared and not sums.striped:
        d_band = _diagonal_band(plan, task, args, d_rows, statistics, tiles.block, side)
    of_keys, key_tile = _key_launch(plan, task, args, d_rows, statistics, sums, by_keys, near_rows)
    if sums.striped:
        d_band = _striped_band(plan, task, args, of_keys.stripes, key_tile)
    d_query = d_factor = None
    d_parameters: Sequence[Any] = (None, None, None)
    if task.product is not None:
        seen = seen_cells(args.sizes, args.kind.LAST)
        d_query, d_factor = product_gradients(
            *(plan, task.product, task.q, of_rows.d_q, d_band, wanted, seen), chained=chained
        )
    if task.curve is not None and (wanted.band or wanted.tails):
        d_parameters = _curve_gradient(
            *(plan, task.curve, extent, d_band, d_tails), chained=chained, side=side
        )
    if task.product is not None or task.curve is not None:
        d_band = d_tails = None  # their gradients went on to the factors or parameters
    d_band = None if d_band is None else plan.summed(d_band, task.inputs.band.shape)
    d_tails = None if d_tails is None else plan.summed(d_tails, task.inputs.tails.shape)
    return Gradients(
        *(of_rows.d_q, of_keys.d_k, of_keys.d_v, d_band, d_tails, d_table),
        *(d_query, d_factor, d_parameters),
    )


def _short_backward(plan: Plan, d_out: Any, task: Task, kept: Kept, wanted: Wanted) -> Gradients:
    """The gradients of a short call. If forward laid no band out, it is laid out here."""
    band, extent, tails = kept.band, kept.extent, kept.tails
    if band is None and task.product is None:
        band, extent, tails = _laid_out(plan, task, _logit_unit(task))
    in_short = _short_call(_with_made(task, extent, tails), band)
    found = short.backward(
        *(plan, d_out, task.q, task.k, task.v, in_short, wanted), tokens=by_token(task.q)
    )
    if task.curve is None:
        return found
    of_curve: Sequence[Any] = (None, None, None)
    if wanted.band or wanted.tails:
        of_curve = _curve_gradient(plan, task.curve, extent, found.band, found.tails)
    return found._replace(band=None, tails=None, parameters=of_curve)


class Sums(NamedTuple):
    """Which sums of dS, the gradient of the logits, are needed besides dQ and dK."""

    rows: bool  # no sum: the query kernel stores dS of every row by lag
    ends: bool  # it stores the sum over each tail in the row's first and last place, for a product
    tails: bool  # the query kernel sums over each tail
    shared: bool  # along the diagonals, for a band that all rows share
    striped: bool  # the key kernel sums these diagonals, in stripes of keys
    balanced: bool  # the query kernel sums each row, which is 0 but for rounding errors
    balanced_first: bool  # it does so in a first pass, to correct its own gradients too


def _sums_of(task: Task, wanted: Wanted) -> Sums:
    """The sums of dS that the wanted gradients need."""
    shape = task.band_shape
    n_q = task.q.shape[2]
    band = shape is not None and wanted.band
    rows = shape is not None and wanted.band and (shape[2] > 1 or n_q == 1)
    shared = band and not rows
    ends = rows and task.product is not None
    tails = task.inputs.tails is not None and wanted.tails and not ends
    # In one pass, balancing takes an addition in every cell. Beside a plain kernel for the far keys
    # our tiles are few, so it costs next to nothing where a band learns.
    single_key = _sees_one_key(task)
    balanced = ends or tails
    if task.far is not None:
        balanced = balanced or wanted.band
    else:
        delicate = wanted.band and _shows_imbalance(task, shared=shared)
        balanced = balanced or task.inputs.table is not None or delicate or single_key
    return Sums(
        rows=rows,
        ends=ends,
        tails=tails,
        shared=shared,
        striped=shared and _is_striped(task),
        balanced=balanced,
        balanced_first=balanced and (n_q <= FEW_ROWS or single_key),
    )


def _is_striped(task: Task) -> bool:
    """Whether the key kernel sums the diagonals of a shared band."""
    numbers, n_q, n_k = task.numbers, task.q.shape[2], task.k.shape[2]
    if max(n_q, n_k) <= STRIPED:
        return True
    if numbers.before < 0 or numbers.after < 0 or n_k > MOST_STRIPED_KEYS:
        return False
    return bool(numbers.before + numbers.after + MARGIN <= STRIPED_WINDOW)


def _shows_imbalance(task: Task, *, shared: bool) -> bool:
    """Whether the error of delta (query_kernel) would show in the gradient of a band.

    Few rows do not average it out. Over few keys dS is small. Where all rows share the band, it may
    be nearly constant over the keys that a row sees, of which a mask may leave few, and then its
    gradient cancels in each row but for that error. With a scale of 0 the logits have no rounding
    errors, and in float32 only small ones, so that nothing else hides it.
    """
    numbers, inputs = task.numbers, task.inputs
    n_q, keys = task.q.shape[2], task.k.shape[2]
    if numbers.before >= 0 and numbers.after >= 0:
        keys = min(keys, numbers.before + numbers.after + 1)
    few_keys = keys <= (FEW_KEYS if shared else FEW_ROWS)
    masked = inputs.keys is not None or inputs.q_segment is not None
    exact_logits = task.q.dtype == torch.float32 or numbers.scale == 0.0
    return bool(n_q <= FEW_ROWS or few_keys or (shared and masked) or exact_logits)


def _sees_one_key(task: Task) -> bool:
    """Whether a row sees a single key. dS should be 0 then, and is the error of delta instead.

    Correcting the query kernel's own gradients costs little there, since a row has few tiles.
    """
    return bool(task.k.shape[2] == 1 or task.numbers.before == task.numbers.after == 0)


def _grain(task: Task, sums: Sums, by_rows: Tiles, by_keys: Tiles) -> int:
    """KIND.GRAIN of a backward pass, or 0."""
    grain = max(by_rows.rows, by_rows.keys, by_keys.rows, by_keys.keys)
    summed = sums.tails and sums.striped and task.far is None and task.curve is not None
    level = not task.numbers.slopes and task.inputs.table is None
    return grain if summed and level and grain <= MARGIN // 2 else 0


def _row_statistics(plan: Plan, task: Task, margin: int) -> a.RowStatistics:
    """Memory for what the query kernel writes for the other kernels."""
    (b, h, n_q, _), numbers, inputs = task.q.shape, task.numbers, task.inputs
    d_mass = far_lse_delta = norm = None
    if inputs.table is not None:
        d_mass = plan.empty(_with_margin(mass_shape(task), margin), torch.float32)
    lse_delta = plan.empty((b, h, n_q, 2), torch.float32)
    of_rows = task.per_row or inputs.table is not None or inputs.tails is not None
    sloping_rows = task.per_row and numbers.slopes  # every row has a slope of its own
    # far_lse_delta is rounded once more than lse_delta, which shows where dS should be 0. It has no
    # room for slopes in float32, where far_cells (device/tile.py) adds them to every cell.
    sloped = numbers.slopes and task.q.dtype == torch.float32
    exact = sloping_rows or sloped or numbers.dropout or _sees_one_key(task)
    if of_rows and task.far is None and not exact:
        far_lse_delta = plan.empty((2, b, h, n_q, 2), torch.float32)
    if _in_base_e(task):
        norm = plan.empty((b, h, n_q), torch.float32)
    return a.RowStatistics(lse_delta, far_lse_delta, d_mass, norm)


def _query_launch(
    plan: Plan,
    task: Task,
    args: Arguments,
    kept: Kept,
    d_rows: a.Rows,
    sums: Sums,
    tiles: Tiles,
    near: int,
    *,
    key_rows: int,
) -> tuple[a.QueryGradients, a.RowStatistics]:
    """The launch by blocks of rows; returns what it writes."""
    (b, h, n_q, _), n_k, kind = task.q.shape, task.k.shape[2], args.kind
    d_q = plan.empty(task.q.shape, task.q.dtype, tokens=kind.TOKENS)
    d_band = d_tails = None
    d_last = 2 * args.sizes.reach if task.product is None else kind.LAST
    if sums.rows:
        # Cells that no tile touches are not written; of a product's band they are not read either.
        reserve = plan.zeros if task.product is None else plan.empty
        d_band = reserve((b, h, n_q, d_last + 1), torch.float32)
    if sums.tails:
        parts = n_q if kind.PER_ROW else ceil_div(n_q, tiles.rows)
        d_tails = plan.empty((4, b, h, parts), torch.float32)
    gradients = a.QueryGradients(d_q, d_band, d_tails)
    statistics = _row_statistics(plan, task, kind.MARGIN)
    # If the value table has the reach of the product, its end masses are those of the tails.
    alike = kind.LAST == kind.VALUE_LAST and not task.numbers.dropout
    mass = kept.mass if sums.ends and task.inputs.table is not None and alike else None
    even = n_q % tiles.rows == 0 and n_k % tiles.keys == 0
    grid = grid_of(plan, args, ceil_div(n_q, tiles.rows), b * h)
    plan.launch(
        query_kernel,
        grid,
        *(args.q, args.k, args.v, d_rows),
        a.Output(kept.out, kept.out_residual, kept.lse, mass),
        *(args.bias, args.visible, args.seed, args.table, args.far),
        *(gradients, statistics),
        *a.scalars(args.sizes),
        warps=tiles.warps,
        stages=tiles.stages,
        registers=tiling.query_registers(kind, tiles, even=even),
        chained=kind.CHAINED,
        KIND=kind,
        TILE=a.Tile(
            *(tiles.rows, tiles.keys, near, tiles.stages, even),
            _all_near(args, n_q, n_k, tiles.rows, tiles.keys, spare=_spare(args)),
            _lines(args, tiles.rows, tiles, task.q.dtype),
            TURNS=len(grid) == 3,
        ),
        BALANCED=sums.balanced,
        TWICE=sums.balanced_first,
        D_LAST=d_last if sums.ends else 0,
        D_ENDS=sums.ends,
        KEY_ROWS=key_rows,
    )
    return gradients, statistics


def _key_launch(
    plan: Plan,
    task: Task,
    args: Arguments,
    d_rows: a.Rows,
    statistics: a.RowStatistics,
    sums: Sums,
    tiles: Tiles,
    near: int,
) -> tuple[a.KeyGradients, a.Tile]:
    """The launch by blocks of keys; returns what it writes, and its tiles."""
    (b, h, n_q, _), (h_kv, n_k), kind = task.q.shape, task.k.shape[1:3], args.kind
    d_k, d_v = (plan.empty(x.shape, x.dtype, tokens=kind.TOKENS) for x in (task.k, task.v))
    even = n_q % tiles.rows == 0 and n_k % tiles.keys == 0
    stripes = None
    by_warp = held = False
    if sums.striped:
        # A warp's lanes add up 32 diagonals at a time (collect_stripe in device/backward.py).
        by_warp = tiles.rows >= 32 and tiling.split_by_warp(tiles.keys, tiles, task.q.dtype)
        # Held sums take shared memory. With wider heads, more stages, partial tiles or, in Triton
        # 3.9, tails, one program would run on a multiprocessor instead of two. With fewer rows
        # Triton's own shared memory is less than 48 KB, and the kernel would need an opt-in that
        # only we make (needs_more_memory in plan.py).
        small = max(kind.BLOCK_D, kind.BLOCK_DV) <= 64 and tiles.stages <= 3
        held = by_warp and tiles.rows == 64 and even and small and not kind.TAILS
        count = ceil_div(n_k, tiles.keys) * (1 if held else tiles.keys // STRIPE.value)
        length = stripe_length(n_q, task.numbers, tiles)
        assert not held or length - 2 * tiles.rows <= STRIPED  # or a warp's shared memory overflows
        stripes = plan.empty((b, h, count, length), torch.float32)
    gradients = a.KeyGradients(d_k, d_v, stripes)
    grid = grid_of(plan, args, ceil_div(n_k, tiles.keys), b * h_kv)
    tile = a.Tile(
        *(tiles.rows, tiles.keys, near, tiles.stages, even),
        _all_near(args, n_k, n_q, tiles.keys, tiles.rows, by_keys=True, spare=_spare(args)),
        _lines(args, tiles.keys, tiles, task.q.dtype),
        TURNS=len(grid) == 3,
        HELD=STRIPED + tiles.keys if held else 0,
    )
    plan.launch(
        key_kernel,
        grid,
        *(args.q, args.k, args.v, d_rows, statistics),
        *(args.bias, args.visible, args.seed, args.far),
        gradients,
        h // h_kv,
        *a.scalars(args.sizes),
        warps=tiles.warps,
        stages=tiles.stages,
        registers=tiling.key_registers(kind, args.sizes, tiles, even=even),
        chained=kind.CHAINED,
        KIND=kind,
        TILE=tile,
        BY_WARP=by_warp,
    )
    return gradients, tile


def stripe_length(n_q: int, numbers: Numbers, tiles: Tiles) -> int:
    """How many sums of diagonals a stripe has: `stripe_length` in device/backward.py."""
    rows = n_q
    if numbers.before >= 0 and numbers.after >= 0:
        rows = min(rows, numbers.before + numbers.after + tiles.keys + tiles.rows)
    return (ceil_div(rows, tiles.rows) + 2) * tiles.rows


def _spare(args: Arguments) -> int:
    """How many far tiles a side count as near. With two tables, a loop for one costs as much."""
    return int(args.kind.ENDS and args.kind.VALUES and not args.kind.FAR)


def kept_rooms(task: Task, *, any_length: bool = False) -> Kept:
    """The memory of what forward keeps for backward, of the task without its far keys' results.

    With `any_length` it is all that some length of q and k needs: a short call, or one with few
    queries, keeps less.
    """
    in_short, few = (False, False) if any_length else (is_short(task), task.few_queries)
    out, lse, residual, mass = out_room(task.q, task.v), None, None, None
    if not in_short:
        lse = Room(lse_shape(task), torch.float32)
        biased = task.band_shape is not None or task.inputs.table is not None
        if biased and task.q.dtype != torch.float32:
            # float16 also for an output in bfloat16: residuals fit its range, and it has more bits.
            residual = out._replace(dtype=torch.float16)
        if task.inputs.table is not None:
            mass = Room(mass_shape(task), torch.float32)
    band = extent = tails = None
    if not few and not (in_short and task.product is not None):
        band, extent, tails = _band_rooms(task)
    return Kept(out, lse, residual, mass, band, extent, tails)


def out_room(q: Any, v: Any) -> Room:
    """The memory of the output."""
    return Room((*q.shape[:3], v.shape[-1]), q.dtype, by_token(q))


def _band_rooms(task: Task) -> list[Room | None]:
    """The memory of the laid-out band, of a curve's extent, and of a curve's or product's tails."""
    laid_out, curve = laid_out_shape(task), task.curve
    band = extent = tails = None
    if laid_out is not None:
        band = Room(laid_out, torch.float32)
    b, h, n_q, _ = task.q.shape
    if task.product is not None:  # its tails have no slopes: kernels do not touch their memory
        tails = Room((4, b, h, n_q), torch.float32)
    elif curve is not None and curve.tails:
        tails = Room((4, 1, h, 1), torch.float32)
    elif curve is not None:
        extent = Room((h,), torch.int32)
    return [band, extent, tails]


class Shape(NamedTuple):
    """A stand-in for a tensor of which only the shape is read."""

    shape: tuple[int, ...]


def is_short(task: Task) -> bool:
    """Whether the kernels for short sequences (short.py) cover the call and are faster."""
    q, k, v = task[:3]
    if max(q.shape[2], k.shape[2]) > short.LONGEST or task.few_queries:
        return False
    band = None
    if task.product is None:
        laid_out = laid_out_shape(task)
        band = None if laid_out is None else Shape(laid_out)
    in_short = short.ShortCall(band, task.product, task.inputs, task.numbers)
    return short.fits(q, k, v, in_short) and short.is_faster(q, k, v, in_short)


def _all_near(
    args: Arguments,
    n: int,
    n_other: int,
    block: int,
    tile: int,
    *,
    by_keys: bool = False,
    spare: int = 0,
) -> bool:
    """Whether every block of rows touches near keys alone (compare key_range in device/tile.py).

    There are n rows in blocks of `block`, and n_other keys in tiles of `tile`. With `by_keys` it is
    n keys, n_other rows and row_range. Up to `spare` far tiles on each side count as near.
    """
    sizes = args.sizes
    if args.kind.EXTENT:  # only the device knows
        return False
    reach = max(sizes.reach, sizes.value_reach)
    start, after = sizes.q_start, sizes.after
    if by_keys:
        start, after = -start, sizes.before
    first, last = (ceil_div(n, block) - 1) * block + start, min(block, n) - 1 + start
    near_stop = ceil_div(max(last + reach + 1, 0), tile) + spare
    right = near_stop >= ceil_div(n_other, tile) or 0 <= after <= reach
    return first - reach < (1 + spare) * tile and right


def _lines(args: Arguments, side: int, tiles: Tiles, dtype: torch.dtype) -> bool:
    """Whether a warp loads its part of a head's band ahead (BandLine in device/band.py).

    `side` is the number of rows of a tile, or of keys in the key kernel. With tails or with few
    rows there are few near tiles, so it cannot gain much. With a value table or segments, the
    kernels would use as much shared memory as `needs_more_memory` (plan.py) warns of.
    """
    kind, sizes = args.kind, args.sizes
    small = max(kind.BLOCK_D, kind.BLOCK_DV, tiles.rows, tiles.keys) <= 64
    tailless = kind.BAND and not (kind.PER_ROW or kind.TAILS)
    alone = not (kind.VALUES or kind.SEGMENTS)
    few = sizes.n_q <= FEW_ROWS or sizes.n_k == 1 or sizes.before == sizes.after == 0
    return tailless and alone and small and not few and tiling.split_by_warp(side, tiles, dtype)


def _short_call(task: Task, band: Any) -> short.ShortCall:
    """The call as short.py takes it, which of a caller's band reads the shape alone.

    A band that a curve makes is not among the inputs, so its shape is put there.
    """
    inputs = task.inputs
    if task.product is None and task.band_shape is not None:
        inputs = inputs._replace(band=Shape(task.band_shape))
    return short.ShortCall(band, task.product, inputs, task.numbers)


def _decode(plan: Plan, task: Task, tiles: Tiles, result: a.Output) -> None:
    """The launches of a call with few queries. They read the band without laying it out."""
    (b, h, n_q, _), (_, h_kv, n_k, d_v) = task.q.shape, task.v.shape
    band, curve = task.inputs.band, task.curve
    if curve is not None and curve.tails:
        band, _, tails = _laid_out(plan, task, None)
        inputs, curve = task.inputs._replace(band=band, tails=tails), None
        task = task._replace(inputs=inputs, curve=None)
    elif curve is not None:  # each share evaluates the part of the curve that it looks up
        band = plan.empty((1, h, 1, 2 * curve.reach + 1), torch.float32)
    args = _arguments(task, band, raw_band=True)
    width = max(args.kind.BLOCK_D, args.kind.BLOCK_DV)
    # Few rows leave room for more keys in a tile, unless the table's tiles had to be made smaller.
    tile = tiling.share_tiles(width, task.q.dtype, 2 * tiles.keys, tiles.stages)
    count, share = tiling.shares(n_k, b * h_kv, tile.at_once * processors(plan.device), tile.keys)
    sums = a.ShareSums(
        plan.empty((count, b, h, n_q, d_v), torch.float32),
        plan.empty((count, b, h, n_q, 4), torch.float32),
    )
    plan.launch(
        share_kernel,
        (count, b * h_kv),
        *(args.q, args.k, args.v, args.bias, args.visible),
        _parameters(() if curve is None else curve.parameters),
        *(result.mass, sums, share, *a.scalars(args.sizes)),
        stages=tile.stages,
        KIND=args.kind,
        TILE=a.Tile(FEW_ROWS, tile.keys, tile.keys, tile.stages, n_k % tile.keys == 0),
        **_curve_constants(curve),
    )
    plan.launch(
        merge_kernel,
        (b * h * n_q,),
        *(sums, args.table, result, count, *a.scalars(args.sizes)),
        KIND=args.kind,
        SHARES=power_of_two(count),
    )


def _laid_out(plan: Plan, task: Task, unit: float | None) -> tuple[Any, Any, Any]:
    """The laid-out band (device/band.py), a curve's extent, and the tails of a curve or product.

    Each is None if the call does not have it. For a product, band and tails are empty memory that
    the forward kernel fills. The band of a head is multiplied with `unit`. Without a unit a curve
    is evaluated but not laid out: its band has the form in which a caller gives one.
    """
    (b, h, n_q, _), curve, shape = task.q.shape, task.curve, task.band_shape
    if shape is None:
        return None, None, None
    rooms = _band_rooms(task)
    if unit is None:
        rooms[0] = Room(shape, torch.float32)
    band, extent, tails = (None if room is None else plan.reserved(room) for room in rooms)
    assert band is not None
    if task.product is not None:
        return band, extent, tails
    logit_unit = _logit_unit(task)
    task = _with_made(task, extent, tails)._replace(far=None)
    given = _arguments(task, task.inputs.band, raw_band=True)
    if given.kind.PER_ROW:
        plan.launch(
            row_layout_kernel,
            (ceil_div(n_q, 32), b * h),
            *(band, given.bias, logit_unit, *a.scalars(given.sizes)),
            KIND=given.kind,
            ROWS=32,
            BLOCK=min(64, power_of_two(shape[-1])),
        )
        return band, extent, tails
    bands, heads, _, width = band.shape
    plan.launch(
        head_layout_kernel,
        (ceil_div(width, LAYOUT_LAGS), bands * heads),
        *(band, given.bias, _parameters(() if curve is None else curve.parameters)),
        1.0 if unit is None else unit,
        *a.scalars(given.sizes._replace(n_heads=heads, edge=width // 2)),
        chained=given.kind.CHAINED,
        KIND=given.kind,
        BLOCK=LAYOUT_LAGS,
        LAID_OUT=unit is not None,
        CURVE_TAILS=None if curve is None else CURVES[curve.name].tails_of,
        **_curve_constants(curve),
    )
    return band, extent, tails


def _is_chained(q: Any, numbers: Numbers) -> bool:
    """Whether a kernel is made ready while the one before ends (pdl_wait in device/tile.py).

    Not where a plain kernel takes the far keys, on two streams; nor for few queries. Such a launch
    takes the host longer, which is the limit there, and it made short calls and decoding slower.
    """
    return tiling.on_hopper() and numbers.far == 0 and q.shape[2] >= tiling.BRIEF


def _starts_with_bias(q: Any, numbers: Numbers) -> bool:
    """Whether a near tile's product accumulates onto a head's band (STARTED in a.Kind).

    Not in float32, where the rounding of one more division would show.
    """
    return q.dtype != torch.float32 and numbers.scale >= LEAST_SCALE


def _band_unit(task: Task) -> float:
    """What a head's band is multiplied with as it is laid out."""
    started = _starts_with_bias(task.q, task.numbers)
    return 1.0 / task.numbers.scale if started else _logit_unit(task)


def _in_base_e(task: Task) -> bool:
    """Whether logits are in base e and rows have a norm: `in_base_e` in device/tile.py."""
    return bool(task.q.dtype == torch.float32 and not task.numbers.far)


def _logit_unit(task: Task) -> float:
    """log2(e) where logits are in base 2, and 1 in base e: `unit_of` in device/tile.py."""
    return 1.0 if _in_base_e(task) else BASE_2


def laid_out_shape(task: Task) -> tuple[int, ...] | None:
    """The shape of the laid-out band, or None without a band."""
    shape, tails = task.band_shape, task.inputs.tails
    if shape is None:
        return None
    if task.per_row:
        lags = a.last_place(task.reach, task.numbers) + 1
        # At least `_margin`, whose power of two would be a guard on a symbolic reach.
        return _with_margin((*task.q.shape[:3], lags), 2 * _farthest(task))
    bands, heads = shape[:2]
    if tails is not None:
        bands, heads = max(bands, tails.shape[1]), max(heads, tails.shape[2])
    return (bands, heads, 1, 2 * _farthest(task) + 1)


def lse_shape(task: Task) -> tuple[int, ...]:
    """The shape of lse [b, h, q], or with norms [2, b, h, q] (row_lse in device/tile.py)."""
    rows = tuple(task.q.shape[:3])
    return (2, *rows) if _in_base_e(task) else rows


def mass_shape(task: Task) -> tuple[int, ...]:
    """The shape [b, h, q, lag] of the masses of a value table's lags, without those never seen."""
    return (*task.q.shape[:3], a.last_place(task.value_reach, task.numbers) + 1)


def _farthest(task: Task) -> int:
    """The largest |lag| that a near tile may touch."""
    reaches = (task.reach, task.value_reach, task.numbers.far)
    return functools.reduce(torch.sym_max, reaches) + MARGIN


def _margin(task: Task) -> int:
    """How many numbers near tiles may touch beyond a row, rounded up to a power of two.

    It is a compile-time constant; rounded up, many lengths share one and compile nothing anew.
    """
    return power_of_two(_farthest(task))


def _with_margin(shape: Sequence[int], margin: int) -> tuple[int, ...]:
    """The shape [1, 1, n, 1] of memory for so many numbers with a margin on both sides."""
    return (1, 1, math.prod(shape) + 2 * margin, 1)


def _with_made(task: Task, extent: Any, tails: Any) -> Task:
    """The task with the extent and tails that a curve or a product defines."""
    inputs = task.inputs
    return task._replace(
        inputs=inputs._replace(
            extent=inputs.extent if extent is None else extent,
            tails=inputs.tails if tails is None else tails,
        )
    )


def _diagonal_band(
    plan: Plan,
    task: Task,
    args: Arguments,
    d_rows: a.Rows,
    statistics: a.RowStatistics,
    block: int,
    side: bool,
) -> Any:
    """The gradient of a band that all queries share, [b|1, h, 1, lag], by block-diagonals."""
    assert task.band_shape is not None
    sizes, kind = args.sizes, args.kind
    bands, n_batch, h = task.band_shape[0], task.q.shape[0], sizes.n_heads
    row_blocks, key_blocks = ceil_div(sizes.n_q, block), ceil_div(sizes.n_k, block)
    lowest = max((sizes.q_start - sizes.reach) // block, 1 - row_blocks)
    highest = min((sizes.q_start + sizes.reach + block - 1) // block, key_blocks - 1)
    diagonals = max(highest - lowest + 1, 1)
    tiles = min(row_blocks, key_blocks) * (n_batch // bands)
    # With an extent most block-diagonals are empty, but only the device knows which. So there are
    # few programs, each of which visits every n-th block-diagonal, and those that are not empty are
    # divided into as many shares as there is memory for, to keep the GPU busy.
    slots = min(diagonals, 8 if kind.EXTENT else 64)
    busy = BUSY // max(1, min(slots, 4) * h * bands)
    parts = max(1, min(tiles, busy, 64))
    size = 2**22 if kind.EXTENT else 2**25  # bytes for the sums of all shares: 4 or 32 MB
    capacity = max(diagonals, min(diagonals * parts, size // (bands * h * 2 * block * 4)))
    first = (sizes.q_start - sizes.reach) // block
    last = (sizes.q_start + sizes.reach) // block
    sums = plan.empty((bands, h, capacity, 2, block), torch.float32)
    d_band = plan.empty((bands, h, 1, 2 * sizes.reach + 1), torch.float32)
    even = sizes.n_q % block == 0 and sizes.n_k % block == 0
    plan.launch(
        band_kernel,
        (slots, parts, bands * h),
        *(args.q, args.k, args.v, d_rows, statistics),
        *(args.bias, args.visible, args.seed, sums),
        *(capacity, n_batch // bands, *a.scalars(sizes)),
        stages=2,
        side=side,
        KIND=kind,
        TILE=a.Tile(block, block, block, 2, even),
    )
    plan.launch(
        collect_kernel,
        (last - first + 1, bands * h),
        *(sums, d_band, args.bias.extent, capacity, first, parts, *a.scalars(sizes)),
        side=side,
        KIND=kind,
        BLOCK=block,
    )
    return d_band


def _striped_band(plan: Plan, task: Task, args: Arguments, stripes: Any, tile: a.Tile) -> Any:
    """The gradient of a shared band, [b|1, h, 1, lag], from the sums that the key kernel stored."""
    assert task.band_shape is not None
    assert tile.NEAR == tile.ROWS
    (n_batch, h, count, _), bands = stripes.shape, task.band_shape[0]
    at_once = 1 if n_batch == bands else 8  # sequences that share the band, in one step
    beyond = 2 * max(args.kind.GRAIN - 1, 0)
    width = 2 * (args.sizes.reach + beyond) + 1
    d_band = plan.empty((bands, h, 1, width), torch.float32)
    plan.launch(
        stripe_kernel,
        (ceil_div(width, STRIPE_LAGS), bands * h),
        *(stripes, d_band, args.bias, beyond, n_batch // bands, count),
        *a.scalars(args.sizes),
        warps=8,
        chained=args.kind.CHAINED,
        KIND=args.kind,
        TILE=tile,
        LAGS=STRIPE_LAGS,
        STRIPES=256 // at_once,
        BATCHES=at_once,
    )
    return d_band


def _curve_gradient(
    plan: Plan,
    curve: CurveBand,
    extent: Any,
    d_band: Any,
    d_tails: Any,
    *,
    chained: bool = False,
    side: bool = False,
) -> Sequence[Any]:
    """The gradients of a curve's parameters in float32; None for a parameter of whole numbers."""
    first = curve.parameters[0]
    if curve.constant:  # one number for all keys does not change a softmax
        return [plan.zeros(first.shape, torch.float32), None, None]
    found = [
        plan.empty(x.shape, torch.float32) if x is not None and x.dtype.is_floating_point else None
        for x in curve.parameters
    ]
    # Gaussians are [h, s]; slopes [h] and a table [bucket, h], the curves with tails, end in heads.
    heads = first.shape[-1] if curve.tails else first.shape[0]
    if d_band is not None and d_band.shape[0] > 1:  # of one query, stored for each sequence
        d_band = plan.summed(d_band, (1, *d_band.shape[1:]))
    beyond = 0 if d_band is None else (d_band.shape[-1] - 1) // 2 - curve.reach
    batches, blocks = (0, 0) if d_tails is None else (d_tails.shape[1], d_tails.shape[3])
    plan.launch(
        CURVES[curve.name].gradient_kernel,
        (heads, math.prod(first.shape) // heads),
        *(_parameters(curve.parameters), extent, d_band, d_tails, _parameters(found)),
        *(curve.reach, beyond, batches, blocks),
        chained=chained,
        side=side,
        BLOCK=128,
        CHAINED=chained,
    )
    return found


def grid_of(plan: Plan, args: Arguments, blocks: int, heads: int) -> tuple[int, ...]:
    """The grid of a kernel with a program for every block of every head (program_of in tile.py).

    In a causal call some blocks are long and some short. If one head followed another, a program
    that starts last could be the longest, and most of the GPU would wait for it. So heads take
    turns: the longest block of each, then the next. CACHE_PARTS limits the heads that take turns.
    """
    kind, sizes = args.kind, args.sizes
    if not kind.CAUSAL or kind.BEFORE or kind.FAR or blocks > MOST_BLOCKS:
        return (blocks, heads)
    of_head = max(sizes.n_q, sizes.n_k) * (kind.D + kind.D_V) * args.q.ptr.dtype.itemsize
    most = max(1, min(heads, cache_bytes(plan.device) // CACHE_PARTS // of_head))
    in_turn = next(count for count in range(most, 0, -1) if heads % count == 0)
    return (in_turn, blocks, heads // in_turn)


def _arguments(
    task: Task,
    band: Any,  # laid out; with raw_band, as the caller gave it
    far_gradients: FarGradients | None = None,
    *,
    raw_band: bool = False,
) -> Arguments:
    """The arguments of a call's kernels."""
    q, k, v, inputs, numbers = task[:5]
    (_, h, n_q, d), (_, h_kv, n_k, d_v) = q.shape, v.shape
    tails, table, per_row = inputs.tails, inputs.table, task.per_row
    causal, biased = numbers.causal, task.band_shape is not None
    last, value_last = (a.last_place(x, numbers) for x in (task.reach, task.value_reach))
    product_last = 0 if task.product is None else last
    kind = a.Kind(
        D=d,
        D_V=d_v,
        BLOCK_D=max(narrowest(), power_of_two(d)),
        BLOCK_DV=max(narrowest(), power_of_two(d_v)),
        GROUPS=h // h_kv,
        BAND=biased,
        RAW_BAND=raw_band,
        EXTENT=inputs.extent is not None,
        TAILS=tails is not None,
        SLOPES=numbers.slopes,
        PER_ROW=per_row,
        VALUES=table is not None,
        BEFORE=numbers.before >= 0,
        AFTER=numbers.after >= 0,
        CAUSAL=causal,
        KEYS=inputs.keys is not None,
        SEGMENTS=inputs.q_segment is not None,
        DROPOUT=numbers.dropout > 0,
        NEGATIVE=numbers.scale < 0.0,
        FAR=task.far is not None,
        TOKENS=by_token(q),
        PRECISION=a.precision_of(q),
        ENDS=task.product is not None,
        LAST=product_last,
        VALUE_LAST=value_last,
        MARGIN=_margin(task) if per_row or table is not None else 0,
        LAGS=max(16, min(32, power_of_two(max(product_last, value_last, 1)))),
        STARTED=biased and not (per_row or raw_band) and _starts_with_bias(q, numbers),
        CHAINED=_is_chained(q, numbers),
    )
    sizes = a.Sizes(
        n_q=n_q,
        n_k=n_k,
        q_start=numbers.q_start,
        reach=task.reach,
        edge=0 if band is None else band.shape[-1] // 2,
        n_heads=h,
        value_reach=task.value_reach,
        before=numbers.before,
        after=numbers.after,
        far_start=0 if task.far is None else task.far.start,
        scale=numbers.scale,
        dropout=numbers.dropout,
    )
    of_band = a.strides_of(band, 0, 1, 2)
    if per_row and not raw_band:  # packed in memory with a margin
        of_band = (h * n_q * (last + 1), n_q * (last + 1), last + 1)
    return Arguments(
        a.rows_of(q),
        a.rows_of(k),
        a.rows_of(v),
        a.Bias(band, inputs.extent, tails, *of_band, *a.strides_of(tails, 0, 1, 2, 3)),
        a.visible_of(inputs),
        inputs.seed,
        a.table_of(table),
        _far(task.far, far_gradients),
        sizes,
        kind,
        tiling.TileKind(
            d,
            n_q,
            row_lookup=per_row or table is not None,
            near_alone=task.far is not None,
            causal=causal,
            sloped=numbers.slopes,
            per_row=per_row,
        ),
    )


def _parameters(given: Sequence[Any]) -> a.Parameters:
    if not given or given[0] is None:
        return a.Parameters(None, None, None, 0)
    first, second, third = given
    return a.Parameters(first, second, third, first.shape[-1])


def _curve_constants(curve: CurveBand | None) -> dict[str, Any]:
    if curve is None:
        return {"CURVE_AT": None, "CURVE_EXTENT": None, "COUNT": 1}
    functions, count = CURVES[curve.name], power_of_two(curve.parameters[0].shape[-1])
    return {"CURVE_AT": functions.at, "CURVE_EXTENT": functions.extent_of, "COUNT": count}


def _far(far: Far | None, gradients: FarGradients | None) -> a.Far | None:
    if far is None:
        return None
    left, right = (far.left, far.left_lse), (far.right, far.right_lse)
    d_left: Sequence[Any] = (None, None, None)
    d_right: Sequence[Any] = (None, None, None)
    if gradients is not None:
        d_left, d_right = gradients.left, gradients.right or d_right
    return a.Far(a.FarSide(*left, *d_left), a.FarSide(*right, *d_right))


@functools.cache
def processors(device: torch.device) -> int:
    """The number of multiprocessors of a GPU; Triton's interpreter is given a few."""
    if device.type != "cuda":
        return 4
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return count


@functools.cache
def cache_bytes(device: torch.device) -> int:
    """The size of a GPU's L2 cache; Triton's interpreter is given that of an H200."""
    if device.type != "cuda":
        return 50 << 20
    size: int = torch.cuda.get_device_properties(device).L2_cache_size
    return size
