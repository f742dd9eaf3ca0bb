"""A term of the logit, of any kind, and the sum of several kinds."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from jaxtyping import Float, Int
from torch import Tensor

if TYPE_CHECKING:
    from whence.lag.bias import LagBias
    from whence.lag.dense import DenseBias, LowRankBias


class Bias(ABC):
    """A term that is added to the logits. `to_dense` defines it; fast paths are tested against it.

    >>> import torch
    >>> from whence.lag import LagBias
    >>> slope = LagBias.line(torch.tensor([-1.0]))
    >>> (slope + slope).to_dense(torch.arange(1), torch.arange(3)).tolist()
    [[[[0.0, -2.0, -4.0]]]]
    """

    @abstractmethod
    def to_dense(
        self, q_pos: Int[Tensor, " q"], k_pos: Int[Tensor, " k"]
    ) -> Float[Tensor, "b h q k"]:
        """The term for every query and key, [b|1, h|1, q, k]."""

    @abstractmethod
    def rows(self, start: int, stop: int) -> "Bias":
        """The term of query rows start..stop alone: what a KV cache or a block of queries needs."""

    @abstractmethod
    def terms(self) -> "Terms":
        """This term as a sum sorted by kind."""

    def __add__(self, other: "Bias") -> "Bias":
        return (self.terms().merge(other.terms())).simplify()


@dataclass(frozen=True, eq=False)
class Terms(Bias):
    """A sum sorted by kind: one lag bias, one low-rank product, and any number of dense terms.

    >>> import torch
    >>> from whence.lag import LagBias, LowRankBias
    >>> ones = LowRankBias(torch.ones(1, 1, 2, 1), torch.ones(1, 1, 2, 1))
    >>> both = LagBias.line(torch.tensor([-1.0])) + ones
    >>> type(both).__name__, [type(part).__name__ for part in both.parts()]
    ('Terms', ['LagBias', 'LowRankBias'])
    """

    lag: "LagBias | None" = None
    low_rank: "LowRankBias | None" = None
    dense: "tuple[DenseBias, ...]" = field(default=())

    def merge(self, other: "Terms") -> "Terms":
        """Both sums in one: lag biases added into one, low-rank products put side by side."""
        lag = self.lag if other.lag is None else other.lag
        if self.lag is not None and other.lag is not None:
            lag = self.lag.plus(other.lag)
        low = self.low_rank if other.low_rank is None else other.low_rank
        if self.low_rank is not None and other.low_rank is not None:
            low = self.low_rank.beside(other.low_rank)
        return Terms(lag, low, self.dense + other.dense)

    def parts(self) -> list[Bias]:
        """The terms that are there, the lag bias first."""
        return [part for part in (self.lag, self.low_rank, *self.dense) if part is not None]

    def simplify(self) -> Bias:
        """A sum of one is that one."""
        parts = self.parts()
        return parts[0] if len(parts) == 1 else self

    def terms(self) -> "Terms":
        """Itself."""
        return self

    def rows(self, start: int, stop: int) -> "Terms":
        """Every part's rows."""
        return Terms(
            None if self.lag is None else self.lag.rows(start, stop),
            None if self.low_rank is None else self.low_rank.rows(start, stop),
            tuple(part.rows(start, stop) for part in self.dense),
        )

    def to_dense(
        self, q_pos: Int[Tensor, " q"], k_pos: Int[Tensor, " k"]
    ) -> Float[Tensor, "b h q k"]:
        """The sum of the parts' matrices."""
        first, *rest = [part.to_dense(q_pos, k_pos) for part in self.parts()]
        for matrix in rest:
            first = first + matrix
        return first
