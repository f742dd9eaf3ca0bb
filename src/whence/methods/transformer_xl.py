"""Transformer-XL (Dai et al., 2019): a key made from the sinusoid of the distance."""

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from whence.checks import at_least
from whence.lag import LagBias
from whence.method import Content, PositionMethod, longest_lag


class TransformerXL(PositionMethod):
    """logit_ij = ((q_i + u) . k_j + (q_i + v) . W_R r(i - j)) / sqrt(d), u and v per head.

    r(x) = [sin(x / 10000^(2m/D)) for all m, then the cosines], D = d_model, in the order of the
    released code and of XLNet; where sines and cosines alternate, permute the columns of W_R.
    r is read at the distance i - j = -lag, and r(-x) differs from r(x): W_R tells left from right.
    u is added to the queries (site heads); the other term is a band for each query, as long as the
    sequence. With `clamp` distances are clipped to it, which bounds the band.

        >>> TransformerXL(2, 4, 8).lag_keys(torch.arange(-2, 3)).shape
        torch.Size([2, 5, 4])
    """

    paper = "Dai et al. 2019, arXiv:1901.02860"
    formula = "(d_model + 2) * n_heads * d_head"
    lengths_only = True

    def __init__(
        self, n_heads: int, d_head: int, d_model: int, *, clamp: int | None = None
    ) -> None:
        super().__init__()
        at_least(1, n_heads=n_heads, d_head=d_head, d_model=d_model)
        if clamp is not None:
            at_least(0, clamp=clamp)
        self.n_heads, self.d_head, self.d_model, self.clamp = n_heads, d_head, d_model, clamp
        self.content_bias = nn.Parameter(torch.empty(n_heads, d_head))
        self.position_bias = nn.Parameter(torch.empty(n_heads, d_head))
        self.projection = nn.Linear(d_model, n_heads * d_head, bias=False)
        for parameter in self.parameters():
            nn.init.normal_(parameter, 0.0, 0.02)

    def query_heads(self, q: Tensor, q_pos: Int[Tensor, "*b q"]) -> Tensor:
        """q + u."""
        return q + self.content_bias[:, None].to(q.dtype)

    def score_term(
        self,
        q: Float[Tensor, "b h q d"],
        q_pos: Int[Tensor, " q"],
        k_pos: Int[Tensor, " k"],
        *,
        content: Content | None = None,
    ) -> LagBias:
        """(q + v) @ (W_R r).T / sqrt(d): one band for each query."""
        reach = longest_lag(q_pos, k_pos, at_most=self.clamp)
        keys = self.lag_keys(torch.arange(-reach, reach + 1, device=q.device)).to(q.dtype)
        query = q + self.position_bias[:, None].to(q.dtype)
        band = query @ keys.transpose(-1, -2) * self.d_head**-0.5
        return (
            LagBias.clipped(band)
            if self.clamp is not None and reach == self.clamp
            else LagBias(band)
        )

    def lag_keys(self, lag: Int[Tensor, " lag"]) -> Float[Tensor, "h lag d"]:
        """W_R r(-lag), the key of each lag."""
        weight = self.projection.weight
        table = sinusoid(-lag, self.d_model, torch.promote_types(weight.dtype, torch.float32))
        keys: Tensor = self.projection(table.to(weight.dtype))
        return keys.view(-1, self.n_heads, self.d_head).transpose(0, 1)


def sinusoid(
    place: Int[Tensor, " n"], width: int, dtype: torch.dtype
) -> Float[Tensor, "n {width}"]:
    """Sines of every frequency 10000^(-2m/width), then cosines; an odd width lacks the last one."""
    step = torch.arange(0, width, 2, device=place.device).to(dtype)
    angle = place[:, None].to(dtype) * 10000 ** (-step / width)
    return torch.cat([angle.sin(), angle.cos()], dim=-1)[:, :width]
