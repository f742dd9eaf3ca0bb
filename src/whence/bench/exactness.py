"""Whether a contender may be timed: its error is at most twice that of same-dtype PyTorch.

Both errors are against the definition in float64, over the output and every gradient, as the root
mean square of the difference. Same-dtype PyTorch is the definition, too, with products in the
inputs' dtype and the softmax in float32. A contender that is itself plain PyTorch is what others
are held against: it must be the definition in float64, where nothing hides a wrong formula.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from whence.bench.point import Point
from whence.bench.problem import Attention, Problem
from whence.kernels.call import AttentionCall
from whence.kernels.reference import attend_rows
from whence.lag import DenseBias, LagBias, LagValues, Line

ALLOWED = 2.0
ALL_PAIRS = {"cpu": 1 << 24, "cuda": 1 << 28}  # pairs up to which every head is compared
TILE = {"cpu": 1 << 22, "cuda": 1 << 26}  # logits held at a time
# Shares of the size of a tensor: an error of PyTorch's below them is luck, and nobody is held
# against luck. A method's few parameters have gradients in which much cancels: four times as much.
FLOOR = {
    torch.bfloat16: 5e-4,
    torch.float16: 1e-4,
    torch.float32: 5e-7,
    torch.float64: 1e-11,
}
FEW = 4
SMALL = 512  # tokens at which plain PyTorch is checked in float64


@dataclass(frozen=True)
class Verdict:
    """The worst ratio of an error to same-dtype PyTorch's, and where it is."""

    ratio: float
    where: str
    held_against: str

    @property
    def exact(self) -> bool:
        """NaN is not."""
        return self.ratio <= ALLOWED

    def __str__(self) -> str:
        return f"{self.where} is off by {self.ratio:.3g} times {self.held_against}"


def small(point: Point) -> Point:
    """The problem at which plain PyTorch must be the definition, in float64."""
    n, batch = min(point.n, SMALL), min(point.batch, 2)
    return replace(point.problem, n=n, batch=batch, dtype="float64")


class Check:
    """The truth about one problem, and how far off same-dtype PyTorch is.

    Beyond some size only the first and the last head of the first and the last sequence are
    compared. The gradient of the output is zero elsewhere then, so that the gradients of the
    method's parameters are of those heads alone.
    """

    def __init__(self, problem: Problem) -> None:
        point = problem.point
        b, h = point.batch, point.n_heads
        all_of_it = point.pairs <= ALL_PAIRS[point.device]
        device = problem.q.device
        self.batches, self.heads = (
            torch.tensor(list(range(n)) if all_of_it else sorted({0, n - 1}), device=device)
            for n in (b, h)
        )
        self.problem = problem
        chosen = torch.zeros(b, h, 1, 1, dtype=problem.d_out.dtype, device=device)
        chosen[self.batches[:, None], self.heads] = 1
        self.d_out = problem.d_out * chosen
        self.truth = self._defined(problem.double())
        self.yardstick = self._errors(self._defined(problem))

    def __call__(self, attention: Attention) -> Verdict:
        """The verdict on a contender, which runs on the whole problem."""
        found = self.problem.run(attention, d_out=self.d_out, select=self._select)
        return self.verdict(found)

    def verdict(self, found: dict[str, Tensor]) -> Verdict:
        """The worst of the output and all gradients; one that is missing counts as zero."""
        dtype = self.problem.q.dtype
        sizes = {name: want.norm().item() for name, want in self.truth.items()}
        largest = max(sizes.values())
        ratios = {}
        for name, error in self._errors(found).items():
            floor = FLOOR[dtype] * (1 if name in ("out", "q", "k", "v") else FEW)
            zero = sizes[name] <= 1e-9 * largest  # in truth: there is no size to take a share of
            size = largest if zero else sizes[name]
            ratios[name] = error / max(self.yardstick[name], floor * size)
        broken = [name for name, ratio in ratios.items() if ratio != ratio]
        worst = broken[0] if broken else max(ratios, key=lambda name: ratios[name])
        against = "rounding" if dtype == torch.float64 else "the error of same-dtype PyTorch"
        return Verdict(ratios[worst], worst, against)

    def _errors(self, found: dict[str, Tensor]) -> dict[str, float]:
        return {
            name: (want - found[name].double() if name in found else want).norm().item()
            for name, want in self.truth.items()
        }

    def _defined(self, problem: Problem) -> dict[str, Tensor]:
        """The definition on the chosen heads, a few rows at a time."""

        def attention(problem: Problem) -> Tensor:
            call = self._chosen(problem.call())
            out = torch.zeros_like(problem.q)
            part = _in_rows(call, TILE[problem.point.device])
            return out.index_put((self.batches[:, None], self.heads), part.to(out.dtype))

        return problem.run(attention, d_out=self.d_out.to(problem.q.dtype), select=self._select)

    def _select(self, x: Tensor) -> Tensor:
        return x[self.batches[:, None], self.heads]

    def _chosen(self, call: AttentionCall) -> AttentionCall:
        lag, values = call.lag, call.values
        if lag is not None:
            left, right = (tail and self._tail(tail) for tail in (lag.left, lag.right))
            lag = LagBias(self._cut(lag.band), left, right)
        if values is not None and values.table.shape[0] > 1:
            values = LagValues(values.table[self.heads])
        q, k, v = (self._select(x) for x in (call.q, call.k, call.v))
        dense = tuple(self._dense(term) for term in call.dense)
        return replace(call, q=q, k=k, v=v, lag=lag, values=values, dense=dense)

    def _tail(self, tail: Line) -> Line:
        const, slope = (None if x is None else self._cut(x) for x in (tail.const, tail.slope))
        return Line(const, slope)

    def _dense(self, term: DenseBias) -> DenseBias:
        """The whole matrix of a few rows, cut afterwards: its function knows no heads."""
        return replace(
            term, function=lambda q_pos, k_pos, *per: self._cut(term.function(q_pos, k_pos, *per))
        )

    def _cut(self, x: Tensor) -> Tensor:
        """The chosen part of the first two axes; axes of one are shared and stay."""
        x = x if x.shape[0] == 1 else x[self.batches]
        return x if x.shape[1] == 1 else x[:, self.heads]


def _in_rows(call: AttentionCall, tile: int) -> Tensor:
    """attend_rows a block at a time, computed again in backward."""
    b, h, n_q, _ = call.q.shape
    step = max(1, tile // (b * h * call.sight.n_k))
    blocks: Sequence[slice] = [slice(i, min(i + step, n_q)) for i in range(0, n_q, step)]
    if len(blocks) == 1:
        return attend_rows(call, blocks[0])
    parts = [checkpoint(attend_rows, call, rows, use_reentrant=False) for rows in blocks]
    return torch.cat(parts, dim=2)
