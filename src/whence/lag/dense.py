"""Terms of the logit that are not a function of lag alone: dense ones, and products of low rank."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from whence.checks import require
from whence.lag.terms import Bias, Terms


@dataclass(frozen=True, eq=False)
class DenseBias(Bias):
    """A term that must be computed for each query and key: function(q_pos, k_pos, *per_query).

    It is held as a function, not a matrix, so that a backend may build it for a few rows at a time.
    `per_query` are the tensors [b, h, q, ...] that belong to the query rows and are cut with them;
    `why` is the reason, which `explain` prints, that the term is not a lag bias.

        >>> def product(q_pos, k_pos):
        ...     return (q_pos[:, None] * k_pos[None, :]).float()[None, None]
        >>> pos = torch.arange(3)
        >>> bias = DenseBias(product, pos, pos, "a product is no function of the lag")
        >>> bias.to_dense(pos, pos)[0, 0].tolist()
        [[0.0, 0.0, 0.0], [0.0, 1.0, 2.0], [0.0, 2.0, 4.0]]
    """

    function: Callable[..., Tensor]
    q_pos: Int[Tensor, " q"]
    k_pos: Int[Tensor, " k"]
    why: str
    per_query: tuple[Tensor, ...] = ()

    def to_dense(
        self, q_pos: Int[Tensor, " q"], k_pos: Int[Tensor, " k"]
    ) -> Float[Tensor, "b h q k"]:
        """The function at these positions."""
        matrix: Tensor = self.function(q_pos, k_pos, *self.per_query)
        return matrix

    def rows(self, start: int, stop: int) -> "DenseBias":
        """The same function for query rows start..stop."""
        cut = tuple(part[:, :, start:stop] for part in self.per_query)
        return DenseBias(self.function, self.q_pos[start:stop], self.k_pos, self.why, cut)

    def terms(self) -> Terms:
        """A sum of this alone."""
        return Terms(dense=(self,))


@dataclass(frozen=True, eq=False)
class LowRankBias(Bias):
    """bias[i, j] = query_i . key_j: exact in linear memory, as extra columns of the heads.

    The axes are [b|1, h|1, q, r] and [b|1, h|1, k, r]. The factors belong to the positions that
    they were made for, so `to_dense` uses of its arguments only the lengths, which must match.

        >>> query, key = torch.ones(1, 1, 2, 1), torch.tensor([1.0, 2.0, 3.0])[None, None, :, None]
        >>> LowRankBias(query, key).to_dense(torch.arange(2), torch.arange(3))[0, 0].tolist()
        [[1.0, 2.0, 3.0], [1.0, 2.0, 3.0]]
    """

    query: Float[Tensor, "bq hq q r"]
    key: Float[Tensor, "bk hk k r"]

    def __post_init__(self) -> None:
        require(
            self.query.shape[-1] == self.key.shape[-1],
            f"LowRankBias needs one rank for both factors, got {self.query.shape[-1]} and "
            f"{self.key.shape[-1]}.",
        )

    def to_dense(
        self, q_pos: Int[Tensor, " q"], k_pos: Int[Tensor, " k"]
    ) -> Float[Tensor, "b h q k"]:
        """The product of the factors."""
        made, asked = (self.query.shape[2], self.key.shape[2]), (q_pos.shape[0], k_pos.shape[0])
        require(
            made == asked,
            lambda: (
                f"this LowRankBias was made for (queries, keys) = {made}, got {asked}. "
                "Take query rows with bias.rows(start, stop)."
            ),
        )
        return self.query @ self.key.transpose(-1, -2)

    def beside(self, other: "LowRankBias") -> "LowRankBias":
        """The sum of two products: their factors side by side."""
        return LowRankBias(_join(self.query, other.query), _join(self.key, other.key))

    def rows(self, start: int, stop: int) -> "LowRankBias":
        """The product of query rows start..stop."""
        return LowRankBias(self.query[:, :, start:stop], self.key)

    def terms(self) -> Terms:
        """A sum of this alone."""
        return Terms(low_rank=self)


def _join(a: Tensor, b: Tensor) -> Tensor:
    lead = torch.broadcast_shapes(a.shape[:-1], b.shape[:-1])  # type: ignore[no-untyped-call]
    return torch.cat([a.expand(*lead, -1), b.expand(*lead, -1)], dim=-1)
