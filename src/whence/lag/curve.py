"""A lag bias that is a curve of a few parameters, made only where somebody looks at it."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from whence.lag.bias import LagBias
from whence.lag.lazy import LazyBias
from whence.lag.line import Line

Tensors = tuple[Tensor | None, ...]


class Curve(NamedTuple):
    """What makes a band from parameters, and its gradient; neither is recorded by autograd.

    make(parameters, reach) gives band [1, h, 1, 2 * reach + 1] and extent [h], float32 and int32,
    and what its gradient needs beside the extent; gradient((d_band, extent, *those), reach) gives
    those of the parameters.

    Where the parameters are three, [h, count] each, a kernel can make the part of a band that it
    needs by the device functions at(h, lags, *parameters, count, COUNT) and
    extent_of(h, reach, *parameters, count, COUNT), COUNT being a power of two.
    """

    make: Callable[[Tensors, int], Tensors]
    gradient: Callable[[Tensors, int], Tensors]
    at: Any = None
    extent_of: Any = None


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
        band, extent, *kept = curve.make(parameters, reach)
        assert band is not None
        assert extent is not None
        ctx.save_for_backward(extent, *kept)
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
