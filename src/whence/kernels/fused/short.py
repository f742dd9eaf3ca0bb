"""Launches for short sequences: one kernel forward, one backward, and sums over the batch.

The argument `plan` is a `Plan`, which takes the launches. Nothing here touches data: of tensors and
slots only shape, strides and dtype are read.
"""

import math
from typing import Any, NamedTuple

import torch

from whence.kernels.fused.backend import Gradients, Inputs, Numbers, Product, Wanted
from whence.kernels.fused.device import arguments as a
from whence.kernels.fused.device.short import (
    HeadGradients,
    Operands,
    Short,
    short_backward_kernel,
    short_band_kernel,
    short_forward_kernel,
    short_tails_kernel,
)
from whence.kernels.fused.device.short_triangle import short_triangle_kernel
from whence.kernels.fused.tables import mass_parts, table_sum
from whence.kernels.fused.tiles import ceil_div, narrowest, power_of_two

LONGEST = 128  # queries, keys and columns of a head
FASTER = 64  # queries and keys up to which these kernels are faster, on an H200
MOST_LAGS = 64  # of a table that is in one tile
TABLE_PROGRAMS = 1056  # programs that sum the gradients of tables: 8 on each SM of an H200


class ShortCall(NamedTuple):
    """Everything about a call but q, k and v."""

    band: Any  # laid out, [b|1, h|1, 1, lag] (device/band.py); None without a band
    product: Product | None  # then there is no band
    inputs: Inputs  # of its band and tails only the shapes are read
    numbers: Numbers


class Cut(NamedTuple):
    """How the work is divided: rows of a tile, which holds all keys, and sequences of a program."""

    rows: int
    warps: int
    run: int = 1
    stages: int = 1  # of the loop over the sequences
    triangle: bool = False  # backward in three tiles, for a call that is `_triangular`


def fits(q: Any, k: Any, v: Any, call: ShortCall) -> bool:
    """Whether these kernels cover a call.

    They cover up to 128 queries, keys and columns of a head (in float32, 64 columns where there
    are more than 64 queries or keys); no band, or one that all rows share and that is laid out for
    every lag of the tile; any padding, segments, window, q_start, dropout and grouped heads. They
    cover a product with q and a value table of at most 64 lags that a query sees and 64 columns,
    without grouped heads.
    """
    n_q, n_k, numbers = q.shape[2], k.shape[2], call.numbers
    longest, widest = max(n_q, n_k), max(q.shape[3], v.shape[3])
    if max(longest, widest) > LONGEST or numbers.far:
        return False
    if _has_tables(call):
        grouped = q.shape[1] > k.shape[1]
        other_query = call.product is not None and call.product.query is not None
        if grouped or other_query or widest > 64:
            return False
        if max(_lasts(call)) >= MOST_LAGS:
            return False
    if q.dtype == torch.float32 and longest > 64 and widest > 64:
        return False
    if call.band is None:
        return True
    laid_out = LONGEST - 1 + abs(numbers.q_start) <= call.band.shape[-1] // 2
    return bool(call.band.shape[2] == 1 and laid_out)


def is_faster(q: Any, k: Any, v: Any, call: ShortCall) -> bool:
    """Whether these kernels are faster than those of long sequences for a call that they cover."""
    if _has_tables(call) and q.dtype == torch.float32:
        return False
    return bool(max(q.shape[2], k.shape[2]) <= FASTER or _as_triangle(q, k, v, call))


def forward(
    plan: Any, q: Any, k: Any, v: Any, call: ShortCall, *, tokens: bool, cut: Cut | None = None
) -> Any:
    """The output [b, h, q, d_v], with `tokens` laid out in memory as [b, q, h, d_v]."""
    (b, h, n_q, _), n_k = q.shape, k.shape[2]
    cut = forward_cut(q, n_k, call) if cut is None else cut
    runs = ceil_div(b, cut.run)
    tile, sizes = _tile(cut, n_q, n_k), _sizes(q, k, call)
    out = plan.empty((b, h, n_q, v.shape[3]), q.dtype, tokens=tokens)
    plan.launch(
        short_forward_kernel,
        (runs * h, ceil_div(n_q, tile.ROWS)),
        *(_operands(q, k, v, call), out, b),
        *a.scalars(sizes),
        warps=cut.warps,
        stages=cut.stages,
        KIND=_kind(q, k, v, call, tokens),
        TILE=tile._replace(STAGES=cut.stages),
        SHORT=Short(1, cut.run, DIAGONALS=False, TRIANGLE=_triangular(call)),
    )
    return out


def backward(
    plan: Any,
    d_out: Any,
    q: Any,
    k: Any,
    v: Any,
    call: ShortCall,
    wanted: Wanted,
    *,
    tokens: bool,
    cut: Cut | None = None,
) -> Gradients:
    """Gradients of q, k, v and what is wanted, from the inputs alone."""
    (b, h, n_q, _), n_k = q.shape, k.shape[2]
    cut = backward_cut(q, k, v, call) if cut is None else cut
    tile, blocks = _tile(cut, n_q, n_k), ceil_div(n_q, cut.rows)
    summed = call.band is not None and (wanted.band or wanted.tails)
    single = k.shape[1] == h and not (summed and blocks > 1)
    run = _run(cut, b, call) if single else 1
    runs = ceil_div(b, run)
    d_q, d_k, d_v = (plan.empty(tuple(x.shape), x.dtype, tokens=tokens) for x in (q, k, v))
    diagonals = d_factors = d_tables = None
    if summed:
        diagonals = plan.empty((runs, h, blocks, 2 * tile.KEYS), torch.float32)
    last, value_last = _lasts(call)
    if call.product is not None and wanted.band:
        d_factors = plan.empty((runs, h, last + 1, q.shape[3]), torch.float32)
    if call.inputs.table is not None:
        d_tables = plan.empty((runs, h, value_last + 1, v.shape[3]), torch.float32)
    sizes = _sizes(q, k, call)
    parts = 2
    if call.inputs.table is not None:
        parts = mass_parts(q, k, call.inputs.table, call.numbers)
    plan.launch(
        short_triangle_kernel if cut.triangle else short_backward_kernel,
        (runs * k.shape[1],),
        *(_operands(q, k, v, call), a.rows_of(d_out)),
        *(HeadGradients(d_q, d_k, d_v, d_factors, d_tables), diagonals, b),
        *a.scalars(sizes),
        warps=cut.warps,
        stages=cut.stages,
        KIND=_kind(q, k, v, call, tokens),
        TILE=tile._replace(STAGES=cut.stages),
        SHORT=Short(
            *(blocks, run),
            DIAGONALS=diagonals is not None,
            TRIANGLE=False,
            FACTOR=d_factors is not None,
            PARTS=parts,
        ),
    )
    band, tails = call.inputs.band, call.inputs.tails
    d_band = d_tails = d_factor = d_table = None
    if diagonals is not None and wanted.band:
        d_band = _band_gradient(plan, diagonals, band, sizes, tile)
    if diagonals is not None and wanted.tails and tails is not None:
        d_tails = _tails_gradient(plan, diagonals, tails, sizes, tile)
    if call.product is not None and wanted.factor:
        factor = call.product.factor
        if d_factors is not None:
            d_factor = table_sum(plan, d_factors, factor)
        else:  # one lag: one number for all keys, which does not change a softmax
            d_factor = plan.zeros(factor.shape, torch.float32)
    if d_tables is not None:
        d_table = table_sum(plan, d_tables, call.inputs.table)
    return Gradients(d_q, d_k, d_v, d_band, d_tails, d_table, factor=d_factor)


def _band_gradient(plan: Any, diagonals: Any, band: Any, sizes: a.Sizes, tile: a.Tile) -> Any:
    """[b|1, h|1, 1, lag] from the sums of diagonals."""
    (runs, h, blocks, _), lags = diagonals.shape, 32
    bands, width = band.shape[0], band.shape[-1]
    d_band = plan.empty((bands, h, 1, width), torch.float32)
    plan.launch(
        short_band_kernel,
        (ceil_div(width, lags), bands * h),
        *(diagonals, d_band, runs // bands, *a.scalars(sizes)),
        warps=4,
        stages=1,
        TILE=tile,
        ROW_BLOCKS=blocks,
        LAGS=lags,
        BATCHES=_batches(runs // bands, lags),
    )
    return plan.summed(d_band, tuple(band.shape))


def _tails_gradient(plan: Any, diagonals: Any, tails: Any, sizes: a.Sizes, tile: a.Tile) -> Any:
    """[4, b|1, h|1, 1] from the sums of diagonals."""
    (runs, h, blocks, _), count = diagonals.shape, tails.shape[1]
    lags = 2 * max(tile.KEYS, blocks * tile.ROWS)
    d_tails = plan.empty((4, count, h, 1), torch.float32)
    plan.launch(
        short_tails_kernel,
        (count * h,),
        *(diagonals, d_tails, runs // count, *a.scalars(sizes)),
        warps=4,
        stages=1,
        TILE=tile,
        ROW_BLOCKS=blocks,
        LAGS=lags,
        BATCHES=_batches(runs // count, lags),
    )
    return plan.summed(d_tails, tuple(tails.shape))


def _batches(batches: int, lags: int) -> int:
    """How many sequences a program adds up in one step: a tile has at most 2048 numbers."""
    return min(2048 // lags, _padded(batches, 1))


def forward_cut(q: Any, n_k: int, call: ShortCall) -> Cut:
    """How forward is divided: two programs of 64 rows keep more of the GPU busy than one of 128.

    The random numbers of dropout take registers, so with more than 64 keys a program has 32 rows.
    """
    keys = _padded(n_k, 16)
    rows = min(32 if call.numbers.dropout and keys > 64 else 64, _padded(q.shape[2], 16))
    if q.dtype == torch.float32:  # without tensor cores a thread holds more: fewer rows
        rows = min(rows, 16 if keys > 64 else 32)
        return Cut(rows, 8 if keys > 32 else 4)
    if _has_tables(call):
        return _table_cut(q, rows, keys, _warps(rows * keys))
    return Cut(rows, _warps(rows * keys))


def backward_cut(q: Any, k: Any, v: Any, call: ShortCall) -> Cut:
    """How backward is divided: one block of rows, so that dK and dV are one product each.

    More than 64 rows of at most 64 columns are taken as a triangle where that kernel covers a call.
    """
    rows, keys = _padded(q.shape[2], 16), _padded(k.shape[2], 16)
    if q.dtype == torch.float32:
        rows = min(rows, 16 if keys > 32 else 32)
        return Cut(rows, 8 if keys > 32 else 4)
    if _as_triangle(q, k, v, call):
        return Cut(rows, 4, triangle=True)
    if _has_tables(call):
        return _table_cut(q, min(rows, 64), keys, max(4, _warps(rows * keys)))
    if max(rows, keys) <= 32:
        return Cut(rows, _warps(rows * keys), run=4, stages=2)
    return Cut(rows, _warps(rows * keys))


def _table_cut(q: Any, rows: int, keys: int, warps: int) -> Cut:
    """With few keys a program takes many sequences, so that it loads the tables only once.

    With more keys, a loop over sequences would not have enough registers.
    """
    if max(rows, keys) > 32:
        return Cut(rows, warps)
    run = ceil_div(q.shape[0], max(1, TABLE_PROGRAMS // q.shape[1]))
    return Cut(rows, warps, run, stages=3)


def _as_triangle(q: Any, k: Any, v: Any, call: ShortCall) -> bool:
    """Whether backward takes a call of more than 64 queries in three tiles of 64 x 64."""
    narrow, grouped = max(q.shape[3], v.shape[3]) <= 64, q.shape[1] > k.shape[1]
    plain = not (grouped or _has_tables(call) or call.numbers.dropout)
    half = q.dtype != torch.float32
    return bool(q.shape[2] > 64 and half and narrow and plain and _triangular(call))


def _warps(cells: int) -> int:
    """Warps for a tile of so many cells: a thread holds at most 64 of them."""
    return 8 if cells > 8192 else 4 if cells > 2048 else 2 if cells > 512 else 1


def _run(cut: Cut, b: int, call: ShortCall) -> int:
    """How many sequences a program takes. They must share the band and the tails."""
    batches = max((x.shape[axis] for x, axis in _batched(call)), default=1)
    return cut.run if batches == 1 else math.gcd(cut.run, b // batches)


def _batched(call: ShortCall) -> list[tuple[Any, int]]:
    pairs = [(call.inputs.band, 0), (call.inputs.tails, 1)]
    return [(x, axis) for x, axis in pairs if call.band is not None and x is not None]


def _has_tables(call: ShortCall) -> bool:
    return call.product is not None or call.inputs.table is not None


def _lasts(call: ShortCall) -> tuple[int, int]:
    """The last place of a product's table and of a value table that a query sees, or 0."""
    factor = None if call.product is None else call.product.factor
    reaches = (0 if x is None else x.shape[1] // 2 for x in (factor, call.inputs.table))
    last, value_last = (a.last_place(reach, call.numbers) for reach in reaches)
    return last, value_last


def _tile(cut: Cut, n_q: int, n_k: int) -> a.Tile:
    """A tile of all keys, with no more rows than keys, as the sums of diagonals require."""
    keys = max(cut.rows, _padded(n_k, 16))
    return a.Tile(cut.rows, keys, keys, 1, n_q % cut.rows == 0 and keys == n_k)


def _triangular(call: ShortCall) -> bool:
    """Whether row i attends to no key beyond i."""
    return bool(call.numbers.causal and call.numbers.q_start <= 0)


def _operands(q: Any, k: Any, v: Any, call: ShortCall) -> Operands:
    inputs = call.inputs
    return Operands(
        *(
            a.rows_of(q),
            a.rows_of(k),
            a.rows_of(v),
            _bias(call.band),
            a.visible_of(inputs),
            inputs.seed,
        ),
        *(a.product_of(q, call.product), a.table_of(inputs.table)),
    )


def _sizes(q: Any, k: Any, call: ShortCall) -> a.Sizes:
    band, numbers, table = call.inputs.band, call.numbers, call.inputs.table
    reach = 0 if band is None else band.shape[-1] // 2
    if call.product is not None:
        reach = call.product.factor.shape[1] // 2
    return a.Sizes(
        n_q=q.shape[2],
        n_k=k.shape[2],
        q_start=numbers.q_start,
        reach=reach,
        edge=0 if call.band is None else call.band.shape[-1] // 2,
        n_heads=q.shape[1],
        value_reach=0 if table is None else table.shape[1] // 2,
        before=numbers.before,
        after=numbers.after,
        far_start=0,
        scale=numbers.scale,
        dropout=numbers.dropout,
    )


def _kind(q: Any, k: Any, v: Any, call: ShortCall, tokens: bool) -> a.Kind:
    d, d_v, inputs, numbers = q.shape[3], v.shape[3], call.inputs, call.numbers
    last, value_last = _lasts(call)
    return a.Kind(
        D=d,
        D_V=d_v,
        BLOCK_D=_padded(d, narrowest()),
        BLOCK_DV=_padded(d_v, narrowest()),
        GROUPS=q.shape[1] // k.shape[1],
        BAND=call.band is not None,
        RAW_BAND=False,
        EXTENT=False,
        TAILS=False,
        SLOPES=False,
        PER_ROW=False,
        VALUES=inputs.table is not None,
        BEFORE=numbers.before >= 0,
        AFTER=numbers.after >= 0,
        CAUSAL=numbers.causal,
        KEYS=inputs.keys is not None,
        SEGMENTS=inputs.q_segment is not None,
        DROPOUT=numbers.dropout > 0,
        NEGATIVE=numbers.scale < 0.0,
        FAR=False,
        TOKENS=tokens,
        PRECISION=a.precision_of(q),
        ENDS=call.product is not None,
        LAST=last,
        VALUE_LAST=value_last,
        MARGIN=0,
        LAGS=_padded(max(last, value_last) + 1, 16),
    )


def _bias(band: Any) -> a.Bias:
    return a.Bias(band, None, None, *a.strides_of(band, 0, 1, 2), *a.strides_of(None, 0, 1, 2, 3))


def _padded(n: int, least: int) -> int:
    return max(least, power_of_two(n))
