"""How the keys are shared out where few queries meet many of them."""

import functools
from typing import NamedTuple

import torch

ROWS = 16  # the least that a tensor core multiplies, and the most that is called few
LEAST = 256  # keys that are worth sharing out
MOST = 64  # shares
OVERHEAD = 1e-4  # of one more share, whose results have to be merged


class ShareTiles(NamedTuple):
    """Keys of a tile, pipeline stages, and how many programs a multiprocessor holds."""

    keys: int
    stages: int
    at_once: int


# Measured on an H200, for heads up to 64 and up to 128.
NARROW, WIDE = ShareTiles(64, 3, 4), ShareTiles(128, 2, 2)
PLAIN = ShareTiles(64, 1, 2)  # wider heads, and float32


def few(n_q: int, n_k: int, groups: int) -> bool:
    """Whether a call has so few rows and so many keys that its keys are shared out."""
    return n_q * groups <= ROWS and n_k >= LEAST


def share_tiles(width: int, dtype: torch.dtype, most_keys: int, most_stages: int) -> ShareTiles:
    """For heads of this width, no larger than a GPU has room for."""
    tiles = NARROW if width <= 64 else WIDE
    if dtype.itemsize > 2 or width > 128:
        tiles = PLAIN
    keys, stages = min(tiles.keys, most_keys), min(tiles.stages, most_stages)
    return tiles._replace(keys=keys, stages=stages)


def shares(n_k: int, key_heads: int, slots: int, tile: int) -> tuple[int, int]:
    """How many shares, and keys of a share: as many as keep `slots` programs busy to the end."""
    count = max(1, min(_even(key_heads, slots), n_k // (2 * tile)))
    share = -(-n_k // (count * tile)) * tile
    return -(-n_k // share), share


@functools.cache
def _even(heads: int, slots: int) -> int:
    """The number of shares of a head for which rounds of `slots` programs waste the least."""

    def cost(count: int) -> float:
        rounds = -(-heads * count // slots)
        return rounds / count + OVERHEAD * count

    return min(range(1, MOST + 1), key=cost)
