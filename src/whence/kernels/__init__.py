"""Attention kernels behind one function."""

from whence.kernels.attend import BACKENDS, Explanation, attend, explain
from whence.kernels.mask import Mask

__all__ = ["BACKENDS", "Explanation", "Mask", "attend", "explain"]
