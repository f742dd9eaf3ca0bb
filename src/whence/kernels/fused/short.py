"""Launches for short sequences: one kernel forward, one backward, and sums over the batch.

`plan` is the builder of the fused backend. Nothing here touches data: tensors and slots are asked
for their shape, strides and dtype alone.
"""

from typing import Any, NamedTuple

import torch

from whence.kernels.fused.device.arguments import Bias, Kind, Rows, Sizes, Tile, Visible
from whence.kernels.fused.device.short import (
    HeadGradients,
    short_backward_kernel,
    short_band_kernel,
    short_forward_kernel,
    short_tails_kernel,
)
from whence.kernels.triton_inputs import Inputs, Numbers, exact_of, precision_of

LONGEST = 128  # queries, keys and columns of a head


class Cut(NamedTuple):
    """Rows of a tile, which holds all keys, and the warps that work on it."""

    rows: int
    warps: int


class ShortGradients(NamedTuple):
    """Gradients of a call, None for what it does not have or nobody wants."""

    q: Any
    k: Any
    v: Any
    band: Any  # float32, of the shape of the call's band
    tails: Any


def fits(q: Any, k: Any, v: Any, band: Any, inputs: Inputs, numbers: Numbers) -> bool:
    """Whether these kernels cover a call whose laid-out band is `band`, None without one.

    They cover up to 128 queries, keys and columns of a head, a band that all rows share and that
    is laid out for every lag of the tile, any mask, dropout and grouped heads.
    """
    n_q, n_k = q.shape[2], k.shape[2]
    if max(n_q, n_k, q.shape[3], v.shape[3]) > LONGEST or numbers.far or inputs.table is not None:
        return False
    if band is None:
        return True
    edge, most = band.shape[-1] // 2, max(_padded(n_q, 16), _padded(n_k, 16)) - 1
    inside = most + abs(numbers.q_start) <= edge
    return bool(band.shape[2] == 1 and inside)


def forward(
    plan: Any,
    q: Any,
    k: Any,
    v: Any,
    band: Any,
    inputs: Inputs,
    numbers: Numbers,
    *,
    tokens: bool,
    cut: Cut | None = None,
) -> Any:
    """The output [b, h, q, d_v], with `tokens` laid out in memory as [b, q, h, d_v]."""
    (b, h, n_q, _), n_k = q.shape, k.shape[2]
    cut = forward_cut(n_q, n_k) if cut is None else cut
    tile = _tile(cut, n_q, n_k)
    out = plan.empty((b, h, n_q, v.shape[3]), q.dtype, tokens=tokens)
    plan.launch(
        short_forward_kernel,
        (b * h, _ceil(n_q, tile.ROWS)),
        *(_rows(q), _rows(k), _rows(v), out, _bias(band), _visible(inputs), inputs.seed),
        _sizes(q, k, band, inputs, numbers),
        warps=cut.warps,
        stages=1,
        KIND=_kind(q, k, v, band, inputs, numbers, tokens),
        TILE=tile,
    )
    return out


def backward(
    plan: Any,
    d_out: Any,
    q: Any,
    k: Any,
    v: Any,
    band: Any,
    inputs: Inputs,
    numbers: Numbers,
    *,
    tokens: bool,
    band_too: bool,
    tails_too: bool,
    cut: Cut | None = None,
) -> ShortGradients:
    """Gradients of q, k, v and, if wanted, of the band and its tails, from the inputs alone."""
    (b, h, n_q, _), n_k = q.shape, k.shape[2]
    cut = backward_cut(n_q, n_k) if cut is None else cut
    tile, kind = _tile(cut, n_q, n_k), _kind(q, k, v, band, inputs, numbers, tokens)
    blocks = _ceil(n_q, tile.ROWS)
    d_q, d_k, d_v = (plan.empty(tuple(x.shape), x.dtype, tokens=tokens) for x in (q, k, v))
    parts = None
    if band is not None and (band_too or tails_too):
        parts = plan.empty((b, h, blocks, 2 * tile.KEYS), torch.float32)
    sizes = _sizes(q, k, band, inputs, numbers)
    plan.launch(
        short_backward_kernel,
        (b * k.shape[1],),
        *(_rows(q), _rows(k), _rows(v), _rows(d_out), HeadGradients(d_q, d_k, d_v), parts),
        *(_bias(band), _visible(inputs), inputs.seed, sizes),
        warps=cut.warps,
        stages=1,
        KIND=kind,
        TILE=tile,
        ROW_BLOCKS=blocks,
        DIAGONALS=parts is not None,
    )
    d_band, d_tails = None, None
    if parts is not None and band_too:
        d_band = _band_gradient(plan, parts, inputs, sizes, tile)
    if parts is not None and tails_too and inputs.tails is not None:
        d_tails = _tails_gradient(plan, parts, inputs, sizes, tile)
    return ShortGradients(d_q, d_k, d_v, d_band, d_tails)


def _band_gradient(plan: Any, parts: Any, inputs: Inputs, sizes: Sizes, tile: Tile) -> Any:
    assert inputs.band is not None
    (b, h, blocks, _), lags = parts.shape, 32
    bands, width = inputs.band.shape[0], inputs.band.shape[-1]
    d_band = plan.empty((bands, h, 1, width), torch.float32)
    plan.launch(
        short_band_kernel,
        (_ceil(width, lags), bands * h),
        *(parts, d_band, sizes, b // bands),
        warps=4,
        stages=1,
        TILE=tile,
        ROW_BLOCKS=blocks,
        LAGS=lags,
        BATCHES=_batches(b // bands, lags),
    )
    return plan.summed(d_band, tuple(inputs.band.shape))


def _tails_gradient(plan: Any, parts: Any, inputs: Inputs, sizes: Sizes, tile: Tile) -> Any:
    assert inputs.tails is not None
    b, h, blocks, _ = parts.shape
    tails, lags = inputs.tails.shape[1], 2 * max(tile.KEYS, blocks * tile.ROWS)
    d_tails = plan.empty((4, tails, h, 1), torch.float32)
    plan.launch(
        short_tails_kernel,
        (tails * h,),
        *(parts, d_tails, sizes, b // tails),
        warps=4,
        stages=1,
        TILE=tile,
        ROW_BLOCKS=blocks,
        LAGS=lags,
        BATCHES=_batches(b // tails, lags),
    )
    return plan.summed(d_tails, tuple(inputs.tails.shape))


def _batches(batches: int, lags: int) -> int:
    """Sequences that a program adds at once: a tile of at most 2048 numbers."""
    return min(2048 // lags, _padded(batches, 1))


def forward_cut(n_q: int, n_k: int) -> Cut:
    """How forward is cut: two programs of 64 rows keep more of the machine busy than one of 128."""
    rows, keys = min(64, _padded(n_q, 16)), _padded(n_k, 16)
    return Cut(rows, _warps(rows * keys))


def backward_cut(n_q: int, n_k: int) -> Cut:
    """How backward is cut: one block of rows, so that dK and dV are one product each."""
    rows, keys = _padded(n_q, 16), _padded(n_k, 16)
    return Cut(rows, _warps(rows * keys))


def _warps(cells: int) -> int:
    return 8 if cells > 8192 else 4 if cells > 2048 else 2 if cells > 512 else 1


def _tile(cut: Cut, n_q: int, n_k: int) -> Tile:
    """All keys, and never more rows than keys, for the sums of diagonals."""
    keys = max(cut.rows, _padded(n_k, 16))
    return Tile(cut.rows, keys, keys, 1, n_q % cut.rows == 0 and keys == n_k)


def _kind(
    q: Any, k: Any, v: Any, band: Any, inputs: Inputs, numbers: Numbers, tokens: bool
) -> Kind:
    d, d_v = q.shape[3], v.shape[3]
    return Kind(
        D=d,
        D_V=d_v,
        BLOCK_D=_padded(d, 16),
        BLOCK_DV=_padded(d_v, 16),
        GROUPS=q.shape[1] // k.shape[1],
        BAND=band is not None,
        RAW_BAND=False,
        EXTENT=False,
        TAILS=False,
        SLOPES=False,
        PER_ROW=False,
        VALUES=inputs.table is not None,
        BEFORE=numbers.before >= 0,
        AFTER=numbers.after >= 0,
        CAUSAL=numbers.after == 0,
        KEYS=inputs.keys is not None,
        SEGMENTS=inputs.q_segment is not None,
        DROPOUT=numbers.dropout > 0,
        FAR=False,
        TOKENS=tokens,
        PRECISION=precision_of(q),
        EXACT=exact_of(q),
    )


def _sizes(q: Any, k: Any, band: Any, inputs: Inputs, numbers: Numbers) -> Sizes:
    return Sizes(
        n_heads=q.shape[1],
        groups=q.shape[1] // k.shape[1],
        n_q=q.shape[2],
        n_k=k.shape[2],
        q_start=numbers.q_start,
        reach=0 if inputs.band is None else inputs.band.shape[-1] // 2,
        edge=0 if band is None else band.shape[-1] // 2,
        value_reach=0 if inputs.table is None else inputs.table.shape[1] // 2,
        before=numbers.before,
        after=numbers.after,
        far_start=0,
        scale=numbers.scale,
        dropout=numbers.dropout,
    )


def _rows(x: Any) -> Rows:
    return Rows(x, *x.stride()[:3])


def _bias(band: Any) -> Bias:
    band_b, band_h = (0, 0) if band is None else _shared(band, 0, 1)
    return Bias(band, None, None, band_b, band_h, 0, 0, 0, 0, 0)


def _visible(inputs: Inputs) -> Visible:
    keys, q_segment, k_segment = inputs.keys, inputs.q_segment, inputs.k_segment
    strides = [0 if x is None else _shared(x, 0)[0] for x in (keys, q_segment, k_segment)]
    return Visible(keys, q_segment, k_segment, *strides)


def _shared(x: Any, *axes: int) -> tuple[int, ...]:
    """The strides of these axes, 0 where an axis of size 1 broadcasts."""
    return tuple(0 if x.shape[axis] == 1 else x.stride(axis) for axis in axes)


def _padded(n: int, least: int) -> int:
    return max(least, 1 << (n - 1).bit_length())


def _ceil(n: int, size: int) -> int:
    return -(-n // size)  # triton.cdiv costs ten times as much
