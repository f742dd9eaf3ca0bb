"""FIRE (Li et al., 2024): a small network of the distance as a share of the query's position."""

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from whence.checks import at_least, finite, require
from whence.lag import DenseBias
from whence.method import Content, PositionMethod

TINY = 1e-6  # of the released code: psi(max(L, i)) may be zero, at i = 0 once L has shrunk to 0


class Fire(PositionMethod):
    """b_h(i, j) = MLP_h(psi(|i - j|) / psi(max(L, i))), psi(x) = log(|c| x + 1), i of the query.

    Positions count from 0. In a causal model i - j >= 0 and the ratio is at most 1, so that longer
    sequences are interpolated; in a bidirectional one the distance is |i - j|, both sides look
    alike, and keys far ahead have a ratio above 1. L = |multiplier| * threshold: up to position L
    the bias is a function of the lag. c and the multiplier are learned, one for all heads; the MLP
    has one hidden layer with ReLU.

        >>> method = Fire(2, threshold=4.0)
        >>> early, late = (method.matrix(torch.tensor([i]), torch.tensor([i - 2])) for i in (2, 9))
        >>> torch.equal(early, late)  # one lag, two positions of the query
        False
    """

    paper = "Li et al. 2024, arXiv:2310.04418"
    formula = "2 + 2 * hidden + (hidden + 1) * n_heads"
    logit_sized = True
    anchored = True

    def __init__(self, n_heads: int, *, hidden: int = 32, threshold: float = 512.0) -> None:
        super().__init__()
        at_least(1, n_heads=n_heads, hidden=hidden)
        finite(threshold=threshold)
        require(threshold > 0, f"threshold must be above 0 positions, got {threshold}.")
        self.n_heads, self.hidden, self.threshold = n_heads, hidden, threshold
        self.c = nn.Parameter(torch.tensor(0.1))
        self.multiplier = nn.Parameter(torch.tensor(1.0))
        self.mlp = nn.Sequential(nn.Linear(1, hidden), nn.ReLU(), nn.Linear(hidden, n_heads))

    def score_term(
        self,
        q: Float[Tensor, "b h q d"],
        q_pos: Int[Tensor, " q"],
        k_pos: Int[Tensor, " k"],
        *,
        content: Content | None = None,
    ) -> DenseBias:
        """Dense, and the hidden layer with it: [q, k, hidden] for the rows asked for."""
        why = "FIRE divides the lag by the query's position"
        return DenseBias(self.matrix, q_pos, k_pos, why)

    def matrix(
        self, q_pos: Int[Tensor, " q"], k_pos: Int[Tensor, " k"]
    ) -> Float[Tensor, "1 h q k"]:
        """The bias of these queries and keys."""
        # bfloat16 cannot tell 257 from 256: the ratio is formed in float32 at least.
        dtype = torch.promote_types(self.c.dtype, torch.float32)
        c, threshold = self.c.abs().to(dtype), self.multiplier.abs().to(dtype) * self.threshold
        distance = (q_pos[:, None] - k_pos[None, :]).abs().to(dtype)
        span = torch.maximum(q_pos.to(dtype), threshold)[:, None]
        ratio = torch.log1p(c * distance) / (torch.log1p(c * span) + TINY)
        bias: Tensor = self.mlp(ratio[..., None].to(self.c.dtype))
        return bias.permute(2, 0, 1)[None]
