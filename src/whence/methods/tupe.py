"""TUPE (Ke et al., 2021): positions look at positions, untied from content."""

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from whence.checks import at_least, require
from whence.lag import Bias, LagBias, LowRankBias
from whence.method import Content, PositionMethod
from whence.methods.fixed_length import within
from whence.methods.t5 import t5_bucket


class Tupe(PositionMethod):
    """logit_ij = (q_i . k_j + (LN(p_i) U_Q) . (LN(p_j) U_K)) / sqrt(2 d); the input gets nothing.

    p is a learned table of max_length rows, and LN carries the bias that U_Q and U_K lack. With
    `cls` the token at position 0 is untied: its row of the position part is one learned number a
    head, its column another, and where they meet the row's holds. With `relative` (TUPE-R) T5's
    buckets are added, always the bidirectional ones. As in the released code they are added after
    the reset, with two bins to spare for [CLS]: buckets // 2, which no lag falls into, for the row,
    and one more for the column.

    Nothing of this is dense: position 0's factors are set to zero, and two more columns carry its
    row and its column, less what the lag bias puts there. Later positions are an error.

        >>> method, pos = Tupe(2, 4, 8, 16), torch.arange(6)
        >>> bias = method.score_term(torch.zeros(1, 2, 6, 4), pos, pos)
        >>> type(bias).__name__, bias.query.shape  # four columns, and two for position 0
        ('LowRankBias', torch.Size([1, 2, 6, 6]))
    """

    paper = "Ke et al. 2021, arXiv:2006.15595"
    formula = (
        "(max_length + 2 + 2 * n_heads * d_head) * d_model"
        " + (2 * cls + relative * (buckets + cls)) * n_heads"
    )
    shared_by_layers = True
    anchored = True

    def __init__(
        self,
        n_heads: int,
        d_head: int,
        d_model: int,
        max_length: int,
        *,
        cls: bool = True,
        relative: bool = False,
        buckets: int = 32,
        max_distance: int = 128,
    ) -> None:
        super().__init__()
        at_least(1, n_heads=n_heads, d_head=d_head, d_model=d_model, max_length=max_length)
        require(
            buckets >= 4 and buckets % 2 == 0, f"buckets must be even, from 4 on, got {buckets}."
        )
        require(
            max_distance > buckets // 4,
            f"max_distance must be above {buckets // 4}, the buckets of one lag each, "
            f"got {max_distance}.",
        )
        self.n_heads, self.d_head, self.d_model = n_heads, d_head, d_model
        self.max_length, self.fixed_length = max_length, True
        self.cls, self.relative = cls, relative
        self.buckets, self.max_distance = buckets, max_distance
        self.table = nn.Parameter(torch.empty(max_length, d_model))
        self.norm = nn.LayerNorm(d_model)
        self.query = nn.Linear(d_model, n_heads * d_head, bias=False)
        self.key = nn.Linear(d_model, n_heads * d_head, bias=False)
        self.row = nn.Parameter(torch.empty(n_heads)) if cls else None
        self.column = nn.Parameter(torch.empty(n_heads)) if cls else None
        self.lags = nn.Parameter(torch.empty(buckets + cls, n_heads)) if relative else None
        for name, parameter in self.named_parameters():
            if not name.startswith("norm"):
                nn.init.normal_(parameter, 0.0, 0.02)

    def query_heads(self, q: Tensor, q_pos: Int[Tensor, "*b q"]) -> Tensor:
        """q / sqrt(2): content and position have half of the variance each."""
        return q * 2**-0.5

    def score_term(
        self,
        q: Float[Tensor, "b h q d"],
        q_pos: Int[Tensor, " q"],
        k_pos: Int[Tensor, " k"],
        *,
        content: Content | None = None,
    ) -> Bias:
        """The position product, as wider heads, and the lag bias of TUPE-R."""
        within(self.max_length, "tupe", q_pos, k_pos)
        query, key = self._factor(self.query, q_pos), self._factor(self.key, k_pos)
        if self.row is not None and self.column is not None:
            first_q, first_k = (pos.eq(0)[None, None, :, None] for pos in (q_pos, k_pos))
            row = self._cls_value(self.row, self.buckets // 2, k_pos)
            column = self._cls_value(self.column, self.buckets, -q_pos).masked_fill(first_q, 0.0)
            query, key = query.masked_fill(first_q, 0.0), key.masked_fill(first_k, 0.0)
            ones_q, ones_k = (first.to(row.dtype) for first in (first_q, first_k))
            query = torch.cat([query, ones_q.expand_as(column), column], dim=-1)
            key = torch.cat([key, row, ones_k.expand_as(row)], dim=-1)
        product = LowRankBias(query, key)
        if self.lags is None:
            return product
        lag = torch.arange(-self.max_distance, self.max_distance + 1, device=self.lags.device)
        return LagBias.clipped(self._lag_curve(self.lags, lag)[None, :, None]) + product

    def _factor(self, projection: nn.Linear, pos: Tensor) -> Float[Tensor, "1 h n d"]:
        """LN(p) U with half of the scale 1/sqrt(2 d): the other factor carries the other half."""
        place: Tensor = projection(self.norm(self.table[pos])) * (2 * self.d_head) ** -0.25
        return place.view(-1, self.n_heads, self.d_head).transpose(0, 1)[None]

    def _cls_value(self, value: Tensor, spare: int, lag: Tensor) -> Float[Tensor, "1 h n 1"]:
        """What [CLS] has at these lags, less the lag bias that will be added there."""
        total = value[:, None].expand(-1, lag.shape[0])
        if self.lags is not None:
            total = total + self.lags[spare][:, None] - self._lag_curve(self.lags, lag)
        return total[None, :, :, None]

    def _lag_curve(
        self, lags: Float[Tensor, "buckets h"], lag: Int[Tensor, " lag"]
    ) -> Float[Tensor, "h lag"]:
        return lags[t5_bucket(lag, self.buckets, self.max_distance, causal=False)].T
