"""A line in |lag|: what a lag bias becomes beyond its band."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Line:
    """const + slope * |lag| for each [b, h, q]; size-1 axes broadcast, None is zero.

    A slope of None tells the host, without a look at the GPU's memory, that a tail is constant.

        >>> line = Line(const=torch.tensor([[[1.0]]]), slope=torch.tensor([[[-0.5]]]))
        >>> line.at(torch.arange(-2, 3)).tolist()
        [[[[0.0, 0.5, 1.0, 0.5, 0.0]]]]
    """

    const: Float[Tensor, "#b #h #q"] | None = None
    slope: Float[Tensor, "#b #h #q"] | None = None

    def at(self, lag: Int[Tensor, "*rows lag"]) -> Float[Tensor, "b h q #lag"] | Float[Tensor, ""]:
        """The line at lags that all queries share [lag], or at each query's own [q, lag]."""
        value = torch.zeros((), device=lag.device)
        if self.const is not None:
            value = self.const[..., None]
        if self.slope is not None:
            exact = torch.promote_types(self.slope.dtype, torch.float32)  # for lags beyond 256
            value = value + self.slope[..., None].to(exact) * lag.abs().to(exact)
        return value

    def __add__(self, other: "Line") -> "Line":
        return Line(_add(self.const, other.const), _add(self.slope, other.slope))

    def rounds_as_sum(self, other: "Line") -> bool:
        """Whether the sum of the lines has, at every lag, the very bits of the sum of their values.

        (c + s |lag|) + c' rounds in another order than (c + c') + s |lag|, and two slopes do too.
        """
        sloped = sum(line.slope is not None for line in (self, other))
        constant = sum(line.const is not None for line in (self, other))
        return sloped == 0 or (sloped == 1 and constant <= 1)

    def rows(self, start: int, stop: int) -> "Line":
        """The line of query rows start..stop; one shared by all queries stays as it is."""
        return Line(_rows(self.const, start, stop), _rows(self.slope, start, stop))

    def to(self, dtype: torch.dtype) -> "Line":
        """The same line in another dtype."""
        const, slope = self.const, self.slope
        return Line(
            None if const is None else const.to(dtype), None if slope is None else slope.to(dtype)
        )


def _add(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    if a is None or b is None:
        return b if a is None else a
    return a + b


def _rows(x: Tensor | None, start: int, stop: int) -> Tensor | None:
    return x if x is None or x.shape[2] == 1 else x[:, :, start:stop]
