"""Derivatives that kernels of our own do not have, refused in words.

Such a kernel has a gradient, and no rule for torch.func's transforms (vmap, grad, jvp), for
forward-mode derivatives and for gradients of gradients. The `reference` backend, which is made of
torch's operations alone, has them all.
"""

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

WAY_OUT = "Take backend='reference', in float32 or float64 and n x n memory."


Tensors = Callable[[], Iterable[Tensor]]  # of a call, asked for only where it matters


def refused_transform(tensors: Tensors) -> str | None:
    """Why a kernel of our own cannot run a call that is being transformed, or None."""
    if torch.compiler.is_compiling():
        return None
    if torch._C._are_functorch_transforms_active():
        return f"has no rules for torch.func (vmap, grad, jvp and the like). {WAY_OUT}"
    return refused_tangent(tensors)


def refused_tangent(tensors: Tensors) -> str | None:
    """Why a kernel without forward-mode derivatives cannot run a call, or None."""
    if torch.compiler.is_compiling() or forward_ad._current_level < 0:
        return None
    parts: Any = forward_ad.unpack_dual  # which has no types
    if all(parts(x).tangent is None for x in tensors()):
        return None
    return f"has no forward-mode derivatives. {WAY_OUT}"


Backward = Callable[..., Any]


def once_differentiable(backward: Backward) -> Backward:
    """torch's decorator of that name, but that a second derivative is refused in our words.

    Gradients that may be differentiated again are tied to what they were computed from, so that
    the refusal is met by any way back.
    """

    @functools.wraps(backward)
    def once(ctx: Any, *d_outs: Tensor | None) -> Any:
        if torch.compiler.is_compiling():  # a compiled function has no second derivative anyway
            return backward(ctx, *d_outs)
        for x in d_outs:
            if x is not None and _is_batched(x):
                raise RuntimeError(
                    f"this attention's backward takes no batch of gradients. {WAY_OUT}"
                )
        if not torch.is_grad_enabled():
            return backward(ctx, *d_outs)
        with torch.no_grad():
            found = backward(ctx, *d_outs)
        several = found if isinstance(found, tuple) else (found,)
        made_of = [x for x in (*d_outs, *ctx.saved_tensors) if x is not None and x.requires_grad]
        grads = [x for x in several if x is not None]
        if not made_of or not grads:
            return found
        tied = iter(_RefusedBackward.apply(len(grads), *grads, *made_of))  # type: ignore[no-untyped-call]
        several = tuple(None if x is None else next(tied) for x in several)
        return several if isinstance(found, tuple) else several[0]

    return once


def _is_batched(x: Tensor) -> bool:
    functorch = torch._C._functorch
    return functorch.is_batchedtensor(x) or functorch.is_legacy_batchedtensor(x)


class _RefusedBackward(torch.autograd.Function):
    """The first n tensors as they are; going back through them is an error."""

    @staticmethod
    def forward(ctx: Any, n: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(x.view_as(x) for x in tensors[:n])

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        raise RuntimeError(f"this attention can be differentiated once, not twice. {WAY_OUT}")
