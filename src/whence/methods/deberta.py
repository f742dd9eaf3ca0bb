"""DeBERTa (He et al., 2021): content and relative positions look at each other."""

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from whence.checks import at_least, require
from whence.lag import Bias, DenseBias, LagBias
from whence.method import Content, PositionMethod, longest_lag, need


class Deberta(PositionMethod):
    """logit_ij = (q_i . k_j + q_i . K[s(i - j)] + k_j . Q[s(i - j)]) / sqrt(3 d).

    K = T W_K + b_K and Q = T W_Q + b_Q per head, from one table T of 2 * span vectors [d_model].
    s(x) = clip(bucket(x) + span, 0, 2 span - 1): x itself with span = max_distance, or, with
    `position_buckets` (v2, v3), logarithmic buckets with span = position_buckets. The two sides are
    not alike: x <= -span has a row of its own, x >= span shares that of span - 1.
    `c2p` is the second term (a band for each query), `p2c` the third (dense, as it looks at the
    key); without one of them the scale is 1/sqrt(2 d).

    The paper writes Q[s(j - i)]; the released models, and so this class, read both tables at
    s(i - j). They also share T between the layers and, in v2 and v3, normalise it and take W_Q and
    W_K from the content: copy the normalised table and those weights here. v1's W_K has no bias:
    leave b_K at zero.

        >>> method = Deberta(2, 4, 8, position_buckets=0, max_distance=2)
        >>> method.slot(torch.arange(-3, 4)).tolist()  # the row of each i - j
        [0, 0, 1, 2, 3, 3, 3]
    """

    paper = "He et al. 2021, arXiv:2006.03654"
    formula = "2 * span * d_model + (c2p + p2c) * (d_model + 1) * n_heads * d_head"

    def __init__(
        self,
        n_heads: int,
        d_head: int,
        d_model: int,
        *,
        c2p: bool = True,
        p2c: bool = True,
        max_distance: int = 512,
        position_buckets: int = 256,
    ) -> None:
        super().__init__()
        at_least(1, n_heads=n_heads, d_head=d_head, d_model=d_model, max_distance=max_distance)
        at_least(0, position_buckets=position_buckets)
        require(c2p or p2c, "deberta needs c2p=true or p2c=true; for neither use 'nope'.")
        if position_buckets:
            require(
                position_buckets % 2 == 0 and position_buckets >= 4,
                f"position_buckets must be even and at least 4, got {position_buckets}; "
                "0 gives every distance a row of its own.",
            )
            require(
                max_distance > position_buckets // 2 + 1,
                f"max_distance must be above {position_buckets // 2 + 1} for position_buckets="
                f"{position_buckets}, got {max_distance}. Raise it, or take fewer buckets.",
            )
        self.n_heads, self.d_head, self.d_model = n_heads, d_head, d_model
        self.c2p, self.p2c = c2p, p2c
        self.max_distance, self.position_buckets = max_distance, position_buckets
        self.span = position_buckets or max_distance
        self.table = nn.Parameter(torch.empty(2 * self.span, d_model))
        self.key = nn.Linear(d_model, n_heads * d_head) if c2p else None
        self.query = nn.Linear(d_model, n_heads * d_head) if p2c else None
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            else:
                nn.init.normal_(parameter, 0.0, 0.02)

    def query_heads(self, q: Tensor, q_pos: Int[Tensor, "*b q"]) -> Tensor:
        """q / sqrt(number of terms), so that the content product has the common scale."""
        return q * self._share

    def score_term(
        self,
        q: Float[Tensor, "b h q d"],
        q_pos: Int[Tensor, " q"],
        k_pos: Int[Tensor, " k"],
        *,
        content: Content | None = None,
    ) -> Bias:
        """The band of content to position, and the dense term of position to content."""
        terms: list[Bias] = []
        if self.key is not None:
            terms.append(self._content_to_position(q, q_pos, k_pos))
        if self.query is not None:
            terms.append(self._position_to_content(need(content, "k", self), q_pos, k_pos))
        return terms[0] if len(terms) == 1 else terms[0] + terms[1]

    def slot(self, distance: Int[Tensor, "*n"]) -> Int[Tensor, "*n"]:
        """s(distance): the row of the table for each distance i - j = -lag."""
        if self.position_buckets:
            distance = log_bucket(distance, self.position_buckets, self.max_distance)
        return (distance + self.span).clamp(0, 2 * self.span - 1)

    @property
    def _share(self) -> float:
        return math.sqrt(1 / (1 + self.c2p + self.p2c))

    def _content_to_position(self, q: Tensor, q_pos: Tensor, k_pos: Tensor) -> LagBias:
        assert self.key is not None
        # From max_distance on, both sides have saturated.
        reach = longest_lag(q_pos, k_pos, at_most=self.max_distance)
        slot = self.slot(-torch.arange(-reach, reach + 1, device=q.device))
        keys = self._heads(self.key)[:, slot].to(q.dtype)
        band = q @ keys.transpose(-1, -2) * (self.d_head**-0.5 * self._share)
        return LagBias.clipped(band) if reach == self.max_distance else LagBias(band)

    def _position_to_content(self, k: Tensor, q_pos: Tensor, k_pos: Tensor) -> DenseBias:
        assert self.query is not None
        queries = self._heads(self.query).to(k.dtype)
        k = k.repeat_interleave(self.n_heads // k.shape[1], dim=1)
        by_slot = k @ queries.transpose(-1, -2) * (self.d_head**-0.5 * self._share)

        def function(q_pos: Tensor, k_pos: Tensor) -> Tensor:
            slot = self.slot(q_pos[:, None] - k_pos)
            matrix: Tensor = by_slot[:, :, torch.arange(k_pos.shape[0], device=slot.device), slot]
            return matrix

        return DenseBias(function, q_pos, k_pos, "p2c looks at the content of the key at each lag")

    def _heads(self, projection: nn.Linear) -> Float[Tensor, "h slot d"]:
        rows: Tensor = projection(self.table)
        return rows.view(2 * self.span, self.n_heads, self.d_head).transpose(0, 1)


def log_bucket(distance: Int[Tensor, "*n"], buckets: int, max_distance: int) -> Int[Tensor, "*n"]:
    """Distances up to buckets / 2 as they are, then logarithmic: buckets - 1 at max_distance - 1.

    It is odd, and goes on to grow beyond; `slot` clips it. The logarithms are float32's, as in the
    released code: in any other precision boundaries move.
    """
    exact = buckets // 2
    far = distance.abs().clamp(min=exact).float() / exact
    whole = torch.tensor((max_distance - 1) / exact, dtype=torch.float32).log()
    steps = (far.log() / whole * (exact - 1)).ceil().long() + exact
    return torch.where(distance.abs() <= exact, distance, steps * distance.sign())
