"""A block of query rows against near keys: a tile of logits with the bias laid in by `skew`."""

import torch
from torch import Tensor

from whence.kernels.blocks.gradients import Gradients, add_rows
from whence.kernels.blocks.plan import Plan
from whence.kernels.blocks.skew import fold, skew, spread, unskew
from whence.lag import LagBias


class Tile:
    """A block of query rows and a range of keys, all of whose logits are held at once.

    Inside, rows are in reverse order, as `skew` needs them; arguments and results are in order.
    """

    def __init__(
        self,
        plan: Plan,
        rows: slice,
        keys: slice,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bias: LagBias,
        table: Tensor | None,
    ) -> None:
        self.plan, self.rows, self.keys, self.bias = plan, rows, keys, bias
        self.sum_dtype = torch.promote_types(q.dtype, torch.float32)
        # On a CPU half precision is for storage; a GPU multiplies it and sums in float32 itself.
        matmul_dtype = self.sum_dtype if q.device.type == "cpu" else q.dtype
        self.q = q[:, :, rows].flip(2).to(matmul_dtype)
        # Scaling the queries is less work than scaling the logits, where it does not round them.
        self.scale = plan.scale
        if matmul_dtype == self.sum_dtype:
            self.q, self.scale = self.q * plan.scale, 1.0
        self.k, self.v = (x[:, :, keys].to(matmul_dtype) for x in (k, v))
        self.table = None if table is None else table.to(self.sum_dtype)
        self.n_keys = keys.stop - keys.start
        self.first_lag = keys.start - (plan.sight.q_start + rows.stop - 1)
        self.n_lags = rows.stop - rows.start + self.n_keys - 1
        self.weights: Tensor | None = None  # set by `forward` if the plan keeps them for backward

    def forward(self) -> tuple[Tensor, Tensor]:
        """Output and log-sum-exp over these keys alone; zeros and -inf for a row without any."""
        if self.n_keys == 0:
            b, h, n, _ = self.q.shape
            shape = b, h, n, self.v.shape[-1]
            empty = torch.zeros(shape, dtype=self.sum_dtype, device=self.q.device)
            return empty, torch.full_like(empty[..., :1], -torch.inf)
        logits = self._logits()
        top = finite(logits.amax(dim=-1, keepdim=True))
        weights = logits.sub_(top).exp_()
        total = weights.sum(dim=-1, keepdim=True)
        divisor = torch.where(total == 0, torch.ones_like(total), total)
        if self.plan.keep_weights:
            self.weights, divisor = weights.div_(divisor), torch.ones_like(divisor)
        factor = self._dropout_factor(weights)
        if factor is not None:
            weights = weights * factor
        out = (weights.to(self.v.dtype) @ self.v).to(self.sum_dtype)
        if self.table is not None:
            mass = fold(unskew(weights), self.first_lag, self.table.shape[1] // 2)
            out += mass @ self.table
        out /= divisor
        return out.flip(2), (top + total.log()).flip(2)

    def backward(
        self, out: Tensor, lse: Tensor, d_out: Tensor, weights: Tensor | None, grads: Gradients
    ) -> None:
        """Add the gradients of this tile.

        out and lse are those of the rows over all keys, near and far; weights are those that
        `forward` kept, if it did.
        """
        if self.n_keys == 0:
            return
        d_out, lse = d_out.flip(2), lse.flip(2)
        if weights is None:
            weights = self._logits().sub_(finite(lse)).exp_()
        d_value = d_out.to(self.v.dtype)
        d_weights = (d_value @ self.v.transpose(-1, -2)).to(self.sum_dtype)
        factor = self._dropout_factor(weights)
        dropped = weights if factor is None else weights * factor
        if self.table is not None:
            assert grads.table is not None
            reach, d_wide = self.table.shape[1] // 2, d_out.to(self.sum_dtype)
            mass = fold(unskew(dropped), self.first_lag, reach)
            grads.table += (mass.transpose(-1, -2) @ d_wide).sum(0).sum_to_size(grads.table.shape)
            d_mass = spread(d_wide @ self.table.transpose(-1, -2), self.first_lag, self.n_lags)
            d_weights += skew(d_mass, self.n_keys)
        if factor is not None:
            d_weights *= factor
        if self._holds_whole_rows():
            # The sum of dS is then zero to the last digit, which distances may magnify.
            delta = torch.linalg.vecdot(weights, d_weights).unsqueeze(-1)
        else:
            delta = (out.flip(2) * d_out).sum(dim=-1, keepdim=True)
        d_logits = d_weights.sub_(delta).mul_(weights)
        narrow = d_logits.to(self.q.dtype)
        grads.q[:, :, self.rows] += (narrow @ self.k).flip(2) * self.plan.scale
        grads.k[:, :, self.keys] += narrow.transpose(-1, -2) @ self.q * self.scale
        grads.v[:, :, self.keys] += dropped.to(self.v.dtype).transpose(-1, -2) @ d_value
        self._add_bias_gradients(d_logits, grads)

    def _holds_whole_rows(self) -> bool:
        """Whether no key of these rows is far."""
        _, *fars = self.plan.ranges(self.rows)
        return all(keys.start == keys.stop for keys in fars)

    def _logits(self) -> Tensor:
        """scale * q.k + bias, and -inf where a query may not look."""
        logits = (self.q @ self.k.transpose(-1, -2)).to(self.sum_dtype)
        if self.scale != 1.0:
            logits *= self.scale
        bias = self.bias.rows(self.rows.start, self.rows.stop)
        lag = torch.arange(self.first_lag, self.first_lag + self.n_lags, device=self.q.device)
        logits += skew(bias.at(lag).flip(2), self.n_keys)
        allowed = self.plan.sight.allowed(self.rows, self.keys)
        if allowed is not None:
            logits.masked_fill_(~allowed.flip(2), -torch.inf)
        return logits

    def _dropout_factor(self, weights: Tensor) -> Tensor | None:
        """0 or 1 / (1 - dropout) for each weight; the seed makes backward draw the same ones."""
        if not self.plan.dropout:
            return None
        source = torch.Generator(weights.device).manual_seed(self.plan.seed + self.rows.start)
        chance = torch.rand(weights.shape, generator=source, device=weights.device)
        return (chance >= self.plan.dropout).to(weights.dtype) / (1 - self.plan.dropout)

    def _add_bias_gradients(self, d_logits: Tensor, grads: Gradients) -> None:
        """Sum dS along its diagonals: within the reach for the band, beyond it for the tails."""
        reach, first_lag = self.bias.reach, self.first_lag
        tails = [x for x in (*grads.const, *grads.slope) if x is not None]
        if not tails:  # then the keys beyond the reach need not be summed
            first = self.plan.sight.q_start + self.rows.start
            last = self.plan.sight.q_start + self.rows.stop - 1
            low = min(max(first - reach - self.keys.start, 0), self.n_keys)
            high = max(low, min(last + reach + 1 - self.keys.start, self.n_keys))
            d_logits, first_lag = d_logits[..., low:high], first_lag + low
            if low == high:
                return
        by_lag = unskew(d_logits)
        if all(x.shape[2] == 1 for x in (grads.band, *tails)):
            by_lag = by_lag.sum(dim=2, keepdim=True, dtype=torch.float64)
        else:
            by_lag = by_lag.flip(2)
        # One lag more than the reach on each side: its column sums everything beyond the reach.
        sums = fold(by_lag, first_lag, reach + 1)
        add_rows(grads.band, self.rows, sums[..., 1:-1])
        for side in (0, 1):
            if (const := grads.const[side]) is not None:
                add_rows(const, self.rows, sums[..., -side])
            if (slope := grads.slope[side]) is not None:
                lag = torch.arange(first_lag, first_lag + by_lag.shape[-1], device=slope.device)
                by_distance = fold(by_lag * lag.abs(), first_lag, reach + 1)
                add_rows(slope, self.rows, by_distance[..., -side])


def finite(lse: Tensor) -> Tensor:
    """Zero in place of the -inf of a row without keys, so that exp(-inf - lse) is 0, not NaN."""
    return torch.where(lse == -torch.inf, torch.zeros_like(lse), lse)
