"""Ways for a tensor to lie in memory, by name; each gives the numbers that it is given."""

from collections.abc import Callable

import torch
from torch import Tensor


def transposed(x: Tensor) -> Tensor:
    """The last two axes in the other order in memory."""
    return x.transpose(-1, -2).contiguous().transpose(-1, -2) if x.ndim > 1 else x


def by_token(x: Tensor) -> Tensor:
    return x.transpose(1, 2).contiguous().transpose(1, 2) if x.ndim > 2 else x


def expanded(x: Tensor) -> Tensor:
    """The first row of the first axis for all of it: no two of them differ."""
    return x[:1].expand(x.shape)


def sliced(x: Tensor) -> Tensor:
    """Part of a larger tensor, with gaps between the rows and an address that is not aligned."""
    larger = torch.zeros(*x.shape[:-1], x.shape[-1] + 3, dtype=x.dtype)
    larger[..., 1:-2] = x
    return larger[..., 1:-2]


def every_second(x: Tensor) -> Tensor:
    return x.repeat_interleave(2, dim=-1)[..., ::2]


def negated(x: Tensor) -> Tensor:
    """Memory holds -x, and a bit says so; a boolean has no such bit."""
    return x if x.dtype == torch.bool else torch._neg_view(-x)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    x.__name__: x for x in (transposed, by_token, expanded, sliced, every_second, negated)
}
