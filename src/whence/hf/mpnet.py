"""MPNet's self-attention with a method: it does not go through the attention interface."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from whence.hf.attention import attended
from whence.hf.layer_context import LayerContext, call_of, dense_bias, runs_as_before


def forward(
    self: Any,
    hidden_states: Tensor,
    attention_mask: Tensor | None = None,
    position_bias: Tensor | None = None,
    output_attentions: bool = False,
    whence: LayerContext | None = None,
    **kwargs: Any,
) -> tuple[Tensor, ...]:
    """In place of MPNetSelfAttention.forward on an instance; with a zero bias, its very bits."""
    if whence is None:
        plain: tuple[Tensor, ...] = type(self).forward(
            self, hidden_states, attention_mask, position_bias, output_attentions
        )
        return plain
    shape = (*hidden_states.shape[:-1], -1, self.attention_head_size)
    q, k, v = (part(hidden_states).view(shape).transpose(1, 2) for part in (self.q, self.k, self.v))
    if not runs_as_before(whence):
        out, weights = attended(
            whence,
            self,
            q,
            k,
            v,
            attention_mask,
            None,
            self.dropout.p if self.training else 0.0,
            {"output_attentions": output_attentions},
            position_bias,
        )
        out = self.o(out.flatten(2))
        return (out,) if weights is None else (out, weights)
    call = call_of(whence, self, q, k, v, None)
    product = call.q @ call.k.transpose(-1, -2)
    logits = product * call.scale
    if call.scale == self.attention_head_size**-0.5:
        logits = product / math.sqrt(self.attention_head_size)  # as the family: it rounds otherwise
    for term in (position_bias, dense_bias(call), attention_mask):
        if term is not None:
            logits = logits + term
    weights = self.dropout(nn.functional.softmax(logits, dim=-1))
    out = self.o(torch.matmul(weights, call.v).transpose(1, 2).flatten(2))
    return (out, weights) if output_attentions else (out,)
