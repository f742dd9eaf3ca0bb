"""Figures from results: nothing here computes what it draws."""

from whence.report.lag_curves import draw_lag_curves
from whence.report.saved import save_png

__all__ = ["draw_lag_curves", "save_png"]
