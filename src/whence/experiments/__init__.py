"""Experiments on `transformers.Trainer`: the same model with each method, on the same data."""

from whence.experiments.lm import (
    LMConfig,
    best_rate,
    load_corpus,
    run_lm,
    run_one,
    save_corpus,
)
from whence.experiments.sweep import Sweep, run_sweep

__all__ = [
    "LMConfig",
    "Sweep",
    "best_rate",
    "load_corpus",
    "run_lm",
    "run_one",
    "run_sweep",
    "save_corpus",
]
