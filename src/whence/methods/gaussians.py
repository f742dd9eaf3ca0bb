"""Gaussians of the lag in the units in which they are trained, and those of the formula."""

from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from whence.checks import require
from whence.method import PositionMethod
from whence.methods.starts import heights, widths
from whence.units import GAIN, Scaled, given, in_float32, unset_numbers, write

STARTS = ("local", "released", "zero")
SHARPEST, BLUNTEST = 1e30, 1e-38  # beyond them a width, or its gradient, is not finite


class InWidths(Scaled):
    """An attribute that is GAIN times the deviation times the parameter `raw_` + its name."""

    def __get__(self, method: nn.Module | None, owner: type) -> Any:
        found = super().__get__(method, owner)
        return found if method is None else found * method.deviation

    def __set__(self, method: nn.Module, value: Tensor | float) -> None:
        width: Any = method.deviation
        name = f"{type(method).__name__}.{self.name}"
        super().__set__(method, given(value, width, name) / width.detach())


class Gaussians(PositionMethod):
    """a_s exp(-|b_s| (lag - c_s)^2) for each head and kernel, with b = 1 / (2 deviation^2).

    A subclass names its offsets. `amplitude`, `sharpness` and the offsets are in the units of the
    formula: read them, or assign to them. What is trained are a / GAIN, log(deviation) / GAIN and
    c / deviation / GAIN, so that a step of Adam with the learning rate of the other weights moves
    a curve by as much as it should (whence.units), be it one lag wide or a thousand.
    """

    logit_sized = True
    offsets: ClassVar[tuple[str, ...]]
    raw_amplitude: nn.Parameter
    raw_deviation: nn.Parameter

    amplitude = Scaled()

    def __init__(self, n_heads: int, kernels: int) -> None:
        super().__init__()
        for name in ("amplitude", "deviation", *self.offsets):
            self.register_parameter(f"raw_{name}", unset_numbers(n_heads, kernels))

    @property
    def deviation(self) -> Float[Tensor, "h s"]:
        """The standard deviation of each Gaussian, its width, in lags."""
        return (GAIN * in_float32(self.raw_deviation)).exp()

    @deviation.setter
    def deviation(self, value: Tensor | float) -> None:
        """Assigning leaves the offsets where they are."""
        size = given(value, self.raw_deviation, f"{type(self).__name__}.deviation")
        require(size.is_meta or not bool((size <= 0).any()), "a deviation must be above 0 lags.")
        offsets = {name: getattr(self, name).detach() for name in self.offsets}
        write(self.raw_deviation, size.log() / GAIN)
        for name, offset in offsets.items():
            setattr(self, name, offset)

    @property
    def sharpness(self) -> Float[Tensor, "h s"]:
        """|b| of the formula. Assigning it leaves the offsets where they are."""
        return 0.5 / self.deviation.square()

    @sharpness.setter
    def sharpness(self, value: Tensor | float) -> None:
        size = given(value, self.raw_deviation, f"{type(self).__name__}.sharpness").abs()
        self.deviation = (0.5 / size.clamp(BLUNTEST, SHARPEST)).sqrt()

    def start_local(self, max_length: int) -> None:
        """A preference for near keys at many scales, up to max_length."""
        n_heads, kernels = self.raw_amplitude.shape
        self.deviation = widths(kernels, max_length)
        self.amplitude = heights(n_heads, kernels, max_length)
        for name in self.offsets:
            setattr(self, name, 0.0)

    def start_released(self, spread: float) -> None:
        """The authors' way: a, b ~ N(0.1, 0.01), c ~ N(0, spread), as mean and deviation."""
        shape = self.raw_amplitude.shape
        self.amplitude = torch.normal(0.1, 0.01, shape)
        self.sharpness = torch.normal(0.1, 0.01, shape)
        for name in self.offsets:
            setattr(self, name, torch.normal(0.0, spread, shape))

    def begin_at(self, start: str, max_length: int, spread: float) -> None:
        """Every parameter as one of STARTS says."""
        if start == "released":
            self.start_released(spread)
            return
        self.start_local(max_length)
        if start == "zero":
            self.amplitude = 0.0
