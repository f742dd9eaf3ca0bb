"""The forgetting gate (Lin et al., 2025): each token says how much is left of those before it."""

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from whence.checks import at_least, require
from whence.lag import DenseBias
from whence.method import Content, PositionMethod, longest_lag, need


class Forget(PositionMethod):
    """b_ij = sum_{l=j+1..i} log f_l = c_i - c_j, f_l = sigmoid(w_h . x_l + b_h), c = cumsum(log f).

    x is the layer's input at the keys, among which the queries must be: c_i is found there by the
    query's position. The gate starts near f = 1/2 (b = 0). Keys after the query have a bias of 0.
    The difference is a product of rank 2 but is left dense: c grows with the length, and as extra
    columns of half precision heads c_i and c_j would lose the digits in which they differ.
    Padding at either end changes nothing; a key masked between two others still forgets.

        >>> method = Forget(2, 8)
        >>> method.forgotten(torch.randn(1, 5, 8)).shape  # summed over tokens, for each head
        torch.Size([1, 2, 5])
    """

    paper = "Lin et al. 2025, arXiv:2503.02130"
    formula = "n_heads * (d_model + 1)"
    causal_only = True
    reads_key_inputs = True

    def __init__(self, n_heads: int, d_model: int) -> None:
        super().__init__()
        at_least(1, n_heads=n_heads, d_model=d_model)
        self.n_heads, self.d_model = n_heads, d_model
        self.gate = nn.Linear(d_model, n_heads)
        nn.init.normal_(self.gate.weight, 0.0, 0.02)
        nn.init.zeros_(self.gate.bias)

    def score_term(
        self,
        q: Float[Tensor, "b h q d"],
        q_pos: Int[Tensor, " q"],
        k_pos: Int[Tensor, " k"],
        *,
        content: Content | None = None,
    ) -> DenseBias:
        """Dense, from one cumulative sum over the keys."""
        x = need(content, "x_k", self)
        require(
            x.shape[1] == k_pos.shape[0],
            lambda: (
                f"forget needs the layer's input at every key: x_k has {x.shape[1]} rows for "
                f"{len(k_pos)} keys. Keep x_k beside the keys in the cache."
            ),
        )
        require(
            longest_lag(q_pos, k_pos) < k_pos.shape[0],
            lambda: (
                f"forget needs every query among the keys, got {len(q_pos)} queries that "
                f"{len(k_pos)} keys do not cover. It is for self-attention, not for "
                "cross-attention."
            ),
        )
        total = self.forgotten(x)
        # Beside the keys it is NaN: positions on a device are not read, so the check above can miss
        # a query there.
        place = (q_pos - k_pos[0]).clamp(-1, k_pos.shape[0])
        at_query = F.pad(total, (1, 1), value=torch.nan)[:, :, place + 1]

        def matrix(q_pos: Tensor, k_pos: Tensor, at_query: Tensor) -> Tensor:
            left = at_query[..., None] - total[:, :, None]
            return left.masked_fill(k_pos[None, :] > q_pos[:, None], 0.0)

        why = "the forgetting gate sums over content"
        return DenseBias(matrix, q_pos, k_pos, why, per_query=(at_query,))

    def forgotten(self, x: Float[Tensor, "b k d_model"]) -> Float[Tensor, "b h k"]:
        """c: the logarithms of the gates, summed from the first key on; float32 at least."""
        logits: Tensor = self.gate(x.to(self.gate.weight.dtype))
        dtype = torch.promote_types(logits.dtype, torch.float32)
        return F.logsigmoid(logits.to(dtype)).cumsum(dim=1).transpose(1, 2)
