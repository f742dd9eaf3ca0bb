"""Tasks that nothing but position solves: copy, reverse, recall, and the k-th token back."""

import hashlib
from collections.abc import Callable, Iterator

import torch
from jaxtyping import Int
from torch import Tensor

from whence.checks import require
from whence.experiments.lm.source import IGNORED, TUNING, VALIDATION, Scored, Source, generator

FILLER, ASK = 0, 1  # tokens that are not symbols
SYMBOLS = 32
QUERIES = 8  # of recall, at the end of a sequence

Sequence = tuple[Tensor, Tensor]  # ids, and what each output is to predict


def copied(length: int, random: torch.Generator, distance: int) -> Sequence:
    """x ASK x: the second x is to be predicted, at a distance that grows with the length."""
    half = (length - 1) // 2
    x = _symbols(half, random)
    return _answered(length, x, x)


def reversed_(length: int, random: torch.Generator, distance: int) -> Sequence:
    """x ASK x backwards: each token at a distance of its own."""
    x = _symbols((length - 1) // 2, random)
    return _answered(length, x, x.flip(0))


def recalled(length: int, random: torch.Generator, distance: int) -> Sequence:
    """Pairs of key and value among fillers, ASK, then keys whose values are to be predicted."""
    queries = min(QUERIES, (length - 1) // 4)
    room = (length - 1 - 2 * queries) // 2
    pairs = min(SYMBOLS, room)
    queries = min(queries, pairs)
    keys = 2 + torch.randperm(SYMBOLS, generator=random)[:pairs]
    values = 2 + SYMBOLS + torch.randint(SYMBOLS, (pairs,), generator=random)
    places = torch.randperm(room, generator=random)[:pairs].sort().values
    body = torch.full((room, 2), FILLER)
    body[places] = torch.stack([keys, values], dim=-1)
    asked = torch.randperm(pairs, generator=random)[:queries]
    tail = torch.stack([keys[asked], values[asked]], dim=-1).flatten()
    front = torch.full((length - 1 - len(tail) - 2 * room,), FILLER)
    ids = torch.cat([front, body.flatten(), torch.tensor([ASK]), tail])
    targets = torch.full((length,), IGNORED)
    first = length - len(tail)
    targets[first::2] = ids[first + 1 :: 2]
    return ids, targets


def back(length: int, random: torch.Generator, distance: int) -> Sequence:
    """Random symbols; every output is to name the symbol `distance` before its own."""
    ids = _symbols(length, random)
    targets = torch.full((length,), IGNORED)
    targets[distance:] = ids[:-distance]
    return ids, targets


TASKS: dict[str, Callable[[int, torch.Generator, int], Sequence]] = {
    "copy": copied,
    "reverse": reversed_,
    "recall": recalled,
    "back": back,
}


class Task(Source):
    """Fresh sequences without end; those of validation and tuning are never trained on."""

    def __init__(
        self,
        name: str,
        *,
        distance: int,
        train_length: int,
        eval_tokens: int,
        tuning_tokens: int = 0,
    ) -> None:
        require(
            name != "back" or distance < train_length,
            f"the task 'back' needs a distance below train_length, got {distance} and "
            f"{train_length}.",
        )
        self.name, self.distance, self.train_length = name, distance, train_length
        self.eval_tokens, self.tuning_tokens = eval_tokens, tuning_tokens
        self.vocab_size = 2 + 2 * SYMBOLS
        self.sha256 = hashlib.sha256(f"{name} {distance} {SYMBOLS}".encode()).hexdigest()

    def example(self, seed: int, index: int) -> dict[str, Tensor]:
        """A new sequence; a causal model shifts its labels itself, so they stand one later."""
        ids, targets = self._drawn(self.train_length, seed, index)
        labels = torch.full_like(targets, IGNORED)
        labels[1:] = targets[:-1]
        return {"input_ids": ids, "labels": labels}

    def scored(self, length: int, *, sliding: bool, tokens: int) -> Iterator[Scored] | None:
        """As many sequences as make up the test tokens; a task cannot slide."""
        rows = max(tokens // length, 1)
        return None if sliding else self._scored(length, rows, VALIDATION, self.eval_tokens)

    def tuning(self, *, tokens: int) -> Iterator[Scored]:
        """As many sequences as make up the tuning tokens, of a seed of their own."""
        rows = max(tokens // self.train_length, 1)
        return self._scored(self.train_length, rows, TUNING, self.tuning_tokens)

    def sample(self, rows: int) -> Int[Tensor, "rows n"]:
        """Validation sequences."""
        drawn = [self._drawn(self.train_length, VALIDATION, i)[0] for i in range(rows)]
        return torch.stack(drawn)

    def facts(self) -> dict[str, str | int]:
        """The task in words."""
        distance = {"distance": self.distance} if self.name == "back" else {}
        return {"task": self.name, "vocab_size": self.vocab_size, "sha256": self.sha256, **distance}

    def _scored(self, length: int, rows: int, seed: int, tokens: int) -> Iterator[Scored]:
        count = max(tokens // length, 1)
        for first in range(0, count, rows):
            numbers = range(first, min(first + rows, count))
            pairs = [self._drawn(length, seed, i) for i in numbers]
            yield Scored(torch.stack([p[0] for p in pairs]), torch.stack([p[1] for p in pairs]))

    def _drawn(self, length: int, seed: int, index: int) -> Sequence:
        ids, targets = TASKS[self.name](length, generator(seed, index, length), self.distance)
        targets[-1] = IGNORED  # the last output has no label in training
        return ids, targets


def _symbols(n: int, random: torch.Generator) -> Tensor:
    return 2 + torch.randint(SYMBOLS, (n,), generator=random)


def _answered(length: int, question: Tensor, answer: Tensor) -> Sequence:
    """Fillers, the question, ASK, the answer; the outputs from ASK on are to give the answer."""
    front = torch.full((length - 1 - len(question) - len(answer),), FILLER)
    ids = torch.cat([front, question, torch.tensor([ASK]), answer])
    targets = torch.full((length,), IGNORED)
    targets[length - len(answer) - 1 : -1] = answer
    return ids, targets
