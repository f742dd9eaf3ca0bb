"""Launching the Triton kernels: tensors in, tensors out, every argument in its place."""

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from whence.kernels.triton_backward import key_kernel, query_kernel
from whence.kernels.triton_band import band_kernel, collect_kernel
from whence.kernels.triton_forward import forward_kernel


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
    left: Tensor
    left_lse: Tensor
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
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """out, what rounding took from it, lse in base 2, near logits and the mass of both far ends."""
    (b, h, n_q, _), d_v = q.shape, v.shape[-1]
    dtype = q.dtype if inputs.table is None else torch.float32  # the table's part is still to come
    out = torch.empty(b, h, n_q, d_v, dtype=dtype, device=q.device)
    lse = torch.empty(b, h, n_q, dtype=torch.float32, device=q.device)
    near, ends, rest = lse, lse, lse
    if inputs.band is not None and q.dtype != torch.float32 and inputs.table is None:
        rest = torch.empty_like(out)
    if inputs.table is not None:
        width = inputs.table.shape[1]
        near = torch.full((b, h, n_q, width), -torch.inf, dtype=torch.float32, device=q.device)
        ends = torch.empty(b, h, n_q, 2, dtype=torch.float32, device=q.device)
    forward_kernel[(triton.cdiv(n_q, tiles.rows), b * h)](
        q,
        k,
        v,
        out,
        lse,
        *_pointers(inputs, q),
        near,
        ends,
        rest,
        *_far_parts(far, lse),
        *_strides(q, k, v),
        *_input_strides(inputs),
        *_sizes(q, k, inputs, numbers, far),
        **_shape(q, v),
        BLOCK_M=tiles.rows,
        BLOCK_N=tiles.keys,
        BAND=inputs.band is not None,
        **_flags(inputs, numbers),
        EVEN_N=k.shape[2] % tiles.keys == 0,
        REST=rest is not lse,
        FAR=far is not None,
        CAUSAL=far is not None and far.right is None,
        PRECISION=_precision(q),
        num_warps=tiles.warps,
        num_stages=tiles.stages,
    )
    return out, rest, lse, near, ends


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
    d_mass: Tensor | None,
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
    """Gradients of q, k, v and, if wanted, band and tails; d_mass is d_out against the table."""
    (b, h, n_q, d), (_, h_kv, n_k, d_v) = q.shape, v.shape
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
    mass = lse if d_mass is None else d_mass
    common = (
        *_pointers(inputs, q),
        mass,
        *_strides(q, k, v),
        *d_out.stride()[:3],
        *_input_strides(inputs),
        *_sizes(q, k, inputs, numbers, far),
    )
    options = {
        **_shape(q, v),
        **_flags(inputs, numbers),
        "PRECISION": _precision(q),
    }
    has_band = inputs.band is not None
    elsewhere = {"FAR": far is not None, "CAUSAL": far is not None and far.right is None}
    from_queries, from_keys = (lse,) * 2, (lse,) * 4
    if far_gradients is not None:
        left, right = far_gradients.left, far_gradients.right or far_gradients.left
        from_queries, from_keys = (left[0], right[0]), (*left[1:], *right[1:])
    # Queries first: their kernel leaves delta for the others.
    query_kernel[(triton.cdiv(n_q, by_rows.rows), b * h)](
        q,
        k,
        v,
        d_out,
        lse,
        delta,
        out,
        out if rest is None else rest,
        d_q,
        lse if d_band is None else d_band,
        lse if d_tails is None else d_tails,
        *from_queries,
        *_far_parts(far, lse),
        *common,
        **options,
        BAND=has_band,
        BLOCK_M=by_rows.rows,
        BLOCK_N=by_rows.keys,
        EVEN=n_q % by_rows.rows == 0 and n_k % by_rows.keys == 0,
        ROW_BAND=row_band,
        REST=rest is not None,
        **elsewhere,
        TAIL_SUMS=d_tails is not None,
        num_warps=by_rows.warps,
        num_stages=by_rows.stages,
    )
    key_kernel[(triton.cdiv(n_k, by_keys.keys), b * h_kv)](
        q,
        k,
        v,
        d_out,
        lse,
        delta,
        d_k,
        d_value,
        *from_keys,
        *common,
        **options,
        BAND=has_band,
        BLOCK_M=by_keys.rows,
        BLOCK_N=by_keys.keys,
        **elsewhere,
        EVEN=n_q % by_keys.rows == 0 and n_k % by_keys.keys == 0,
        num_warps=by_keys.warps,
        num_stages=by_keys.stages,
    )
    if inputs.band is not None and band_too and d_band is None:
        d_band = _shared_band(d_out, q, k, v, lse, delta, common, options, inputs, numbers, block)
    return Backward(d_q, d_k, d_value, d_band, d_tails)


def _shared_band(
    d_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse: Tensor,
    delta: Tensor,
    common: tuple[object, ...],
    options: dict[str, object],
    inputs: Inputs,
    numbers: Numbers,
    block: int,
) -> Tensor:
    """The gradient of a band that all queries share, [b|1, h, 1, lag]."""
    assert inputs.band is not None
    (b, h, n_q, _), n_k = q.shape, k.shape[2]
    batches, reach = inputs.band.shape[0], inputs.band.shape[-1] // 2
    lowest = max((numbers.q_start - reach) // block, 1 - triton.cdiv(n_q, block))
    highest = min((numbers.q_start + reach + block - 1) // block, triton.cdiv(n_k, block) - 1)
    diagonals = max(highest - lowest + 1, 1)
    tiles = min(triton.cdiv(n_q, block), triton.cdiv(n_k, block)) * (b // batches)
    # With an extent most diagonals are empty, but only the device knows which: few programs each
    # take every n-th of them. Then as many shares of a diagonal as keep the GPU busy.
    slots = min(diagonals, 8 if inputs.extent is not None else 64)
    busy = 4096 // max(1, min(slots, 4) * h * batches)
    room = 2**25 // (diagonals * batches * h * 2 * block * 4)  # of memory for the shares: 32 MB
    parts = max(1, min(tiles, busy, room, 64))
    part = torch.empty(diagonals, parts, batches, h, 2, block, dtype=torch.float32, device=q.device)
    band_kernel[(slots, parts, batches * h)](
        q,
        k,
        v,
        d_out,
        lse,
        delta,
        part,
        *common,
        lowest,
        b // batches,
        **options,
        BLOCK=block,
        num_warps=4,
        num_stages=2,
    )
    d_band = torch.empty(batches, h, 1, 2 * reach + 1, dtype=torch.float32, device=q.device)
    first = (numbers.q_start - reach) // block
    last = (numbers.q_start + reach) // block
    flags = {key: options[key] for key in ("EXTENT", "BEFORE", "AFTER")}
    collect_kernel[(last - first + 1, batches * h)](
        part,
        d_band,
        lse if inputs.extent is None else inputs.extent,
        h,
        n_q,
        n_k,
        numbers.q_start,
        reach,
        numbers.before,
        numbers.after,
        lowest,
        first,
        parts,
        BLOCK=block,
        **flags,
    )
    return d_band


def _padded(d: int) -> int:
    return max(16, 1 << (d - 1).bit_length())


def _precision(q: Tensor) -> str:
    """Products of float32 in float32: the tensor cores' short float would cost three digits."""
    return "ieee" if q.dtype == torch.float32 else "tf32"


def _pointers(inputs: Inputs, stand_in: Tensor) -> tuple[Tensor, ...]:
    """band, extent, tails, keys, segments, seed; a stand-in for a missing one is never read."""
    names = ("band", "extent", "tails", "keys", "q_segment", "k_segment", "seed")
    found = (getattr(inputs, name) for name in names)
    return tuple(stand_in if x is None else x for x in found)


def _strides(q: Tensor, k: Tensor, v: Tensor) -> tuple[int, ...]:
    return (*q.stride()[:3], *k.stride()[:3], *v.stride()[:3])


def _input_strides(inputs: Inputs) -> tuple[int, ...]:
    """Axes of size 1 are shared: stride 0."""

    def shared(x: Tensor | None, axes: int) -> tuple[int, ...]:
        if x is None:
            return (0,) * axes
        pairs = zip(x.shape[:axes], x.stride()[:axes], strict=True)
        return tuple(0 if size == 1 else stride for size, stride in pairs)

    return (
        *shared(inputs.band, 3),
        *shared(inputs.tails, 4),
        *shared(inputs.keys, 1),
        *shared(inputs.q_segment, 1),
        *shared(inputs.k_segment, 1),
    )


def _far_parts(far: Far | None, stand_in: Tensor) -> tuple[Tensor, ...]:
    if far is None:
        return (stand_in,) * 4
    right = (stand_in, stand_in) if far.right is None else (far.right, far.right_lse)
    return (far.left, far.left_lse, *right)  # type: ignore[return-value]


def _sizes(
    q: Tensor, k: Tensor, inputs: Inputs, numbers: Numbers, far: Far | None
) -> tuple[int | float, ...]:
    h = q.shape[1]
    reach = 0 if inputs.band is None else inputs.band.shape[-1] // 2
    value_reach = 0 if inputs.table is None else inputs.table.shape[1] // 2
    return (
        h,
        h // k.shape[1],
        q.shape[2],
        k.shape[2],
        numbers.q_start,
        reach,
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
        "PER_ROW": inputs.band is not None and inputs.band.shape[2] > 1,
        "VALUES": inputs.table is not None,
        "BEFORE": numbers.before >= 0,
        "AFTER": numbers.after >= 0,
        "KEYS": inputs.keys is not None,
        "SEGMENTS": inputs.q_segment is not None,
        "DROPOUT": numbers.dropout > 0,
    }
