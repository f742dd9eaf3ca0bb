"""whence: positional information in Transformers."""

import importlib
from types import ModuleType

from whence.autoclasses import teach_when_imported
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

teach_when_imported()


def __getattr__(name: str) -> ModuleType:
    """`whence.hf` without importing it by name; transformers is imported then and not before."""
    if name == "hf":
        return importlib.import_module("whence.hf")
    raise AttributeError(f"module 'whence' has no attribute {name!r}")
