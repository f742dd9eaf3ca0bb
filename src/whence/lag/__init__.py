"""The lag algebra: what a positional method says to a kernel."""

from whence.lag.bias import LagBias
from whence.lag.curve import Curve, CurveBias
from whence.lag.dense import DenseBias, LowRankBias
from whence.lag.line import Line
from whence.lag.query import QueryBias
from whence.lag.terms import Bias, Terms
from whence.lag.values import LagValues

__all__ = [
    "Bias",
    "Curve",
    "CurveBias",
    "DenseBias",
    "LagBias",
    "LagValues",
    "Line",
    "LowRankBias",
    "QueryBias",
    "Terms",
]
