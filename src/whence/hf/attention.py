"""The attention functions that whence registers with `transformers`, each with its mask function.

One for each way of running: "whence_sdpa" and "whence_eager" call what the model called before,
with the position in the mask; "whence_attend" is `whence.attend`. A module without a method (a
cross-attention, a layer that was left out) gets what it got before, or plain attention.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import eager_mask, sdpa_mask

from whence.checks import require
from whence.hf.layer_context import (
    LayerContext,
    call_of,
    check_cache,
    dense_bias,
    runs_as_before,
    unscaled,
)
from whence.hf.masks import attend_mask, combined, given, seen
from whence.methods.nope import Nope
from whence.nn.positioned import positioned_attention

Run = Callable[..., tuple[Tensor, Tensor | None]]
SDPA: Run = AttentionInterface()["sdpa"]
NAMES = {"sdpa": "whence_sdpa", "eager": "whence_eager", "attend": "whence_attend"}


def plain_name(implementation: str) -> str:
    """The implementation without a method: a config of a model with one attached has ours."""
    before = {name: kind for kind, name in NAMES.items()}.get(implementation, implementation)
    return "sdpa" if before == "attend" else before


def whence_sdpa(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    whence: LayerContext | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """transformers' own sdpa function with the position in its mask.

    While the bias is zero the call without it gives the output, so that no bit changes: with a
    mask, or with a mask that needs gradients, PyTorch may take another kernel.
    """
    if whence is None:
        return SDPA(
            module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **kwargs
        )
    if not runs_as_before(whence):
        return attended(whence, module, query, key, value, attention_mask, scaling, dropout, kwargs)
    call = call_of(whence, module, query, key, value, scaling)
    bias = dense_bias(call)
    heads, numbers = (call.q, call.k, call.v), {"scaling": call.scale, "dropout": dropout}
    if bias is None:
        return SDPA(module, *heads, attention_mask, **numbers, **kwargs)
    nonzero = whence.zero_bias.nonzero(bias)
    needs_grad = torch.is_grad_enabled() and bias.requires_grad
    if not nonzero and not needs_grad:
        return SDPA(module, *heads, attention_mask, **numbers, **kwargs)
    causal = attention_mask is None and _is_causal(module, kwargs)
    mask = combined(bias, attention_mask, causal, whence.start)
    out, weights = SDPA(module, *heads, mask, **numbers, **kwargs)
    if not nonzero and not dropout:  # the value of the plain call, the gradient of this one
        plain, _ = SDPA(module, *heads, attention_mask, **numbers, **kwargs)
        out = plain.detach() + (out - out.detach())
    return out, weights


def whence_eager(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    whence: LayerContext | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """The family's own eager function, weights included, with the position in its mask."""
    run: Run = type(module).forward.__globals__["eager_attention_forward"]
    if whence is None:
        return run(
            module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **kwargs
        )
    if not runs_as_before(whence):
        return attended(whence, module, query, key, value, attention_mask, scaling, dropout, kwargs)
    call = call_of(whence, module, query, key, value, scaling)
    bias, mask = dense_bias(call), attention_mask
    if bias is not None:
        mask = combined(bias, attention_mask, False, whence.start)
    return run(module, call.q, call.k, call.v, mask, scaling=call.scale, dropout=dropout, **kwargs)


def whence_attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    whence: LayerContext | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """`whence.attend`: linear memory, and the fused kernels on a GPU."""
    return attended(whence, module, query, key, value, attention_mask, scaling, dropout, kwargs)


def attended(
    context: LayerContext | None,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None,
    dropout: float,
    kwargs: dict[str, Any],
    bias: Tensor | None = None,
) -> tuple[Tensor, None]:
    """All sites by `attend`; a dense `bias` of the model's own is added to the logits."""
    require(
        not kwargs.get("output_attentions"),
        "output_attentions needs the weights, which this attention never holds: load the model "
        "with attn_implementation='eager' and attach with backend='original' a method that has "
        "neither a value nor a replace site.",
    )
    if context is not None:
        check_cache(context, query, key)
    mask, extra = seen(attention_mask, query.shape[2])
    if extra is not None:
        bias = extra if bias is None else bias + extra
    by_keys = attention_mask is None or (mask is not None and mask.keys is not None)
    start = key.shape[2] - query.shape[2] if context is None else context.start
    query, scaling = unscaled(module, query, scaling)
    out = positioned_attention(
        Nope() if context is None else context.method,
        query,
        key,
        value,
        x_q=None if context is None else context.x,
        x_k=None if context is None or start else context.x,
        bias=None if bias is None else given(bias),
        mask=mask,
        causal=by_keys and _is_causal(module, kwargs),
        scale=scaling,
        dropout=dropout,
        q_start=start,
        backend="auto" if context is None or context.backend == "original" else context.backend,
    )
    return out.transpose(1, 2).contiguous(), None


def register() -> None:
    """Make the names known to transformers: a function and a mask for each, or padding is lost."""
    functions = {"sdpa": whence_sdpa, "eager": whence_eager, "attend": whence_attend}
    masks = {"sdpa": sdpa_mask, "eager": eager_mask, "attend": attend_mask}
    for kind, name in NAMES.items():
        AttentionInterface.register(name, functions[kind])
        AttentionMaskInterface.register(name, masks[kind])


def _is_causal(module: nn.Module, kwargs: dict[str, Any]) -> bool:
    given = kwargs.get("is_causal")
    return bool(getattr(module, "is_causal", False) if given is None else given)
