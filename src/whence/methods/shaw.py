"""Relative position representations (Shaw et al., 2018): a vector a lag, for keys and values."""

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from whence.checks import at_least, require
from whence.lag import LagBias, LagValues, QueryBias
from whence.lag.query import clipped_product
from whence.method import Content, PositionMethod


class Shaw(PositionMethod):
    """e_ij = q_i . (k_j + A_K[c]) / sqrt(d);  z_i = sum_j alpha_ij (v_j + A_V[c]), c = clip(j - i).

    Lags are clipped to [-left, right], both `clip` unless given. Tables are shared by the heads, or
    one each (`per_head`). The keys' term needs only q @ A_K.T, a band of left + right + 1 numbers
    a query.
    """

    paper = "Shaw et al. 2018, arXiv:1803.02155"
    formula = "(keys + values) * (n_heads if per_head else 1) * (left + right + 1) * d_head"
    lengths_only = True

    def __init__(
        self,
        n_heads: int,
        d_head: int,
        *,
        clip: int = 16,
        left: int | None = None,
        right: int | None = None,
        keys: bool = True,
        values: bool = True,
        per_head: bool = False,
    ) -> None:
        super().__init__()
        left, right = clip if left is None else left, clip if right is None else right
        at_least(1, n_heads=n_heads, d_head=d_head)
        at_least(0, clip=clip, left=left, right=right)
        require(keys or values, "shaw needs keys=true or values=true; for neither use 'nope'.")
        self.n_heads, self.d_head, self.per_head = n_heads, d_head, per_head
        self.left, self.right, self.keys, self.values = left, right, keys, values
        shape = (n_heads if per_head else 1, left + right + 1, d_head)
        self.key_table = nn.Parameter(torch.empty(shape)) if keys else None
        self.value_table = nn.Parameter(torch.empty(shape)) if values else None
        for table in self.parameters():
            for matrix in table.data:  # as one tensor, the fans would be multiplied by d_head
                nn.init.xavier_uniform_(matrix)

    def score_term(
        self,
        q: Float[Tensor, "b h q d"],
        q_pos: Int[Tensor, " q"],
        k_pos: Int[Tensor, " k"],
        *,
        content: Content | None = None,
    ) -> LagBias | None:
        """q @ A_K.T / sqrt(d): one band for each query; clipping makes its ends the tails."""
        if self.key_table is None:
            return None
        table, scale = self._symmetric(self.key_table), self.d_head**-0.5
        if torch.compiler.is_compiling():  # a lazy one breaks the graph of some versions
            return clipped_product(q, table, scale)
        return QueryBias(q, table, scale=scale)

    def value_term(self, q_pos: Int[Tensor, " q"], k_pos: Int[Tensor, " k"]) -> LagValues | None:
        """A_V, its end rows for every lag beyond the clip."""
        return None if self.value_table is None else LagValues(self._symmetric(self.value_table))

    def _symmetric(self, table: Float[Tensor, "h lag d"]) -> Float[Tensor, "h lags d"]:
        if self.left == self.right:
            return table
        reach = max(self.left, self.right)
        lag = torch.arange(-reach, reach + 1, device=table.device)
        return table[:, lag.clamp(-self.left, self.right) + self.left]
