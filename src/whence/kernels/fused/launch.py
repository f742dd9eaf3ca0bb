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
    Inputs,
    Kept,
    Numbers,
    Product,
    Wanted,
    by_token,
    decoded,
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
from whence.kernels.fused.plan import Plan
from whence.kernels.fused.tables import mass_parts, product_gradients, seen_cells, table_gradient
from whence.kernels.fused.tiles import Tiles, TileSet, ceil_div, narrowest, power_of_two

# How far beyond the reach a near tile may touch: rows and keys of the largest tile. A line that is
# loaded ahead (BandLine) extends to 207, for tiles of at most 64 rows and keys.
MARGIN = 272
LEAST_SCALE = 1e-4  # of a call whose band is divided by it: a bias up to 1e34 stays finite
BASE_2 = math.log2(math.e)  # the unit of a band in base 2
# The key kernel sums the diagonals of a shared band if no key meets more rows than this, in a short
# sequence or in a window. Its workspace is their product, at most a megabyte for each head of each
# sequence of this length.
STRIPED = 2048
# Registers a thread may use in kernels with a band for each row and a value table, with sums of two
# tails of a head, in causal key kernels with tiles of few rows, and in forward kernels with slopes
# to both sides: with this limit three programs run on one multiprocessor instead of two.
MOST_REGISTERS = 168
# The same for other forward kernels, and causal query kernels with a product, in whole tiles: four
# programs. The forward kernel hardly spills then; the query kernel spills six numbers, outside of
# its loops.
FEW_REGISTERS = 128
BUSY = 1024  # programs that keep a whole GPU busy
MOST_BLOCKS = 65_535  # CUDA's limit for the second axis of a grid
# The keys and values of the heads that take turns fill at most one CACHE_PARTS-th of the L2 cache.
# On an H200 a quarter was the best, or within 2% of it, at 512, 1,024 and 2,048 tokens.
CACHE_PARTS = 4
LAYOUT_LAGS = 256  # lags that one program lays out
STRIPE_LAGS = 16  # lags that one program sums from the stripes: few, so that many programs run


class _Call(NamedTuple):
    """The groups of arguments of a call's kernels, and what the choice of launches depends on."""

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
    band_shape: tuple[int, ...] | None  # [b|1, h|1, q|1, lag], before the band is laid out
    tile_kind: tiling.TileKind


def forward(
    plan: Plan,
    q: Any,
    k: Any,
    v: Any,
    inputs: Inputs,
    numbers: Numbers,
    far: Far | None,
    tiles: Tiles,
    product: Product | None = None,
    curve: CurveBand | None = None,
    *,
    recorded: bool = True,
) -> Kept:
    """The launches of the output; returns it with what backward needs.

    If the band is a product or a curve, inputs.band is None. `recorded` says whether backward may
    follow. A call with few queries (`decoded`) must not have a product.
    """
    (b, h, n_q, _), d_v = q.shape, v.shape[-1]
    tokens = by_token(q)
    if is_short(q, k, v, inputs, numbers, product, curve):
        band = extent = tails = None
        if product is None:
            band, extent, tails = _laid_out(plan, q, k, v, inputs, numbers, None, curve, BASE_2)
        made = _with_made(inputs, extent, tails)
        in_short = _short_call(q, made, numbers, product, curve, band)
        out = short.forward(plan, q, k, v, in_short, tokens=tokens)
        return Kept(out, None, None, None, band, extent, tails)
    out = plan.empty((b, h, n_q, d_v), q.dtype, tokens=tokens)
    lse = plan.empty(lse_shape(q, split=far is not None), torch.float32)
    residual = mass = None
    biased = _band_shape(q, inputs, product, curve) is not None or inputs.table is not None
    if recorded and biased and q.dtype != torch.float32:
        # float16 also for an output in bfloat16: residuals fit its range, and it has more digits.
        residual = plan.empty(out.shape, torch.float16, tokens=tokens)
    if inputs.table is not None:
        mass = plan.empty(mass_shape(q, inputs.table, numbers), torch.float32)
    result = a.Output(out, residual, lse, mass)
    if decoded(q, k, numbers):
        _decode(plan, q, k, v, inputs, numbers, tiles, curve, result)
        return Kept(out, lse, residual, mass, None, None, None)
    unit = _band_unit(q, numbers)
    band, extent, tails = _laid_out(plan, q, k, v, inputs, numbers, product, curve, unit)
    inputs = _with_made(inputs, extent, tails)
    call = _call(q, k, v, inputs, numbers, band, far, None, product, curve)
    tiles, near = tiling.forward_tiles(tiles, call.tile_kind)
    even = n_q % tiles.rows == 0 and k.shape[2] % tiles.keys == 0
    alone = _all_near(call, n_q, k.shape[2], tiles.rows, tiles.keys)
    limit = _forward_limit(call, tiles) if even else None
    if limit is None:
        limit = _register_limit(call, tiles)
    product_alone = alone and call.kind.CAUSAL and call.kind.ENDS
    if limit is not None and even and (product_alone or _plain_causal_product(call.kind)):
        limit = FEW_REGISTERS
    grid = grid_of(plan, call, ceil_div(n_q, tiles.rows), b * h)
    plan.launch(
        forward_kernel,
        grid,
        *(call.q, call.k, call.v, call.bias, call.visible, call.seed, call.table, call.far),
        a.product_of(q, product),
        result,
        *a.scalars(call.sizes),
        warps=tiles.warps,
        stages=tiles.stages,
        registers=limit,
        chained=call.kind.CHAINED,
        KIND=call.kind,
        TILE=a.Tile(
            *(tiles.rows, tiles.keys, near, tiles.stages, even, alone), TURNS=len(grid) == 3
        ),
        PRODUCT=0 if product is None else product.table.shape[-1],
    )
    return Kept(out, lse, residual, mass, band, extent, tails)


def backward(
    plan: Plan,
    d_out: Any,
    q: Any,
    k: Any,
    v: Any,
    kept: Kept,
    inputs: Inputs,
    numbers: Numbers,
    far: Far | None,
    tiles: TileSet,
    wanted: Wanted,
    far_gradients: FarGradients | None = None,
    product: Product | None = None,
    curve: CurveBand | None = None,
) -> Gradients:
    """The launches of every gradient of a call."""
    (b, h, n_q, _), (h_kv, n_k) = q.shape, k.shape[1:3]
    band, extent, tails = kept.band, kept.extent, kept.tails
    brief = is_short(q, k, v, inputs, numbers, product, curve)
    if band is None and not (brief and product is not None):
        # Forward had few queries (`decoded`) and laid no band out.
        unit = BASE_2 if brief else _band_unit(q, numbers)
        band, extent, tails = _laid_out(plan, q, k, v, inputs, numbers, product, curve, unit)
    inputs = _with_made(inputs, extent, tails)
    if brief:
        in_short = _short_call(q, inputs, numbers, product, curve, band)
        found = short.backward(plan, d_out, q, k, v, in_short, wanted, tokens=by_token(q))
        if curve is None:
            return found
        of_curve: Sequence[Any] = (None, None, None)
        if wanted.band or wanted.tails:
            of_curve = _curve_gradient(plan, curve, extent, found.band, found.tails)
        return found._replace(band=None, tails=None, parameters=of_curve)
    call = _call(q, k, v, inputs, numbers, band, far, far_gradients, product, curve)
    tokens = call.kind.TOKENS
    d_table = None
    if inputs.table is not None:
        parts = mass_parts(q, k, inputs.table, numbers)
        d_table = table_gradient(
            *(plan, kept.mass, d_out, inputs.table, parts), chained=call.kind.CHAINED
        )
    d_q, d_k, d_value = (plan.empty(x.shape, x.dtype, tokens=tokens) for x in (q, k, v))
    d_band = d_tails = d_mass = far_lse_delta = None
    d_last = call.kind.LAST if product is not None else 2 * call.sizes.reach
    if call.band_shape is not None and wanted.band and (call.band_shape[2] > 1 or n_q == 1):
        # Cells that no tile touches are not written; of a product's band they are not read either.
        room = plan.zeros if product is None else plan.empty
        d_band = room((b, h, n_q, d_last + 1), torch.float32)
    ends = product is not None and d_band is not None
    tail_sums = inputs.tails is not None and wanted.tails and not ends
    if inputs.table is not None:
        d_mass = plan.empty(_with_margin(kept.mass.shape, call.kind.MARGIN), torch.float32)
    lse_delta = plan.empty((b, h, n_q, 2), torch.float32)
    of_rows = call.tile_kind.by_row or inputs.tails is not None
    sloping_rows = call.kind.PER_ROW and numbers.slopes  # every row has a slope of its own
    single_key = n_k == 1 or (numbers.before == 0 and numbers.after == 0)  # that a row sees
    # The numbers of the far sides have a rounding of their own, which shows where dS is 0.
    if of_rows and far is None and not (sloping_rows or numbers.dropout or single_key):
        far_lse_delta = plan.empty((2, b, h, n_q, 2), torch.float32)
    norm = None
    if q.dtype == torch.float32 and far is None:
        norm = plan.empty((b, h, n_q), torch.float32)
    statistics = a.RowStatistics(lse_delta, far_lse_delta, d_mass, norm)
    d_rows = a.rows_of(d_out)
    shared = call.band_shape is not None and wanted.band and d_band is None
    striped = shared and min(max(n_q, n_k), _touching(numbers)) <= STRIPED
    tile_kind = call.tile_kind._replace(
        tail_sums=tail_sums, striped=striped, limited=_is_limited(call)
    )
    by_rows, near_keys = tiling.query_tiles(tiles.by_rows, tile_kind)
    by_keys, near_rows = tiling.key_tiles(tiles.by_keys, tile_kind)
    if tail_sums:
        parts = n_q if call.kind.PER_ROW else ceil_div(n_q, by_rows.rows)
        d_tails = plan.empty((4, b, h, parts), torch.float32)
    if tail_sums and striped and far is None and curve is not None and not numbers.slopes:
        grain = max(by_rows.rows, by_rows.keys, by_keys.rows, by_keys.keys)
        if grain <= MARGIN // 2 and inputs.table is None:
            call = call._replace(kind=call.kind._replace(GRAIN=grain))
    # When dS of a row is balanced (device/backward.py). Beside a plain kernel for the far keys our
    # tiles are few, so it costs next to nothing where a band learns. In one pass it takes an
    # addition in every cell. With a scale of 0 the logits have no rounding errors, so the error of
    # delta is the only one left and shows. In a window of few keys dS is small. In float32 other
    # errors are as small. Where a row sees a single key, dS is 0 and whatever the error of delta
    # leaves is wrong: there the query kernel's own gradients are balanced too, which costs little,
    # for a row has few tiles.
    narrow = numbers.before >= 0 and 0 <= numbers.after < FEW_ROWS - numbers.before
    exact_else = q.dtype == torch.float32 or numbers.scale == 0.0
    delicate = wanted.band and (n_q <= FEW_ROWS or narrow or exact_else)
    balanced = ends or tail_sums or (far is not None and wanted.band)
    if far is None:
        balanced = balanced or inputs.table is not None or delicate or single_key
    # Forward's masses at the ends of the value table are those of the tails, if both end alike.
    same = call.kind.LAST == call.kind.VALUE_LAST and not numbers.dropout
    of_tails = ends and inputs.table is not None and same
    # With two tables, a single far tile is treated as near: a loop of its own would cost as much.
    spare = int(call.kind.ENDS and call.kind.VALUES and far is None)
    # The query kernel comes first: it writes the row statistics that the other kernels read.
    even = n_q % by_rows.rows == 0 and n_k % by_rows.keys == 0
    limit = _register_limit(call, by_rows)
    few_keys = by_rows.keys <= tiling.NEAR
    if limit is not None and even and few_keys and _plain_causal_product(call.kind):
        limit = FEW_REGISTERS
    grid = grid_of(plan, call, ceil_div(n_q, by_rows.rows), b * h)
    plan.launch(
        query_kernel,
        grid,
        *(call.q, call.k, call.v, d_rows),
        a.Output(kept.out, kept.out_residual, kept.lse, kept.mass if of_tails else None),
        *(call.bias, call.visible, call.seed, call.table, call.far),
        a.QueryGradients(d_q, d_band, d_tails),
        statistics,
        *a.scalars(call.sizes),
        warps=by_rows.warps,
        stages=by_rows.stages,
        registers=limit,
        chained=call.kind.CHAINED,
        KIND=call.kind,
        TILE=a.Tile(
            *(by_rows.rows, by_rows.keys, near_keys, by_rows.stages, even),
            _all_near(call, n_q, n_k, by_rows.rows, by_rows.keys, spare=spare),
            _lines(call, by_rows.rows, by_rows, q.dtype),
            TURNS=len(grid) == 3,
        ),
        BALANCED=balanced,
        TWICE=balanced and (n_q <= FEW_ROWS or single_key),
        D_LAST=d_last if ends else 0,
        ENDS=ends,
        KEY_ROWS=by_keys.rows,
    )
    stripes = None
    even = n_q % by_keys.rows == 0 and n_k % by_keys.keys == 0
    by_warp = held = False
    if striped:
        by_warp = by_keys.rows >= 32 and tiling.split_by_warp(by_keys.keys, by_keys, q.dtype)
        # With wider heads, more stages, tiles that are not whole or, in Triton 3.9, tails, one
        # program would run on a multiprocessor where two did. With fewer rows Triton's own shared
        # memory is less than 48 KB, and the kernel would depend on our asking for more
        # (needs_more_memory in plan.py).
        small = max(call.kind.BLOCK_D, call.kind.BLOCK_DV) <= 64 and by_keys.stages <= 3
        held = by_warp and by_keys.rows == 64 and even and small and not call.kind.TAILS
        count = ceil_div(n_k, by_keys.keys) * (1 if held else by_keys.keys // STRIPE.value)
        length = stripe_length(n_q, numbers, by_keys)
        stripes = plan.empty((b, h, count, length), torch.float32)
    # Where a plain kernel takes the far keys, the key kernel leaves much of the GPU idle, so the
    # kernels of the band run beside it on a second stream.
    side = shared and not striped and far is not None
    if shared and not striped:
        d_band = _shared_band(plan, call, d_rows, statistics, tiles.block, side)
    grid = grid_of(plan, call, ceil_div(n_k, by_keys.keys), b * h_kv)
    key_tile = a.Tile(
        *(by_keys.rows, by_keys.keys, near_rows, by_keys.stages, even),
        _all_near(call, n_k, n_q, by_keys.keys, by_keys.rows, by_keys=True, spare=spare),
        _lines(call, by_keys.keys, by_keys, q.dtype),
        TURNS=len(grid) == 3,
        HELD=STRIPED + by_keys.keys if held else 0,
    )
    # In tiles of few rows these kernels spill under a limit, but hardly in their loops.
    limit = None
    few_rows = by_keys.rows <= 32
    if few_rows and even and _plain_causal_product(call.kind):
        limit = _register_limit(call, by_keys)
    elif few_rows and tile_kind.limited and _is_small(call, by_keys):
        limit = MOST_REGISTERS
    plan.launch(
        key_kernel,
        grid,
        *(call.q, call.k, call.v, d_rows, statistics),
        *(call.bias, call.visible, call.seed, call.far),
        a.KeyGradients(d_k, d_value, stripes),
        h // h_kv,
        *a.scalars(call.sizes),
        warps=by_keys.warps,
        stages=by_keys.stages,
        registers=limit,
        chained=call.kind.CHAINED,
        KIND=call.kind,
        TILE=key_tile,
        BY_WARP=by_warp,
    )
    if stripes is not None:
        d_band = _striped_band(plan, call, stripes, key_tile)
    d_parameters: Sequence[Any] = (None, None, None)
    if curve is not None and (wanted.band or wanted.tails):
        d_parameters = _curve_gradient(
            *(plan, curve, extent, d_band, d_tails), chained=call.kind.CHAINED, side=side
        )
    d_query = d_factor = None
    if product is not None:
        d_query, d_factor = product_gradients(
            *(plan, product, q, d_q, d_band, wanted, seen_cells(call.sizes, d_last)),
            chained=call.kind.CHAINED,
        )
    if product is not None or curve is not None:
        d_band = d_tails = None  # their gradients went on to the factors or parameters
    d_band = None if d_band is None else plan.summed(d_band, inputs.band.shape)
    d_tails = None if d_tails is None else plan.summed(d_tails, inputs.tails.shape)
    return Gradients(d_q, d_k, d_value, d_band, d_tails, d_table, d_query, d_factor, d_parameters)


def _touching(numbers: Numbers) -> float:
    """About how many rows a block of keys meets in its window."""
    if numbers.before < 0 or numbers.after < 0:
        return math.inf
    return numbers.before + numbers.after + MARGIN


def stripe_length(n_q: int, numbers: Numbers, tiles: Tiles) -> int:
    """How many sums of diagonals a stripe has: `stripe_length` in device/backward.py."""
    rows = n_q
    if numbers.before >= 0 and numbers.after >= 0:
        rows = min(rows, numbers.before + numbers.after + tiles.keys + tiles.rows)
    return (ceil_div(rows, tiles.rows) + 2) * tiles.rows


class Shape(NamedTuple):
    """A stand-in for a tensor of which only the shape is read."""

    shape: tuple[int, ...]


def is_short(
    q: Any,
    k: Any,
    v: Any,
    inputs: Inputs,
    numbers: Numbers,
    product: Product | None,
    curve: CurveBand | None,
) -> bool:
    """Whether the kernels for short sequences (short.py) cover the call and are faster."""
    if max(q.shape[2], k.shape[2]) > short.LONGEST or decoded(q, k, numbers):
        return False
    band = None
    if product is None:
        laid_out = laid_out_shape(q, inputs, numbers, None, curve)
        band = None if laid_out is None else Shape(laid_out)
    call = short.ShortCall(band, product, inputs, numbers)
    return short.fits(q, k, v, call) and short.is_faster(q, k, v, call)


def _all_near(
    call: _Call,
    n: int,
    n_other: int,
    block: int,
    tile: int,
    *,
    by_keys: bool = False,
    spare: int = 0,
) -> bool:
    """Whether all keys that a block of n rows touches, of n_other, are near, in tiles of so many.

    Or, by keys, all rows that a block of n keys touches. Compare key_range and row_range.
    `spare` far tiles on each side count as near.
    """
    sizes = call.sizes
    if call.kind.EXTENT:  # only the device knows
        return False
    reach = max(sizes.reach, sizes.value_reach)
    start, after = sizes.q_start, sizes.after
    if by_keys:
        start, after = -start, sizes.before
    first, last = (ceil_div(n, block) - 1) * block + start, min(block, n) - 1 + start
    near_stop = ceil_div(max(last + reach + 1, 0), tile) + spare
    right = near_stop >= ceil_div(n_other, tile) or 0 <= after <= reach
    return first - reach < (1 + spare) * tile and right


def _lines(call: _Call, side: int, tiles: Tiles, dtype: torch.dtype) -> bool:
    """Whether a warp loads its part of a head's band ahead (BandLine in device/band.py).

    `side` is the number of rows of a tile, or of keys in the key kernel. A band with tails has few
    near tiles, and so have few rows: there it cannot gain much. Beside a value table or segments,
    the kernels would get into the gap that `needs_more_memory` (plan.py) is about.
    """
    kind, sizes = call.kind, call.sizes
    small = max(kind.BLOCK_D, kind.BLOCK_DV, tiles.rows, tiles.keys) <= 64
    endless = kind.BAND and not (kind.PER_ROW or kind.TAILS)
    alone = not (kind.VALUES or kind.SEGMENTS)
    few = sizes.n_q <= FEW_ROWS or sizes.n_k == 1 or sizes.before == sizes.after == 0
    return endless and alone and small and not few and tiling.split_by_warp(side, tiles, dtype)


def _register_limit(call: _Call, tiles: Tiles) -> int | None:
    """MOST_REGISTERS for the kernels that it was measured to speed up, else None.

    Without a limit, the compiler takes fewer for a causal query kernel that sums a tail over tiles
    of few keys.
    """
    kind = call.kind
    wanted = (kind.VALUES and kind.PER_ROW) or (
        kind.GRAIN > 0 and (tiles.keys > tiling.NEAR or not kind.CAUSAL)
    )
    return MOST_REGISTERS if wanted and _is_small(call, tiles) else None


def _forward_limit(call: _Call, tiles: Tiles) -> int | None:
    """The registers of a forward kernel in whole tiles with which most programs run side by side.

    With the band of a head or none it spills at most a few numbers, outside of its loops (counted
    for a Hopper GPU). Without a limit the compiler may take a few registers more, so that one
    program fewer would run.
    """
    kind = call.kind
    more = kind.DROPOUT or kind.KEYS or kind.SEGMENTS or kind.FAR or call.tile_kind.by_row
    small = max(kind.BLOCK_D, kind.BLOCK_DV) <= 64 and kind.PRECISION != "ieee"
    wide = tiles.keys > 64 or tiles.rows > 16 * tiles.warps
    if more or not small or wide or not tiling.on_hopper():
        return None
    return MOST_REGISTERS if kind.SLOPES and not kind.CAUSAL else FEW_REGISTERS


def _is_limited(call: _Call) -> bool:
    """Whether a key kernel with few rows was measured to be faster in fewer registers.

    Masks, dropout and lengths that are no multiple of a tile take registers of their own, and on
    other GPUs than a Hopper the kernel spills in its loops.
    """
    kind, sizes = call.kind, call.sizes
    whole = sizes.n_q % 64 == 0 and sizes.n_k % 64 == 0 and not call.tile_kind.by_row
    more = kind.DROPOUT or kind.KEYS or kind.SEGMENTS or kind.FAR
    return tiling.on_hopper() and kind.CAUSAL and whole and not more


def _is_small(call: _Call, tiles: Tiles) -> bool:
    """Whether a limit of registers was measured for heads, tiles and a dtype like these."""
    kind = call.kind
    return max(kind.BLOCK_D, kind.BLOCK_DV) <= 64 and tiles.warps == 4 and kind.PRECISION != "ieee"


def _plain_causal_product(kind: a.Kind) -> bool:
    """Whether a causal call has a product as its band, and no dropout, mask or left limit."""
    more = kind.DROPOUT or kind.KEYS or kind.SEGMENTS or kind.BEFORE
    return kind.CAUSAL and kind.ENDS and not more


def _short_call(
    q: Any,
    inputs: Inputs,
    numbers: Numbers,
    product: Product | None,
    curve: CurveBand | None,
    band: Any,
) -> short.ShortCall:
    shape = _band_shape(q, inputs, None, curve)
    inputs = inputs if shape is None else inputs._replace(band=Shape(shape))
    return short.ShortCall(band, product, inputs, numbers)


def _decode(
    plan: Plan,
    q: Any,
    k: Any,
    v: Any,
    inputs: Inputs,
    numbers: Numbers,
    tiles: Tiles,
    curve: CurveBand | None,
    result: a.Output,
) -> None:
    """The launches of a call with few queries. They read the band without laying it out."""
    (b, h, n_q, _), (_, h_kv, n_k, d_v) = q.shape, v.shape
    band = inputs.band
    if curve is not None and curve.tails:
        band, _, tails = _laid_out(plan, q, k, v, inputs, numbers, None, curve, None)
        inputs, curve = inputs._replace(band=band, tails=tails), None
    elif curve is not None:  # each share evaluates the part of the curve that it looks up
        band = plan.empty((1, h, 1, 2 * curve.reach + 1), torch.float32)
    call = _call(q, k, v, inputs, numbers, band, None, None, None, curve, raw_band=True)
    width = max(call.kind.BLOCK_D, call.kind.BLOCK_DV)
    # Few rows leave room for more keys in a tile, unless the table's tiles had to be made smaller.
    tile = tiling.share_tiles(width, q.dtype, 2 * tiles.keys, tiles.stages)
    count, share = tiling.shares(n_k, b * h_kv, tile.at_once * processors(plan.device), tile.keys)
    sums = a.ShareSums(
        plan.empty((count, b, h, n_q, d_v), torch.float32),
        plan.empty((count, b, h, n_q, 4), torch.float32),
    )
    plan.launch(
        share_kernel,
        (count, b * h_kv),
        *(call.q, call.k, call.v, call.bias, call.visible),
        _parameters(() if curve is None else curve.parameters),
        *(result.mass, sums, share, *a.scalars(call.sizes)),
        stages=tile.stages,
        KIND=call.kind,
        TILE=a.Tile(FEW_ROWS, tile.keys, tile.keys, tile.stages, n_k % tile.keys == 0),
        **_curve_constants(curve),
    )
    plan.launch(
        merge_kernel,
        (b * h * n_q,),
        *(sums, call.table, result, count, *a.scalars(call.sizes)),
        KIND=call.kind,
        SHARES=power_of_two(count),
    )


def _laid_out(
    plan: Plan,
    q: Any,
    k: Any,
    v: Any,
    inputs: Inputs,
    numbers: Numbers,
    product: Product | None,
    curve: CurveBand | None,
    unit: float | None,
) -> tuple[Any, Any, Any]:
    """The laid-out band (device/band.py), a curve's extent, and the tails of a curve or product.

    Each is None if the call does not have it. For a product, band and tails are empty memory that
    the forward kernel fills. The band of a head is multiplied with `unit`. Without a unit a curve
    is evaluated but not laid out: its band has the form in which a caller gives one.
    """
    b, h, n_q, _ = q.shape
    shape = _band_shape(q, inputs, product, curve)
    laid_out = laid_out_shape(q, inputs, numbers, product, curve)
    if shape is None or laid_out is None:
        return None, None, None
    reach, extent, tails = shape[-1] // 2, None, None
    if product is not None:  # its tails have no slopes: nobody writes or reads those places
        tails = plan.empty((4, b, h, n_q), torch.float32)
        return plan.empty(laid_out, torch.float32), None, tails
    if curve is not None and curve.tails:
        tails = plan.empty((4, 1, h, 1), torch.float32)
    elif curve is not None:
        extent = plan.empty((h,), torch.int32)
    inputs = _with_made(inputs, extent, tails)
    given = _call(q, k, v, inputs, numbers, inputs.band, None, None, None, curve, raw_band=True)
    if given.kind.PER_ROW:
        band = plan.empty(laid_out, torch.float32)
        plan.launch(
            row_layout_kernel,
            (ceil_div(n_q, 32), b * h),
            *(band, given.bias, *a.scalars(given.sizes)),
            KIND=given.kind,
            ROWS=32,
            BLOCK=min(64, power_of_two(2 * reach + 1)),
        )
        return band, None, None
    if unit is None:
        laid_out = shape
    batches, heads, _, width = laid_out
    band = plan.empty(laid_out, torch.float32)
    plan.launch(
        head_layout_kernel,
        (ceil_div(width, LAYOUT_LAGS), batches * heads),
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
    """Whether a kernel is made ready while the one before ends (take_turn in device/tile.py).

    Not where a plain kernel takes the far keys, on two streams; nor for few queries. Such a launch
    takes the host longer, which is the limit there, and it made short calls and decoding slower.
    """
    return tiling.on_hopper() and numbers.far == 0 and q.shape[2] >= tiling.BRIEF


def _starts_with_bias(q: Any, numbers: Numbers) -> bool:
    """Whether near tiles' products start from a band of a head, in place of adding it (a.Kind).

    Not in float32, where the rounding of one more division would show.
    """
    return q.dtype != torch.float32 and numbers.scale >= LEAST_SCALE


def _band_unit(q: Any, numbers: Numbers) -> float:
    """What a head's band is multiplied with as it is laid out."""
    return 1.0 / numbers.scale if _starts_with_bias(q, numbers) else BASE_2


def laid_out_shape(
    q: Any,
    inputs: Inputs,
    numbers: Numbers,
    product: Product | None,
    curve: CurveBand | None,
) -> tuple[int, ...] | None:
    """The shape of the laid-out band, or None without a band."""
    shape = _band_shape(q, inputs, product, curve)
    if shape is None:
        return None
    batches, heads, rows, width = shape
    reach, tails = width // 2, inputs.tails
    if product is not None or rows > 1 or (tails is not None and tails.shape[3] > 1):
        lags = a.last_place(reach, numbers) + 1
        return _with_margin((*q.shape[:3], lags), _margin(reach, inputs.table, numbers))
    if tails is not None:
        batches, heads = max(batches, tails.shape[1]), max(heads, tails.shape[2])
    edge = _farthest(reach, inputs.table, numbers)
    return (batches, heads, 1, 2 * edge + 1)


def lse_shape(q: Any, *, split: bool) -> tuple[int, ...]:
    """The shape of lse [b, h, q], or with norms [2, b, h, q] (row_lse in device/tile.py)."""
    return tuple(q.shape[:3]) if split or q.dtype != torch.float32 else (2, *q.shape[:3])


def mass_shape(q: Any, table: Any, numbers: Numbers) -> tuple[int, ...]:
    """The shape [b, h, q, lag] of the masses of a value table's lags, without those never seen."""
    return (*q.shape[:3], a.last_place(table.shape[1] // 2, numbers) + 1)


def _farthest(reach: int, table: Any, numbers: Numbers) -> int:
    """The largest |lag| that a near tile may touch."""
    value_reach = 0 if table is None else table.shape[1] // 2
    return max(reach, value_reach, numbers.far) + MARGIN


def _margin(reach: int, table: Any, numbers: Numbers) -> int:
    """As many numbers as near tiles may touch beyond a row, and at least as many.

    It is a power of two, since it is a constant of the kernels: few lengths have one of their own.
    """
    return power_of_two(_farthest(reach, table, numbers))


def _with_margin(shape: Sequence[int], margin: int) -> tuple[int, ...]:
    """The shape [1, 1, n, 1] of memory for so many numbers with a margin on both sides."""
    return (1, 1, math.prod(shape) + 2 * margin, 1)


def _with_made(inputs: Inputs, extent: Any, tails: Any) -> Inputs:
    """The inputs with the extent and tails that a curve or a product defines."""
    return inputs._replace(
        extent=inputs.extent if extent is None else extent,
        tails=inputs.tails if tails is None else tails,
    )


def _shared_band(
    plan: Plan, call: _Call, d_rows: a.Rows, statistics: a.RowStatistics, block: int, side: bool
) -> Any:
    """The gradient of a band that all queries share, [b|1, h, 1, lag]."""
    assert call.band_shape is not None
    sizes, kind = call.sizes, call.kind
    batches, n_batch, h = call.band_shape[0], call.q.ptr.shape[0], sizes.n_heads
    row_blocks, key_blocks = ceil_div(sizes.n_q, block), ceil_div(sizes.n_k, block)
    lowest = max((sizes.q_start - sizes.reach) // block, 1 - row_blocks)
    highest = min((sizes.q_start + sizes.reach + block - 1) // block, key_blocks - 1)
    diagonals = max(highest - lowest + 1, 1)
    tiles = min(row_blocks, key_blocks) * (n_batch // batches)
    # With an extent most block-diagonals are empty, but only the device knows which. So there are
    # few programs, each of which visits every n-th block-diagonal, and those that are not empty are
    # divided into as many shares as there is memory for, to keep the GPU busy.
    slots = min(diagonals, 8 if kind.EXTENT else 64)
    busy = BUSY // max(1, min(slots, 4) * h * batches)
    parts = max(1, min(tiles, busy, 64))
    size = 2**22 if kind.EXTENT else 2**25  # bytes for the sums of all shares: 4 or 32 MB
    room = max(diagonals, min(diagonals * parts, size // (batches * h * 2 * block * 4)))
    first = (sizes.q_start - sizes.reach) // block
    last = (sizes.q_start + sizes.reach) // block
    sums = plan.empty((batches, h, room, 2, block), torch.float32)
    d_band = plan.empty((batches, h, 1, 2 * sizes.reach + 1), torch.float32)
    even = sizes.n_q % block == 0 and sizes.n_k % block == 0
    plan.launch(
        band_kernel,
        (slots, parts, batches * h),
        *(call.q, call.k, call.v, d_rows, statistics),
        *(call.bias, call.visible, call.seed, sums),
        *(room, n_batch // batches, *a.scalars(sizes)),
        stages=2,
        side=side,
        KIND=kind,
        TILE=a.Tile(block, block, block, 2, even),
    )
    plan.launch(
        collect_kernel,
        (last - first + 1, batches * h),
        *(sums, d_band, call.bias.extent, room, first, parts, *a.scalars(sizes)),
        side=side,
        KIND=kind,
        BLOCK=block,
    )
    return d_band


def _striped_band(plan: Plan, call: _Call, stripes: Any, tile: a.Tile) -> Any:
    """The gradient of a band that all queries share, from the sums that the key kernel stored."""
    assert call.band_shape is not None
    assert tile.NEAR == tile.ROWS
    (n_batch, h, count, _), batches = stripes.shape, call.band_shape[0]
    beyond = 2 * max(call.kind.GRAIN - 1, 0)
    width = 2 * (call.sizes.reach + beyond) + 1
    d_band = plan.empty((batches, h, 1, width), torch.float32)
    plan.launch(
        stripe_kernel,
        (ceil_div(width, STRIPE_LAGS), batches * h),
        *(stripes, d_band, call.bias, beyond, n_batch // batches, count),
        *a.scalars(call.sizes),
        warps=8,
        chained=call.kind.CHAINED,
        KIND=call.kind,
        TILE=tile,
        LAGS=STRIPE_LAGS,
        STRIPES=32,
        BATCHES=8,
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
    heads = first.shape[-1] if curve.tails else first.shape[0]
    if d_band is not None and d_band.shape[0] > 1:  # one query: d_band is of each sequence
        d_band, side = plan.summed(d_band, (1, *d_band.shape[1:])), False
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


def grid_of(plan: Plan, call: _Call, blocks: int, heads: int) -> tuple[int, ...]:
    """The grid of a kernel with a program for every block of every head (program_of in tile.py).

    In a causal call some blocks are long and some short. Head after head, the last programs to
    start would be as long as any, and most of the GPU would wait for them. So heads take turns: the
    longest block of each, then the next. CACHE_PARTS limits how many of them do.
    """
    kind, sizes = call.kind, call.sizes
    if not kind.CAUSAL or kind.BEFORE or kind.FAR or blocks > MOST_BLOCKS:
        return (blocks, heads)
    of_head = max(sizes.n_q, sizes.n_k) * (kind.D + kind.D_V) * call.q.ptr.dtype.itemsize
    most = max(1, min(heads, cache_bytes(plan.device) // CACHE_PARTS // of_head))
    in_turn = next(count for count in range(most, 0, -1) if heads % count == 0)
    return (in_turn, blocks, heads // in_turn)


def _call(
    q: Any,
    k: Any,
    v: Any,
    inputs: Inputs,
    numbers: Numbers,
    band: Any,  # laid out; with raw_band, as the caller gave it
    far: Far | None,
    far_gradients: FarGradients | None,
    product: Product | None,
    curve: CurveBand | None,
    *,
    raw_band: bool = False,
) -> _Call:
    (_, h, n_q, d), (_, h_kv, n_k, d_v) = q.shape, v.shape
    shape = _band_shape(q, inputs, product, curve)
    tails, table = inputs.tails, inputs.table
    per_row = product is not None or (
        shape is not None and (shape[2] > 1 or (tails is not None and tails.shape[3] > 1))
    )
    causal = numbers.after == 0
    reach = 0 if shape is None else shape[-1] // 2
    value_reach = 0 if table is None else table.shape[1] // 2
    last, value_last = a.last_place(reach, numbers), a.last_place(value_reach, numbers)
    product_last = 0 if product is None else last
    kind = a.Kind(
        D=d,
        D_V=d_v,
        BLOCK_D=max(narrowest(), power_of_two(d)),
        BLOCK_DV=max(narrowest(), power_of_two(d_v)),
        GROUPS=h // h_kv,
        BAND=shape is not None,
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
        FAR=far is not None,
        TOKENS=by_token(q),
        PRECISION=a.precision_of(q),
        ENDS=product is not None,
        LAST=product_last,
        VALUE_LAST=value_last,
        MARGIN=_margin(reach, table, numbers) if per_row or table is not None else 0,
        LAGS=max(16, min(32, power_of_two(max(product_last, value_last, 1)))),
        STARTED=shape is not None and not (per_row or raw_band) and _starts_with_bias(q, numbers),
        CHAINED=_is_chained(q, numbers),
    )
    sizes = a.Sizes(
        n_q=n_q,
        n_k=n_k,
        q_start=numbers.q_start,
        reach=reach,
        edge=0 if band is None else band.shape[-1] // 2,
        n_heads=h,
        value_reach=value_reach,
        before=numbers.before,
        after=numbers.after,
        far_start=0 if far is None else far.start,
        scale=numbers.scale,
        dropout=numbers.dropout,
    )
    by_row = table is not None or per_row
    of_band = a.strides_of(band, 0, 1, 2)
    if per_row and not raw_band:  # packed in memory with a margin
        of_band = (h * n_q * (last + 1), n_q * (last + 1), last + 1)
    return _Call(
        a.rows_of(q),
        a.rows_of(k),
        a.rows_of(v),
        a.Bias(band, inputs.extent, tails, *of_band, *a.strides_of(tails, 0, 1, 2, 3)),
        a.visible_of(inputs),
        inputs.seed,
        a.table_of(table),
        _far(far, far_gradients),
        sizes,
        kind,
        shape,
        tiling.TileKind(d, n_q, by_row, far is not None, causal, numbers.slopes, per_row),
    )


def _band_shape(
    q: Any, inputs: Inputs, product: Product | None, curve: CurveBand | None
) -> tuple[int, ...] | None:
    """The shape [b|1, h|1, q|1, lag] of the band, whatever makes it."""
    if product is not None:
        return (*q.shape[:3], product.table.shape[1])
    if curve is not None:
        return (1, q.shape[1], 1, 2 * curve.reach + 1)
    return None if inputs.band is None else tuple(inputs.band.shape)


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
