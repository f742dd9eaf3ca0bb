"""The fused attention as an autograd function, for calls that nobody compiles."""

from typing import Any

import torch
from torch import Tensor

from whence.kernels.fused_parts import Kept, attended, gradients
from whence.kernels.triton_inputs import NO_PRODUCT, Inputs, Numbers, Product
from whence.kernels.triton_query_band import band_gradients, band_room


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
        given, band, product = Inputs(*inputs), None, NO_PRODUCT
        ctx.band_too, ctx.tails_too = ctx.needs_input_grad[7], ctx.needs_input_grad[9]
        if factor is not None:
            product = Product(scale, q if query is None else query, factor)
            band, tails = band_room(q if query is None else query, factor)
            given = given._replace(band=band[..., 1:-1], tails=tails)
            ctx.query_too = ctx.needs_input_grad[2 if query is None else 5]
            # One lag is one number for all keys of a query, which no softmax sees.
            more = factor.shape[1] > 1
            ctx.band_too = ctx.tails_too = more and (ctx.query_too or ctx.needs_input_grad[6])
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
            d_query = None if query is None else torch.zeros_like(query)
        elif factor is not None:
            assert d_band is not None
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
