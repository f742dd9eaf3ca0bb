"""The fused attention as an autograd function, for calls that nobody compiles."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from whence.kernels.fused_parts import Kept, attended, gradients
from whence.kernels.triton_inputs import NO_PRODUCT, Inputs, Numbers, Product, shared_out
from whence.kernels.triton_query_band import band_gradients, band_room
from whence.lag import Curve
from whence.replay import Tensors, replayed

KEPT, INPUTS = len(Kept._fields), len(Inputs._fields)


class Making(NamedTuple):
    """How the band is made where it is no input: by a curve, or as a product with this scale."""

    scale: float = 1.0
    curve: Curve | None = None
    reach: int = 0


class Wanted(NamedTuple):
    """Whose gradients are asked for."""

    band: bool
    tails: bool
    query: bool
    factor: bool


class LagAttention(torch.autograd.Function):
    """The eager path: fewer steps on the host than an operator takes, which counts at small n."""

    @staticmethod
    def forward(
        ctx: Any,
        numbers: Numbers,
        making: Making,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        query: Tensor | None,
        factor: Tensor | None,
        *more: Tensor | None,
    ) -> Tensor:
        """Run the kernels; keep what backward needs.

        query and factor are those of a Product. `more` are the Inputs, and a curve's parameters.
        """
        needs = ctx.needs_input_grad
        wanted = Wanted(needs[7], needs[9], needs[2 if query is None else 5], needs[6])
        if factor is not None:
            # One lag is one number for all keys of a query, which no softmax sees.
            some = factor.shape[1] > 1 and (wanted.query or wanted.factor)
            wanted = wanted._replace(band=some, tails=some)
        elif making.curve is not None:
            wanted = wanted._replace(band=any(needs[7 + INPUTS :]))
        given = (q, k, v, query, factor)
        out, *found = replayed(_forward, (*given, *more), numbers, making, wanted.tails, True)
        assert out is not None
        ctx.save_for_backward(*given, out, *found)
        ctx.settings = (numbers, making, wanted)
        ctx.parameters = len(more) - INPUTS
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> Tensors:
        """Gradients in the order of forward's arguments."""
        given = (d_out, *ctx.saved_tensors)
        d_q, d_k, d_v, d_query, d_factor, *more = replayed(_backward, given, *ctx.settings)
        d_band, d_tails, d_table, *d_parameters = more
        of_inputs = (d_band, None, d_tails, d_table, None, None, None, None)
        of_curve = d_parameters or (None,) * ctx.parameters
        return (None, None, d_q, d_k, d_v, d_query, d_factor, *of_inputs, *of_curve)


def without_gradients(numbers: Numbers, making: Making, *given: Tensor | None) -> Tensor:
    """LagAttention's output alone."""
    out, *_ = replayed(_forward, given, numbers, making, False, False)
    assert out is not None
    return out


def _forward(
    given: Tensors, numbers: Numbers, making: Making, tails_too: bool, recorded: bool
) -> Tensors:
    """What is kept, the inputs with a band that was made, and what its curve's gradient needs."""
    q, k, v, query, factor, *rest = given
    assert q is not None
    assert k is not None
    assert v is not None
    inputs, parameters = Inputs(*rest[:INPUTS]), rest[INPUTS:]
    band, product, curve, of_curve = None, NO_PRODUCT, None, []
    if factor is not None:
        source = q if query is None else query
        product = Product(making.scale, source, factor)
        band, tails = band_room(source, factor)
        inputs = inputs._replace(band=band[..., 1:-1], tails=tails)
    elif (
        making.curve is not None and not recorded and making.curve.at and shared_out(q, k, numbers)
    ):
        curve = making.curve, tuple(x.float().contiguous() for x in parameters if x is not None)
        shape = (1, q.shape[1], 1, 2 * making.reach + 1)
        room = torch.empty(shape, dtype=torch.float32, device=q.device)
        inputs = inputs._replace(band=room)
    elif making.curve is not None:
        made, extent, *of_curve = making.curve.make(tuple(parameters), making.reach)
        inputs = inputs._replace(band=made, extent=extent)
    kept = attended(
        *(q, k, v, inputs, numbers),
        tails_too=tails_too,
        band=band,
        product=product,
        curve=curve,
        recorded=recorded,
    )
    return (*kept, *inputs, *of_curve)


def _backward(given: Tensors, numbers: Numbers, making: Making, wanted: Wanted) -> Tensors:
    """Gradients of q, k, v, a product's factors, band, tails, table and a curve's parameters."""
    d_out, q, k, v, query, factor, *rest = given
    assert d_out is not None
    assert q is not None
    assert k is not None
    assert v is not None
    kept = Kept(*rest[:KEPT])  # type: ignore[arg-type]
    inputs, of_curve = Inputs(*rest[KEPT : KEPT + INPUTS]), rest[KEPT + INPUTS :]
    d_q, d_k, d_v, d_band, d_tails, d_table = gradients(
        *(d_out, q, k, v, kept, inputs, numbers), band_too=wanted.band, tails_too=wanted.tails
    )
    d_query, d_factor = None, None
    d_parameters: Tensors = ()
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
            making.scale,
            into=d_q if query is None else None,
            query_too=wanted.query,
            table_too=wanted.factor,
        )
        d_query = None if query is None else d_query
        d_band, d_tails = None, None
    elif making.curve is not None and d_band is not None:
        d_parameters = making.curve.gradient((d_band, inputs.extent, *of_curve), making.reach)
        d_band = None
    return (d_q, d_k, d_v, d_query, d_factor, d_band, d_tails, d_table, *d_parameters)
