"""The table's tiles, which are for plain loops, fitted to what a call looks up near the diagonal.

Look-ups take registers and shared memory, and a row's own numbers take the most. All of this was
measured on one H200 (docs/LOG.md); on another GPU it costs speed at worst.
"""

from typing import NamedTuple

from whence.kernels.triton_inputs import Tiles

NEAR = 32  # keys a step near the diagonal, or rows in the key kernel
SHORT = 1024  # tokens: up to here programs have little to do each


class Kind(NamedTuple):
    """What tiles depend on besides the GPU."""

    d: int
    n: int
    by_row: bool  # rows have numbers of their own
    near_alone: bool  # others do the far keys
    causal: bool


def forward_tiles(tiles: Tiles, kind: Kind) -> tuple[Tiles, int]:
    """Tiles, and keys a near step."""
    if not (kind.near_alone or kind.by_row):
        return tiles, min(tiles.keys, NEAR)
    keys = 32 if kind.near_alone and kind.by_row else 64
    tiles = tiles._replace(rows=min(tiles.rows, 64), keys=min(tiles.keys, keys), warps=4)
    if kind.near_alone and kind.d > 64:
        tiles = tiles._replace(stages=min(tiles.stages, 2))
        return tiles, tiles.keys
    return tiles, min(tiles.keys, NEAR)


def query_tiles(tiles: Tiles, kind: Kind) -> tuple[Tiles, int]:
    """Tiles, and keys a near step."""
    if kind.near_alone or kind.by_row:
        keys = 32 if kind.by_row else 64
        tiles = tiles._replace(rows=min(tiles.rows, 64), keys=min(tiles.keys, keys), warps=4)
    elif kind.causal:  # half of a diagonal tile is for nothing
        tiles = tiles._replace(rows=min(tiles.rows, 64))
    return tiles, tiles.keys if kind.d > 64 else min(tiles.keys, NEAR)


def key_tiles(tiles: Tiles, kind: Kind) -> tuple[Tiles, int]:
    """Tiles, and rows a near step."""
    if kind.near_alone or kind.by_row:
        rows = 32 if kind.by_row else 64
        tiles = tiles._replace(rows=min(tiles.rows, rows), keys=min(tiles.keys, 64), warps=4)
        if kind.near_alone and kind.d <= 64 and not kind.by_row:
            tiles = tiles._replace(stages=1)
        return tiles, min(tiles.rows, NEAR)
    if kind.causal and kind.n <= SHORT:
        tiles = tiles._replace(rows=min(tiles.rows, 32))
    return tiles, min(tiles.rows, NEAR) if kind.d > 64 else tiles.rows


def band_programs(n: int) -> int:
    """How many programs sum a shared band's gradient: enough to fill a GPU."""
    return 512 if n <= SHORT else 1024
