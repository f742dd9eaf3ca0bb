"""Methods in units of other kinds, for the ablation of starts and units: what the defaults replace.

`tisa_paper`, `t5_paper` and `shaw_paper` train the numbers of the formulas themselves, `gain` times
each: with gain=1 as the papers do, with gain=30 as if they had 30 times the learning rate.
`kerple_paper` is KERPLE as it was before its numbers were scaled. Importing this module registers
them.
"""

from typing import Literal

import torch
from torch import Tensor, nn

from whence.lag import LagBias, LagValues, Line, QueryBias
from whence.method import PositionMethod, longest_lag
from whence.methods import METHODS
from whence.methods.kerple import Kerple
from whence.methods.shaw import Shaw
from whence.methods.t5 import T5
from whence.methods.tisa import Tisa


class TisaPaper(PositionMethod):
    """TISA with gain * (a, b, c) as its parameters."""

    formula = "3 * n_heads * kernels"
    logit_sized = True
    lengths_only = True

    def __init__(
        self,
        n_heads: int,
        *,
        kernels: int = 5,
        start: Literal["local", "released"] = "released",
        gain: float = 1.0,
        max_length: int = 512,
    ) -> None:
        super().__init__()
        self.n_heads, self.kernels, self.gain = n_heads, kernels, gain
        like = Tisa(n_heads, kernels=kernels, start=start, max_length=max_length)
        for name in like.former_names:
            self.register_parameter(name, nn.Parameter(getattr(like, name).detach() / gain))

    def curve(self, lag: Tensor) -> Tensor:
        """f at each lag."""
        a, b, c = (self.gain * p[..., None] for p in self.parameters())
        return (a * torch.exp(-b.abs() * (lag.to(c.dtype) - c).square())).sum(dim=1)

    def score_term(
        self, q: Tensor, q_pos: Tensor, k_pos: Tensor, *, content: object = None
    ) -> LagBias:
        """One band for all queries."""
        reach = longest_lag(q_pos, k_pos)
        device = next(self.parameters()).device
        return LagBias.from_function(self.curve, reach, left=Line(), right=Line(), device=device)


class T5Paper(T5):
    """T5 with gain * table as its parameter."""

    lengths_only = True

    def __init__(
        self,
        n_heads: int,
        *,
        start: Literal["local", "normal"] = "normal",
        gain: float = 1.0,
        causal: bool = False,
    ) -> None:
        super().__init__(n_heads, causal=causal, start=start)
        self.gain, self.raw_table = gain, nn.Parameter(self.table.detach() / gain)

    def score_term(
        self, q: Tensor, q_pos: Tensor, k_pos: Tensor, *, content: object = None
    ) -> LagBias:
        """A band to where the last buckets begin, and constant tails."""
        band = self.gain * nn.functional.embedding(self._buckets(), self.raw_table)
        return LagBias.clipped(band.T[None, :, None])


class ShawPaper(Shaw):
    """Shaw with A_K and A_V as its parameters."""

    lengths_only = True

    def __init__(
        self,
        n_heads: int,
        d_head: int,
        *,
        clip: int = 16,
        start: Literal["wide", "xavier"] = "xavier",
    ) -> None:
        super().__init__(n_heads, d_head, clip=clip, start=start)
        self.raw_key_table = nn.Parameter(self.key_table.detach())
        self.raw_value_table = nn.Parameter(self.value_table.detach())

    def score_term(
        self, q: Tensor, q_pos: Tensor, k_pos: Tensor, *, content: object = None
    ) -> LagBias:
        """q @ A_K.T / sqrt(d)."""
        return QueryBias(q, self.raw_key_table, scale=self.d_head**-0.5)

    def value_term(self, q_pos: Tensor, k_pos: Tensor) -> LagValues:
        """A_V."""
        return LagValues(self.raw_value_table)


class KerplePaper(Kerple):
    """KERPLE with what stands behind its two numbers as parameters."""

    lengths_only = True

    def __init__(self, n_heads: int) -> None:
        super().__init__(n_heads)
        self.held_p, self.held_a = (nn.Parameter(x.detach()) for x in (self.raw_p, self.raw_a))

    def curve(self, lag: Tensor) -> Tensor:
        """-p log(1 + a |lag|)."""
        p, a = (nn.functional.softplus(x)[:, None] for x in (self.held_p, self.held_a))
        return -p * torch.log1p(a * lag.abs().to(p.dtype))


VARIANTS: dict[str, type[PositionMethod]] = {
    "tisa_paper": TisaPaper,
    "t5_paper": T5Paper,
    "shaw_paper": ShawPaper,
    "kerple_paper": KerplePaper,
}
METHODS.update(VARIANTS)
