"""A lag bias that is a curve of a few parameters, made only where somebody looks at it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from whence.lag.bias import LagBias
from whence.lag.lazy import LazyBias
from whence.lag.line import Line

Tensors = tuple[Tensor | None, ...]


@dataclass(frozen=True, eq=False)
class Curve:
    """What makes a band from three parameters [h, count], and their gradients.

    make(parameters, reach) gives band [1, h, 1, 2 * reach + 1] and extent [h], float32 and int32;
    gradient((d_band, extent, *parameters), reach) gives those of the parameters. Neither is
    recorded by autograd. Kernels make the part of a band that they need by device functions:
    at(h, lags, *parameters, count, COUNT) and extent_of(h, reach, *parameters, count, COUNT), COUNT
    being a power of two.
    """

    make: Callable[[Tensors, int], tuple[Tensor, Tensor]]
    gradient: Callable[[Tensors, int], Tensors]
    at: Any
    extent_of: Any


class CurveBias(LazyBias):
    """b(lag) = f(parameters, lag) for each head, the same for all queries, and 0 beyond the reach.

    A kernel that makes the band itself asks autograd for one function in place of two.
    """

    def __init__(self, curve: Curve, reach: int, *parameters: Tensor) -> None:
        super().__init__()
        self.curve, self.longest, self.parameters = curve, reach, parameters

    def __repr__(self) -> str:
        return f"CurveBias(heads {len(self.parameters[0])}, reach {self.reach})"

    def make(self) -> LagBias:
        """The band and its extent, with the gradient of the parameters."""
        band, extent = _Made.apply(  # type: ignore[no-untyped-call]
            self.curve, self.longest, *self.parameters
        )
        return LagBias(band, Line(), Line(), extent)

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the band."""
        return (1, len(self.parameters[0]), 1, 2 * self.longest + 1)

    @property
    def reach(self) -> int:
        """The largest |lag| in the band."""
        return self.longest

    @property
    def extent(self) -> Int[Tensor, " h"] | None:
        """Of the bias as made."""
        return self.made().extent

    @property
    def dtype(self) -> torch.dtype:
        """Of the band."""
        return torch.float32

    def tensors(self) -> list[Tensor]:
        """The parameters."""
        return list(self.parameters)

    def rows(self, start: int, stop: int) -> LagBias:
        """All queries share it."""
        return self


class _Made(torch.autograd.Function):
    """Band and extent of a curve."""

    @staticmethod
    def forward(ctx: Any, curve: Curve, reach: int, *parameters: Tensor) -> tuple[Tensor, Tensor]:
        """As the curve makes them."""
        band, extent = curve.make(parameters, reach)
        ctx.save_for_backward(extent, *parameters)
        ctx.curve, ctx.reach, ctx.count = curve, reach, len(parameters)
        ctx.mark_non_differentiable(extent)
        ctx.set_materialize_grads(False)  # else zeros are filled in for the extent
        return band, extent

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, d_band: Tensor | None, d_extent: None) -> Tensors:
        """As the curve gives them."""
        if d_band is None:
            return (None, None, *(None for _ in range(ctx.count)))
        found: Tensors = ctx.curve.gradient((d_band, *ctx.saved_tensors), ctx.reach)
        return (None, None, *found)
