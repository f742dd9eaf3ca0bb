"""KERPLE (Chi et al., 2022): a learned logarithm, or power, of the distance."""

from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from whence.checks import at_least, one_of
from whence.lag import LagBias
from whence.method import Content, PositionMethod, longest_lag
from whence.units import Scaled, unset_numbers

SMALLEST = 1e-2  # the released code clamps p and a from below here; we only start there


class Kerple(PositionMethod):
    """log: b_h(lag) = -p_h log(1 + a_h |lag|).  power: b_h(lag) = -a_h |lag|^p_h, 0 < p_h < 2.

    p and a must stay positive, and a power at most 2, or the kernel is not conditionally positive
    definite. The released code clamps them, which stops their gradient; here a = softplus(raw_a),
    and p = softplus(raw_p) for log, 2 sigmoid(raw_p) for power. `p` and `a` are the numbers of the
    formula; they start at p ~ U(0.01, 1.99) and a ~ U(0.01, 1). What is trained are raw_p / GAIN
    and raw_a / GAIN (whence.units).

        >>> curve = Kerple(2).curve(torch.arange(0, 4))
        >>> bool((curve.diff() < 0).all())  # it falls with the distance
        True
    """

    paper = "Chi et al. 2022, arXiv:2205.09921"
    formula = "2 * n_heads"
    logit_sized = True
    lengths_only = True
    former_names = {"raw_p": "held_p", "raw_a": "held_a"}  # noqa: RUF012

    raw_p, raw_a = Scaled(parameter="held_p"), Scaled(parameter="held_a")

    def __init__(self, n_heads: int, *, kind: Literal["log", "power"] = "log") -> None:
        super().__init__()
        at_least(1, n_heads=n_heads)
        one_of("kind of kerple", kind, ("log", "power"))
        self.n_heads, self.kind = n_heads, kind
        self.held_p, self.held_a = unset_numbers(n_heads), unset_numbers(n_heads)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw p and a, and put what stands behind them into the parameters."""
        self.p = torch.empty(self.n_heads).uniform_(SMALLEST, 2 - SMALLEST)
        self.a = torch.empty(self.n_heads).uniform_(SMALLEST, 1)

    @property
    def p(self) -> Float[Tensor, " h"]:
        """The factor of the logarithm, or the power."""
        return 2 * torch.sigmoid(self.raw_p) if self.kind == "power" else F.softplus(self.raw_p)

    @p.setter
    def p(self, value: Tensor) -> None:
        self.raw_p = (value / 2).logit() if self.kind == "power" else value.expm1().log()

    @property
    def a(self) -> Float[Tensor, " h"]:
        """The scale of the distance, or the factor of the power."""
        return F.softplus(self.raw_a)

    @a.setter
    def a(self, value: Tensor) -> None:
        self.raw_a = value.expm1().log()

    def curve(self, lag: Int[Tensor, " lag"]) -> Float[Tensor, "h lag"]:
        """b at each lag."""
        p, a = self.p[:, None], self.a[:, None]
        distance = lag.abs().to(p.dtype)
        if self.kind == "log":
            return -p * torch.log1p(a * distance)
        # The derivative of 0^p by p is 0 log 0: keep the zero out of the power, put it in after.
        powers = torch.where(distance > 0, distance.clamp(min=1).pow(p), 0.0)
        return -a * powers

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
        return LagBias.from_function(self.curve, reach, device=self.held_p.device)
