"""How large the Triton kernels' tiles are: by GPU and head size, smaller where they do not fit.

A table that the user has measured (`whence tune`) comes first, then the built-in row of the GPU's
architecture. Nothing is ever measured in a training step.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from whence.kernels.tiles_file import PARTS, Rows, default_path, gpu_key, read_all
from whence.kernels.triton_forward import forward_kernel
from whence.kernels.triton_inputs import Tiles
from whence.replay import forget


class TileSet(NamedTuple):
    """The tiles of each kernel, and the side of a block-diagonal's block."""

    forward: Tiles
    by_rows: Tiles
    by_keys: Tiles
    block: int


class BuiltIn(NamedTuple):
    """The tiles for a GPU with at least this much shared memory a block, by head size up to."""

    shared: int
    sizes: dict[int, TileSet]


TABLE = {  # by compute capability; only that of the H200 was measured
    (9, 0): BuiltIn(
        227 << 10,
        {
            64: TileSet(Tiles(128, 64, 8, 3), Tiles(128, 64, 4, 3), Tiles(64, 64, 4, 3), 64),
            128: TileSet(Tiles(128, 64, 8, 3), Tiles(64, 64, 4, 2), Tiles(32, 64, 4, 3), 64),
            256: TileSet(Tiles(64, 64, 8, 2), Tiles(64, 32, 8, 2), Tiles(32, 64, 8, 2), 64),
        },
    ),
    (8, 0): BuiltIn(
        163 << 10,
        {
            64: TileSet(Tiles(128, 64, 4, 2), Tiles(128, 64, 4, 2), Tiles(64, 64, 4, 2), 64),
            128: TileSet(Tiles(128, 64, 8, 2), Tiles(64, 64, 4, 2), Tiles(64, 64, 4, 2), 64),
            256: TileSet(Tiles(64, 32, 4, 2), Tiles(32, 32, 4, 2), Tiles(32, 32, 4, 2), 32),
        },
    ),
    (8, 6): BuiltIn(  # and 8.9: fewer than 100 KiB
        99 << 10,
        {
            64: TileSet(Tiles(128, 64, 4, 2), Tiles(64, 64, 4, 2), Tiles(64, 64, 4, 2), 64),
            128: TileSet(Tiles(64, 64, 4, 2), Tiles(64, 32, 4, 2), Tiles(32, 64, 4, 2), 32),
            256: TileSet(Tiles(64, 32, 4, 1), Tiles(32, 32, 4, 1), Tiles(32, 32, 4, 1), 16),
        },
    ),
}
INTERPRETED = TileSet(Tiles(16, 16, 1, 1), Tiles(16, 16, 1, 1), Tiles(16, 16, 1, 1), 16)
SMALLEST = 16  # the least that a tensor core multiplies

_shrunk: dict[tuple[object, ...], int] = {}  # how often tiles were made smaller, by what for
_tried: list[TileSet] = []  # at most one; not a ContextVar: backward runs in a thread of its own


def interpreted() -> bool:
    """Whether Triton runs its kernels in Python (TRITON_INTERPRET=1): a machine without a GPU."""
    return type(forward_kernel).__name__ == "InterpretedFunction"


def fitting(kind: str, q: Tensor, v: Tensor, launch: Callable[..., Any]) -> Any:
    """Launch with the table's tiles, or with ever smaller ones until the GPU has room for them.

    The kernel refuses before it runs, so a second try costs a compilation, once.
    """
    if _tried:
        return _launched(kind, _tried[-1], launch)
    width = max(q.shape[-1], v.shape[-1])
    what = (kind, width, q.dtype, q.device)
    while True:
        smaller = _shrunk.get(what, 0)
        tiles = shrunk(lookup(width, q.dtype, q.device), smaller)
        try:
            return _launched(kind, tiles, launch)
        except triton.runtime.errors.OutOfResources:
            if all(min(t.rows, t.keys) <= SMALLEST and t.stages == 1 for t in tiles[:3]):
                raise
            _shrunk[what] = smaller + 1


class Gpu(NamedTuple):
    """What tiles depend on: name, compute capability, and bytes of shared memory a block."""

    name: str
    capability: tuple[int, int]
    shared: int


def gpu_of(device: torch.device) -> Gpu:
    """The GPU behind a device."""
    index = torch.cuda.current_device() if device.index is None else device.index
    known = triton.runtime.driver.active.utils.get_device_properties(index)
    capability = torch.cuda.get_device_capability(index)
    return Gpu(torch.cuda.get_device_name(index), capability, known["max_shared_mem"])


@contextmanager
def trying(tiles: TileSet) -> Iterator[None]:
    """Every launch takes these tiles, and fails where they do not fit: for `whence tune`."""
    forget()
    _tried.append(tiles)
    try:
        yield
    finally:
        _tried.pop()
        forget()


@functools.cache
def lookup(
    width: int, dtype: torch.dtype, device: torch.device, path: Path | None = None
) -> TileSet:
    """The tiles for heads up to `width`, from the user's file if it has them, else built in.

    The file is the one at `path`, or tiles.json in the user's cache folder; it is read when a
    GPU's tiles are first asked for, and not again.
    """
    if interpreted():
        return INTERPRETED
    if device.type != "cuda":
        return built_in(width, dtype, (9, 0), 227 << 10)
    gpu = gpu_of(device)
    rows = read_all(path or default_path()).get(gpu_key(gpu.name, gpu.capability), {})
    return tuned(width, dtype, rows) or built_in(width, dtype, gpu.capability, gpu.shared)


def tuned(width: int, dtype: torch.dtype, rows: Rows) -> TileSet | None:
    """The tiles of a measured row for this dtype and heads of at least this width, or None."""
    sizes = rows.get(str(dtype).removeprefix("torch."), {})
    size = min((size for size in sizes if width <= size), default=None)
    if size is None:
        return None
    row = sizes[size]
    forward, by_rows, by_keys = (Tiles(*row[part]) for part in PARTS)
    return TileSet(forward, by_rows, by_keys, row["block"])


def built_in(width: int, dtype: torch.dtype, capability: tuple[int, int], shared: int) -> TileSet:
    """The row of this architecture, or the largest that its shared memory has room for.

    float32 takes twice the room, so its tiles are one step smaller.
    """
    row = TABLE.get(capability)
    if row is None:
        fits = [entry for entry in TABLE.values() if entry.shared <= shared]
        pick = max if fits else min
        row = pick(fits or TABLE.values(), key=lambda entry: entry.shared)
    tiles = row.sizes[min(size for size in row.sizes if width <= size)]
    return shrunk(tiles, int(dtype == torch.float32))


def shrunk(tiles: TileSet, times: int) -> TileSet:
    """The same tiles, made smaller so many times."""
    for _ in range(times):
        forward, by_rows, by_keys, block = tiles
        tiles = TileSet(
            _smaller(forward), _smaller(by_rows), _smaller(by_keys), max(SMALLEST, block // 2)
        )
    return tiles


def _launched(kind: str, tiles: TileSet, launch: Callable[..., Any]) -> Any:
    if kind == "forward":
        return launch(tiles.forward)
    return launch(tiles.by_rows, tiles.by_keys, tiles.block)


def _smaller(tiles: Tiles) -> Tiles:
    """One stage less, then half of the longer side."""
    rows, keys, warps, stages = tiles
    if stages > 1:
        return Tiles(rows, keys, warps, stages - 1)
    if rows >= keys:
        return Tiles(max(SMALLEST, rows // 2), keys, min(warps, 4), 1)
    return Tiles(rows, max(SMALLEST, keys // 2), min(warps, 4), 1)
