"""Launching the Triton kernels: tensors in, tensors out, every argument in its place."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from whence.kernels.beside import Beside
from whence.kernels.tiles_suited import (
    Kind,
    forward_tiles,
    key_tiles,
    query_tiles,
)
from whence.kernels.triton_band import band_kernel, collect_kernel
from whence.kernels.triton_decode import decode
from whence.kernels.triton_edges import shared
from whence.kernels.triton_forward import forward_kernel
from whence.kernels.triton_inputs import (
    NO_PRODUCT,
    Far,
    FarGradients,
    Inputs,
    Numbers,
    Product,
    Tiles,
    exact_of,
    far_parts,
    flags_of,
    input_strides,
    laid_out,
    per_row,
    pointers_of,
    precision_of,
    shape_of,
    shared_out,
    sizes_of,
    strides_of,
    tokens_of,
)
from whence.kernels.triton_keys import key_kernel
from whence.kernels.triton_queries import query_kernel
from whence.kernels.triton_rows import empty_rows, packed
from whence.lag import Curve
from whence.launcher import launch

BUSY = 1024  # programs that sum a shared band's gradient: enough to fill a GPU


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    inputs: Inputs,
    numbers: Numbers,
    tiles: Tiles,
    far: Far | None = None,
    band: Tensor | None = None,
    product: Product = NO_PRODUCT,
    curve: tuple[Curve, tuple[Tensor, ...]] | None = None,
    *,
    recorded: bool = True,
) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None, Tensor | None]:
    """out, what rounding took from it, lse in base 2, the table's masses, the band if laid out.

    The band and the tails of a product are filled in: `band` is room for it as the kernels read it.
    A curve is for few queries; what rounding took is for a gradient, if one is `recorded`.
    """
    (b, h, n_q, _), d_v = q.shape, v.shape[-1]
    tokens = tokens_of(q, k, numbers)
    out = empty_rows((b, h, n_q, d_v), q, tokens)
    lse = torch.empty(b, h, n_q, dtype=torch.float32, device=q.device)
    mass, rest = None, None
    biased = inputs.band is not None or inputs.table is not None
    if recorded and biased and q.dtype != torch.float32:
        # float16 for bfloat16 too: of what is so small its range is enough, and it has more digits.
        rest = torch.empty_like(out, dtype=torch.float16)
    if inputs.table is not None:
        width = inputs.table.shape[1]
        mass = torch.empty(b, h, n_q, width, dtype=torch.float32, device=q.device)
    if shared_out(q, k, numbers):
        flags = flags_of(inputs, numbers)
        del flags["DROPOUT"]
        decode(
            *(q, k, v, pointers_of(inputs, inputs.band)[:-1]),
            *(input_strides(inputs, inputs.band), inputs.table),
            (out, rest, lse, mass),
            reach=0 if inputs.band is None else inputs.band.shape[-1] // 2,
            q_start=numbers.q_start,
            before=numbers.before,
            after=numbers.after,
            scale=numbers.scale,
            flags=flags,
            shape=shape_of(q, v),
            precision=precision_of(q),
            most_keys=2 * tiles.keys,  # a tile has few rows; smaller ones where they did not fit
            most_stages=tiles.stages,
            curve=curve,
        )
        return out, rest, lse, mass, None
    band = laid_out(q, inputs, numbers, far) if band is None else band
    by_row = inputs.table is not None or (inputs.band is not None and per_row(inputs))
    kind = _kind(q, by_row, far, numbers)
    tiles, near = forward_tiles(tiles, kind)
    factor_scale, query, factor = product
    launch(
        forward_kernel,
        (_ceil(n_q, tiles.rows), b * h),
        (
            *(q, k, v, out, lse),
            *pointers_of(inputs, band),
            *(inputs.table, mass, rest),
            *far_parts(far),
            *(query, factor),
        ),
        (
            *strides_of(q, k, v),
            *input_strides(inputs, band),
            0 if inputs.table is None else shared(inputs.table, 0)[0],
            *((0, 0, 0) if query is None else query.stride()[:3]),
            0 if factor is None else shared(factor, 0)[0],
            factor_scale,
            *sizes_of(q, k, inputs, numbers, far, band),
        ),
        **shape_of(q, v),
        GROUPS=h // k.shape[1],
        BLOCK_M=tiles.rows,
        BLOCK_N=tiles.keys,
        NEAR_N=near,
        STAGES=tiles.stages,
        BAND=inputs.band is not None,
        PRODUCT=0 if factor is None else factor.shape[-1],
        **flags_of(inputs, numbers),
        EVEN_N=k.shape[2] % tiles.keys == 0,
        REST=rest is not None,
        FAR=far is not None,
        CAUSAL=numbers.after == 0,
        TOKENS=tokens,
        EXACT=exact_of(q),
        PRECISION=precision_of(q),
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
    (b, h, n_q, _), (h_kv, n_k) = q.shape, k.shape[1:3]
    band = laid_out(q, inputs, numbers, far) if band is None else band  # a few queries' gradients
    by_row = inputs.table is not None or (inputs.band is not None and per_row(inputs))
    kind = _kind(q, by_row, far, numbers)
    by_rows, near_keys = query_tiles(by_rows, kind)
    by_keys, near_rows = key_tiles(by_keys, kind)
    pair = torch.empty(b, h, n_q, 2, dtype=torch.float32, device=q.device)  # lse and delta
    tokens = tokens_of(q, k, numbers)
    # What was saved need not lie as it did: hooks of saved tensors may have moved it.
    out, rest = packed(out, tokens), None if rest is None else packed(rest, tokens)
    d_q, d_k, d_value = (empty_rows(x.shape, x, tokens) for x in (q, k, v))
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
        sides = torch.empty(2, *pair.shape, dtype=torch.float32, device=q.device)
    pointers = (*pointers_of(inputs, band), d_mass)
    common = (
        *strides_of(q, k, v),
        *d_out.stride()[:3],
        *input_strides(inputs, band),
        *sizes_of(q, k, inputs, numbers, far, band),
    )
    options = {
        **shape_of(q, v),
        **flags_of(inputs, numbers),
        "PRECISION": precision_of(q),
    }
    has_band = inputs.band is not None
    elsewhere = {"FAR": far is not None, "CAUSAL": numbers.after == 0, "TOKENS": tokens}
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
            *(q, k, v, d_out, lse, pair, sides, out),
            *(rest, d_q, d_band, d_tails),
            *from_queries,
            *far_parts(far),
            *pointers,
            inputs.table,
        ),
        (*common, 0 if inputs.table is None else shared(inputs.table, 0)[0]),
        **options,
        BAND=has_band,
        GROUPS=h // h_kv,
        BLOCK_M=by_rows.rows,
        BLOCK_N=by_rows.keys,
        NEAR_N=near_keys,
        STAGES=by_rows.stages,
        EVEN=n_q % by_rows.rows == 0 and n_k % by_rows.keys == 0,
        ROW_BAND=row_band,
        REST=rest is not None,
        SIDES=sides is not None,
        EXACT=exact_of(q),
        **elsewhere,
        TAIL_SUMS=d_tails is not None,
        num_warps=by_rows.warps,
        num_stages=by_rows.stages,
    )
    beside = None
    if inputs.band is not None and band_too and d_band is None:
        tensors = (q, k, v, d_out, pair)
        if far is None:
            d_band = _shared_band(tensors, pointers, common, options, inputs, numbers, block)
        else:  # where the key kernel has little to do
            with Beside(q.device) as beside:
                d_band = _shared_band(tensors, pointers, common, options, inputs, numbers, block)
    launch(
        key_kernel,
        (_ceil(n_k, by_keys.keys), b * h_kv),
        (*(q, k, v, d_out, pair, sides, d_k, d_value), *from_keys, *pointers),
        (*common, h // h_kv),
        **options,
        BAND=has_band,
        BLOCK_M=by_keys.rows,
        BLOCK_N=by_keys.keys,
        SIDES=sides is not None,
        NEAR_M=near_rows,
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


def _kind(q: Tensor, by_row: bool, far: Far | None, numbers: Numbers) -> Kind:
    sloped, causal = numbers.slopes, numbers.after == 0
    return Kind(q.shape[-1], q.shape[2], by_row, far is not None, causal, sloped)


def _ceil(n: int, size: int) -> int:
    return -(-n // size)  # triton.cdiv costs ten times as much
