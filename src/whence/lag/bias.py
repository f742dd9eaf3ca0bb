"""The lag bias: a term of the logit that depends on lag = key - query, as a band and two tails."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from whence.checks import (
    at_least,
    broadcasts,
    is_symbolic,
    larger,
    require,
    smaller,
    surely_equal,
)
from whence.lag.line import Line
from whence.lag.terms import Bias, Terms


@dataclass(eq=False)  # not frozen: PyTorch 2.11's compiler cannot trace subclasses of such a class
class LagBias(Bias):
    """b(lag) = band[lag + reach] for |lag| <= reach; left/right const + slope * |lag| beyond it.

    lag = key position - query position. Axes are [b|1, h|1, q|1, 2 * reach + 1]; a q axis of 1 is
    one band for all queries (TISA, T5), a q axis of n is a band for each query (Shaw's keys).
    Without tails (both None) a lag beyond the reach is an error, not a guess.

    `extent`, one whole number a head *on the band's device*, promises that beyond it the band
    already equals its tail in its own dtype, bit for bit, so a kernel may skip the look-up there.

        >>> bias = LagBias.from_function(lambda lag: -0.1 * lag.abs()[None].float(), reach=2)
        >>> bias.reach
        2
    """

    band: Float[Tensor, "b h q lag"]
    left: Line | None = None
    right: Line | None = None
    extent: Int[Tensor, " h"] | None = None
    ends: bool = False  # the tails are the band's own end columns (`clipped`): kernels need not ask

    def __post_init__(self) -> None:
        shape = tuple(self.band.shape)
        require(
            len(shape) == 4,
            lambda: (
                f"LagBias.band needs 4 axes [b|1, h, q|1, lag], got shape {shape}. "
                "Build it with LagBias.from_function."
            ),
        )
        require(
            shape[-1] % 2 == 1,
            lambda: (
                f"LagBias.band needs an odd last axis (lags -reach..reach), got {shape[-1]} "
                f"in shape {shape}. Build it with LagBias.from_function."
            ),
        )
        require(
            (self.left is None) == (self.right is None),
            "LagBias needs both tails or neither: give left=Line() for a tail of zero.",
        )

    @staticmethod
    def from_function(
        curve: Callable[[Int[Tensor, " lag"]], Float[Tensor, "h lag"]],
        reach: int,
        *,
        left: Line | None = None,
        right: Line | None = None,
        extent: Int[Tensor, " h"] | None = None,
        device: torch.device | None = None,
    ) -> "LagBias":
        """The band of a function of the lags -reach..reach that gives [h, lag]."""
        at_least(0, reach=reach)
        band = curve(torch.arange(-reach, reach + 1, device=device))
        return LagBias(band[None, :, None], left, right, extent)

    @staticmethod
    def line(slope: Float[Tensor, " h"]) -> "LagBias":
        """slope_h * |lag|, and no table at all: reach 0."""
        slope = slope.to(torch.promote_types(slope.dtype, torch.float32))
        tail = Line(slope=slope[None, :, None])
        return LagBias(torch.zeros_like(slope)[None, :, None, None], tail, tail)

    @staticmethod
    def clipped(band: Float[Tensor, "b h q lag"]) -> "LagBias":
        """A band whose end columns go on for ever, as when lags are clipped to the reach."""
        return LagBias(band, Line(const=band[..., 0]), Line(const=band[..., -1]), ends=True)

    @property
    def shape(self) -> tuple[int, ...]:
        """The band's, without asking for its numbers: see QueryBias."""
        return tuple(self.band.shape)

    @property
    def dtype(self) -> torch.dtype:
        """The band's."""
        return self.band.dtype

    @property
    def endless(self) -> bool:
        """Whether it has tails."""
        return self.left is not None

    @property
    def sloped(self) -> bool:
        """Whether a tail slopes."""
        return any(tail is not None and tail.slope is not None for tail in (self.left, self.right))

    def tensors(self) -> list[Tensor]:
        """What a gradient could flow into: the band, and the parts of the tails."""
        lines = [line for line in (self.left, self.right) if line is not None]
        parts = [self.band, *(x for line in lines for x in (line.const, line.slope))]
        return [x for x in parts if x is not None]

    @property
    def reach(self) -> int:
        """The largest |lag| in the band."""
        return self.shape[-1] // 2

    def at(self, lag: Int[Tensor, " lag"]) -> Float[Tensor, "b h q lag"]:
        """The bias at each of these lags, the same ones for every query: [b, h, q|1, lag]."""
        self._check_lags(lag)
        return self._at(lag)

    def _at(self, lag: Tensor) -> Tensor:
        inside = self.band.index_select(-1, lag.clamp(-self.reach, self.reach) + self.reach)
        return self._with_tails(inside, lag)

    def to_dense(
        self, q_pos: Int[Tensor, " q"], k_pos: Int[Tensor, " k"]
    ) -> Float[Tensor, "b h q k"]:
        """b(k_pos - q_pos) for every pair: the definition."""
        lag = (k_pos[None, :] - q_pos[:, None]).to(self.band.device)
        self._check_lags(lag)
        b, h, q, _ = self.band.shape
        require(
            broadcasts(q, q_pos.shape[0]),
            lambda: (
                f"this LagBias has a band for each of {q} queries, got {len(q_pos)} query "
                "positions. Take the rows you need with bias.rows(start, stop)."
            ),
        )
        index = lag.clamp(-self.reach, self.reach) + self.reach
        if q == 1:
            inside = self.band[:, :, 0].index_select(-1, index.flatten()).view(b, h, *lag.shape)
        else:
            inside = self.band.gather(-1, index.expand(b, h, *lag.shape))
        return self._with_tails(inside, lag)

    def _with_tails(self, inside: Tensor, lag: Tensor) -> Tensor:
        if self.left is None or self.right is None:
            return inside
        left, right = (tail.at(lag).to(inside.dtype) for tail in (self.left, self.right))
        return torch.where(lag < -self.reach, left, torch.where(lag > self.reach, right, inside))

    def _check_lags(self, lag: Tensor) -> None:
        if not self.endless and not torch.compiler.is_compiling() and lag.numel():
            self.check(int(lag.min()), int(lag.max()))

    def check(self, smallest: int, largest: int) -> None:
        """Raise if a bias without tails is asked about lags it does not know."""
        worst = max(-smallest, largest)
        require(
            self.endless or worst <= self.reach,
            lambda: (
                f"this LagBias knows lags -{self.reach}..{self.reach} and has no tails, got "
                f"{worst}. Build it for the longer sequence, or give it tails "
                "(LagBias.clipped, Line())."
            ),
        )

    def widen(self, reach: int) -> "LagBias":
        """The same function with a longer band. The extent, a promise about values, stays."""
        more = reach - self.reach
        require(
            more >= 0,
            lambda: f"cannot widen a LagBias of reach {self.reach} to {reach}: it is wider.",
        )
        if more == 0:
            return self
        self.check(-reach, reach)
        band = self._at(torch.arange(-reach, reach + 1, device=self.band.device))
        return LagBias(band, self.left, self.right, self.extent)

    def narrow(self, reach: int) -> "LagBias":
        """The same function cut to a shorter band, for a reach no shorter than any extent."""
        cut = self.reach - reach
        require(cut >= 0, lambda: f"cannot narrow a LagBias of reach {self.reach} to {reach}.")
        return LagBias(
            self.band[..., cut : cut + 2 * reach + 1], self.left, self.right, self.extent
        )

    def _with_reach(self, reach: int) -> "LagBias":
        """The same function with a longer or shorter band."""
        if surely_equal(reach, self.reach):
            return self
        if is_symbolic(reach, self.reach):  # to ask which of the two it is would be a guard
            band = self._at(torch.arange(-reach, reach + 1, device=self.band.device))
            return LagBias(band, self.left, self.right, self.extent)
        return self.widen(reach) if self.reach < reach else self.narrow(reach)

    def trimmed(self) -> "LagBias":
        """The same function without the part of the band that equals its tail: reads the extent."""
        if self.extent is None or self.left is None:
            return self
        return self.narrow(min(self.reach, int(self.extent.max())))

    def plus(self, other: "LagBias") -> "LagBias":
        """The lag bias of the sum. Where one of the two has no tails, neither has the sum."""
        if self.endless == other.endless:
            reach = (larger if self.endless else smaller)(self.reach, other.reach)
        else:
            reach = other.reach if self.endless else self.reach
        a, b = (x._with_reach(reach) for x in (self, other))
        if a.left is None or b.left is None or a.right is None or b.right is None:
            return LagBias(a.band + b.band)
        band, extent = a.band + b.band, None
        known = self.extent is not None or other.extent is not None
        if known and a.left.rounds_as_sum(b.left) and a.right.rounds_as_sum(b.right):
            extent = torch.maximum(_extent(self), _extent(other))
            extent = extent.expand(band.shape[1]).contiguous()
        return LagBias(band, a.left + b.left, a.right + b.right, extent)

    def terms(self) -> Terms:
        """A sum of this alone."""
        return Terms(lag=self)

    def rows(self, start: int, stop: int) -> "LagBias":
        """The bias of query rows start..stop; a band shared by all queries stays as it is."""
        band = self.band if self.band.shape[2] == 1 else self.band[:, :, start:stop]
        left, right = (tail and tail.rows(start, stop) for tail in (self.left, self.right))
        return LagBias(band, left, right, self.extent, self.ends)

    def to(self, dtype: torch.dtype) -> "LagBias":
        """The same bias in another dtype."""
        left, right = (tail and tail.to(dtype) for tail in (self.left, self.right))
        return LagBias(self.band.to(dtype), left, right, self.extent, self.ends)


def _extent(bias: LagBias) -> Tensor:
    if bias.extent is not None:
        return bias.extent
    return torch.full((1,), bias.reach, device=bias.band.device)
