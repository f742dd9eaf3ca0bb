"""The attention functions that whence registers with `transformers`.

One for each way of running: "whence_sdpa" and "whence_eager" take the place of "sdpa" and "eager",
and call them as long as that is exact; "whence_attend" is `whence.attend`. A layer that was left
out gets what it got before, or plain attention.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from whence.checks import require
from whence.hf.layer_context import (
    LayerContext,
    call_of,
    check_cache,
    dense_bias,
    needs_grad,
    runs_as_before,
    unscaled,
)
from whence.hf.masks import attend_mask, combined, given, seen
from whence.kernels.attend import execute
from whence.kernels.reference import attend_with_weights
from whence.methods.nope import Nope
from whence.nn.positioned import positioned_call

Run = Callable[..., tuple[Tensor, Tensor | None]]
SDPA: Run = AttentionInterface()["sdpa"]
NAMES = {"sdpa": "whence_sdpa", "eager": "whence_eager", "attend": "whence_attend"}


def plain_name(implementation: str) -> str:
    """The implementation without a method, where a model with one may have ours."""
    return "sdpa" if implementation == NAMES["attend"] else implementation


def check_implementation(config: Any) -> None:
    """Refuse an attention implementation that no method can enter."""
    name = plain_name(str(config._attn_implementation))
    require(
        name in ("sdpa", "eager"),
        f"a method works beside the attention implementations sdpa and eager, this model has "
        f"{name!r}. Load it with attn_implementation='sdpa', or call "
        "model.set_attn_implementation('sdpa'); on a GPU whence takes the fastest of its own.",
    )
    require(
        name != "eager" or not getattr(config, "reorder_and_upcast_attn", False),
        "reorder_and_upcast_attn has an attention of its own, which no method can enter. Load the "
        "model with attn_implementation='sdpa'.",
    )


class AttentionConfig:
    """The config as the attention of a layer with a method sees it: it asks for our functions.

    Everything else is read from the model's config, in which an implementation may be set at any
    time, as in a model without a method.
    """

    def __init__(self, config: Any, backend: str) -> None:
        self.config, self.backend = config, backend

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "config":  # as it is being copied
            raise AttributeError(name)
        return getattr(self.config, name)

    @property
    def _attn_implementation(self) -> str:
        if self.backend not in ("auto", "original"):
            return NAMES["attend"]
        return NAMES[self.config._attn_implementation]


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
    """transformers' own sdpa function while the bias is zero, so that no bit changes.

    Then `whence.attend`; or, with backend="original", the same function with the bias in its mask,
    for which PyTorch may take another kernel. The first steps of training need a gradient of a bias
    of zero: the plain call gives the value, the other one the gradient.
    """
    arguments = (module, query, key, value, attention_mask)
    if whence is None:
        return SDPA(*arguments, scaling=scaling, dropout=dropout, **kwargs)
    in_blocks = whence.backend == "auto" and "score" in whence.method.sites()
    if query.is_cuda and attention_mask is not None:
        # The fused kernels take no n x n mask, which is what the model makes of padding, and blocks
        # of queries are slow there. With backend="fused" padding stays a row.
        in_blocks = in_blocks and attention_mask.shape[2] == 1
    if (
        not runs_as_before(whence)
        or whence.weights
        or (in_blocks and whence.zero_bias.must_be_run(query))
    ):
        return attended(whence, *arguments, scaling, dropout, kwargs)
    # Gradient checkpointing computes a layer a second time, which must save the same tensors. The
    # bias is looked at in the first run alone, so the look records no gradients.
    with torch.no_grad():
        looked = call_of(whence, module, query, key, value, scaling)
        has_bias = looked.lag is not None or bool(looked.dense)
        nonzero = has_bias and whence.zero_bias.nonzero(looked)
    if nonzero and in_blocks:
        return attended(whence, *arguments, scaling, dropout, kwargs)
    call = call_of(whence, module, query, key, value, scaling)
    heads, numbers = (call.q, call.k, call.v), {"scaling": call.scale, "dropout": dropout}
    # The first run of a reentrant checkpoint records no gradients. With dropout both runs must take
    # the same branch all the same, or the second one would draw other random numbers.
    learns = dropout and any(p.requires_grad for p in whence.method.parameters())
    if not nonzero and not (has_bias and (learns or needs_grad(call))):
        return SDPA(module, *heads, attention_mask, **numbers, **kwargs)
    if in_blocks:
        out, _ = attended(whence, *arguments, scaling, dropout, kwargs)
    else:
        bias = dense_bias(call)
        assert bias is not None
        causal = attention_mask is None and _is_causal(module, kwargs)
        mask = combined(bias, attention_mask, causal, whence.start)
        out, _ = SDPA(module, *heads, mask, **numbers, **kwargs)
    if not nonzero and not dropout:
        plain, _ = SDPA(module, *heads, attention_mask, **numbers, **kwargs)
        out = plain.detach() + (out - out.detach())
    return out, None


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
) -> tuple[Tensor, Tensor | None]:
    """All sites by `attend`; a dense `bias` of the model's own is added to the logits.

    Weights that are asked for are n x n, and the output is then computed from them.
    """
    if context is not None:
        check_cache(context, query, key)
    mask, extra = seen(attention_mask, query.shape[2])
    if extra is not None:
        bias = extra if bias is None else bias + extra
    by_keys = attention_mask is None or (mask is not None and mask.keys is not None)
    start = key.shape[2] - query.shape[2] if context is None else context.start
    query, scaling = unscaled(module, query, scaling)
    call = positioned_call(
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
    )
    if kwargs.get("output_attentions") if context is None else context.weights:
        out, weights = attend_with_weights(call)
        return out.transpose(1, 2).contiguous(), weights
    backend = "auto" if context is None or context.backend == "original" else context.backend
    return execute(call, backend=backend).transpose(1, 2).contiguous(), None


def register() -> None:
    """Make the names known to transformers.

    "whence_attend" has a mask function too, for it stands in the config of a model; in place of the
    other two a config has the name that it had, and with it the model's own masks.
    """
    functions = {"sdpa": whence_sdpa, "eager": whence_eager, "attend": whence_attend}
    for kind, name in NAMES.items():
        AttentionInterface.register(name, functions[kind])
    AttentionMaskInterface.register(NAMES["attend"], attend_mask)


def _is_causal(module: nn.Module, kwargs: dict[str, Any]) -> bool:
    given = kwargs.get("is_causal")
    return bool(getattr(module, "is_causal", False) if given is None else given)
