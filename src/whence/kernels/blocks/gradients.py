"""The gradients of a blocked attention while the blocks add to them."""

import torch
from torch import Tensor

from whence.lag import LagBias


class Gradients:
    """Sums that start at zero, one for each tensor of the call.

    Those of q, k and v are in float32 or better. Those of the bias and the value table, which rows
    share, are in float64: thousands of terms of both signs cancel there.
    """

    def __init__(
        self, q: Tensor, k: Tensor, v: Tensor, bias: LagBias, table: Tensor | None
    ) -> None:
        assert bias.left is not None
        assert bias.right is not None
        self.q, self.k, self.v = (
            torch.zeros_like(x, dtype=torch.promote_types(x.dtype, torch.float32))
            for x in (q, k, v)
        )
        self.band = torch.zeros_like(bias.band, dtype=torch.float64)
        self.const = [_zeros(tail.const) for tail in (bias.left, bias.right)]
        self.slope = [_zeros(tail.slope) for tail in (bias.left, bias.right)]
        self.table = _zeros(table)

    def in_order(self) -> tuple[Tensor | None, ...]:
        """The sums in the order of the tensors that BlockedAttention.forward takes."""
        tails = (self.const[0], self.slope[0], self.const[1], self.slope[1])
        return self.q, self.k, self.v, self.band, *tails, self.table


def add_rows(total: Tensor, rows: slice, part: Tensor) -> None:
    """Add a block's part [b, h, rows, ...] to a sum; axes of size 1 in the sum are summed over."""
    place = total if total.shape[2] == 1 else total[:, :, rows]
    shared = [axis for axis in range(part.ndim) if place.shape[axis] != part.shape[axis]]
    place += part.sum(dim=shared, keepdim=True, dtype=total.dtype) if shared else part


def _zeros(x: Tensor | None) -> Tensor | None:
    return None if x is None else torch.zeros_like(x, dtype=torch.float64)
