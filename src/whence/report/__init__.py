"""Figures and pages from results: nothing here computes what it draws."""

from whence.report.comparison_figures import draw_scores, draw_steps
from whence.report.components import draw_components
from whence.report.figure_files import save_figure, save_png
from whence.report.fits import draw_fits
from whence.report.folder import Results, read_folder, write_folder
from whence.report.heads import draw_head_curves, draw_head_matrices
from whence.report.heat_maps import draw_heat_maps, draw_table
from whence.report.key_numbers import key_numbers as telling
from whence.report.lag_curves import draw_lag_curves
from whence.report.page import make_page, save_page
from whence.report.profiles import draw_profiles
from whence.report.windows import draw_windows

__all__ = [
    "Results",
    "draw_components",
    "draw_fits",
    "draw_head_curves",
    "draw_head_matrices",
    "draw_heat_maps",
    "draw_lag_curves",
    "draw_profiles",
    "draw_scores",
    "draw_steps",
    "draw_table",
    "draw_windows",
    "make_page",
    "read_folder",
    "save_figure",
    "save_page",
    "save_png",
    "telling",
    "write_folder",
]
