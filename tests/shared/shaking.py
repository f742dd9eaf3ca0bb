"""Random numbers for the parameters of modules, in the units of each method's formula.

A method may train its numbers in other units (whence.units): noise on those would give widths of
e^30 lags and logits that nothing else is seen beside.
"""

import torch
from torch import Tensor, nn

from whence.method import PositionMethod
from whence.units import GAIN, VECTOR_GAIN


def shake(module: nn.Module, by: float) -> None:
    """Move every number: many start at zero, which would hide bugs."""
    for owner, name in _numbers(module):
        value = getattr(owner, name).detach()
        _put(owner, name, value + by * torch.randn_like(value))


def draw(module: nn.Module, scale: float, generator: torch.Generator) -> None:
    """Draw every number that is trained from N(0, scale)."""
    for owner, name in _numbers(module):
        if any(p.requires_grad for p in owner.parameters(recurse=False)):
            shape = getattr(owner, name).shape
            _put(owner, name, torch.randn(shape, generator=generator) * scale)


def gain(name: str) -> float:
    """How much larger the gradient of this parameter is than that in the units of the formula."""
    last = name.rpartition(".")[2]
    if last in ("raw_key_table", "raw_value_table"):
        return VECTOR_GAIN
    return GAIN if last.startswith(("raw_", "held_")) else 1.0


def gains(method: nn.Module) -> list[float]:
    """The gain of each parameter of the method."""
    return [gain(name) for name, _ in method.named_parameters()]


def _numbers(module: nn.Module) -> list[tuple[nn.Module, str]]:
    found = []
    for owner in module.modules():
        formula = owner.former_names if isinstance(owner, PositionMethod) else ()
        own = [name for name, _ in owner.named_parameters(recurse=False)]
        found += [(owner, name) for name in formula or own]
    return found


def _put(owner: nn.Module, name: str, value: Tensor) -> None:
    if name in owner._parameters:
        owner.get_parameter(name).data.copy_(value)
    else:
        setattr(owner, name, value)
