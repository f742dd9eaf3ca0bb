"""A block of query rows against far keys: plain attention by PyTorch's flash kernel for the CPU.

Beyond the reach, the bias is one constant c for a row and the value table one vector A for a head.
The constant shifts the log-sum-exp of the range by c and changes nothing else; A is added to the
output of the range.
"""

import torch
from torch import Tensor

from whence.kernels.blocks.gradients import Gradients, add_rows
from whence.kernels.blocks.plan import Plan
from whence.lag import Line


class FarRange:
    """A block of query rows and a range of keys that all lie in one tail of the bias.

    side is 0 for the keys on the left and 1 for those on the right, so that the index -side is the
    first or the last entry of an axis.
    """

    def __init__(
        self,
        plan: Plan,
        rows: slice,
        keys: slice,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        tail: Line,
        table: Tensor | None,
        side: int,
    ) -> None:
        self.plan, self.rows, self.keys, self.side = plan, rows, keys, side
        self.q, self.k, self.v = q[:, :, rows], k[:, :, keys], v[:, :, keys]
        self.const = tail.rows(rows.start, rows.stop).const
        self.end_row = None
        if table is not None:  # [1, h|1, 1, d_v]
            dtype = torch.promote_types(q.dtype, torch.float32)
            self.end_row = table[None, :, -side, None].to(dtype)

    def forward(self) -> tuple[Tensor, Tensor]:
        """The output without the value table, and the log-sum-exp, of these keys alone."""
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            self.q, self.k, self.v, 0.0, False, scale=self.plan.scale
        )
        lse = lse[..., None]
        return out, lse if self.const is None else lse + self.const[..., None]

    def with_end_row(self, out: Tensor) -> Tensor:
        """The output plus the table's end row, which all of these keys carry."""
        return out if self.end_row is None else out + self.end_row

    def backward(
        self,
        out: Tensor,
        lse: Tensor,
        d_out: Tensor,
        far_out: Tensor | None,
        far_lse: Tensor | None,
        grads: Gradients,
    ) -> None:
        """Add the gradients of this range.

        out and lse are those of the rows over all keys, far_out and far_lse what `forward` gave.
        """
        plain_lse = lse if self.const is None else lse - self.const[..., None]
        # The kernel computes delta = rowsum(out * d_out) itself, and dP from v without the end row.
        # Both miss d_out . A, which cancels in dS = P * (dP - delta), if out is given without A.
        plain_out = out if self.end_row is None else out - self.end_row
        d_q, d_k, d_v = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            d_out.to(self.q.dtype),
            self.q,
            self.k,
            self.v,
            plain_out.to(self.q.dtype),
            _heads_adjacent(plain_lse[..., 0]),
            0.0,
            False,
            scale=self.plan.scale,
        )
        grads.q[:, :, self.rows] += d_q
        grads.k[:, :, self.keys] += d_k
        grads.v[:, :, self.keys] += d_v
        if far_lse is None:
            return
        mass = torch.exp(far_lse - lse)  # the share of these keys in a row's weights
        if grads.table is not None:
            d_end_row = (mass * d_out).sum(dim=(0, 2), dtype=torch.float64)
            grads.table[:, -self.side] += d_end_row.sum_to_size(grads.table[:, 0].shape)
        if (const := grads.const[self.side]) is not None:
            assert far_out is not None
            d_mass = (d_out * (self.with_end_row(far_out) - out)).sum(dim=-1)
            add_rows(const, self.rows, mass[..., 0] * d_mass)


def _heads_adjacent(lse: Tensor) -> Tensor:
    """[b, h, q] with heads adjacent in memory, as the flash kernel lays it out."""
    return lse.transpose(1, 2).contiguous().transpose(1, 2)
