"""The fused attention and its gradient: an autograd function, and one operator for compilers."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from whence.kernels.split import far_attention, far_gradients, near_numbers
from whence.kernels.tiles_table import fitting
from whence.kernels.triton_inputs import (
    NO_PRODUCT,
    Far,
    Inputs,
    Numbers,
    Product,
    laid_out_shape,
    shared_out,
    tokens_of,
)
from whence.kernels.triton_launch import backward, forward
from whence.kernels.triton_query_band import band_gradients, band_room, value_table_gradient
from whence.kernels.triton_rows import empty_rows


def lag_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    inputs: Inputs,
    numbers: Numbers,
    product: Product = NO_PRODUCT,
) -> Tensor:
    """Attention by the Triton kernels; to a compiler it is the operator whence::lag_attention.

    A product, which compilers are not given, stands in the place of the inputs' band and tails.
    """
    if torch.compiler.is_compiling():
        out: Tensor = lag_attention_op(q, k, v, *inputs, *numbers)[0]
    else:
        scale, *factors = product
        out = LagAttention.apply(  # type: ignore[no-untyped-call]
            numbers, scale, q, k, v, *factors, *inputs
        )
    return out


class Kept(NamedTuple):
    """What forward leaves for backward; None for what the call does not need."""

    out: Tensor
    lse: Tensor  # in base 2
    rest: Tensor | None  # what rounding took from out
    mass: Tensor | None  # a lag of the value table
    far_left: Tensor | None
    far_left_lse: Tensor | None
    far_right: Tensor | None
    far_right_lse: Tensor | None
    band: Tensor | None  # as the kernels read it


def attended(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    inputs: Inputs,
    numbers: Numbers,
    *,
    tails_too: bool,
    band: Tensor | None = None,
    product: Product = NO_PRODUCT,
) -> Kept:
    """The output and what its gradient needs; `band` is room for that of a product."""
    far, near = None, numbers
    if numbers.far:
        far, near = far_attention(q, k, v, numbers), near_numbers(numbers)
    out, rest, lse, mass, band = fitting(
        "forward", q, v, lambda tiles: forward(q, k, v, inputs, near, tiles, far, band, product)
    )
    # Only the gradient of a tail asks again what the far keys gave.
    parts = far[1:] if far is not None and tails_too else (None,) * 4
    return Kept(out, lse, rest, mass, *parts, band)


def gradients(
    d_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kept: Kept,
    inputs: Inputs,
    numbers: Numbers,
    *,
    band_too: bool = True,
    tails_too: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of q, k, v, band, tails and table; None for what is not there."""
    d_out = d_out if d_out.stride(-1) == 1 else d_out.contiguous()
    d_table = None
    if inputs.table is not None:
        assert kept.mass is not None
        d_table = value_table_gradient(kept.mass, d_out, inputs.table)
    far, elsewhere, near = None, None, numbers
    if numbers.far:
        near = near_numbers(numbers)
        elsewhere = far_gradients(d_out, q, k, v, kept.out, kept.lse, inputs, numbers)
        far = Far(numbers.far, *kept[4:8])
    found = fitting(
        "backward",
        q,
        v,
        lambda rows, keys, block: backward(
            d_out,
            q,
            k,
            v,
            kept.out,
            kept.rest,
            kept.lse,
            kept.band,
            inputs,
            near,
            rows,
            keys,
            block,
            band_too=band_too,
            tails_too=tails_too,
            far=far,
            far_gradients=elsewhere,
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
        ctx: Any,
        numbers: Numbers,
        scale: float,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        query: Tensor | None,
        factor: Tensor | None,
        *inputs: Tensor | None,
    ) -> Tensor:
        """Run the kernel; keep what backward needs. scale, query, factor: see Product."""
        given, band = Inputs(*inputs), None
        ctx.band_too, ctx.tails_too = ctx.needs_input_grad[7], ctx.needs_input_grad[9]
        if factor is not None:
            band, tails = band_room(q if query is None else query, factor)
            given = given._replace(band=band[..., 1:-1], tails=tails)
            ctx.query_too = ctx.needs_input_grad[2 if query is None else 5]
            # One lag is one number for all keys of a query, which no softmax sees.
            more = factor.shape[1] > 1
            ctx.band_too = ctx.tails_too = more and (ctx.query_too or ctx.needs_input_grad[6])
        product = Product(scale, q if query is None else query, factor)
        kept = attended(
            *(q, k, v, given, numbers), tails_too=ctx.tails_too, band=band, product=product
        )
        ctx.save_for_backward(q, k, v, query, factor, *kept, *given)
        ctx.numbers, ctx.scale = numbers, scale
        return kept.out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients in the order of forward's arguments."""
        q, k, v, query, factor, *tensors = ctx.saved_tensors
        d_q, d_k, d_v, d_band, d_tails, d_table = gradients(
            d_out,
            q,
            k,
            v,
            Kept(*tensors[:9]),
            Inputs(*tensors[9:]),
            ctx.numbers,
            band_too=ctx.band_too,
            tails_too=ctx.tails_too,
        )
        d_query, d_factor = None, None
        if factor is not None and d_band is None:
            d_factor = torch.zeros_like(factor)
        elif factor is not None and d_band is not None:
            d_query, d_factor = band_gradients(
                d_band,
                d_tails,
                q if query is None else query,
                factor,
                ctx.scale,
                into=d_q if query is None else None,
                query_too=ctx.query_too,
                table_too=ctx.needs_input_grad[6],
            )
            d_query = None if query is None else d_query
            d_band, d_tails = None, None
        of_inputs = (d_band, None, d_tails, d_table, None, None, None, None)
        return (None, None, d_q, d_k, d_v, d_query, d_factor, *of_inputs)


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
