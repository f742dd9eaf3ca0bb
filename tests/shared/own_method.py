"""A method of somebody's own, as a user would write it: a file in a folder, no part of whence."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SOURCE = '''
"""Waves of the lag."""

from __future__ import annotations

import torch
from torch import nn

from whence import LagBias, PositionMethod
from whence.method import longest_lag


class Wave(PositionMethod):
    """b_h(lag) = a_h cos(lag / period)."""

    paper = "nobody"
    formula = "n_heads"

    def __init__(self, n_heads: int, *, period: float = 8.0) -> None:
        super().__init__()
        self.n_heads, self.period = n_heads, period
        self.weight = nn.Parameter(torch.ones(n_heads))

    def score_term(self, q, q_pos, k_pos, *, content=None):
        reach = longest_lag(q_pos, k_pos)
        device = self.weight.device
        return LagBias.from_function(self.curve, reach, device=device)

    def curve(self, lag):
        return self.weight[:, None] * torch.cos(lag / self.period)


class Wanting(PositionMethod):
    """It has an option without a default, and one that no text can give."""

    def __init__(self, size: int, *, sizes: list[int] | None = None) -> None:
        super().__init__()


def no_class() -> None:
    pass
'''
MODULE = "my_waves"


@contextmanager
def own_module(folder: Path) -> Iterator[Path]:
    """Write my_waves.py into a folder; afterwards nothing of it is imported."""
    (folder / f"{MODULE}.py").write_text(SOURCE)
    (folder / "broken_waves.py").write_text("import not_there_at_all\n")
    try:
        yield folder
    finally:
        for name in (MODULE, "broken_waves"):
            sys.modules.pop(name, None)
