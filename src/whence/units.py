"""Numbers that a method holds in units of its own, so that one learning rate suits a whole model.

Adam moves every number by about the learning rate a step, whatever its size. A weight of a matrix
is some hundredths, and a step of 1e-3 suits it. A number that is added to a logit is of size 1 and
more, and the same step would take thousands of times to change it. So such a number is held as a
GAIN-th of itself: a step of Adam then moves it by GAIN times the learning rate, with any trainer
and without groups of parameters. The function that is computed does not change.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

# Powers of two, so that a number changes its units without rounding.
GAIN = 32.0  # of a number that is added to a logit
VECTOR_GAIN = 8.0  # of the numbers of a vector that meets queries or is added to values


class Scaled:
    """An attribute of a method that is `gain` times a parameter, `raw_` + its name or as named.

    Reading gives the number of the formula, in float32 at least, with a gradient to the parameter;
    None where there is no such parameter.
    Assigning writes the parameter. Writing into what was read (`copy_`, `fill_`) changes nothing.
    """

    def __init__(self, gain: float = GAIN, parameter: str = "") -> None:
        self.gain, self.raw = gain, parameter

    def __set_name__(self, owner: type, name: str) -> None:
        self.raw = self.raw or f"raw_{name}"

    def __get__(self, method: nn.Module | None, owner: type) -> Any:
        if method is None:
            return self
        raw = getattr(method, self.raw)
        return None if raw is None else self.gain * exact(raw)

    def __set__(self, method: nn.Module, value: Tensor | float) -> None:
        raw = getattr(method, self.raw)
        write(raw, as_exact(value, raw) / self.gain)


def exact(parameter: Tensor) -> Tensor:
    """The parameter in float32 at least: half precision cannot tell lag 257 from 256."""
    return parameter.to(torch.promote_types(parameter.dtype, torch.float32))


def as_exact(value: Tensor | float, parameter: Tensor) -> Tensor:
    """A value in the precision in which its units may change: the parameter's, float32 at least.

    It is on the parameter's device. It may have fewer axes, but no others: a checkpoint of one
    kernel is not to be repeated for five.
    """
    dtype = torch.promote_types(parameter.dtype, torch.float32)
    if not isinstance(value, Tensor):
        return torch.tensor(value, dtype=dtype, device=parameter.device)
    if value.ndim >= parameter.ndim and value.shape != parameter.shape:
        raise ValueError(
            f"Numbers of shape {tuple(value.shape)} were given for a parameter of shape "
            f"{tuple(parameter.shape)}. Build the method with the sizes that they have."
        )
    return value.detach().to(parameter.device, torch.promote_types(value.dtype, dtype))


def write(parameter: Tensor, value: Tensor) -> None:
    """Fill a parameter, without a gradient, broadcasting a value of fewer axes."""
    with torch.no_grad():
        parameter.copy_(value.expand_as(parameter))


def empty_numbers(*shape: int) -> nn.Parameter:
    """A parameter for such numbers, in float32 also where the default is half precision."""
    dtype = torch.promote_types(torch.get_default_dtype(), torch.float32)
    return nn.Parameter(torch.empty(shape, dtype=dtype))


def keeping_float32(fn: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """What `nn.Module._apply` does to tensors, but that float32 does not become half precision."""

    def kept(tensor: Tensor) -> Tensor:
        found = fn(tensor)
        narrowed = tensor.dtype == torch.float32 and found.dtype in (torch.bfloat16, torch.float16)
        return tensor.to(found.device) if narrowed else found

    return kept
