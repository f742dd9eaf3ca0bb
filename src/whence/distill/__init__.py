"""A pretrained model's own positional attention distilled into TISA, in place of its table."""

from whence.distill.distilling import Plan, distill
from whence.distill.results import Distillation

__all__ = ["Distillation", "Plan", "distill"]
