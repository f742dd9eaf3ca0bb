"""whence: positional information in Transformers.

The names below are imported when they are first used, because torch takes more than a second.
"""

import importlib
from typing import TYPE_CHECKING, Any

from whence.autoclasses import teach_when_imported

if TYPE_CHECKING:
    from whence.kernels import Mask, attend, explain
    from whence.lag import DenseBias, LagBias, LagValues, Line, LowRankBias
    from whence.method import Content, PositionMethod
    from whence.methods import METHODS, Sum, build

__version__ = "0.1.0"
__all__ = [
    "METHODS",
    "Content",
    "DenseBias",
    "LagBias",
    "LagValues",
    "Line",
    "LowRankBias",
    "Mask",
    "PositionMethod",
    "Sum",
    "attend",
    "build",
    "explain",
]

_HOMES = {
    "whence.kernels": ("Mask", "attend", "explain"),
    "whence.lag": ("DenseBias", "LagBias", "LagValues", "Line", "LowRankBias"),
    "whence.method": ("Content", "PositionMethod"),
    "whence.methods": ("METHODS", "Sum", "build"),
}
_MODULES = ("hf", "kernels", "lag", "method", "methods")  # `whence.hf` without importing it by name

teach_when_imported()


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"whence.{name}")
    for home, names in _HOMES.items():
        if name in names:
            found = globals()[name] = getattr(importlib.import_module(home), name)
            return found
    raise AttributeError(f"module 'whence' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_MODULES})
