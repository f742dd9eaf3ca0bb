"""What a method is, read off its code: small functions that return frozen results."""

from whence.analysis.call_description import Described, describe
from whence.analysis.catalogue import Entry, catalogue, entry
from whence.analysis.lag_curves import LagCurves, lag_curves, position_matrix

__all__ = [
    "Described",
    "Entry",
    "LagCurves",
    "catalogue",
    "describe",
    "entry",
    "lag_curves",
    "position_matrix",
]
