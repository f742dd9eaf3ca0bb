"""How large the Triton kernels' tiles are: by head size, and smaller where they do not fit."""

from collections.abc import Callable
from typing import Any

import torch
import triton
from torch import Tensor

from whence.kernels.triton_forward import forward_kernel
from whence.kernels.triton_launch import Tiles

TABLE = {  # head size up to: forward, backward by rows, backward by keys; measured on an H200
    64: (Tiles(128, 64, 4, 2), Tiles(128, 64, 4, 2), Tiles(64, 64, 4, 3)),
    128: (Tiles(128, 64, 8, 3), Tiles(64, 64, 4, 2), Tiles(64, 64, 4, 2)),
    256: (Tiles(64, 64, 8, 2), Tiles(64, 32, 8, 2), Tiles(32, 64, 8, 2)),
}
BAND_BLOCK = 64
SMALLEST = 16  # the least that a tensor core multiplies

_shrunk: dict[
    tuple[object, ...], int
] = {}  # how often tiles had to be halved, by what they were for


def interpreted() -> bool:
    """Whether Triton runs its kernels in Python (TRITON_INTERPRET=1): a machine without a GPU."""
    return type(forward_kernel).__name__ == "InterpretedFunction"


def fitting(kind: str, q: Tensor, v: Tensor, launch: Callable[..., Any]) -> Any:
    """Launch with the table's tiles, or with ever smaller ones until the GPU has room for them.

    The kernel refuses before it runs, so a second try costs a compilation, once.
    """
    width = max(q.shape[-1], v.shape[-1])
    what = (kind, width, q.dtype, q.device)
    while True:
        halvings = _shrunk.get(what, 0)
        tiles, block = _tiles(width, halvings + (q.dtype == torch.float32))
        try:
            return launch(tiles[0]) if kind == "forward" else launch(*tiles[1:], block)
        except triton.runtime.errors.OutOfResources:
            if all(min(t.rows, t.keys) <= SMALLEST and t.stages == 1 for t in tiles):
                raise
            _shrunk[what] = halvings + 1


def _tiles(width: int, halvings: int) -> tuple[list[Tiles], int]:
    if interpreted():
        return [Tiles(16, 16, 1, 1)] * 3, 16
    tiles, block = list(TABLE[min(size for size in TABLE if width <= size)]), BAND_BLOCK
    for _ in range(halvings):
        tiles, block = [_smaller(t) for t in tiles], max(SMALLEST, block // 2)
    return tiles, block


def _smaller(tiles: Tiles) -> Tiles:
    """One stage less, then half of the longer side."""
    rows, keys, warps, stages = tiles
    if stages > 1:
        return Tiles(rows, keys, warps, stages - 1)
    if rows >= keys:
        return Tiles(max(SMALLEST, rows // 2), keys, min(warps, 4), 1)
    return Tiles(rows, max(SMALLEST, keys // 2), min(warps, 4), 1)
