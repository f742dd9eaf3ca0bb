"""A content-conditioned band (Inkling, 2026): each query mixes learned profiles of the distance."""

from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from whence.checks import at_least, one_of
from whence.lag import LagBias, Line
from whence.method import Content, PositionMethod, longest_lag, need
from whence.methods.starts import widths

STARTS = ("local", "normal", "zero")


class ContentBand(PositionMethod):
    """b_ij = r_i . B[:, i - j] for 0 <= i - j < width, else 0;  r_i = W_r x_i in R^rank per head.

    x is the layer's input at the queries. B (`profiles`) is shared by the heads; their mixes
    differ. Keys ahead of the query get 0, as in the causal model it was made for; with `symmetric`
    they get r_i . B[:, j - i]. Inkling also scales q and this bias by a function of i on long
    inputs: not here.

    With start="local" the profiles begin as Gaussians of the distance at many scales, of which W_r,
    N(0, 0.1), mixes some for each query. "normal" draws both from N(0, 0.02). With "zero" the
    profiles are 0 and W_r as with "local", so that a model to which it is added does not change.

        >>> method, pos = ContentBand(2, 8, rank=4, width=3), torch.arange(5)
        >>> content = Content(x_q=torch.randn(1, 5, 8))
        >>> method.score_term(torch.zeros(1, 2, 5, 4), pos, pos, content=content).reach  # width - 1
        2
    """

    paper = "Inkling 2026 (transformers: InklingRelativeLogits)"
    formula = "n_heads * rank * d_model + rank * width"
    lengths_only = True

    def __init__(
        self,
        n_heads: int,
        d_model: int,
        *,
        rank: int = 16,
        width: int = 1024,
        symmetric: bool = False,
        start: Literal["local", "normal", "zero"] = "local",
    ) -> None:
        super().__init__()
        one_of("start", start, STARTS)
        at_least(1, n_heads=n_heads, d_model=d_model, rank=rank, width=width)
        self.n_heads, self.d_model, self.rank = n_heads, d_model, rank
        self.width, self.symmetric, self.start = width, symmetric, start
        self.mix = nn.Linear(d_model, n_heads * rank, bias=False)
        self.profiles = nn.Parameter(torch.empty(rank, width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """As `start` says."""
        nn.init.normal_(self.mix.weight, 0.0, 0.02 if self.start == "normal" else 0.1)
        if self.start == "normal":
            nn.init.normal_(self.profiles, 0.0, 0.02)
            return
        distance = torch.arange(float(self.width)) / widths(self.rank, self.width)[:, None]
        with torch.no_grad():
            self.profiles.copy_((self.start == "local") * torch.exp(-0.5 * distance.square()))

    def score_term(
        self,
        q: Float[Tensor, "b h q d"],
        q_pos: Int[Tensor, " q"],
        k_pos: Int[Tensor, " k"],
        *,
        content: Content | None = None,
    ) -> LagBias:
        """A band for each query, zero beyond the width; a shorter one has no tails."""
        x = need(content, "x_q", self)
        reach = longest_lag(q_pos, k_pos, at_most=self.width - 1)
        behind = self.profiles[:, : reach + 1].flip(-1)  # lags -reach..0
        if self.symmetric:
            profiles = torch.cat([behind, self.profiles[:, 1 : reach + 1]], dim=-1)
        else:
            profiles = F.pad(behind, (0, reach))
        mix = self.mix(x.to(self.mix.weight.dtype)).to(x.dtype)
        mix = mix.view(*mix.shape[:2], self.n_heads, self.rank).transpose(1, 2)
        band = mix @ profiles.to(mix.dtype)
        return LagBias(band, Line(), Line()) if reach == self.width - 1 else LagBias(band)
