"""Attention with a lag bias in blocks of queries: linear memory in training, on any device.

For a block of query rows the keys fall into far left, near and far right. The near ones, within the
band, get a tile of logits with the bias laid in by `skew`. The far ones see a constant at most, so
they are plain attention, which PyTorch's own flash kernel runs; its log-sum-exp is what the parts
are merged by, and in backward it is handed the log-sum-exp and output of the whole row. Where that
is not possible (a mask, a window, dropout, a sloped tail, no such kernel) near is all there is.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from whence.kernels.mask import Sight
from whence.kernels.tiles import Far, Gradients, Tile, merged
from whence.lag import LagBias, Line

FAR = 128  # far keys below which a flash call is not worth its merge


@dataclass(frozen=True, eq=False)
class Plan:
    """What the blocks need besides the tensors."""

    sight: Sight
    scale: float
    dropout: float
    seed: int
    rows: int  # query rows a block
    split: bool  # far parts by the flash kernel
    keep: bool  # the weights for backward: for a call so small that they cost less than computing
    reach: int

    def blocks(self) -> list[slice]:
        """The query rows, a block at a time."""
        n = self.sight.n_q
        return [slice(i, min(i + self.rows, n)) for i in range(0, n, self.rows)]

    def ranges(self, rows: slice) -> tuple[slice, slice, slice]:
        """The keys of a block: near, far left, far right. A far part may be empty."""
        keys = self.sight.key_range(rows)
        low, high = keys.start, keys.stop
        if self.split:
            first, last = self.sight.q_start + rows.start, self.sight.q_start + rows.stop - 1
            left, right = first - self.reach, last + self.reach + 1
            if left - keys.start >= FAR:
                low = min(left, keys.stop)
            if keys.stop - right >= FAR:
                high = max(right, keys.start)
        return slice(low, high), slice(keys.start, low), slice(high, keys.stop)


class BlockedAttention(torch.autograd.Function):
    """The blocks, forward and backward; logits are computed again in backward, not kept."""

    @staticmethod
    def forward(
        ctx: Any,
        plan: Plan,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        band: Tensor,
        left_const: Tensor | None,
        left_slope: Tensor | None,
        right_const: Tensor | None,
        right_slope: Tensor | None,
        table: Tensor | None,
    ) -> Tensor:
        """softmax(scale q.k + bias) (v + values), block by block."""
        tails = (Line(left_const, left_slope), Line(right_const, right_slope))
        bias = LagBias(band, *tails)
        exact = torch.promote_types(q.dtype, torch.float32)
        (b, h, n_q, _), d_v = q.shape, v.shape[-1]
        out = q.new_empty(b, h, n_q, d_v)
        lse = q.new_empty(b, h, n_q, 1, dtype=exact)
        # A constant tail or a value table has gradients that need what each far part gave.
        kept = [
            (
                q.new_empty(b, h, n_q, d_v) if tail.const is not None else None,
                q.new_empty(b, h, n_q, 1, dtype=exact)
                if tail.const is not None or table is not None
                else None,
            )
            for tail in tails
        ]
        weights = []
        for rows in plan.blocks():
            near, *fars = plan.ranges(rows)
            tile = Tile(plan, rows, near, q, k, v, bias, table)
            parts = [tile.forward()]
            weights.append(tile.weights)
            for side, keys in enumerate(fars):
                if keys.start < keys.stop:
                    far = Far(plan, rows, keys, q, k, v, tails[side], table, side)
                    part_out, part_lse = far.forward()
                    for place, part in zip(kept[side], (part_out, part_lse), strict=True):
                        if place is not None:
                            place[:, :, rows] = part
                    parts.append((far.with_value(part_out), part_lse))
            out[:, :, rows], lse[:, :, rows] = merged(parts)
        ctx.plan, ctx.kept = plan, kept
        tensors = (q, k, v, band, left_const, left_slope, right_const, right_slope, table)
        ctx.save_for_backward(*tensors, out, lse, *weights)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of everything, each summed in float32 or better and in a fixed order."""
        plan: Plan = ctx.plan
        saved = ctx.saved_tensors
        q, k, v, band, left_const, left_slope, right_const, right_slope, table = saved[:9]
        out, lse, *weights = saved[9:]
        tails = (Line(left_const, left_slope), Line(right_const, right_slope))
        bias = LagBias(band, *tails)
        grads = Gradients(q, k, v, bias, table)
        for rows, kept in zip(plan.blocks(), weights, strict=True):
            near, *fars = plan.ranges(rows)
            block = out[:, :, rows], lse[:, :, rows], d_out[:, :, rows]
            Tile(plan, rows, near, q, k, v, bias, table).backward(*block, kept, grads)
            for side, keys in enumerate(fars):
                if keys.start < keys.stop:
                    far = Far(plan, rows, keys, q, k, v, tails[side], table, side)
                    far_out, far_lse = (x if x is None else x[:, :, rows] for x in ctx.kept[side])
                    far.backward(*block, far_out, far_lse, grads)
        return None, *grads.cast()
