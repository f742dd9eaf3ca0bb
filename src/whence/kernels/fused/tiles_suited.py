"""The table's tiles, which are for plain loops, fitted to what a call looks up near the diagonal.

Look-ups take registers and shared memory, and a row's own numbers take the most. All of this was
measured on one H200 (docs/LOG.md); on another GPU it costs speed at worst.
"""

from typing import NamedTuple

from whence.kernels.fused.inputs import Tiles

NEAR = 32  # keys a step near the diagonal, or rows in the key kernel
SHORT, MIDDLE = 1024, 2048  # tokens: up to here programs have little to do each


class Kind(NamedTuple):
    """What tiles depend on besides the GPU."""

    d: int
    n: int
    by_row: bool  # rows have numbers of their own
    near_alone: bool  # others do the far keys
    causal: bool
    sloped: bool


def forward_tiles(tiles: Tiles, kind: Kind) -> tuple[Tiles, int]:
    """Tiles, and keys a near step."""
    near_rows = kind.near_alone and kind.by_row
    if kind.near_alone or kind.by_row:
        tiles = _at_most(tiles, 64, 32 if near_rows else 64)
    elif kind.d <= 64 and (kind.causal or kind.sloped or kind.n <= MIDDLE):
        tiles = _at_most(tiles, 64, 64)
    if near_rows or (kind.near_alone and kind.d > 64):
        tiles = tiles._replace(stages=min(tiles.stages, 2))
        return tiles, tiles.keys
    return tiles, min(tiles.keys, NEAR)


def query_tiles(tiles: Tiles, kind: Kind) -> tuple[Tiles, int]:
    """Tiles, and keys a near step."""
    if kind.by_row:
        tiles = _at_most(tiles, 64, 32)
        return tiles, min(tiles.keys, 16)
    if kind.near_alone or kind.causal:  # half of a causal diagonal tile is for nothing
        tiles = tiles._replace(rows=min(tiles.rows, 64))
    if kind.n <= SHORT and kind.d <= 64:
        tiles = _at_most(tiles, 64, 32)
    return tiles, tiles.keys if kind.d > 64 else min(tiles.keys, NEAR)


def key_tiles(tiles: Tiles, kind: Kind) -> tuple[Tiles, int]:
    """Tiles, and rows a near step."""
    if kind.by_row or (kind.n <= SHORT and not kind.near_alone):
        tiles = tiles._replace(rows=min(tiles.rows, 32))
    if kind.near_alone and kind.d <= 64 and not kind.by_row:
        tiles = tiles._replace(stages=1)
    small = kind.near_alone or kind.by_row or kind.d > 64
    return tiles, min(tiles.rows, NEAR) if small else tiles.rows


def _at_most(tiles: Tiles, rows: int, keys: int) -> Tiles:
    """With four warps, which is what so few rows are for."""
    return tiles._replace(rows=min(tiles.rows, rows), keys=min(tiles.keys, keys), warps=4)
