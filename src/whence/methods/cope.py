"""CoPE (Golovneva et al., 2024): a position is how many of the keys in between the query counts."""

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from whence.checks import at_least
from whence.lag import DenseBias
from whence.method import Content, PositionMethod, need


class Cope(PositionMethod):
    """b_ij = q_i . e[p_ij], p_ij = sum_{t=j..i} g_it, g_it = sigmoid(q_i . k_t / sqrt(d)).

    p is clipped to positions - 1, and e is interpolated between the whole numbers next to it. As
    in the published code the gates use the scaled product, the term q . e is not scaled, and the
    table e (zero at first) is shared by the heads; `per_head` gives each its own. Gates of keys
    after the query are zero. A method does not see the mask: padding at either end changes
    nothing, since the count runs from the key to the query, but a key masked *between* the two is
    still counted.

        >>> method, zero = Cope(1, 4, positions=8), torch.zeros(1, 1, 3, 4)  # each gate is 1/2
        >>> method.counted(zero, zero, torch.arange(3), torch.arange(3))[0, 0].tolist()
        [[0.5, 0.0, 0.0], [1.0, 0.5, 0.0], [1.5, 1.0, 0.5]]
    """

    paper = "Golovneva et al. 2024, arXiv:2405.18719"
    formula = "(n_heads if per_head else 1) * positions * d_head"
    causal_only = True

    def __init__(
        self, n_heads: int, d_head: int, *, positions: int = 64, per_head: bool = False
    ) -> None:
        super().__init__()
        at_least(1, n_heads=n_heads, d_head=d_head, positions=positions)
        self.n_heads, self.d_head = n_heads, d_head
        self.positions, self.per_head = positions, per_head
        self.table = nn.Parameter(torch.zeros(n_heads if per_head else 1, positions, d_head))

    def score_term(
        self,
        q: Float[Tensor, "b h q d"],
        q_pos: Int[Tensor, " q"],
        k_pos: Int[Tensor, " k"],
        *,
        content: Content | None = None,
    ) -> DenseBias:
        """Dense: every pair has a position of its own."""
        k = need(content, "k", self)
        k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)

        def matrix(q_pos: Tensor, k_pos: Tensor, q: Tensor) -> Tensor:
            return self.interpolated(q, self.counted(q, k, q_pos, k_pos))

        why = "CoPE counts positions by content"
        return DenseBias(matrix, q_pos, k_pos, why, per_query=(q,))

    def counted(
        self,
        q: Float[Tensor, "b h q d"],
        k: Float[Tensor, "b h k d"],
        q_pos: Int[Tensor, " q"],
        k_pos: Int[Tensor, " k"],
    ) -> Float[Tensor, "b h q k"]:
        """p: the gates summed from each key up to the query, clipped."""
        # A sum of many numbers below 1 stops growing at 256 in half precision.
        dtype = torch.promote_types(q.dtype, torch.float32)
        gate = torch.sigmoid((q @ k.transpose(-1, -2)).to(dtype) * self.d_head**-0.5)
        gate = gate.masked_fill(k_pos[None, :] > q_pos[:, None], 0.0)
        return gate.flip(-1).cumsum(dim=-1).flip(-1).clamp(max=self.positions - 1)

    def interpolated(
        self, q: Float[Tensor, "b h q d"], place: Float[Tensor, "b h q k"]
    ) -> Float[Tensor, "b h q k"]:
        """q . e at places between the rows of e: the products with all rows, looked up twice."""
        products = (q @ self.table.to(q.dtype).transpose(-1, -2)).to(place.dtype)
        below = place.detach().floor().long()
        above = (below + 1).clamp(max=self.positions - 1)
        share = place - below
        return products.gather(-1, below) * (1 - share) + products.gather(-1, above) * share
