"""TISAv2 (Wennberg, 2023): the logarithm of a learned sum of sigmoids, on a fixed slope."""

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from whence.checks import at_least, finite, require
from whence.lag import LagBias
from whence.method import Content, PositionMethod, longest_lag

TINY = 1e-8  # keeps the logarithm finite; also the weight left at the edge of the field of view


class Tisa2(PositionMethod):
    """b(lag) = log(sum_s |a_s| sigmoid(sgn(a_s) (lag - c_s) / w_s) + |beta| + 1e-8) - m_h |lag|.

    a, c, w are `amplitude`, `offset` and `width`, each [heads, kernels]; beta is `floor`, one a
    head. The sign of a_s says on which side of c_s its step is. The slopes m_h = -ln(1e-8) /
    (fov_h / 2) are fixed: at the edge of the head's field of view the weight has fallen by 1e-8.
    The fields go geometrically from `shortest` (head 0) to `longest`; the released code has no
    default for the two, 32 and 2048 are ours. The last `agnostic` heads see no position: no
    parameters, a bias of 0.

        >>> method = Tisa2(3, kernels=3, agnostic=1)  # head 2 sees no position
        >>> method.n_parameters(), method.curve(torch.tensor([5]))[2].tolist()
        (20, [0.0])
    """

    paper = "Wennberg 2023 (TISAv2), after Wennberg & Henter 2021, arXiv:2106.01950"
    formula = "(n_heads - agnostic) * (3 * kernels + 1)"
    logit_sized = True
    lengths_only = True

    slope: Tensor

    def __init__(
        self,
        n_heads: int,
        *,
        kernels: int = 5,
        shortest: float = 32.0,
        longest: float = 2048.0,
        agnostic: int = 0,
    ) -> None:
        super().__init__()
        at_least(1, n_heads=n_heads, kernels=kernels)
        at_least(0, agnostic=agnostic)
        finite(shortest=shortest, longest=longest)
        require(
            agnostic < n_heads,
            f"agnostic must be below n_heads = {n_heads}, got {agnostic}. "
            "For heads without any position use 'nope'.",
        )
        require(
            0 < shortest <= longest,
            f"fields of view need 0 < shortest <= longest, got {shortest} and {longest}.",
        )
        self.n_heads, self.kernels, self.agnostic = n_heads, kernels, agnostic
        self.shortest, self.longest = shortest, longest
        aware = n_heads - agnostic
        self.amplitude = nn.Parameter(torch.empty(aware, kernels))
        self.offset = nn.Parameter(torch.empty(aware, kernels))
        self.width = nn.Parameter(torch.empty(aware, kernels))
        self.floor = nn.Parameter(torch.empty(aware))
        self.register_buffer("slope", torch.empty(aware), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """As released: a ~ N(0, 0.01), c ~ N(0, 15), w = 5, beta = 1; and the slopes."""
        nn.init.normal_(self.amplitude, 0.0, 0.01)
        nn.init.normal_(self.offset, 0.0, 15.0)
        nn.init.constant_(self.width, 5.0)
        nn.init.ones_(self.floor)
        aware = len(self.slope)
        ratio = (self.longest / self.shortest) ** (1 / max(aware - 1, 1))
        slopes = [-math.log(TINY) / (self.shortest * ratio**h / 2) for h in range(aware)]
        self.slope.copy_(torch.tensor(slopes, dtype=torch.float64))

    def curve(self, lag: Int[Tensor, " lag"]) -> Float[Tensor, "h lag"]:
        """b at each lag."""
        # In half precision 1e-8 is zero, and the logarithm of nothing else would be minus infinity.
        dtype = torch.promote_types(self.offset.dtype, torch.float32)
        place = lag.to(dtype)
        # Not abs() and sign(): both have gradient 0 at a = 0, where a kernel could never leave.
        side = 1.0 - 2.0 * (self.amplitude < 0).to(dtype)
        step = torch.sigmoid(
            side[..., None] * (place - self.offset[..., None]) / self.width[..., None]
        )
        mass = ((self.amplitude * side)[..., None] * step).sum(dim=1) + self.floor.abs()[:, None]
        bias = torch.log(mass + TINY) - self.slope[:, None] * place.abs()
        return nn.functional.pad(bias, (0, 0, 0, self.agnostic))

    def score_term(
        self,
        q: Float[Tensor, "b h q d"],
        q_pos: Int[Tensor, " q"],
        k_pos: Int[Tensor, " k"],
        *,
        content: Content | None = None,
    ) -> LagBias:
        """One band for all queries, as long as the sequence."""
        reach = longest_lag(q_pos, k_pos)
        return LagBias.from_function(self.curve, reach, device=self.offset.device)
