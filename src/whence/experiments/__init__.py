"""Experiments on `transformers.Trainer`: the same model with each method, on the same data."""

from whence.experiments.config import LMConfig
from whence.experiments.sweep import run_lm, run_one

__all__ = ["LMConfig", "run_lm", "run_one"]
