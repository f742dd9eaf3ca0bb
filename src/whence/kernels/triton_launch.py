"""Launching the Triton kernels: tensors in, tensors out, every argument in its place."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from whence.kernels.beside import Beside
from whence.kernels.triton_band import band_kernel, collect_kernel
from whence.kernels.triton_decode import decode, few
from whence.kernels.triton_edges import MARGIN, shared, with_edges, with_row_edges
from whence.kernels.triton_forward import forward_kernel
from whence.kernels.triton_keys import key_kernel
from whence.kernels.triton_queries import query_kernel
from whence.launcher import launch

NEAR = 32  # keys a step near the diagonal: look-ups take registers and shared memory
BUSY = 1024  # programs that sum a shared band's gradient: enough to fill a GPU


class Tiles(NamedTuple):
    """Rows and keys a tile, and how the compiler is to run it."""

    rows: int
    keys: int
    warps: int
    stages: int


class Inputs(NamedTuple):
    """The tensors of a call besides q, k and v; None where the call has no such thing."""

    band: Tensor | None  # float32 [b|1, h|1, q|1, lag]
    extent: Tensor | None  # int32 [h]
    tails: Tensor | None  # float32 [4, b|1, h|1, q|1]
    table: Tensor | None  # float32 [h|1, lag, d_v]
    keys: Tensor | None  # uint8 [b|1, k]
    q_segment: Tensor | None  # int32 [b|1, q]
    k_segment: Tensor | None  # int32 [b|1, k]
    seed: Tensor | None  # int64 []


class Numbers(NamedTuple):
    """The numbers of a call. before and after are -1 without a limit.

    Keys at |lag| >= far are left to a plain kernel (split.py); 0 means that none are.
    """

    scale: float
    q_start: int
    before: int
    after: int
    dropout: float
    slopes: bool
    far: int = 0


class Far(NamedTuple):
    """Attention to the keys at |lag| >= start, computed elsewhere; the right side in reverse.

    out is [b, h, n - start, d_v] and lse, in base e, [b, h, n - start], both packed. A causal call
    has nothing on its right: those are None.
    """

    start: int
    left: Tensor | None  # None too where only the gradients are wanted
    left_lse: Tensor | None
    right: Tensor | None
    right_lse: Tensor | None


class FarGradients(NamedTuple):
    """What the far keys give to the gradients of q, k and v, in the same order of rows."""

    left: tuple[Tensor, Tensor, Tensor]
    right: tuple[Tensor, Tensor, Tensor] | None


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    inputs: Inputs,
    numbers: Numbers,
    tiles: Tiles,
    far: Far | None = None,
) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None, Tensor | None]:
    """out, what rounding took from it, lse in base 2, the table's masses, the band if laid out."""
    (b, h, n_q, _), d_v = q.shape, v.shape[-1]
    out = torch.empty(b, h, n_q, d_v, dtype=q.dtype, device=q.device)
    lse = torch.empty(b, h, n_q, dtype=torch.float32, device=q.device)
    mass, rest = None, None
    if (inputs.band is not None or inputs.table is not None) and q.dtype != torch.float32:
        # float16 for bfloat16 too: of what is so small its range is enough, and it has more digits.
        rest = torch.empty(b, h, n_q, d_v, dtype=torch.float16, device=q.device)
    if inputs.table is not None:
        width = inputs.table.shape[1]
        mass = torch.empty(b, h, n_q, width, dtype=torch.float32, device=q.device)
    if shared_out(q, k, numbers):
        flags = _flags(inputs, numbers)
        del flags["DROPOUT"]
        decode(
            *(q, k, v, _pointers(inputs, inputs.band)[:-1]),
            *(_input_strides(inputs, inputs.band), inputs.table),
            (out, rest, lse, mass),
            reach=0 if inputs.band is None else inputs.band.shape[-1] // 2,
            q_start=numbers.q_start,
            before=numbers.before,
            after=numbers.after,
            scale=numbers.scale,
            flags=flags,
            shape=_shape(q, v),
            precision=_precision(q),
            most_keys=2 * tiles.keys,  # a tile has few rows; smaller ones where they did not fit
            most_stages=tiles.stages,
        )
        return out, rest, lse, mass, None
    band = laid_out(q, inputs, numbers, far)
    by_row = inputs.table is not None or (inputs.band is not None and _per_row(inputs))
    tiles = _suited(tiles, by_row, near_alone=far is not None)
    launch(
        forward_kernel,
        (_ceil(n_q, tiles.rows), b * h),
        (
            *(q, k, v, out, lse),
            *_pointers(inputs, band),
            *(inputs.table, mass, rest),
            *_far_parts(far),
        ),
        (
            *_strides(q, k, v),
            *_input_strides(inputs, band),
            0 if inputs.table is None else shared(inputs.table, 0)[0],
            *_sizes(q, k, inputs, numbers, far, band),
        ),
        **_shape(q, v),
        GROUPS=h // k.shape[1],
        BLOCK_M=tiles.rows,
        BLOCK_N=tiles.keys,
        NEAR_N=min(tiles.keys, NEAR),
        STAGES=tiles.stages,
        BAND=inputs.band is not None,
        **_flags(inputs, numbers),
        EVEN_N=k.shape[2] % tiles.keys == 0,
        REST=rest is not None,
        FAR=far is not None,
        CAUSAL=far is not None and numbers.after == 0,
        EXACT=_exact(q),
        PRECISION=_precision(q),
        num_warps=tiles.warps,
        num_stages=tiles.stages,
    )
    return out, rest, lse, mass, band


class Backward(NamedTuple):
    """The gradients that the kernels give; None where the call has no such thing."""

    q: Tensor
    k: Tensor
    v: Tensor
    band: Tensor | None
    tails: Tensor | None


def backward(
    d_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    rest: Tensor | None,
    lse: Tensor,
    band: Tensor | None,
    inputs: Inputs,
    numbers: Numbers,
    by_rows: Tiles,
    by_keys: Tiles,
    block: int,
    *,
    band_too: bool,
    tails_too: bool,
    far: Far | None = None,
    far_gradients: FarGradients | None = None,
) -> Backward:
    """Gradients of q, k, v and, if wanted, band and tails."""
    (b, h, n_q, d), (_, h_kv, n_k, d_v) = q.shape, v.shape
    band = laid_out(q, inputs, numbers, far) if band is None else band  # a few queries' gradients
    by_row = inputs.table is not None or (inputs.band is not None and _per_row(inputs))
    by_rows = _suited(by_rows, by_row, near_alone=far is not None)
    by_keys = _suited_keys(by_keys, d, by_row, near_alone=far is not None)
    delta = torch.empty_like(lse)
    d_q = torch.empty(b, h, n_q, d, dtype=q.dtype, device=q.device)
    d_k = torch.empty(b, h_kv, n_k, d, dtype=k.dtype, device=k.device)
    d_value = torch.empty(b, h_kv, n_k, d_v, dtype=v.dtype, device=v.device)
    row_band, d_band = False, None
    if inputs.band is not None and band_too:
        row_band = inputs.band.shape[2] > 1 or n_q == 1
        if row_band:
            shape = (b, h, n_q, inputs.band.shape[-1])
            d_band = torch.zeros(shape, dtype=torch.float32, device=q.device)
    d_tails = None
    if inputs.tails is not None and tails_too:
        d_tails = torch.empty(4, b, h, n_q, dtype=torch.float32, device=q.device)
    d_mass = None
    if inputs.table is not None:
        width = inputs.table.shape[1]
        d_mass = torch.empty(b, h, n_q, width, dtype=torch.float32, device=q.device)
    sides = None
    if by_row and far is None and not numbers.slopes and not numbers.dropout:
        sides = torch.empty(4, b, h, n_q, dtype=torch.float32, device=q.device)
    pointers = (*_pointers(inputs, band), d_mass)
    common = (
        *_strides(q, k, v),
        *d_out.stride()[:3],
        *_input_strides(inputs, band),
        *_sizes(q, k, inputs, numbers, far, band),
    )
    options = {
        **_shape(q, v),
        **_flags(inputs, numbers),
        "PRECISION": _precision(q),
    }
    has_band = inputs.band is not None
    elsewhere = {"FAR": far is not None, "CAUSAL": far is not None and numbers.after == 0}
    from_queries: tuple[Tensor | None, ...] = (None,) * 2
    from_keys: tuple[Tensor | None, ...] = (None,) * 4
    if far_gradients is not None:
        left, right = far_gradients.left, far_gradients.right or (None,) * 3
        from_queries, from_keys = (left[0], right[0]), (*left[1:], *right[1:])
    # Queries first: their kernel leaves delta for the others.
    launch(
        query_kernel,
        (_ceil(n_q, by_rows.rows), b * h),
        (
            *(q, k, v, d_out, lse, delta, sides, out),
            *(rest, d_q, d_band, d_tails),
            *from_queries,
            *_far_parts(far),
            *pointers,
            inputs.table,
        ),
        (*common, 0 if inputs.table is None else shared(inputs.table, 0)[0]),
        **options,
        BAND=has_band,
        GROUPS=h // h_kv,
        BLOCK_M=by_rows.rows,
        BLOCK_N=by_rows.keys,
        NEAR_N=min(by_rows.keys, NEAR),
        STAGES=by_rows.stages,
        EVEN=n_q % by_rows.rows == 0 and n_k % by_rows.keys == 0,
        ROW_BAND=row_band,
        REST=rest is not None,
        SIDES=sides is not None,
        EXACT=_exact(q),
        **elsewhere,
        TAIL_SUMS=d_tails is not None,
        num_warps=by_rows.warps,
        num_stages=by_rows.stages,
    )
    beside = None
    if inputs.band is not None and band_too and d_band is None:
        tensors = (q, k, v, d_out, lse, delta)
        if far is None:
            d_band = _shared_band(tensors, pointers, common, options, inputs, numbers, block)
        else:  # where the key kernel has little to do
            with Beside(q.device) as beside:
                d_band = _shared_band(tensors, pointers, common, options, inputs, numbers, block)
    launch(
        key_kernel,
        (_ceil(n_k, by_keys.keys), b * h_kv),
        (*(q, k, v, d_out, lse, delta, sides, d_k, d_value), *from_keys, *pointers),
        (*common, h // h_kv),
        **options,
        BAND=has_band,
        BLOCK_M=by_keys.rows,
        BLOCK_N=by_keys.keys,
        SIDES=sides is not None,
        NEAR_M=min(by_keys.rows, NEAR if by_row or far is not None or d > 64 else by_keys.rows),
        STAGES=by_keys.stages,
        **elsewhere,
        EVEN=n_q % by_keys.rows == 0 and n_k % by_keys.keys == 0,
        num_warps=by_keys.warps,
        num_stages=by_keys.stages,
    )
    if beside is not None:
        beside.join(d_band)
    return Backward(d_q, d_k, d_value, d_band, d_tails)


def _shared_band(
    tensors: tuple[Tensor, ...],
    pointers: tuple[Tensor | None, ...],
    common: tuple[int | float, ...],
    options: dict[str, Any],
    inputs: Inputs,
    numbers: Numbers,
    block: int,
) -> Tensor:
    """The gradient of a band that all queries share, [b|1, h, 1, lag]."""
    assert inputs.band is not None
    q, k = tensors[:2]
    (b, h, n_q, _), n_k = q.shape, k.shape[2]
    batches, reach = inputs.band.shape[0], inputs.band.shape[-1] // 2
    lowest = max((numbers.q_start - reach) // block, 1 - _ceil(n_q, block))
    highest = min((numbers.q_start + reach + block - 1) // block, _ceil(n_k, block) - 1)
    diagonals = max(highest - lowest + 1, 1)
    tiles = min(_ceil(n_q, block), _ceil(n_k, block)) * (b // batches)
    # With an extent most diagonals are empty, but only the device knows which: few programs each
    # take every n-th of them, and cut those that are there into as many shares as there is room
    # for, so that the GPU is kept busy.
    slots = min(diagonals, 8 if inputs.extent is not None else 64)
    busy = BUSY // max(1, min(slots, 4) * h * batches)
    parts = max(1, min(tiles, busy, 64))
    size = 2**22 if inputs.extent is not None else 2**25  # bytes for the shares: 4 or 32 MB
    room = max(diagonals, min(diagonals * parts, size // (batches * h * 2 * block * 4)))
    part = torch.empty(batches, h, room, 2, block, dtype=torch.float32, device=q.device)
    launch(
        band_kernel,
        (slots, parts, batches * h),
        (*tensors, part, *pointers),
        (*common, room, b // batches),
        **options,
        GROUPS=h // k.shape[1],
        BLOCK=block,
        EVEN=n_q % block == 0 and n_k % block == 0,
        num_warps=4,
        num_stages=2,
    )
    d_band = torch.empty(batches, h, 1, 2 * reach + 1, dtype=torch.float32, device=q.device)
    first = (numbers.q_start - reach) // block
    last = (numbers.q_start + reach) // block
    flags = {key: options[key] for key in ("EXTENT", "BEFORE", "AFTER")}
    launch(
        collect_kernel,
        (last - first + 1, batches * h),
        (part, d_band, inputs.extent),
        (
            *(h, n_q, n_k, numbers.q_start, reach, numbers.before, numbers.after),
            *(room, first, parts),
        ),
        BLOCK=block,
        **flags,
    )
    return d_band


def _suited(tiles: Tiles, by_row: bool, *, near_alone: bool) -> Tiles:
    """The table's tiles, made for plain loops, where look-ups take registers too.

    Measured on an H200: a program that walks near tiles alone, or looks up a row's own numbers,
    takes 64 rows at most.
    """
    if near_alone or by_row:
        tiles = tiles._replace(rows=min(tiles.rows, 64), keys=min(tiles.keys, 64), warps=4)
    return tiles


def _suited_keys(tiles: Tiles, d: int, by_row: bool, *, near_alone: bool) -> Tiles:
    """The same for the key kernel, which without far tiles is the better for fewer stages."""
    tiles = _suited(tiles, by_row, near_alone=near_alone)
    return tiles._replace(stages=2 if by_row or d > 64 else 1) if near_alone else tiles


def _ceil(n: int, size: int) -> int:
    return -(-n // size)  # triton.cdiv costs ten times as much


def _padded(d: int) -> int:
    return max(16, 1 << (d - 1).bit_length())


def _precision(q: Tensor) -> str:
    """Products of float32 in float32: the tensor cores' short float would cost three digits."""
    return "ieee" if q.dtype == torch.float32 else "tf32"


def _exact(q: Tensor) -> str:
    """Products with a table of float32: three short ones give its digits, where speed counts."""
    return "ieee" if q.dtype == torch.float32 else "tf32x3"


def shared_out(q: Tensor, k: Tensor, numbers: Numbers) -> bool:
    """Whether few queries meet many keys: then forward reads the band as it is."""
    groups = q.shape[1] // k.shape[1]
    return not numbers.far and not numbers.dropout and few(q.shape[2], k.shape[2], groups)


def laid_out(q: Tensor, inputs: Inputs, numbers: Numbers, far: Far | None) -> Tensor | None:
    """The band as the kernels read it."""
    if inputs.band is None:
        return None
    b, h, n_q, _ = q.shape
    if _per_row(inputs):
        return with_row_edges(inputs.band, inputs.tails, b, h, n_q)
    edge = _edge(inputs, 0 if far is None else far.start)
    return with_edges(inputs.band, inputs.tails, edge, numbers.before, numbers.after)


def laid_out_shape(q: Tensor, inputs: Inputs, far_start: int) -> tuple[int, ...] | None:
    """The shape of what `laid_out` makes."""
    if inputs.band is None:
        return None
    if _per_row(inputs):
        return (*q.shape[:3], inputs.band.shape[-1] + 2)
    b, h = inputs.band.shape[:2]
    if inputs.tails is not None:
        b, h = max(b, inputs.tails.shape[1]), max(h, inputs.tails.shape[2])
    return b, h, 1, 2 * _edge(inputs, far_start) + 1


def _edge(inputs: Inputs, far_start: int) -> int:
    assert inputs.band is not None
    table = 0 if inputs.table is None else inputs.table.shape[1] // 2
    return max(inputs.band.shape[-1] // 2, table, far_start) + MARGIN


def _per_row(inputs: Inputs) -> bool:
    """Whether a row has a band or tails of its own."""
    assert inputs.band is not None
    return inputs.band.shape[2] > 1 or (inputs.tails is not None and inputs.tails.shape[3] > 1)


def _pointers(inputs: Inputs, band: Tensor | None) -> tuple[Tensor | None, ...]:
    _, extent, tails, _, keys, q_segment, k_segment, seed = inputs
    return band, extent, tails, keys, q_segment, k_segment, seed


def _strides(q: Tensor, k: Tensor, v: Tensor) -> tuple[int, ...]:
    return (*q.stride()[:3], *k.stride()[:3], *v.stride()[:3])


def _input_strides(inputs: Inputs, band: Tensor | None) -> tuple[int, ...]:
    tails, keys, q_segment = inputs.tails, inputs.keys, inputs.q_segment
    return (
        *((0, 0, 0) if band is None else shared(band, 0, 1, 2)),
        *((0, 0, 0, 0) if tails is None else shared(tails, 0, 1, 2, 3)),
        *((0,) if keys is None else shared(keys, 0)),
        *((0,) if q_segment is None else shared(q_segment, 0)),
        *((0,) if inputs.k_segment is None else shared(inputs.k_segment, 0)),
    )


def _far_parts(far: Far | None) -> tuple[Tensor | None, ...]:
    return (None,) * 4 if far is None else far[1:]


def _sizes(
    q: Tensor,
    k: Tensor,
    inputs: Inputs,
    numbers: Numbers,
    far: Far | None,
    band: Tensor | None,
) -> tuple[int | float, ...]:
    h = q.shape[1]
    reach = 0 if inputs.band is None else inputs.band.shape[-1] // 2
    value_reach = 0 if inputs.table is None else inputs.table.shape[1] // 2
    return (
        h,
        q.shape[2],
        k.shape[2],
        numbers.q_start,
        reach,
        0 if band is None else band.shape[-1] // 2,
        value_reach,
        numbers.before,
        numbers.after,
        0 if far is None else far.start,
        numbers.scale,
        numbers.dropout,
    )


def _shape(q: Tensor, v: Tensor) -> dict[str, int]:
    d, d_v = q.shape[-1], v.shape[-1]
    return {"D": d, "D_V": d_v, "BLOCK_D": _padded(d), "BLOCK_DV": _padded(d_v)}


def _flags(inputs: Inputs, numbers: Numbers) -> dict[str, bool]:
    return {
        "EXTENT": inputs.extent is not None,
        "TAILS": inputs.tails is not None,
        "SLOPES": numbers.slopes,
        "PER_ROW": inputs.band is not None and _per_row(inputs),
        "VALUES": inputs.table is not None,
        "BEFORE": numbers.before >= 0,
        "AFTER": numbers.after >= 0,
        "KEYS": inputs.keys is not None,
        "SEGMENTS": inputs.q_segment is not None,
        "DROPOUT": numbers.dropout > 0,
    }
