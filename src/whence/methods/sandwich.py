"""Sandwich (Chi et al., 2023): the inner product of two sinusoidal embeddings, as a bias."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from whence.checks import at_least, require
from whence.lag import LagBias
from whence.method import Content, PositionMethod, longest_lag


class Sandwich(PositionMethod):
    """b_h(lag) = sum_i cos(lag / 10000^(2i/d)) / (8h/H), i = 1..d/2, heads h = 1..H. No parameters.

    d is `dimensions`, a free number, not the head size (128 is recalled from the paper, unchecked).
    8h/H, the compression ratio, divides the sum, so that head H is the flattest. Taken here: the
    sum as the formula has it, from i = 1, and without the constant d/2 that some code subtracts,
    which no softmax sees.

        >>> curve = Sandwich(2, dimensions=4).curve(torch.arange(-3, 4))
        >>> torch.equal(curve, curve.flip(-1))  # symmetric in the lag
        True
    """

    paper = "Chi et al. 2023, arXiv:2212.10356"
    lengths_only = True

    def __init__(self, n_heads: int, *, dimensions: int = 128) -> None:
        super().__init__()
        at_least(1, n_heads=n_heads)
        at_least(2, dimensions=dimensions)
        require(dimensions % 2 == 0, f"dimensions must be even, a cosine a pair, got {dimensions}.")
        self.n_heads, self.dimensions = n_heads, dimensions

    def curve(
        self, lag: Int[Tensor, " lag"], dtype: torch.dtype = torch.float32
    ) -> Float[Tensor, "h lag"]:
        """b at each lag. It has no state, so nothing is rounded when a model is cast."""
        pair, head = (
            torch.arange(1, n + 1, device=lag.device, dtype=dtype)
            for n in (self.dimensions // 2, self.n_heads)
        )
        frequency = 10000.0 ** (-2 * pair / self.dimensions)
        similarity = torch.cos(lag.to(dtype)[:, None] * frequency).sum(dim=-1)
        return similarity / (8 * head / self.n_heads)[:, None]

    def score_term(
        self,
        q: Float[Tensor, "b h q d"],
        q_pos: Int[Tensor, " q"],
        k_pos: Int[Tensor, " k"],
        *,
        content: Content | None = None,
    ) -> LagBias:
        """One band for all queries, as long as the sequence."""
        # Half precision cannot tell 2049 from 2048: the angles are float32's at least.
        dtype = torch.promote_types(q.dtype, torch.float32)
        reach = longest_lag(q_pos, k_pos)
        return LagBias.from_function(lambda lag: self.curve(lag, dtype), reach, device=q.device)
