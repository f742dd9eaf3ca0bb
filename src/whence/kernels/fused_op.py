"""The fused attention and its gradient: an autograd function, and one operator for compilers."""

from typing import Any

import torch
from torch import Tensor

from whence.kernels.tiles_table import fitting
from whence.kernels.triton_launch import Inputs, Numbers, backward, forward


def lag_attention(q: Tensor, k: Tensor, v: Tensor, inputs: Inputs, numbers: Numbers) -> Tensor:
    """Attention by the Triton kernels; to a compiler it is the operator whence::lag_attention."""
    if torch.compiler.is_compiling():
        out: Tensor = lag_attention_op(q, k, v, *inputs, *numbers)[0]
    else:
        out = LagAttention.apply(numbers, q, k, v, *inputs)  # type: ignore[no-untyped-call]
    return out


def attended(
    q: Tensor, k: Tensor, v: Tensor, inputs: Inputs, numbers: Numbers
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """out, log-sum-exp in base 2, what rounding took from out, and the mass a lag of the table."""
    out, rest, lse, near, ends = fitting(
        "forward", q, v, lambda tiles: forward(q, k, v, inputs, numbers, tiles)
    )
    if inputs.table is None:
        return out, lse, None if rest is lse else rest, None
    mass = torch.exp2(near - lse[..., None]) / (1 - numbers.dropout)
    mass[..., 0] += ends[..., 0]
    mass[..., -1] += ends[..., 1]
    whole = out + mass @ inputs.table
    short = whole.to(q.dtype)
    return short, lse, None if short is whole else (whole - short).to(q.dtype), mass


def gradients(
    d_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    rest: Tensor | None,
    mass: Tensor | None,
    inputs: Inputs,
    numbers: Numbers,
    *,
    band_too: bool = True,
    tails_too: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of q, k, v, band, tails and table; None for what is not there."""
    d_out = d_out if d_out.stride(-1) == 1 else d_out.contiguous()
    d_table, d_mass = None, None
    if inputs.table is not None:
        assert mass is not None
        wide = d_out.float()
        d_mass = wide @ inputs.table.transpose(-1, -2)
        d_table = (mass.transpose(-1, -2) @ wide).sum(0).sum_to_size(inputs.table.shape)
    found = fitting(
        "backward",
        q,
        v,
        lambda rows, keys, block: backward(
            d_out,
            q,
            k,
            v,
            out,
            rest,
            lse,
            d_mass,
            inputs,
            numbers,
            rows,
            keys,
            block,
            band_too=band_too,
            tails_too=tails_too,
        ),
    )
    d_band, d_tails = found.band, found.tails
    if inputs.band is not None and d_band is not None:
        d_band = d_band.sum_to_size(inputs.band.shape)
    if inputs.tails is not None and d_tails is not None:
        d_tails = d_tails.sum_to_size(inputs.tails.shape)
    return found.q, found.k, found.v, d_band, d_tails, d_table


class LagAttention(torch.autograd.Function):
    """The eager path: fewer steps on the host than an operator takes, which counts at small n."""

    @staticmethod
    def forward(
        ctx: Any, numbers: Numbers, q: Tensor, k: Tensor, v: Tensor, *inputs: Tensor | None
    ) -> Tensor:
        """Run the kernel; keep what backward needs."""
        out, lse, rest, mass = attended(q, k, v, Inputs(*inputs), numbers)
        ctx.save_for_backward(q, k, v, out, lse, rest, mass, *inputs)
        ctx.numbers = numbers
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients in the order of forward's arguments."""
        q, k, v, out, lse, rest, mass, *tensors = ctx.saved_tensors
        inputs = Inputs(*tensors)
        d_q, d_k, d_v, d_band, d_tails, d_table = gradients(
            d_out,
            q,
            k,
            v,
            out,
            lse,
            rest,
            mass,
            inputs,
            ctx.numbers,
            band_too=ctx.needs_input_grad[4],
            tails_too=ctx.needs_input_grad[6],
        )
        return (None, d_q, d_k, d_v, d_band, None, d_tails, d_table, None, None, None, None)


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
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """out, lse, rest, mass, as `attended`; an empty tensor for what is not there."""
    inputs = Inputs(band, extent, tails, table, keys, q_segment, k_segment, seed)
    numbers = Numbers(scale, q_start, before, after, dropout, slopes)
    out, lse, rest, mass = attended(q, k, v, inputs, numbers)
    return out, lse, _empty(rest, out), _empty(mass, lse)


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
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    b, h, n_q, _ = q.shape
    out = q.new_empty(b, h, n_q, v.shape[-1])
    lse = q.new_empty(b, h, n_q, dtype=torch.float32)
    rounded = q.dtype != torch.float32 and (band is not None or table is not None)
    mass = (0,) if table is None else (b, h, n_q, table.shape[1])
    return out, lse, out.new_empty(out.shape if rounded else (0,)), lse.new_empty(mass)


@torch.library.custom_op("whence::lag_attention_backward", mutates_args=())
def lag_attention_backward_op(
    d_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    rest: Tensor,
    mass: Tensor,
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
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """As `gradients`; an empty tensor for what is not there."""
    inputs = Inputs(band, extent, tails, table, keys, q_segment, k_segment, seed)
    numbers = Numbers(scale, q_start, before, after, dropout, slopes)
    there, weighed = (x if x.numel() else None for x in (rest, mass))
    d_q, d_k, d_v, *more = gradients(d_out, q, k, v, out, lse, there, weighed, inputs, numbers)
    d_band, d_tails, d_table = (_empty(x, lse) for x in more)
    return d_q, d_k, d_v, d_band, d_tails, d_table


@lag_attention_backward_op.register_fake
def _(
    d_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    rest: Tensor,
    mass: Tensor,
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
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    d_q, d_k, d_v = (x.new_empty(x.shape) for x in (q, k, v))
    d_band, d_tails, d_table = (
        lse.new_empty((0,) if x is None else x.shape) for x in (band, tails, table)
    )
    return d_q, d_k, d_v, d_band, d_tails, d_table


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs[:3], *output, *inputs[3:11])
    ctx.numbers = inputs[11:]


def _backward(ctx: Any, d_out: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    q, k, v, out, lse, rest, mass, *tensors = ctx.saved_tensors
    d_q, d_k, d_v, d_band, d_tails, d_table = lag_attention_backward_op(
        d_out, q, k, v, out, lse, rest, mass, *tensors, *ctx.numbers
    )
    band, _extent, tails, table = tensors[:4]
    bias = (
        None if band is None else d_band,
        None,
        None if tails is None else d_tails,
        None if table is None else d_table,
    )
    return (d_q, d_k, d_v, *bias, *(None,) * 10)


lag_attention_op.register_autograd(_backward, setup_context=_setup_context)


def _empty(x: Tensor | None, like: Tensor) -> Tensor:
    return like.new_empty(0) if x is None else x
