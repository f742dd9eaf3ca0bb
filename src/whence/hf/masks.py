"""The masks of transformers in the terms of `attend`, and with a bias added."""

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from transformers.masking_utils import (
    bidirectional_mask_function,
    causal_mask_function,
    sdpa_mask,
)

from whence.kernels import Mask
from whence.lag import DenseBias


def attend_mask(
    *,
    batch_size: int,
    q_length: int,
    kv_length: int,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Tensor | None = None,
    **kwargs: Any,
) -> Bool[Tensor, "b 1 q_or_1 k"] | None:
    """Padding as [b, 1, 1, k], causality left to the attention: no n x n mask is made.

    For any other pattern (packed sequences, a mask function of the user) transformers' own mask.
    """
    plain = mask_function in (causal_mask_function, bidirectional_mask_function)
    if plain and (attention_mask is None or attention_mask.shape[-1] == kv_length):
        return None if attention_mask is None else attention_mask.bool()[:, None, None, :]
    kwargs |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    full: Tensor = sdpa_mask(
        batch_size=batch_size,
        q_length=q_length,
        kv_length=kv_length,
        mask_function=mask_function,
        attention_mask=attention_mask,
        **kwargs,
    )
    return full


def combined(bias: Tensor, mask: Tensor | None, causal: bool, start: int) -> Tensor:
    """The bias where a key may be looked at, and elsewhere what the mask had there."""
    if mask is None:
        if not causal:
            return bias
        n_q, n_k = bias.shape[-2:]
        place = torch.arange(n_k, device=bias.device)
        return bias.masked_fill(place > place[:n_q, None] + start, float("-inf"))
    if mask.dtype == torch.bool:
        return torch.where(mask, bias, float("-inf"))
    # A sum with the least number there is would overflow in half precision.
    return torch.where(mask <= torch.finfo(mask.dtype).min, mask, mask + bias)


def seen(mask: Tensor | None, n_q: int) -> tuple[Mask | None, Tensor | None]:
    """A mask of transformers as a Mask, and what a float one adds where it forbids nothing."""
    if mask is None:
        return None, None
    if mask.dtype == torch.bool and mask.shape[1] == mask.shape[2] == 1:
        return Mask(keys=mask[:, 0, 0]), None
    mask = mask.expand(-1, -1, n_q, -1)  # a user's own may have one row for all queries
    if mask.dtype == torch.bool:
        return Mask(pairs=mask), None
    forbidden = mask <= torch.finfo(mask.dtype).min
    return Mask(pairs=~forbidden), mask.masked_fill(forbidden, 0.0)


def given(matrix: Float[Tensor, "b h q k"]) -> DenseBias:
    """A matrix that is there already, as a bias."""

    def rows(q_pos: Tensor, k_pos: Tensor, rows: Tensor) -> Tensor:
        return rows

    q_pos, k_pos = (torch.arange(n, device=matrix.device) for n in matrix.shape[2:])
    return DenseBias(rows, q_pos, k_pos, "the model's own mask or bias is a matrix", (matrix,))
