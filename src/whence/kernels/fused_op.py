"""The fused attention as one operator for compilers, and the choice between it and eager calls."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from whence.kernels.fused_eager import Call, LagAttention, Making, without_gradients
from whence.kernels.fused_parts import Kept, attended, gradients
from whence.kernels.triton_inputs import (
    NO_PRODUCT,
    Inputs,
    Numbers,
    Product,
    laid_out_shape,
    shared_out,
    tokens_of,
)
from whence.kernels.triton_rows import empty_rows
from whence.lag import CurveBias


def lag_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    inputs: Inputs,
    numbers: Numbers,
    product: Product = NO_PRODUCT,
    curve: CurveBias | None = None,
) -> Tensor:
    """Attention by the Triton kernels; to a compiler it is the operator whence::lag_attention.

    A product or a curve, which compilers are not given, stands in the place of the inputs' band.
    """
    out: Tensor
    if torch.compiler.is_compiling():
        out, *_ = lag_attention_op(q, k, v, *inputs, *numbers)
        return out
    scale, *factors = product
    making = Making(scale)
    parameters: tuple[Tensor, ...] = ()
    if curve is not None:
        making, parameters = Making(1.0, curve.curve, curve.reach), curve.parameters
    every = (q, k, v, *factors, *inputs, *parameters)
    call = Call(numbers, making, tuple([x is not None for x in every]))
    tensors = [x for x in every if x is not None]
    if not torch.is_grad_enabled() and forward_ad._current_level < 0:
        return without_gradients(call, *tensors)
    out = LagAttention.apply(call, *tensors)  # type: ignore[no-untyped-call]
    return out


@torch.library.custom_op("whence::lag_attention", mutates_args=())
def lag_attention_op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    band: Tensor | None,
    extent: Tensor | None,
    tails: Tensor | None,
    table: Tensor | None,
    keys: Tensor | None,
    q_segment: Tensor | None,
    k_segment: Tensor | None,
    seed: Tensor | None,
    scale: float,
    q_start: int,
    before: int,
    after: int,
    dropout: float,
    slopes: bool,
    far: int,
) -> list[Tensor]:
    """As `attended`; an empty tensor for what is not there."""
    inputs = Inputs(band, extent, tails, table, keys, q_segment, k_segment, seed)
    numbers = Numbers(scale, q_start, before, after, dropout, slopes, far)
    kept = attended(q, k, v, inputs, numbers, tails_too=tails is not None)
    return [_empty(x, kept.lse) for x in kept]


@lag_attention_op.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    band: Tensor | None,
    extent: Tensor | None,
    tails: Tensor | None,
    table: Tensor | None,
    keys: Tensor | None,
    q_segment: Tensor | None,
    k_segment: Tensor | None,
    seed: Tensor | None,
    scale: float,
    q_start: int,
    before: int,
    after: int,
    dropout: float,
    slopes: bool,
    far: int,
) -> list[Tensor]:
    b, h, n_q, _ = q.shape
    numbers = Numbers(scale, q_start, before, after, dropout, slopes, far)
    tokens = tokens_of(q, k, numbers)
    out = empty_rows((b, h, n_q, v.shape[-1]), q, tokens)
    lse = q.new_empty(b, h, n_q, dtype=torch.float32)
    rounded = q.dtype != torch.float32 and (band is not None or table is not None)
    rest = torch.empty_like(out, dtype=torch.float16) if rounded else _empty(None, lse)
    mass = lse.new_empty((0,) if table is None else (b, h, n_q, table.shape[1]))
    sides = [0, 0]
    if far and tails is not None:
        sides = [n_q - far, 0 if after == 0 else n_q - far]
    parts = [
        empty_rows((b, h, m, v.shape[-1]), q, tokens) if i % 2 == 0 else lse.new_empty(b, h, m)
        for m in sides
        for i in range(2)
    ]
    parts = [x if x.numel() else _empty(None, lse) for x in parts]
    inputs = Inputs(band, extent, tails, table, keys, q_segment, k_segment, seed)
    edges = None if shared_out(q, k, numbers) else laid_out_shape(q, inputs, far)
    return [out, lse, rest, mass, *parts, lse.new_empty((0,) if edges is None else edges)]


@torch.library.custom_op("whence::lag_attention_backward", mutates_args=())
def lag_attention_backward_op(
    d_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kept: list[Tensor],
    band: Tensor | None,
    extent: Tensor | None,
    tails: Tensor | None,
    table: Tensor | None,
    keys: Tensor | None,
    q_segment: Tensor | None,
    k_segment: Tensor | None,
    seed: Tensor | None,
    scale: float,
    q_start: int,
    before: int,
    after: int,
    dropout: float,
    slopes: bool,
    far: int,
    band_too: bool,
    tails_too: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """As `gradients`; an empty tensor for what is not there."""
    inputs = Inputs(band, extent, tails, table, keys, q_segment, k_segment, seed)
    numbers = Numbers(scale, q_start, before, after, dropout, slopes, far)
    out, lse, *more = kept
    found = Kept(out, lse, *(x if x.numel() else None for x in more))
    d_q, d_k, d_v, *others = gradients(
        *(d_out, q, k, v, found, inputs, numbers), band_too=band_too, tails_too=tails_too
    )
    d_band, d_tails, d_table = (_empty(x, lse) for x in others)
    return d_q, d_k, d_v, d_band, d_tails, d_table


@lag_attention_backward_op.register_fake
def _(
    d_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kept: list[Tensor],
    band: Tensor | None,
    extent: Tensor | None,
    tails: Tensor | None,
    table: Tensor | None,
    keys: Tensor | None,
    q_segment: Tensor | None,
    k_segment: Tensor | None,
    seed: Tensor | None,
    scale: float,
    q_start: int,
    before: int,
    after: int,
    dropout: float,
    slopes: bool,
    far: int,
    band_too: bool,
    tails_too: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    tokens = tokens_of(q, k, Numbers(scale, q_start, before, after, dropout, slopes, far))
    d_q, d_k, d_v = (empty_rows(x.shape, x, tokens) for x in (q, k, v))
    wanted = (band if band_too else None, tails if tails_too else None, table)
    d_band, d_tails, d_table = (kept[1].new_empty((0,) if x is None else x.shape) for x in wanted)
    return d_q, d_k, d_v, d_band, d_tails, d_table


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    ctx.save_for_backward(*inputs[:3], *output, *inputs[3:11])
    ctx.numbers = inputs[11:]


def _backward(ctx: Any, d_kept: list[Tensor]) -> tuple[Tensor | None, ...]:
    q, k, v, *tensors = ctx.saved_tensors
    kept, tensors = tensors[:9], tensors[9:]
    d_q, d_k, d_v, d_band, d_tails, d_table = lag_attention_backward_op(
        *(d_kept[0], q, k, v, kept, *tensors, *ctx.numbers),
        band_too=ctx.needs_input_grad[3],
        tails_too=ctx.needs_input_grad[5],
    )
    table = tensors[3]
    bias = (
        d_band if ctx.needs_input_grad[3] else None,
        None,
        d_tails if ctx.needs_input_grad[5] else None,
        None if table is None else d_table,
    )
    return (d_q, d_k, d_v, *bias, *(None,) * 11)


lag_attention_op.register_autograd(_backward, setup_context=_setup_context)


def _empty(x: Tensor | None, like: Tensor) -> Tensor:
    return like.new_empty(0) if x is None else x
