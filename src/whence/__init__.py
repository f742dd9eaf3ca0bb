"""whence: positional information in Transformers."""

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
