"""Attention with a lag bias in blocks of query rows: linear memory in training, on any device.

The keys of a block fall into near ones, within the reach of the bias, and far ones to the left and
to the right. Near keys are a tile of logits (`tile.py`). Far keys see a constant bias at most, so
they are plain attention, which PyTorch's flash kernel computes (`far.py`); the log-sum-exp of each
part gives its share of the output. Backward gives every part the output and log-sum-exp of the
whole row, as FlashAttention does for its blocks of keys. Where the flash kernel cannot be used (a
mask, a window, dropout, a sloped tail, no CPU) all keys count as near.
"""

from typing import Any

import torch
from torch import Tensor

from whence.derivatives import once_differentiable
from whence.kernels.blocks.far import FarRange
from whence.kernels.blocks.gradients import Gradients
from whence.kernels.blocks.plan import Plan
from whence.kernels.blocks.tile import Tile, finite
from whence.kernels.mask import Mask
from whence.lag import LagBias, Line

N_DIFFERENTIABLE = 9  # tensor arguments of `BlockedAttention` that have a gradient; masks follow


class BlockedAttention(torch.autograd.Function):
    """softmax(scale q.k + bias) (v + values), forward and backward.

    The tensors of the mask are arguments of their own, not part of the plan: backward reads them
    again, and only a tensor that autograd saves raises if it was changed in place in between.
    """

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
        mask_keys: Tensor | None,
        mask_q_segments: Tensor | None,
        mask_k_segments: Tensor | None,
        mask_pairs: Tensor | None,
    ) -> Tensor:
        """Attend block by block and save what backward needs: no logits, unless there are few."""
        masks = (mask_keys, mask_q_segments, mask_k_segments, mask_pairs)
        here = plan.with_mask(_mask(*masks))
        tails = (Line(left_const, left_slope), Line(right_const, right_slope))
        bias = LagBias(band, *tails)
        wide = torch.promote_types(q.dtype, torch.float32)
        (b, h, n_q, _), d_v = q.shape, v.shape[-1]
        # Saved before it is rounded to half precision: in dS = P * (dP - delta) with
        # delta = rowsum(out * d_out), a row with few keys cancels, and a rounding error would stay.
        out = q.new_empty(b, h, n_q, d_v, dtype=wide)
        lse = q.new_empty(b, h, n_q, 1, dtype=wide)
        # The gradient of a constant tail needs the output and log-sum-exp of its far range, that
        # of the value table needs the log-sum-exp.
        far_outs = [None if x.const is None else q.new_empty(b, h, n_q, d_v) for x in tails]
        far_lses = [
            None if x.const is None and table is None else torch.empty_like(lse) for x in tails
        ]
        weights = []
        for rows in here.blocks():
            near, *fars = here.ranges(rows)
            tile = Tile(here, rows, near, q, k, v, bias, table)
            parts = [tile.forward()]
            weights.append(tile.weights)
            for side, keys in enumerate(fars):
                if keys.start == keys.stop:
                    continue
                far = FarRange(here, rows, keys, q, k, v, tails[side], table, side)
                part_out, part_lse = far.forward()
                if (far_out := far_outs[side]) is not None:
                    far_out[:, :, rows] = part_out
                if (far_lse := far_lses[side]) is not None:
                    far_lse[:, :, rows] = part_lse
                parts.append((far.with_end_row(part_out), part_lse))
            out[:, :, rows], lse[:, :, rows] = _merged(parts)
        ctx.plan = plan
        tensors = (q, k, v, band, left_const, left_slope, right_const, right_slope, table)
        ctx.save_for_backward(*tensors, *masks, out, lse, *far_outs, *far_lses, *weights)
        return out.to(q.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        """Every gradient, each summed in float32 or better and in a fixed order."""
        saved = ctx.saved_tensors
        tensors, (*masks, out, lse) = saved[:N_DIFFERENTIABLE], saved[N_DIFFERENTIABLE:][:6]
        left_out, right_out, left_lse, right_lse, *weights = saved[N_DIFFERENTIABLE + 6 :]
        far_outs, far_lses = (left_out, right_out), (left_lse, right_lse)
        q, k, v, band, left_const, left_slope, right_const, right_slope, table = tensors
        plan: Plan = ctx.plan.with_mask(_mask(*masks))
        tails = (Line(left_const, left_slope), Line(right_const, right_slope))
        bias = LagBias(band, *tails)
        grads = Gradients(q, k, v, bias, table)
        for rows, kept_weights in zip(plan.blocks(), weights, strict=True):
            near, *fars = plan.ranges(rows)
            whole = out[:, :, rows], lse[:, :, rows], d_out[:, :, rows]
            Tile(plan, rows, near, q, k, v, bias, table).backward(*whole, kept_weights, grads)
            for side, keys in enumerate(fars):
                if keys.start == keys.stop:
                    continue
                far = FarRange(plan, rows, keys, q, k, v, tails[side], table, side)
                far_out, far_lse = (
                    None if x is None else x[:, :, rows] for x in (far_outs[side], far_lses[side])
                )
                far.backward(*whole, far_out, far_lse, grads)
        given = [
            None if total is None else total.to(x.dtype)
            for total, x in zip(grads.in_order(), tensors, strict=True)
        ]
        return None, *given, *(None for _ in masks)


def _mask(
    keys: Tensor | None,
    q_segments: Tensor | None,
    k_segments: Tensor | None,
    pairs: Tensor | None,
) -> Mask | None:
    if keys is None and q_segments is None and pairs is None:
        return None
    segments = None
    if q_segments is not None:
        assert k_segments is not None
        segments = (q_segments, k_segments)
    return Mask(keys, segments, pairs)


def _merged(parts: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """One attention from the (output, log-sum-exp) of attention to disjoint sets of keys."""
    if len(parts) == 1:
        return parts[0]
    lse = torch.logsumexp(torch.cat([part for _, part in parts], dim=-1), dim=-1, keepdim=True)
    out = sum(torch.exp(part - finite(lse)) * out for out, part in parts)
    assert isinstance(out, Tensor)
    return out, lse
