"""What each head of a model does at each lag: as its method states it, and as attention does it."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from whence.analysis.json_result import Array
from whence.analysis.lag_curves import curves_of
from whence.analysis.lm_results import LagView
from whence.experiments.lm.source import Source

REACH = 64
ROWS = 4  # sequences of which attention is averaged
Curves = tuple[str, Array, list[Array]]  # the quantity, the lags, [h, l] a layer


def stated(before: Any, after: Any, length: int) -> tuple[LagView, ...]:
    """The method's own curves. Where content has a say they are means over random content."""
    return _views(_stated(before, length), _stated(after, length))


def attention(before: Any, after: Any, source: Source, device: torch.device) -> tuple[LagView, ...]:
    """Mean attention weight at each lag over validation sequences."""
    ids = source.sample(ROWS).to(device)
    return _views(_attention(before, ids), _attention(after, ids))


def _views(before: Curves, after: Curves) -> tuple[LagView, ...]:
    quantity, lag, first = before
    pairs = enumerate(zip(first, after[2], strict=True))
    return tuple(LagView(layer, quantity, lag, *pair) for layer, pair in pairs)


def _stated(model: Any, length: int) -> Curves:
    """One layer alone where all layers see the same method."""
    stack = model.model.stack
    position, config = stack.position, model.config
    reach = min(REACH, (length - 1) // 2)
    position.whole.begin(2 * reach + 1)
    layers = [position.layer(index) for index in range(stack.n_layers)]
    if all(layer is layers[0] for layer in layers) or not layers[0].sites():
        layers = layers[:1]
    found = [
        curves_of(
            layer,
            name=config.position,
            n_heads=config.num_attention_heads,
            d_head=config.head_dim,
            reach=reach,
            causal=stack.causal,
        )
        for layer in layers
    ]
    if not found[0].site or found[0].site == "value":
        return "", np.zeros(0, np.float32), []
    if found[0].site == "input":
        found = found[:1]
    lag = found[0].lag.float().numpy()
    return found[0].quantity, lag, [curves.mean.numpy() for curves in found]


@torch.no_grad()
def _attention(model: Any, ids: Int[Tensor, "rows n"]) -> Curves:
    model = model.to(ids.device).eval()
    causal, reach = model.model.stack.causal, min(REACH, ids.shape[1] - 1)
    lags = range(-reach, 1 if causal else reach + 1)
    total: list[Tensor] = []
    for row in ids:  # n x n weights of every layer: one sequence at a time
        weights: Sequence[Tensor] = model(row[None], output_attentions=True).attentions
        curves = [_by_lag(layer[0].float(), lags) for layer in weights]
        total = [a + b for a, b in zip(total, curves, strict=True)] if total else curves
    lag = np.asarray(lags, np.float32)
    return "mean attention weight", lag, [(one / len(ids)).cpu().numpy() for one in total]


def _by_lag(weights: Float[Tensor, "h n n"], lags: range) -> Float[Tensor, "h l"]:
    n = weights.shape[-1]
    lag = torch.arange(lags.start, lags.stop, device=weights.device)
    key = torch.arange(n, device=weights.device)[:, None] + lag
    inside = (key >= 0) & (key < n)
    gathered = weights.gather(2, key.clamp(0, n - 1).expand(len(weights), -1, -1))
    return (gathered * inside).sum(dim=1) / inside.sum(dim=0)
