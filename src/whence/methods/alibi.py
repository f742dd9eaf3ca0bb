"""ALiBi (Press et al., 2022): a penalty that grows linearly with distance."""

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from whence.checks import at_least
from whence.lag import LINE, CurveBias, LagBias
from whence.method import Content, PositionMethod


class Alibi(PositionMethod):
    """b_h(lag) = -m_h |lag|. Extrapolates by construction.

    m_h = 2^(-8h/H) for a power of two H; otherwise the slopes of the next smaller power of two,
    then every other one of the next larger. Slopes are fixed, or start there and are learned.

        >>> Alibi(8).slope.tolist()[:4]
        [0.5, 0.25, 0.125, 0.0625]
    """

    paper = "Press et al. 2022, arXiv:2108.12409"
    formula = "learned * n_heads"
    lengths_only = True

    def __init__(self, n_heads: int, *, learned: bool = False) -> None:
        super().__init__()
        at_least(1, n_heads=n_heads)
        self.n_heads, self.learned = n_heads, learned
        slope = alibi_slopes(n_heads)
        if learned:
            self.slope = nn.Parameter(slope)
        else:
            self.register_buffer("slope", slope, persistent=False)

    def score_term(
        self,
        q: Float[Tensor, "b h q d"],
        q_pos: Int[Tensor, " q"],
        k_pos: Int[Tensor, " k"],
        *,
        content: Content | None = None,
    ) -> LagBias:
        """No table at all: reach 0."""
        return CurveBias(LINE, 0, self.slope)


def alibi_slopes(n_heads: int) -> Float[Tensor, " h"]:
    """The published slopes, steepest head first (the paper's heads h = 1..H)."""
    power = 2 ** math.floor(math.log2(n_heads))
    slopes = [2.0 ** (-8 * h / power) for h in range(1, power + 1)]
    between = [2.0 ** (-4 * h / power) for h in range(1, 2 * (n_heads - power), 2)]
    return torch.tensor(slopes + between)
