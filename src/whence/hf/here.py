"""What a layer tells its attention function: its method, and what that makes of projected heads."""

from dataclasses import replace
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from whence.checks import require
from whence.kernels.call import AttentionCall
from whence.method import PositionMethod
from whence.nn.positioned import positioned_call

FIXED_CACHE = (
    "a cache of fixed size was given, in which the position of a token cannot be told without "
    "waiting for the device. Generate with the dynamic cache, which is the default."
)


class Quiet:
    """Whether a bias has been zero throughout: until it is not, the plain call gives its result."""

    def __init__(self) -> None:
        self.still = True

    def hears(self, bias: Tensor) -> bool:
        """Whether this bias is not all zero; on a GPU it waits, and once it was so never again."""
        if not self.still or torch.compiler.is_compiling():
            return True
        if bias.is_cuda and torch.cuda.is_current_stream_capturing():
            return True
        self.still = not bool(bias.any())
        return not self.still


class Here(NamedTuple):
    """What a layer's hook tells its attention function: its method, and where it is."""

    method: PositionMethod
    x: Tensor  # the layer's input, for methods that look at content
    start: int  # the position of the first query: how many tokens a cache holds
    backend: str
    quiet: Quiet


def call_of(
    here: Here, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, scale: float | None
) -> AttentionCall:
    """The heads and terms of a layer, after the method's hooks.

    Where the method left the queries as they are, so does this, to the bit.
    """
    check_cache(here, q, k)
    x_k = here.x if here.start == 0 else None
    raw, scale_of_raw = unscaled(module, q, scale)
    call = positioned_call(
        here.method, raw, k, v, x_q=here.x, x_k=x_k, scale=scale_of_raw, q_start=here.start
    )
    if raw is q or call.q is not raw:
        return call
    return replace(call, q=q, scale=1.0)


def unscaled(module: nn.Module, q: Tensor, scale: float | None) -> tuple[Tensor, float | None]:
    """The queries as projected and their scale: OPT multiplies them before, and passes 1.0."""
    own = getattr(module, "scaling", None)
    if scale != 1.0 or not isinstance(own, float) or own == 1.0:
        return q, scale
    return q / own, own


def check_cache(here: Here, q: Tensor, k: Tensor) -> None:
    """The keys must be those of the cache and of these tokens, without empty places after them."""
    require(k.shape[2] == here.start + q.shape[2], FIXED_CACHE)


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


def runs_as_before(here: Here) -> bool:
    """Whether the function that the model had can run it: it has no place for two of the sites."""
    return here.backend == "original" and not {"value", "replace"} & set(here.method.sites())
