"""Tensor parallelism: a method built for all heads, seen by a process that holds some of them."""

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from whence.lag import Bias, DenseBias, LagBias, LagValues, Line, LowRankBias
from whence.lag.terms import Terms
from whence.method import Content, PositionMethod
from whence.rotation import Rotation


class LocalHeads(PositionMethod):
    """Heads rank * h .. (rank + 1) * h of a method for `n_heads`, h the heads of this process.

    The method is asked about all heads, with zeros for those of other processes, and what it says
    is cut. So any method works, per head or not. Its parameters are the same everywhere. Their
    gradients, and those of the layer's input where a method reads it, are each from a few heads:
    they are added up over the processes.
    """

    whole: PositionMethod

    def __init__(self, whole: PositionMethod, *, rank: int, size: int, group: Any) -> None:
        super().__init__()
        object.__setattr__(self, "whole", whole)  # not a submodule: the stack owns it
        self.rank, self.size, self.group = rank, size, group
        self.lengths_only = whole.lengths_only

    def _all(self, x: Float[Tensor, "b h n d"]) -> Float[Tensor, "b heads n d"]:
        h = x.shape[1]
        before, after = self.rank * h, (self.size - 1 - self.rank) * h
        return F.pad(x, (0, 0, 0, 0, before, after))

    def _mine(self, x: Tensor, axis: int) -> Tensor:
        if x.shape[axis] == 1:  # one for all heads
            return x
        h = x.shape[axis] // self.size
        return x.narrow(axis, self.rank * h, h)

    def query_heads(self, q: Tensor, q_pos: Int[Tensor, "*b q"]) -> Tensor:
        """This process's queries as all of them would be."""
        return self._mine(self.whole.query_heads(self._all(q), q_pos), 1)

    def key_heads(self, k: Tensor, k_pos: Int[Tensor, "*b k"]) -> Tensor:
        """Its keys."""
        return self._mine(self.whole.key_heads(self._all(k), k_pos), 1)

    def rotation(self) -> Rotation | None:
        """That of the whole method: all heads turn alike."""
        return self.whole.rotation()

    def value_heads(self, v: Tensor, k_pos: Int[Tensor, "*b k"]) -> Tensor:
        """Its values."""
        return self._mine(self.whole.value_heads(self._all(v), k_pos), 1)

    def score_term(
        self,
        q: Float[Tensor, "b h q d"],
        q_pos: Int[Tensor, " q"],
        k_pos: Int[Tensor, " k"],
        *,
        content: Content | None = None,
    ) -> Bias | None:
        """The score term's heads of this process."""
        term = self.whole.score_term(self._all(q), q_pos, k_pos, content=self._content(content))
        return None if term is None else self._cut(term)

    def logits(
        self,
        q: Float[Tensor, "b h q d"],
        q_pos: Int[Tensor, " q"],
        k_pos: Int[Tensor, " k"],
        *,
        content: Content | None = None,
    ) -> Bias | None:
        """The replacing logits' heads of this process."""
        term = self.whole.logits(self._all(q), q_pos, k_pos, content=self._content(content))
        return None if term is None else self._cut(term)

    def value_term(self, q_pos: Int[Tensor, " q"], k_pos: Int[Tensor, " k"]) -> LagValues | None:
        """The value table's heads of this process."""
        values = self.whole.value_term(q_pos, k_pos)
        return None if values is None else LagValues(self._mine(values.table, 0))

    def _content(self, content: Content | None) -> Content | None:
        if content is None:
            return None
        x_q, x_k = (
            None if x is None else _SummedGradient.apply(x, self.group)  # type: ignore[no-untyped-call]
            for x in (content.x_q, content.x_k)
        )
        return replace(
            content, x_q=x_q, x_k=x_k, k=None if content.k is None else self._all(content.k)
        )

    def _cut(self, bias: Bias) -> Bias:
        terms = bias.terms()
        lag, low = terms.lag, terms.low_rank
        return Terms(
            None if lag is None else self._cut_lag(lag),
            None if low is None else LowRankBias(self._mine(low.query, 1), self._mine(low.key, 1)),
            tuple(self._cut_dense(term) for term in terms.dense),
        ).simplify()

    def _cut_lag(self, lag: LagBias) -> LagBias:
        extent = lag.extent if lag.extent is None else self._mine(lag.extent, 0)
        left, right = (self._cut_line(line) for line in (lag.left, lag.right))
        return LagBias(self._mine(lag.band, 1), left, right, extent)

    def _cut_line(self, line: Line | None) -> Line | None:
        if line is None:
            return None
        parts = (line.const, line.slope)
        return Line(*(None if part is None else self._mine(part, 1) for part in parts))

    def _cut_dense(self, term: DenseBias) -> DenseBias:
        def function(*arguments: Tensor) -> Tensor:
            return self._mine(term.function(*arguments), 1)

        return DenseBias(function, term.q_pos, term.k_pos, term.why, term.per_query)


class _SummedGradient(torch.autograd.Function):
    """x itself, with a gradient that is the sum of all processes'."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        """Nothing happens."""
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """The sum."""
        return _summed(gradient, ctx.group), None


def sum_gradients(positions: nn.Module, group: Any) -> None:
    """Let the parameters behind `LocalHeads` have the gradients of all processes.

    Not those of an input term: what comes back to the input is already whole. Each parameter is
    told once; `from_pretrained` may have put others in their place since the model was built.
    """
    for method in positions.modules():
        if not isinstance(method, PositionMethod) or method.sites() == ("input",):
            continue
        for parameter in method.parameters():
            if parameter.requires_grad and not getattr(parameter, "_whence_summed", False):
                # On what arrives, not on .grad, where earlier batches may have been added up.
                parameter.register_hook(  # type: ignore[no-untyped-call]
                    lambda gradient: _summed(gradient, group)
                )
                parameter._whence_summed = True  # type: ignore[attr-defined]


def _summed(gradient: Tensor, group: Any) -> Tensor:
    total = gradient.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total
