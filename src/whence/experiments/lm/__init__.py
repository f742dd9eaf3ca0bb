"""`whence lm`: the same language model trained with each method, on the same data."""

from whence.experiments.lm.config import LMConfig
from whence.experiments.lm.corpus_file import load_corpus, save_corpus
from whence.experiments.lm.results import best_rate
from whence.experiments.lm.sweep import run_lm, run_one

__all__ = ["LMConfig", "best_rate", "load_corpus", "run_lm", "run_one", "save_corpus"]
