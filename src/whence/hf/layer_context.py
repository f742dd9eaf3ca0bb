"""What a layer passes to its attention function, and the attention call made of it."""

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from whence.checks import require
from whence.kernels.call import AttentionCall
from whence.method import PositionMethod
from whence.nn.positioned import positioned_call

ROWS = 128  # of a dense bias, looked at at once
FIXED_CACHE = (
    "a cache of fixed size was given, in which the position of a token cannot be told without "
    "waiting for the device. Generate with the dynamic cache, which is the default."
)


class ZeroBias:
    """Remembers whether every bias of a layer has been zero: then the plain call gives its result.

    Looking at a bias makes the host wait for a GPU, so nothing is looked at after the first bias
    that is not zero.
    """

    def __init__(self) -> None:
        self.so_far = True

    def must_be_run(self, q: Tensor) -> bool:
        """Whether an earlier bias was not zero; True also where that cannot be looked at."""
        if not self.so_far or torch.compiler.is_compiling():
            return True
        return q.is_cuda and torch.cuda.is_current_stream_capturing()

    def nonzero(self, call: AttentionCall) -> bool:
        """Whether the bias of this call, or an earlier one, is not zero."""
        if not self.must_be_run(call.q):
            self.so_far = not any(bool(part.any()) for part in _bias_parts(call))
            return not self.so_far
        return True


class LayerContext(NamedTuple):
    """What a layer's hook passes to its attention function."""

    method: PositionMethod
    x: Tensor  # the layer's input, for methods that look at content
    start: int  # the position of the first query, which is the number of tokens in the cache
    backend: str
    weights: bool  # whether the attention weights are asked for
    zero_bias: ZeroBias


def call_of(
    context: LayerContext, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, scale: float | None
) -> AttentionCall:
    """The attention call of a layer, after the method's hooks.

    Queries that the method does not change stay the same to the bit.
    """
    check_cache(context, q, k)
    x_k = context.x if context.start == 0 else None
    raw, scale_of_raw = unscaled(module, q, scale)
    call = positioned_call(
        context.method, raw, k, v, x_q=context.x, x_k=x_k, scale=scale_of_raw, q_start=context.start
    )
    if raw is q or call.q is not raw:
        return call
    return replace(call, q=q, scale=1.0)


def unscaled(module: nn.Module, q: Tensor, scale: float | None) -> tuple[Tensor, float | None]:
    """The queries before scaling, and their scale: OPT scales its queries and passes 1.0."""
    own = getattr(module, "scaling", None)
    if scale != 1.0 or not isinstance(own, float) or own == 1.0:
        return q, scale
    return q / own, own


def check_cache(context: LayerContext, q: Tensor, k: Tensor) -> None:
    """Refuse a cache of fixed size, whose keys go on after those of the tokens so far."""
    require(k.shape[2] == context.start + q.shape[2], FIXED_CACHE)


def dense_bias(call: AttentionCall) -> Float[Tensor, "b h q k"] | None:
    """The terms of the logit as one matrix, in the dtype of the queries."""
    sight, total = call.sight, None
    if call.lag is not None:
        place = torch.arange(sight.n_k, device=call.q.device)
        total = call.lag.to_dense(place[: sight.n_q] + sight.q_start, place)
    for term in call.dense:
        part = term.to_dense(term.q_pos, term.k_pos)
        total = part if total is None else total + part
    return None if total is None else total.to(call.q.dtype)


def needs_grad(call: AttentionCall) -> bool:
    """Whether a gradient will be asked of the bias."""
    if not torch.is_grad_enabled():
        return False
    first = [term.rows(0, 1) for term in call.dense]
    tensors = [term.to_dense(term.q_pos, term.k_pos) for term in first]
    tensors += [] if call.lag is None else call.lag.tensors()
    return any(tensor.requires_grad for tensor in tensors)


def runs_as_before(context: LayerContext) -> bool:
    """Whether the model's own attention function can run it, which has no value or replace site."""
    own = context.backend in ("auto", "original")
    return own and not {"value", "replace"} & set(context.method.sites())


def _bias_parts(call: AttentionCall) -> Iterator[Tensor]:
    """Tensors that are all zero where the bias is, none of them n x n."""
    if call.lag is not None:
        lines = [line for line in (call.lag.left, call.lag.right) if line is not None]
        ends = [x for line in lines for x in (line.const, line.slope)]
        yield from (x.detach() for x in (call.lag.band, *ends) if x is not None)
    for term in call.dense:
        for start in range(0, call.sight.n_q, ROWS):
            with torch.no_grad():
                rows = term.rows(start, min(start + ROWS, call.sight.n_q))
                yield rows.to_dense(rows.q_pos, rows.k_pos)
