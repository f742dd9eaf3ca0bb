"""Experiments on `transformers.Trainer`: the same model with each method, on the same data."""

from whence.experiments.config import LMConfig
from whence.experiments.corpus_file import load_corpus, save_corpus
from whence.experiments.results import best_rate
from whence.experiments.sweep import run_lm, run_one

__all__ = ["LMConfig", "best_rate", "load_corpus", "run_lm", "run_one", "save_corpus"]
