"""The lag algebra: what a positional method says to a kernel."""

from whence.lag.bias import LagBias
from whence.lag.deferred import BUCKETS, GAUSSIANS, LINE, Curve, CurveBias, DeferredBias, QueryBias
from whence.lag.dense import DenseBias, LowRankBias
from whence.lag.line import Line
from whence.lag.terms import Bias, Terms
from whence.lag.values import LagValues

__all__ = [
    "BUCKETS",
    "GAUSSIANS",
    "LINE",
    "Bias",
    "Curve",
    "CurveBias",
    "DeferredBias",
    "DenseBias",
    "LagBias",
    "LagValues",
    "Line",
    "LowRankBias",
    "QueryBias",
    "Terms",
]
