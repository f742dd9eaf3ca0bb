"""Attention with a lag bias in blocks of query rows: linear memory in training, on any device.

The keys of a block fall into near ones, within the reach of the bias, and far ones to the left and
to the right. Near keys are a tile of logits (`tile.py`). Far keys see a constant bias at most, so
they are plain attention, which PyTorch's flash kernel computes (`far.py`); the log-sum-exp of each
part gives its share of the output. Backward gives every part the output and log-sum-exp of the
whole row, as FlashAttention does for its blocks of keys. Where the flash kernel cannot be used (a
mask, a window, dropout, a sloped tail, no CPU) all keys count as near.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from whence.derivatives import once_differentiable
from whence.kernels.blocks.far import FarRange
from whence.kernels.blocks.gradients import Gradients
from whence.kernels.blocks.plan import Plan
from whence.kernels.blocks.tile import Tile, finite
from whence.kernels.mask import Mask
from whence.lag import LagBias, Line


class Given(NamedTuple):
    """The tensors of a call that have a gradient."""

    q: Tensor
    k: Tensor
    v: Tensor
    band: Tensor
    left_const: Tensor | None
    left_slope: Tensor | None
    right_const: Tensor | None
    right_slope: Tensor | None
    table: Tensor | None

    @property
    def bias(self) -> LagBias:
        """The bias with tails, which are zero where nothing was given."""
        return LagBias(self.band, *self.tails)

    @property
    def tails(self) -> tuple[Line, Line]:
        """The lines on the left and on the right."""
        return Line(self.left_const, self.left_slope), Line(self.right_const, self.right_slope)


class MaskTensors(NamedTuple):
    """The tensors of a mask."""

    keys: Tensor | None = None
    q_segments: Tensor | None = None
    k_segments: Tensor | None = None
    pairs: Tensor | None = None

    def mask(self) -> Mask | None:
        """The mask, or None if it would hold nothing."""
        segments = None
        if self.q_segments is not None and self.k_segments is not None:
            segments = (self.q_segments, self.k_segments)
        if self.keys is None and segments is None and self.pairs is None:
            return None
        return Mask(self.keys, segments, self.pairs)


class Kept(NamedTuple):
    """What backward needs besides the given tensors; of the two far lists the left side is first.

    out      the output before it is rounded to half precision: in dS = P * (dP - delta) with
             delta = rowsum(out * d_out), a row with few keys cancels, and a rounding error would
             stay
    far_out  of each far range, which the gradient of a constant tail needs
    far_lse  of each far range, which it and the gradient of the value table need
    """

    out: Tensor
    lse: Tensor
    far_out: tuple[Tensor | None, Tensor | None]
    far_lse: tuple[Tensor | None, Tensor | None]


N_GIVEN, N_MASK = len(Given._fields), len(MaskTensors._fields)


class BlockedAttention(torch.autograd.Function):
    """The autograd function of the eager path; `operator.py` is the compiled one.

    The tensors of the mask are arguments of their own, not part of the plan: backward reads them
    again, and only a tensor that autograd saves raises if it was changed in place in between.
    """

    @staticmethod
    def forward(ctx: Any, plan: Plan, *tensors: Any) -> Tensor:
        """Attend block by block and save what backward needs: no logits, unless there are few."""
        given, masks = Given(*tensors[:N_GIVEN]), MaskTensors(*tensors[N_GIVEN:])
        kept, weights = attended(plan.with_mask(masks.mask()), given)
        ctx.plan = plan
        ctx.save_for_backward(*tensors, kept.out, kept.lse, *kept.far_out, *kept.far_lse, *weights)
        return kept.out.to(given.q.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        """Every gradient."""
        saved = ctx.saved_tensors
        given, masks = Given(*saved[:N_GIVEN]), MaskTensors(*saved[N_GIVEN:][:N_MASK])
        out, lse, *fars = saved[N_GIVEN + N_MASK :][:6]
        kept = Kept(out, lse, (fars[0], fars[1]), (fars[2], fars[3]))
        weights = saved[N_GIVEN + N_MASK + 6 :]
        plan: Plan = ctx.plan.with_mask(masks.mask())
        return None, *gradients(plan, given, kept, d_out, weights), *(None for _ in masks)


def attended(plan: Plan, given: Given) -> tuple[Kept, list[Tensor | None]]:
    """softmax(scale q.k + bias) (v + values), in float32 or better.

    The list has the weights of each block, or None if the plan does not keep them.
    """
    (q, k, v), bias, tails, table = given[:3], given.bias, given.tails, given.table
    wide = torch.promote_types(q.dtype, torch.float32)
    (b, h, n_q, _), d_v = q.shape, v.shape[-1]
    out = q.new_empty(b, h, n_q, d_v, dtype=wide)
    lse = q.new_empty(b, h, n_q, 1, dtype=wide)
    far_outs: list[Tensor | None] = [None, None]
    far_lses: list[Tensor | None] = [None, None]
    for side, tail in enumerate(tails if plan.split else ()):
        if tail.const is not None:
            far_outs[side] = q.new_zeros(b, h, n_q, d_v)
        if tail.const is not None or table is not None:
            far_lses[side] = torch.zeros_like(lse)
    weights = []
    for rows in plan.blocks():
        near, *fars = plan.ranges(rows)
        tile = Tile(plan, rows, near, q, k, v, bias, table)
        parts = [tile.forward()]
        weights.append(tile.weights)
        for side, keys in enumerate(fars):
            if keys.start == keys.stop:
                continue
            far = FarRange(plan, rows, keys, q, k, v, tails[side], table, side)
            part_out, part_lse = far.forward()
            if (far_out := far_outs[side]) is not None:
                far_out[:, :, rows] = part_out
            if (far_lse := far_lses[side]) is not None:
                far_lse[:, :, rows] = part_lse
            parts.append((far.with_end_row(part_out), part_lse))
        out[:, :, rows], lse[:, :, rows] = _merged(parts)
    return Kept(out, lse, (far_outs[0], far_outs[1]), (far_lses[0], far_lses[1])), weights


def gradients(
    plan: Plan, given: Given, kept: Kept, d_out: Tensor, weights: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """The gradient of each given tensor, summed in float32 or better and in a fixed order.

    `weights` are those of each block; where they are None they are computed again.
    """
    (q, k, v), bias, tails, table = given[:3], given.bias, given.tails, given.table
    grads = Gradients(q, k, v, bias, table)
    for rows, kept_weights in zip(plan.blocks(), weights, strict=True):
        near, *fars = plan.ranges(rows)
        whole = kept.out[:, :, rows], kept.lse[:, :, rows], d_out[:, :, rows]
        Tile(plan, rows, near, q, k, v, bias, table).backward(*whole, kept_weights, grads)
        for side, keys in enumerate(fars):
            if keys.start == keys.stop:
                continue
            far = FarRange(plan, rows, keys, q, k, v, tails[side], table, side)
            far_out, far_lse = (
                None if x is None else x[:, :, rows]
                for x in (kept.far_out[side], kept.far_lse[side])
            )
            far.backward(*whole, far_out, far_lse, grads)
    return [
        None if total is None or x is None else total.to(x.dtype)
        for total, x in zip(grads.in_order(), given, strict=True)
    ]


def _merged(parts: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """One attention from the (output, log-sum-exp) of attention to disjoint sets of keys."""
    if len(parts) == 1:
        return parts[0]
    lse = torch.logsumexp(torch.cat([part for _, part in parts], dim=-1), dim=-1, keepdim=True)
    out = sum(torch.exp(part - finite(lse)) * out for out, part in parts)
    assert isinstance(out, Tensor)
    return out, lse
