"""Where sequences come from: each a function of a seed and a place, so that a run can go on."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor
from torch.utils.data import Dataset

IGNORED = -100
VALIDATION, TUNING = -1, -2  # seeds that no run has


@dataclass(frozen=True, eq=False)
class Scored:
    """Sequences to test on: `targets` holds what output t is to predict, IGNORED where nothing."""

    ids: Int[Tensor, "b n"]
    targets: Int[Tensor, "b n"]


class Source(ABC):
    """Training sequences by number, and test sequences of any length."""

    vocab_size: int
    sha256: str
    train_length: int

    @abstractmethod
    def example(self, seed: int, index: int) -> dict[str, Tensor]:
        """The index-th training sequence of a run, with the labels that the model's class wants."""

    @abstractmethod
    def scored(self, length: int, *, sliding: bool, tokens: int) -> Iterator[Scored] | None:
        """Test sequences in batches of about `tokens` tokens; None where there is no such way."""

    @abstractmethod
    def tuning(self, *, tokens: int) -> Iterator[Scored]:
        """Sequences of the training length that are never reported, by which rates are chosen."""

    @abstractmethod
    def sample(self, rows: int) -> Int[Tensor, "rows n"]:
        """Validation sequences of the training length, to look at attention on."""

    @abstractmethod
    def facts(self) -> dict[str, str | int]:
        """What the data is, for the results."""


class Examples(Dataset[dict[str, Tensor]]):
    """All sequences of one run, in the order in which it sees them.

    The order is here and not in a sampler: sequence i is the same whether the run was killed before
    it or not, and on however many processes.
    """

    def __init__(self, source: Source, *, seed: int, n: int) -> None:
        self.source, self.seed, self.n = source, seed, n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return self.source.example(self.seed, index)


def generator(*numbers: int) -> torch.Generator:
    """Random numbers that depend on these alone."""
    state = 0
    for number in numbers:
        state = (state * 1_000_003 + number + 7919) % (1 << 62)
    return torch.Generator().manual_seed(state)
