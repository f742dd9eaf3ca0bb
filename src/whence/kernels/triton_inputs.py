"""What a call gives the Triton kernels: its parts, and the arguments that they become."""

from typing import NamedTuple

import torch
from torch import Tensor

from whence.kernels.triton_decode import few
from whence.kernels.triton_edges import MARGIN, shared, with_edges, with_row_edges
from whence.kernels.triton_rows import by_token


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


class Product(NamedTuple):
    """A band still to be made, scale * query @ table^T, whose end columns are its tails."""

    scale: float
    query: Tensor | None  # [b, h, q, d]; None: it is the very q of the attention, or there is none
    table: Tensor | None  # float32 [h|1, lag, d], packed; None: the call has no such band


NO_PRODUCT = Product(1.0, None, None)


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


def _padded(d: int) -> int:
    return max(16, 1 << (d - 1).bit_length())


def precision_of(q: Tensor) -> str:
    """Products of float32 in float32: the tensor cores' short float would cost three digits."""
    return "ieee" if q.dtype == torch.float32 else "tf32"


def exact_of(q: Tensor) -> str:
    """Products with a table of float32: three short ones give its digits, where speed counts."""
    return "ieee" if q.dtype == torch.float32 else "tf32x3"


def shared_out(q: Tensor, k: Tensor, numbers: Numbers) -> bool:
    """Whether few queries meet many keys: then forward reads the band as it is."""
    groups = q.shape[1] // k.shape[1]
    return not numbers.far and not numbers.dropout and few(q.shape[2], k.shape[2], groups)


def tokens_of(q: Tensor, k: Tensor, numbers: Numbers) -> bool:
    """Whether out and the gradients are [b, n, h, d] in memory: as q is, but for few queries."""
    return by_token(q) and not shared_out(q, k, numbers)


def laid_out(q: Tensor, inputs: Inputs, numbers: Numbers, far: Far | None) -> Tensor | None:
    """The band as the kernels read it."""
    if inputs.band is None:
        return None
    b, h, n_q, _ = q.shape
    if per_row(inputs):
        return with_row_edges(inputs.band, inputs.tails, b, h, n_q)
    edge = _edge(inputs, 0 if far is None else far.start)
    return with_edges(inputs.band, inputs.tails, edge, numbers.before, numbers.after)


def laid_out_shape(q: Tensor, inputs: Inputs, far_start: int) -> tuple[int, ...] | None:
    """The shape of what `laid_out` makes."""
    if inputs.band is None:
        return None
    if per_row(inputs):
        return (*q.shape[:3], inputs.band.shape[-1] + 2)
    b, h = inputs.band.shape[:2]
    if inputs.tails is not None:
        b, h = max(b, inputs.tails.shape[1]), max(h, inputs.tails.shape[2])
    return b, h, 1, 2 * _edge(inputs, far_start) + 1


def _edge(inputs: Inputs, far_start: int) -> int:
    assert inputs.band is not None
    return edge_of(inputs.band.shape[-1] // 2, inputs.table, far_start)


def edge_of(reach: int, table: Tensor | None, far_start: int) -> int:
    """How far a head's band is laid out: beyond all that a near tile may touch."""
    return max(reach, 0 if table is None else table.shape[1] // 2, far_start) + MARGIN


def per_row(inputs: Inputs) -> bool:
    """Whether a row has a band or tails of its own."""
    assert inputs.band is not None
    return inputs.band.shape[2] > 1 or (inputs.tails is not None and inputs.tails.shape[3] > 1)


def pointers_of(inputs: Inputs, band: Tensor | None) -> tuple[Tensor | None, ...]:
    """The tensors besides q, k and v that every kernel takes, in its order."""
    _, extent, tails, _, keys, q_segment, k_segment, seed = inputs
    return band, extent, tails, keys, q_segment, k_segment, seed


def strides_of(q: Tensor, k: Tensor, v: Tensor) -> tuple[int, ...]:
    """Of q, k and v, without the last axis."""
    return (*q.stride()[:3], *k.stride()[:3], *v.stride()[:3])


def input_strides(inputs: Inputs, band: Tensor | None) -> tuple[int, ...]:
    """Of the tensors besides."""
    tails, keys, q_segment = inputs.tails, inputs.keys, inputs.q_segment
    return (
        *((0, 0, 0) if band is None else shared(band, 0, 1, 2)),
        *((0, 0, 0, 0) if tails is None else shared(tails, 0, 1, 2, 3)),
        *((0,) if keys is None else shared(keys, 0)),
        *((0,) if q_segment is None else shared(q_segment, 0)),
        *((0,) if inputs.k_segment is None else shared(inputs.k_segment, 0)),
    )


def far_parts(far: Far | None) -> tuple[Tensor | None, ...]:
    """The far keys' results, or as many times None."""
    return (None,) * 4 if far is None else far[1:]


def sizes_of(
    q: Tensor,
    k: Tensor,
    inputs: Inputs,
    numbers: Numbers,
    far: Far | None,
    band: Tensor | None,
) -> tuple[int | float, ...]:
    """The numbers that every kernel takes, in its order."""
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


def shape_of(q: Tensor, v: Tensor) -> dict[str, int]:
    """Head sizes, and those of the tiles that hold them."""
    d, d_v = q.shape[-1], v.shape[-1]
    return {"D": d, "D_V": d_v, "BLOCK_D": _padded(d), "BLOCK_DV": _padded(d_v)}


def flags_of(inputs: Inputs, numbers: Numbers) -> dict[str, bool]:
    """What a kernel is compiled for."""
    return {
        "EXTENT": inputs.extent is not None,
        "TAILS": inputs.tails is not None,
        "SLOPES": numbers.slopes,
        "PER_ROW": inputs.band is not None and per_row(inputs),
        "VALUES": inputs.table is not None,
        "BEFORE": numbers.before >= 0,
        "AFTER": numbers.after >= 0,
        "KEYS": inputs.keys is not None,
        "SEGMENTS": inputs.q_segment is not None,
        "DROPOUT": numbers.dropout > 0,
    }
