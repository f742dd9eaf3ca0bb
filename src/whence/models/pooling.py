"""One vector for a sequence: its first token, its last one, or the mean of all."""

import torch
from jaxtyping import Float
from torch import Tensor


def pooled(
    x: Float[Tensor, "b n d"], attention_mask: Tensor | None, pooling: str
) -> Float[Tensor, "b d"]:
    """One vector a row, of the tokens that exist."""
    if attention_mask is None:
        return {"first": x[:, 0], "last": x[:, -1], "mean": x.mean(dim=1)}[pooling]
    exists = attention_mask != 0
    if pooling == "mean":
        weight = exists.to(x.dtype)[..., None]
        return (x * weight).sum(dim=1) / weight.sum(dim=1).clamp(min=1)
    place = torch.arange(x.shape[1], device=x.device)
    far = place if pooling == "last" else -place
    index = torch.where(exists, far, -x.shape[1]).argmax(dim=-1)
    return x[torch.arange(x.shape[0], device=x.device), index]
