"""Relative position representations (Shaw et al., 2018): a vector a lag, for keys and values."""

from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from whence.checks import at_least, one_of, require
from whence.lag import LagBias, LagValues, QueryBias
from whence.method import Content, PositionMethod
from whence.units import VECTOR_GAIN, Scaled

STARTS = ("wide", "xavier", "zero")


class Shaw(PositionMethod):
    """e_ij = q_i . (k_j + A_K[c]) / sqrt(d);  z_i = sum_j alpha_ij (v_j + A_V[c]), c = clip(j - i).

    Lags are clipped to [-left, right], both `clip` unless given. Tables are shared by the heads, or
    one each (`per_head`). The keys' term needs only q @ A_K.T, a band of left + right + 1 numbers
    a query.

    `key_table` and `value_table` are A_K and A_V, or None: read them, or assign to them. What is
    trained is a VECTOR_GAIN-th of them (whence.units). start="wide" draws A_K from N(0, 1), so that
    queries tell lags apart from the first step on, and A_V as Xavier has it; "xavier" draws both
    so, as released; "zero" is for a model that is trained already.

        >>> method = Shaw(2, 4, clip=3)
        >>> method.n_parameters(), method.sites()  # 7 lags of 4 numbers, for keys and for values
        (56, ('score', 'value'))
    """

    paper = "Shaw et al. 2018, arXiv:1803.02155"
    formula = "(keys + values) * (n_heads if per_head else 1) * (left + right + 1) * d_head"
    lengths_only = True

    key_table, value_table = Scaled(VECTOR_GAIN), Scaled(VECTOR_GAIN)

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
        start: Literal["wide", "xavier", "zero"] = "wide",
    ) -> None:
        super().__init__()
        one_of("start", start, STARTS)
        left, right = clip if left is None else left, clip if right is None else right
        at_least(1, n_heads=n_heads, d_head=d_head)
        at_least(0, clip=clip, left=left, right=right)
        require(keys or values, "shaw needs keys=true or values=true; for neither use 'nope'.")
        self.n_heads, self.d_head, self.per_head = n_heads, d_head, per_head
        self.left, self.right, self.keys, self.values = left, right, keys, values
        self.start = start
        shape = (n_heads if per_head else 1, left + right + 1, d_head)
        self.raw_key_table = nn.Parameter(torch.empty(shape)) if keys else None
        self.raw_value_table = nn.Parameter(torch.empty(shape)) if values else None
        tables = {"key_table": keys, "value_table": values}
        self.former_names = {name: f"raw_{name}" for name, there in tables.items() if there}
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """As `start` says."""
        for name, parameter in self.former_names.items():
            table = torch.zeros(self.get_parameter(parameter).shape)
            if self.start == "wide" and name == "key_table":
                table.normal_()
            elif self.start != "zero":
                for matrix in table:  # as one tensor, the fans would be multiplied by d_head
                    nn.init.xavier_uniform_(matrix)
            setattr(self, name, table)

    def score_term(
        self,
        q: Float[Tensor, "b h q d"],
        q_pos: Int[Tensor, " q"],
        k_pos: Int[Tensor, " k"],
        *,
        content: Content | None = None,
    ) -> LagBias | None:
        """q @ A_K.T / sqrt(d): one band for each query; clipping makes its ends the tails."""
        if self.raw_key_table is None:
            return None
        table, scale = self._symmetric(self.raw_key_table), VECTOR_GAIN * self.d_head**-0.5
        return QueryBias(q, table, scale=scale)

    def value_term(self, q_pos: Int[Tensor, " q"], k_pos: Int[Tensor, " k"]) -> LagValues | None:
        """A_V, its end rows for every lag beyond the clip."""
        if self.raw_value_table is None:
            return None
        return LagValues(self._symmetric(VECTOR_GAIN * self.raw_value_table))

    def _symmetric(self, table: Float[Tensor, "h lag d"]) -> Float[Tensor, "h lags d"]:
        if self.left == self.right:
            return table
        reach = max(self.left, self.right)
        lag = torch.arange(-reach, reach + 1, device=table.device)
        return table[:, lag.clamp(-self.left, self.right) + self.left]
