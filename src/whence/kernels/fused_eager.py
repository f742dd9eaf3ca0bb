"""The fused attention as an autograd function, for calls that nobody compiles."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from whence.kernels.fused_parts import Kept, attended, gradients
from whence.kernels.split import near_numbers
from whence.kernels.triton_edges import edges_of_curve
from whence.kernels.triton_inputs import (
    NO_PRODUCT,
    Inputs,
    Numbers,
    Product,
    edge_of,
    shared_out,
)
from whence.kernels.triton_query_band import band_gradients, band_room
from whence.lag import Curve
from whence.replay import Tensors, replayed

INPUTS = len(Inputs._fields)


class Making(NamedTuple):
    """How the band is made where it is no input: by a curve, or as a product with this scale."""

    scale: float = 1.0
    curve: Curve | None = None
    reach: int = 0


class Call(NamedTuple):
    """A call without its tensors, of which `there` says which it has.

    They are q, k, v, a Product's query and factor, the Inputs, and a curve's parameters. What is
    not there is not passed on: every argument and every saved tensor costs time at small n.
    """

    numbers: Numbers
    making: Making
    there: tuple[bool, ...]


class Wanted(NamedTuple):
    """Whose gradients are asked for."""

    band: bool
    tails: bool
    query: bool
    factor: bool


NOTHING = Wanted(band=False, tails=False, query=False, factor=False)


class LagAttention(torch.autograd.Function):
    """The eager path: fewer steps on the host than an operator takes, which counts at small n."""

    @staticmethod
    def forward(ctx: Any, call: Call, *tensors: Tensor) -> Tensor:
        """Run the kernels; keep what backward needs."""
        needs = [bool(x) for x in _spread(ctx.needs_input_grad[1:], call.there)]
        q, _, _, query, factor, band, _, tails, *rest = needs
        wanted = Wanted(band, tails, query if call.there[3] else q, factor)
        if call.there[4]:
            # One lag is one number for all keys of a query, which no softmax sees.
            lags = tensors[3 + call.there[3]].shape[1]
            some = lags > 1 and (wanted.query or wanted.factor)
            wanted = wanted._replace(band=some, tails=some)
        elif call.making.curve is not None:
            wanted = wanted._replace(band=any(rest[INPUTS - 3 :]))
        found, tape = replayed(_forward, tensors, call, wanted, True)
        saved = tuple([x is not None for x in found])
        ctx.save_for_backward(*tensors, *[x for x in found if x is not None])
        ctx.settings, ctx.tape = (call, wanted, saved), tape
        out = found[0]
        assert out is not None
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> Tensors:
        """Gradients in the order of forward's arguments."""
        given = (d_out, *ctx.saved_tensors)
        found, _ = replayed(_backward, given, *ctx.settings, after=ctx.tape)
        return (None, *found)


def without_gradients(call: Call, *tensors: Tensor) -> Tensor:
    """LagAttention's output alone."""
    found, _ = replayed(_forward, tensors, call, NOTHING, False)
    out = found[0]
    assert out is not None
    return out


def _forward(given: Tensors, call: Call, wanted: Wanted, recorded: bool) -> Tensors:
    """What is kept, and the band, the extent and the tails that were made and are read again."""
    numbers, making, there = call
    q, k, v, query, factor, *rest = _spread(given, there)
    inputs, parameters = Inputs(*rest[:INPUTS]), tuple(rest[INPUTS:])
    laid, product, curve = None, NO_PRODUCT, None
    made: Tensors = (None, None, None)
    if factor is not None:
        source = q if query is None else query
        product = Product(making.scale, source, factor)
        laid, tails = band_room(source, factor)
        inputs, made = inputs._replace(band=_within(laid, 1), tails=tails), (None, None, tails)
    elif making.curve is not None and shared_out(q, k, numbers) and not recorded:
        curve = making.curve, tuple(x.float().contiguous() for x in parameters)
        shape = (1, q.shape[1], 1, 2 * making.reach + 1)
        room = torch.empty(shape, dtype=torch.float32, device=q.device)
        inputs = inputs._replace(band=room)
    elif making.curve is not None and shared_out(q, k, numbers):
        band, extent = making.curve.make(parameters, making.reach)
        inputs, made = inputs._replace(band=band, extent=extent), (band, extent, None)
    elif making.curve is not None:
        near = near_numbers(numbers) if numbers.far else numbers
        edge = edge_of(making.reach, inputs.table, numbers.far)
        laid, extent = edges_of_curve(
            making.curve, parameters, making.reach, edge, near.before, near.after
        )
        inputs = inputs._replace(band=_within(laid, edge - making.reach), extent=extent)
        made = (None, extent, None)
    kept = attended(
        *(q, k, v, inputs, numbers),
        tails_too=wanted.tails,
        band=laid,
        product=product,
        curve=curve,
        recorded=recorded,
    )
    return (*kept, *made)


def _backward(given: Tensors, call: Call, wanted: Wanted, saved: tuple[bool, ...]) -> Tensors:
    """Gradients of the call's tensors, in their order."""
    numbers, making, there = call
    d_out, *rest = _spread(given, (True, *there, *saved))
    q, k, v, query, factor, *more = rest[: len(there)]
    inputs, parameters = Inputs(*more[:INPUTS]), more[INPUTS:]
    *kept_parts, band, extent, tails = rest[len(there) :]
    kept = Kept(*kept_parts)
    if factor is not None:
        inputs = inputs._replace(band=_within(kept.band, 1), tails=tails)
    elif making.curve is not None:
        if band is None:
            edge = edge_of(making.reach, inputs.table, numbers.far)
            band = _within(kept.band, edge - making.reach)
        inputs = inputs._replace(band=band, extent=extent)
    d_q, d_k, d_v, d_band, d_tails, d_table = gradients(
        *(d_out, q, k, v, kept, inputs, numbers), band_too=wanted.band, tails_too=wanted.tails
    )
    d_query, d_factor = None, None
    d_parameters: Tensors = (None,) * len(parameters)
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
        d_band, d_tails = None, None
    elif making.curve is not None and d_band is not None:
        d_parameters = making.curve.gradient((d_band, extent, *parameters), making.reach)
    of_inputs = (d_band, None, d_tails, d_table, None, None, None, None)
    found = (d_q, d_k, d_v, d_query, d_factor, *of_inputs, *d_parameters)
    return tuple([x for x, here in zip(found, there, strict=True) if here])


def _spread(given: Sequence[Any], there: Sequence[bool]) -> list[Any]:
    """Each in its place, None in those of what is not there."""
    each = iter(given)
    return [next(each) if here else None for here in there]


def _within(laid: Tensor | None, edge: int) -> Tensor:
    """The band within what is laid out of it: for its shape, for the numbers are in base 2."""
    assert laid is not None
    return laid[..., edge : laid.shape[-1] - edge]
