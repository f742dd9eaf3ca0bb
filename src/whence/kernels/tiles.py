"""The two kinds of part that a block of query rows is attended in: a near tile, or a far range."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from whence.kernels.skew import fold, skew, spread, unskew
from whence.lag import LagBias, Line

if TYPE_CHECKING:
    from whence.kernels.blocked import Plan


def merged(parts: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """One attention from the (output, log-sum-exp) of attention to separate sets of keys."""
    if len(parts) == 1:
        return parts[0]
    lse = torch.logsumexp(torch.cat([part for _, part in parts], dim=-1), dim=-1, keepdim=True)
    out = sum(torch.exp(part - _finite(lse)) * out for out, part in parts)
    assert isinstance(out, Tensor)
    return out, lse


class Gradients:
    """The gradients while they are summed: of q, k and v in float32 or better, of what all rows
    share in float64, since thousands of terms of both signs meet there.
    """

    def __init__(
        self, q: Tensor, k: Tensor, v: Tensor, bias: LagBias, table: Tensor | None
    ) -> None:
        assert bias.left is not None
        assert bias.right is not None
        lines = (bias.left.const, bias.left.slope, bias.right.const, bias.right.slope)
        self.like = (q, k, v, bias.band, *lines, table)
        wide = [torch.promote_types(x.dtype, torch.float32) for x in (q, k, v)] + [
            torch.float64
        ] * 6
        zeros = [
            None if x is None else torch.zeros_like(x, dtype=dtype)
            for x, dtype in zip(self.like, wide, strict=True)
        ]
        self.q, self.k, self.v, self.band, *rest, self.table = zeros
        self.const, self.slope = rest[0::2], rest[1::2]

    def cast(self) -> tuple[Tensor | None, ...]:
        """Each in the dtype of its tensor, in the order of `forward`'s arguments."""
        sums = (self.q, self.k, self.v, self.band)
        lines = (self.const[0], self.slope[0], self.const[1], self.slope[1])
        every = (*sums, *lines, self.table)
        return tuple(
            None if x is None or like is None else x.to(like.dtype)
            for x, like in zip(every, self.like, strict=True)
        )


class Tile:
    """A block of query rows against a range of keys, with every logit of it in hand.

    Inside, rows are in reverse order (see `skew`); what goes in and comes out is in order.
    """

    def __init__(
        self,
        plan: "Plan",
        rows: slice,
        keys: slice,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bias: LagBias,
        table: Tensor | None,
    ) -> None:
        self.plan, self.rows, self.keys, self.bias = plan, rows, keys, bias
        self.exact = torch.promote_types(q.dtype, torch.float32)
        # On a CPU half precision is for storage; a GPU multiplies it and sums in float32 itself.
        matmul = self.exact if q.device.type == "cpu" else q.dtype
        self.q = q[:, :, rows].flip(2).to(matmul)
        # Scaling the queries is less work than scaling the logits, where it does not round them.
        self.scale = plan.scale
        if matmul == self.exact:
            self.q, self.scale = self.q * plan.scale, 1.0
        self.k, self.v = (x[:, :, keys].to(matmul) for x in (k, v))
        self.table = None if table is None else table.to(self.exact)
        self.n_keys = keys.stop - keys.start
        self.first_lag = keys.start - (plan.sight.q_start + rows.stop - 1)
        self.n_lags = rows.stop - rows.start + self.n_keys - 1
        self.weights: Tensor | None = None  # of `forward`, where the plan keeps them for backward

    def logits(self) -> Tensor:
        """scale q.k + bias, -inf where a query may not look."""
        logits = (self.q @ self.k.transpose(-1, -2)).to(self.exact)
        if self.scale != 1.0:
            logits *= self.scale
        bias = self.bias.rows(self.rows.start, self.rows.stop)
        lag = torch.arange(self.first_lag, self.first_lag + self.n_lags, device=self.q.device)
        logits += skew(bias.at(lag).flip(2), self.n_keys)
        allowed = self.plan.sight.allowed(self.rows, self.keys)
        if allowed is not None:
            logits.masked_fill_(~allowed.flip(2), -torch.inf)
        return logits

    def keep(self, weights: Tensor) -> Tensor | None:
        """What dropout multiplies the weights by: the same again in backward, from the seed."""
        if not self.plan.dropout:
            return None
        source = torch.Generator(weights.device).manual_seed(self.plan.seed + self.rows.start)
        chance = torch.rand(weights.shape, generator=source, device=weights.device)
        return (chance >= self.plan.dropout).to(weights.dtype) / (1 - self.plan.dropout)

    def forward(self) -> tuple[Tensor, Tensor]:
        """The rows' output and log-sum-exp over these keys alone; zeros and -inf without any."""
        if self.n_keys == 0:
            b, h, n, _ = self.q.shape
            empty = torch.zeros(b, h, n, self.v.shape[-1], dtype=self.exact, device=self.q.device)
            return empty, torch.full_like(empty[..., :1], -torch.inf)
        logits = self.logits()
        top = _finite(logits.amax(dim=-1, keepdim=True))
        weights = logits.sub_(top).exp_()
        total = weights.sum(dim=-1, keepdim=True)
        whole = torch.where(total == 0, torch.ones_like(total), total)
        if self.plan.keep:
            self.weights, whole = weights.div_(whole), torch.ones_like(whole)
        keep = self.keep(weights)
        if keep is not None:
            weights = weights * keep
        out = (weights.to(self.v.dtype) @ self.v).to(self.exact)
        if self.table is not None:
            mass = fold(unskew(weights), self.first_lag, self.table.shape[1] // 2)
            out += mass @ self.table
        out /= whole
        return out.flip(2), (top + total.log()).flip(2)

    def backward(
        self, out: Tensor, lse: Tensor, d_out: Tensor, weights: Tensor | None, grads: Gradients
    ) -> None:
        """Add this tile's share, given the whole rows' output, log-sum-exp and any kept weights."""
        if self.n_keys == 0:
            return
        d_out, lse = d_out.flip(2), lse.flip(2)
        delta = (out.flip(2).to(self.exact) * d_out).sum(dim=-1, keepdim=True)
        if weights is None:
            weights = self.logits().sub_(_finite(lse)).exp_()
        d_value = d_out.to(self.v.dtype)
        d_weights = (d_value @ self.v.transpose(-1, -2)).to(self.exact)
        keep = self.keep(weights)
        kept = weights if keep is None else weights * keep
        if self.table is not None:
            assert grads.table is not None
            reach, d_exact = self.table.shape[1] // 2, d_out.to(self.exact)
            mass = fold(unskew(kept), self.first_lag, reach)
            grads.table += (mass.transpose(-1, -2) @ d_exact).sum(0).sum_to_size(grads.table.shape)
            d_mass = spread(d_exact @ self.table.transpose(-1, -2), self.first_lag, self.n_lags)
            d_weights += skew(d_mass, self.n_keys)
        if keep is not None:
            d_weights *= keep
        d_logits = d_weights.sub_(delta).mul_(weights)
        assert grads.q is not None
        assert grads.k is not None
        assert grads.v is not None
        low = d_logits.to(self.q.dtype)
        grads.q[:, :, self.rows] += (low @ self.k).flip(2) * self.plan.scale
        grads.k[:, :, self.keys] += low.transpose(-1, -2) @ self.q * self.scale
        grads.v[:, :, self.keys] += kept.to(self.v.dtype).transpose(-1, -2) @ d_value
        self._bias_backward(d_logits, grads)

    def _bias_backward(self, d_logits: Tensor, grads: Gradients) -> None:
        assert grads.band is not None
        reach, first_lag = self.bias.reach, self.first_lag
        if all(x is None for x in (*grads.const, *grads.slope)):  # then only the band counts
            first = self.plan.sight.q_start + self.rows.start
            last = self.plan.sight.q_start + self.rows.stop - 1
            low = min(max(first - reach - self.keys.start, 0), self.n_keys)
            high = max(low, min(last + reach + 1 - self.keys.start, self.n_keys))
            d_logits, first_lag = d_logits[..., low:high], first_lag + low
            if low == high:
                return
        by_lag = unskew(d_logits)
        if self.bias.band.shape[2] == 1:
            by_lag = by_lag.sum(dim=2, keepdim=True, dtype=torch.float64)
        else:
            by_lag = by_lag.flip(2)
        sums = fold(by_lag, first_lag, reach + 1)
        _add(grads.band, self.rows, sums[..., 1:-1])
        for side in (0, 1):
            if (const := grads.const[side]) is not None:
                _add(const, self.rows, sums[..., -side])
            if (slope := grads.slope[side]) is not None:
                lag = torch.arange(first_lag, first_lag + by_lag.shape[-1], device=slope.device)
                by_distance = fold(by_lag * lag.abs(), first_lag, reach + 1)
                _add(slope, self.rows, by_distance[..., -side])


class Far:
    """A block of query rows against keys all in one tail: plain attention and a constant."""

    def __init__(
        self,
        plan: "Plan",
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
        self.end = None if table is None else table[None, :, -side, None]  # [1, h|1, 1, d_v]

    def forward(self) -> tuple[Tensor, Tensor]:
        """The rows' output over these keys without the table, and log-sum-exp with the constant."""
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            self.q, self.k, self.v, 0.0, False, scale=self.plan.scale
        )
        lse = lse[..., None]
        return out, lse if self.const is None else lse + self.const[..., None]

    def with_value(self, out: Tensor) -> Tensor:
        """The output with the table's end row, which every one of these keys carries."""
        return out if self.end is None else out + self.end

    def backward(
        self,
        out: Tensor,
        lse: Tensor,
        d_out: Tensor,
        far_out: Tensor | None,
        far_lse: Tensor | None,
        grads: Gradients,
    ) -> None:
        """Add this range's share, given the whole rows' output and log-sum-exp and its own."""
        assert grads.q is not None
        assert grads.k is not None
        assert grads.v is not None
        plain = lse if self.const is None else lse - self.const[..., None]
        # The kernel takes rowsum(out * d_out) for delta; without the end row that is the right one.
        seen = out if self.end is None else (out - self.end).to(out.dtype)
        d_q, d_k, d_v = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            d_out.to(out.dtype),
            self.q,
            self.k,
            self.v,
            seen,
            _heads_last(plain[..., 0]),
            0.0,
            False,
            scale=self.plan.scale,
        )
        grads.q[:, :, self.rows] += d_q
        grads.k[:, :, self.keys] += d_k
        grads.v[:, :, self.keys] += d_v
        if far_lse is None:
            return
        mass = torch.exp(far_lse - lse)
        if grads.table is not None:
            d_end = (mass * d_out).sum(dim=(0, 2), dtype=torch.float64)
            grads.table[:, -self.side] += d_end.sum_to_size(grads.table[:, 0].shape)
        if (const := grads.const[self.side]) is not None:
            assert far_out is not None
            share = (d_out * (self.with_value(far_out) - out)).sum(dim=-1)
            _add(const, self.rows, mass[..., 0] * share)


def _add(total: Tensor, rows: slice, part: Tensor) -> None:
    """Add a block's part [b, h, rows or 1, ...] to a sum with size-1 axes for what is shared."""
    place = total if total.shape[2] == 1 else total[:, :, rows]
    place += part.sum_to_size(place.shape)


def _finite(lse: Tensor) -> Tensor:
    """Zero for the -inf of a row that sees nothing, so that exp(-inf - lse) is 0 and not NaN."""
    return torch.where(lse == -torch.inf, torch.zeros_like(lse), lse)


def _heads_last(lse: Tensor) -> Tensor:
    """[b, h, q] with heads adjacent in memory, as the flash kernel lays it out."""
    return lse.transpose(1, 2).contiguous().transpose(1, 2)
