"""A lag bias that is a product of queries and a table, made only where somebody looks at it."""

import torch
from jaxtyping import Float
from torch import Tensor

from whence.checks import require
from whence.lag.bias import LagBias
from whence.lag.lazy import LazyBias

PIECE = 256  # rows of a product


class QueryBias(LazyBias):
    """b(lag) of query i = scale * query_i . table[clip(lag)]: a band for each query (Shaw's keys).

    Axes [b, h, q, d] and [h|1, 2 * reach + 1, d]; beyond the reach the end rows go on for ever. A
    kernel that reads `query` and `table` never makes the band, which everyone else finds in `band`,
    `left` and `right` as in any LagBias, in the queries' dtype. Until then it is these very
    tensors: what is written into them changes the bias.
    """

    query: Float[Tensor, "b h q d"]
    table: Float[Tensor, "h_table lag d"]
    scale: float
    ends = True

    def __init__(
        self,
        query: Float[Tensor, "b h q d"],
        table: Float[Tensor, "..."],
        *,
        scale: float = 1.0,
    ) -> None:
        super().__init__()
        self.query, self.table, self.scale = query, table, scale
        require(
            query.ndim == 4,
            lambda: f"QueryBias needs queries [b, h, q, d], got shape {tuple(query.shape)}.",
        )
        h, d, shape = query.shape[1], query.shape[3], tuple(table.shape)
        require(
            len(shape) == 3 and shape[0] in (1, h) and shape[1] % 2 == 1 and shape[2] == d,
            lambda: (
                f"QueryBias needs a table [1 or {h}, lag, {d}] with an odd lag axis (lags "
                f"-reach..reach) for these queries, got shape {shape}."
            ),
        )

    def __repr__(self) -> str:
        shapes = f"query {tuple(self.query.shape)}, table {tuple(self.table.shape)}"
        return f"QueryBias({shapes}, scale={self.scale})"

    def make(self) -> LagBias:
        """The product."""
        return clipped_product(self.query, self.table, self.scale)

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the band."""
        return (*self.query.shape[:3], self.table.shape[1])

    @property
    def dtype(self) -> torch.dtype:
        """Of the band."""
        return self.query.dtype

    def tensors(self) -> list[Tensor]:
        """The factors."""
        return [self.query, self.table]

    def rows(self, start: int, stop: int) -> LagBias:
        """The bias of query rows start..stop, still not made."""
        if self.shape[2] == 1:
            return self
        return QueryBias(self.query[:, :, start:stop], self.table, scale=self.scale)


def clipped_product(query: Tensor, table: Tensor, scale: float) -> LagBias:
    """The same bias, made at once."""
    table = (table * scale).to(query.dtype)  # smaller than the product
    return LagBias.clipped(_product(query, table.transpose(-1, -2)))


def _product(q: Tensor, table: Tensor) -> Tensor:
    """q [b, h, n, d] @ table [h|1, d, lag], by pieces of rows where there are many.

    The table's gradient is a sum over all rows: as one product it would keep few processors busy.
    """
    n = q.shape[2]
    if torch.compiler.is_compiling() or n <= PIECE or n % PIECE:
        return q @ table
    pieces = q.reshape(*q.shape[:2], n // PIECE, PIECE, q.shape[-1])
    return (pieces @ table[:, None]).flatten(2, 3)
