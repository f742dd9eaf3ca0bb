"""Rows of tokens, and batches of rows of like length by the number of their tokens.

All tokens lie on the device in one vector a side, so that a batch is one look-up a side: no Python
runs for a sentence, and no batch is copied to the device.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor
from torch.utils.data import Dataset

from whence.experiments.translation.bpe import PAD_ID

# To what batches are padded; beyond the last to a multiple of it. Each shape costs a compilation of
# some kernels, so there are few of them.
WIDTHS = (16, 24, 32, 48, 64)
MULTIPLE = 16  # of the rows of a batch, for the same reason
IGNORED = -100  # the label of padding


@dataclass(frozen=True, eq=False)
class Rows:
    """Sequences one after another: the i-th is ids[starts[i] : starts[i + 1]]."""

    ids: Int[Tensor, " tokens"]
    starts: Int[Tensor, " rows_and_one"]

    def __len__(self) -> int:
        return len(self.starts) - 1

    @property
    def lengths(self) -> Int[Tensor, " rows"]:
        """Tokens of each row."""
        return self.starts.diff()

    def to(self, device: torch.device) -> "Rows":
        """The same on a device."""
        return replace(self, ids=self.ids.to(device), starts=self.starts.to(device))

    def padded(
        self, rows: Int[Tensor, " b"], width: int
    ) -> tuple[Int[Tensor, "b width"], Bool[Tensor, "b width"]]:
        """These rows, padded on the right, and where they have tokens."""
        place = torch.arange(width, device=self.ids.device)
        first = self.starts[rows]
        there = place < (self.starts[rows + 1] - first)[:, None]
        index = (first[:, None] + place).clamp(max=len(self.ids) - 1)
        return self.ids[index].long().masked_fill(~there, PAD_ID), there


def rows_of(sequences: Sequence[Sequence[int]]) -> Rows:
    """Sequences of tokens as rows."""
    flat = np.fromiter((token for row in sequences for token in row), np.int32)
    starts = np.concatenate([[0], np.cumsum([len(row) for row in sequences], dtype=np.int64)])
    return Rows(torch.from_numpy(flat), torch.from_numpy(starts))


def width_of(length: int) -> int:
    """To what a batch is padded whose longest row has this length."""
    widest = WIDTHS[-1]
    return next((w for w in WIDTHS if length <= w), -(-length // widest) * widest)


class TokenBatches(Dataset[dict[str, Tensor]]):
    """`n` batches as a model takes them; an item is a whole batch, and the order is the seed's.

    A row belongs to the bucket of the longer of its two sides. In each pass over the rows every
    bucket is shuffled and cut into batches of at most `tokens` a side; rows that do not fill one
    go to the next wider bucket. The few that are left over after the widest, others in each pass,
    are left out of it, unless there is no batch else. The order of the batches is shuffled.
    """

    def __init__(self, source: Rows, target: Rows, *, tokens: int, seed: int, n: int) -> None:
        self.source, self.target, self.seed, self.n = source, target, seed, n
        longest = torch.maximum(source.lengths, target.lengths).cpu().numpy()
        widths = np.asarray([width_of(int(x)) for x in range(int(longest.max()) + 1)])[longest]
        self.buckets = {int(w): np.flatnonzero(widths == w) for w in np.unique(widths)}
        self.sizes = {width: _rows(tokens // width) for width in self.buckets}
        self.a_pass = len(self._shuffled(0))
        self._pass: tuple[int, list[tuple[int, Tensor]]] = (-1, [])

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        number, place = divmod(index, self.a_pass)
        if self._pass[0] != number:
            self._pass = number, self._shuffled(number)
        width, rows = self._pass[1][place]
        return batch(self.source, self.target, rows, width)

    def _shuffled(self, number: int) -> list[tuple[int, Tensor]]:
        """The batches of a pass: the width of each and its rows."""
        draw = np.random.default_rng((self.seed, number))
        device, found = self.source.ids.device, []
        left = np.zeros(0, np.int64)
        for width, rows in self.buckets.items():
            mixed = np.concatenate([left, draw.permutation(rows)])
            full = len(mixed) - len(mixed) % self.sizes[width]
            if full:
                batches = torch.from_numpy(mixed[:full]).to(device)
                found += [(width, x) for x in batches.view(-1, self.sizes[width])]
            left = mixed[full:]
        if not found:
            found.append((max(self.buckets), torch.from_numpy(left).to(device)))
        return [found[i] for i in draw.permutation(len(found))]


def _rows(most: int) -> int:
    return most // MULTIPLE * MULTIPLE if most > MULTIPLE else max(most, 1)


def batch(source: Rows, target: Rows, rows: Int[Tensor, " b"], width: int) -> dict[str, Tensor]:
    """Rows of both sides as a model takes them: the decoder begins with padding.

    The decoder is causal, so that its padding, which comes last, needs no mask.
    """
    ids, there = source.padded(rows, width)
    wanted, exists = target.padded(rows, width)
    before = torch.cat([torch.full_like(wanted[:, :1], PAD_ID), wanted[:, :-1]], dim=1)
    return {
        "input_ids": ids,
        "attention_mask": there.long(),
        "decoder_input_ids": before,
        "labels": wanted.masked_fill(~exists, IGNORED),
    }


def only(items: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The collate function of `TokenBatches`, whose items are whole batches."""
    (found,) = items
    return found
