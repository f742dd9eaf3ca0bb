"""Numbers that a method holds in units of its own, so that one learning rate suits a whole model.

Adam moves every number by about the learning rate a step, whatever its size. A weight of a matrix
is some hundredths, and a step of 1e-3 suits it. A number that is added to a logit is of size 1 and
more, and it would take thousands of such steps to change it. So such a number is held as a GAIN-th
of itself: a step of Adam then moves it by GAIN times the learning rate, with any trainer and
without groups of parameters. The function that is computed does not change.
"""

import math
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
    None where there is no such parameter. Assigning writes the parameter. Writing into what was
    read (`copy_`, `fill_`) changes nothing.
    """

    def __init__(self, gain: float = GAIN, parameter: str = "") -> None:
        self.gain, self.raw = gain, parameter

    def __set_name__(self, owner: type, name: str) -> None:
        self.name, self.raw = name, self.raw or f"raw_{name}"

    def __get__(self, method: nn.Module | None, owner: type) -> Any:
        if method is None:
            return self
        raw = getattr(method, self.raw)
        return None if raw is None else self.gain * in_float32(raw)

    def __set__(self, method: nn.Module, value: Tensor | float) -> None:
        raw = getattr(method, self.raw)
        if raw is None:
            raise ValueError(
                f"this {type(method).__name__} has no {self.name}: it was built without one."
            )
        write(raw, given(value, raw, f"{type(method).__name__}.{self.name}") / self.gain)


def in_float32(parameter: Tensor) -> Tensor:
    """The parameter in float32 at least: half precision cannot tell lag 257 from 256."""
    return parameter.to(torch.promote_types(parameter.dtype, torch.float32))


def given(value: Tensor | float, parameter: Tensor, name: str) -> Tensor:
    """A value for a parameter, on its device, in float32 at least, or in what is more exact.

    It may have fewer axes than the parameter, but no others: a checkpoint of one kernel is not to
    be repeated for five. A value with a gradient is refused, because assigning would cut it off.
    """
    dtype = torch.promote_types(parameter.dtype, torch.float32)
    if not isinstance(value, Tensor):
        return torch.tensor(value, dtype=dtype, device=parameter.device)
    if value.requires_grad and not value.is_leaf:
        raise ValueError(
            f"{name} was given a tensor with a gradient, which assigning would cut off. Assign its "
            ".detach(), or train the parameters of the method themselves."
        )
    if value.ndim >= parameter.ndim and value.shape != parameter.shape:
        raise ValueError(
            f"{name} has the shape {tuple(parameter.shape)} and was given {tuple(value.shape)}. "
            "Build the method with the sizes of these numbers."
        )
    return value.detach().to(parameter.device, torch.promote_types(value.dtype, dtype))


def write(parameter: Tensor, value: Tensor) -> None:
    """Fill a parameter, without a gradient, broadcasting a value of fewer axes."""
    with torch.no_grad():
        parameter.copy_(value.expand_as(parameter))


def unset_numbers(*shape: int) -> nn.Parameter:
    """A parameter for such numbers, in float32 also where the default is half precision.

    It is NaN until it is set: what a method forgets to set shows in the first loss.
    """
    dtype = torch.promote_types(torch.get_default_dtype(), torch.float32)
    return nn.Parameter(torch.full(shape, math.nan, dtype=dtype))


def keeping_float32(fn: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """What `nn.Module._apply` does to tensors, but that none becomes less exact than float32."""

    def kept(tensor: Tensor) -> Tensor:
        found = fn(tensor)
        exact = tensor.dtype in (torch.float32, torch.float64)
        narrowed = exact and found.dtype in (torch.bfloat16, torch.float16)
        return tensor.to(found.device, torch.float32) if narrowed else found

    return kept
