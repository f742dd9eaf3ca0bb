"""Tiles of the fused kernels, and limits of their registers: by GPU, head size and kind of call.

A table that the user has measured (`whence tune`) comes first, then the built-in row of the GPU's
architecture; tiles that do not fit in the GPU's shared memory are made smaller until they do.
Nothing is ever measured in a training step.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch
import triton

from whence.kernels.fused.device import arguments as a
from whence.kernels.fused.tiles_file import PARTS, Rows, default_path, gpu_key, read_all


class Tiles(NamedTuple):
    """Rows and keys of a tile, and the compiler's warps and pipeline stages for it."""

    rows: int
    keys: int
    warps: int
    stages: int


class TileSet(NamedTuple):
    """The tiles of each kernel, and the side of a block-diagonal's block."""

    forward: Tiles
    by_rows: Tiles
    by_keys: Tiles
    block: int


class BuiltIn(NamedTuple):
    """The tiles of an architecture, and the bytes of shared memory a block that they need.

    A key of the tiles is the largest head size that they are for.
    """

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
    (8, 6): BuiltIn(  # also for 8.9: less than 100 KiB of shared memory
        99 << 10,
        {
            64: TileSet(Tiles(128, 64, 4, 2), Tiles(64, 64, 4, 2), Tiles(64, 64, 4, 2), 64),
            128: TileSet(Tiles(64, 64, 4, 2), Tiles(64, 32, 4, 2), Tiles(32, 64, 4, 2), 32),
            256: TileSet(Tiles(64, 32, 4, 1), Tiles(32, 32, 4, 1), Tiles(32, 32, 4, 1), 16),
        },
    ),
}
INTERPRETER_TILES = TileSet(Tiles(16, 16, 1, 1), Tiles(16, 16, 1, 1), Tiles(16, 16, 1, 1), 16)
SMALLEST = 16  # the side of the smallest tile of a tensor core


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


Made = TypeVar("Made")


class FittingTiles:
    """The tiles that a process uses: those of the table, made smaller until they fit the GPU."""

    def __init__(self) -> None:
        # (purpose, width of a head, dtype, device) -> how often its tiles were made smaller
        self._shrunk: dict[tuple[str, int, torch.dtype, torch.device], int] = {}
        self._forced: TileSet | None = None

    def fit(
        self,
        purpose: str,
        width: int,
        dtype: torch.dtype,
        device: torch.device,
        make: Callable[[TileSet], Made],
    ) -> Made:
        """make(tiles) with the table's tiles, or with smaller ones until they fit the GPU.

        The purpose is "forward" or "backward", since their kernels need unequal memory.

        Triton raises OutOfResources when it loads a kernel, so a second try costs a compilation,
        once a process.
        """
        if self._forced is not None:
            return make(self._forced)
        what = (purpose, width, dtype, device)
        current = torch.cuda.device(device) if device.type == "cuda" else nullcontext()
        while True:
            smaller = self._shrunk.get(what, 0)
            tiles = shrunk(lookup(width, dtype, device), smaller)
            try:
                with current:
                    return make(tiles)
            except triton.runtime.errors.OutOfResources:
                if all(min(t.rows, t.keys) <= SMALLEST and t.stages == 1 for t in tiles[:3]):
                    raise
                self._shrunk[what] = smaller + 1

    @contextmanager
    def forced(self, tiles: TileSet) -> Iterator[None]:
        """A context in which every plan uses these tiles, or fails if they do not fit."""
        before, self._forced = self._forced, tiles
        try:
            yield
        finally:
            self._forced = before


TILES = FittingTiles()  # one for the process: autograd runs backward in its own threads


@functools.cache
def lookup(
    width: int, dtype: torch.dtype, device: torch.device, path: Path | None = None
) -> TileSet:
    """The tiles for heads up to `width`, from the user's file if it has them, else built in.

    The file is the one at `path`, or tiles.json in the user's cache folder; it is read when a
    GPU's tiles are first asked for, and not again.
    """
    if device.type != "cuda":  # Triton's interpreter
        return INTERPRETER_TILES
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


def _smaller(tiles: Tiles) -> Tiles:
    """One stage less, then half of the longer side."""
    rows, keys, warps, stages = tiles
    if stages > 1:
        return Tiles(rows, keys, warps, stages - 1)
    if rows >= keys:
        return Tiles(max(SMALLEST, rows // 2), keys, min(warps, 4), 1)
    return Tiles(rows, max(SMALLEST, keys // 2), min(warps, 4), 1)


# The table has the best tiles for far keys, where no bias is looked up. Looking it up in near tiles
# takes registers, and where every row has its own band also shared memory. The functions below
# choose tiles for that. They were measured on one H200 (docs/LOG.md); on another GPU these choices
# may cost speed, but no exactness.
NEAR = 32  # keys in one step of near tiles that have to be small, or rows in the key kernel
# Tokens: up to these lengths a program has little work.
BRIEF, SHORT, MIDDLE = 512, 1024, 2048


class TileKind(NamedTuple):
    """What tiles depend on besides the GPU."""

    d: int
    n: int
    row_lookup: bool  # every row has a band or tails of its own, or there is a value table
    near_alone: bool  # a plain kernel takes the far keys
    causal: bool
    sloped: bool
    per_row: bool = False  # every row has a band or tails of its own (Task.per_row)
    tail_sums: bool = False  # backward also sums over what is near and belongs to a tail
    striped: bool = False  # the key kernel also sums the diagonals of a shared band
    limited: bool = False  # a key kernel with few rows is faster with a limit of registers


def forward_tiles(tiles: Tiles, kind: TileKind) -> tuple[Tiles, int]:
    """Tiles, and keys a near step."""
    near_rows = kind.near_alone and kind.row_lookup
    if kind.near_alone or kind.row_lookup:
        tiles = _at_most(tiles, 64, 32 if near_rows else 64)
    elif kind.d <= 64 and (kind.causal or kind.sloped or kind.n <= MIDDLE):
        tiles = _at_most(tiles, 64, 64)
    if near_rows or (kind.near_alone and kind.d > 64):
        tiles = tiles._replace(stages=min(tiles.stages, 2))
        return tiles, tiles.keys
    return tiles, min(tiles.keys, NEAR) if kind.row_lookup else tiles.keys


def query_tiles(tiles: Tiles, kind: TileKind) -> tuple[Tiles, int]:
    """Tiles, and keys a near step."""
    if kind.row_lookup:
        tiles = _at_most(tiles, 64, 64 if _long_product(kind) else 32)
        return tiles, tiles.keys
    # Half of a diagonal tile is masked out; sums of tails take registers.
    if kind.near_alone or kind.causal or kind.tail_sums:
        tiles = tiles._replace(rows=min(tiles.rows, 64))
    if kind.n <= SHORT and kind.d <= 64:
        tiles = _at_most(tiles, 64, 32)
    tail_sums = kind.tail_sums and not (kind.striped and kind.causal)
    small = kind.d <= 64 and (tail_sums or kind.near_alone)
    return tiles, min(tiles.keys, NEAR) if small else tiles.keys


def key_tiles(tiles: Tiles, kind: TileKind) -> tuple[Tiles, int]:
    """Tiles, and rows a near step.

    Where diagonals of a shared band are summed, near and far tiles have the same number of rows.
    """
    unequal = kind.per_row and not kind.near_alone
    most = SHORT
    if kind.striped and kind.causal:
        most = BRIEF if kind.limited else 0
    few_rows = kind.n <= most and not kind.near_alone
    if (kind.row_lookup and not unequal) or few_rows:
        tiles = tiles._replace(rows=min(tiles.rows, 32))
    # Near tiles alone are few, and want small steps, unless they also sum diagonals.
    shrink = kind.near_alone and not (kind.striped and kind.d <= 64)
    if shrink and kind.d <= 64 and not kind.row_lookup:
        tiles = tiles._replace(stages=1)
    small = shrink or (kind.row_lookup and not _long_product(kind)) or kind.d > 64
    near = min(tiles.rows, NEAR) if small else tiles.rows
    return tiles._replace(rows=near) if kind.striped else tiles, near


def _long_product(kind: TileKind) -> bool:
    """Whether the band of each row is looked up in near tiles as large as the far ones.

    They are few in a long causal call. In whole tiles a thread has registers enough for them.
    """
    long = kind.n > SHORT and kind.n % 64 == 0 and kind.d <= 64
    return kind.per_row and kind.causal and long and not kind.near_alone


def _at_most(tiles: Tiles, rows: int, keys: int) -> Tiles:
    """Tiles no larger than this, with four warps, which suit so few rows."""
    return tiles._replace(rows=min(tiles.rows, rows), keys=min(tiles.keys, keys), warps=4)


# Registers of a thread with which three, or four, programs of 128 threads run on a multiprocessor:
# 65,536 / 128 / 3, rounded down to a multiple of 8, and 65,536 / 128 / 4. Which kernels are limited
# was measured: forward_registers, query_registers, key_registers.
MOST_REGISTERS = 168
FEW_REGISTERS = 128


def forward_registers(kind: a.Kind, tiles: Tiles, *, even: bool, alone: bool) -> int | None:
    """The limit of registers with which most programs of the forward kernel run side by side.

    With the band of a head or none, and in whole tiles, it spills at most a few numbers, outside of
    its loops (counted for a Hopper GPU). Without a limit the compiler may take a few registers
    more, so that one program fewer would run.
    """
    more = kind.DROPOUT or kind.KEYS or kind.SEGMENTS or kind.FAR or kind.PER_ROW or kind.VALUES
    small = max(kind.BLOCK_D, kind.BLOCK_DV) <= 64 and kind.PRECISION != "ieee"
    wide = tiles.keys > 64 or tiles.rows > 16 * tiles.warps
    if even and small and not (more or wide) and on_hopper():
        return MOST_REGISTERS if kind.SLOPES and not kind.CAUSAL else FEW_REGISTERS
    limit = _table_registers(kind, tiles)
    product_alone = alone and kind.CAUSAL and kind.ENDS
    if limit is not None and even and (product_alone or _plain_causal_product(kind)):
        limit = FEW_REGISTERS
    return limit


def query_registers(kind: a.Kind, tiles: Tiles, *, even: bool) -> int | None:
    """The limit of registers of the query kernel, where one was measured to be faster.

    With the lower limit it spills six numbers, outside of its loops.
    """
    limit = _table_registers(kind, tiles)
    few_keys = tiles.keys <= NEAR
    if limit is not None and even and few_keys and _plain_causal_product(kind):
        return FEW_REGISTERS
    return limit


def key_registers(kind: a.Kind, sizes: a.Sizes, tiles: Tiles, *, even: bool) -> int | None:
    """The limit of registers of the key kernel: in tiles of few rows, its loops hardly spill."""
    if tiles.rows > 32:
        return None
    if even and _plain_causal_product(kind):
        return _table_registers(kind, tiles)
    return MOST_REGISTERS if is_limited(kind, sizes) and _is_small(kind, tiles) else None


def _table_registers(kind: a.Kind, tiles: Tiles) -> int | None:
    """The limit of kernels with two tables, or with sums of two tails of a head.

    Without a limit, the compiler takes fewer for a causal query kernel that sums a tail over tiles
    of few keys.
    """
    wanted = (kind.VALUES and kind.PER_ROW) or (
        kind.GRAIN > 0 and (tiles.keys > NEAR or not kind.CAUSAL)
    )
    return MOST_REGISTERS if wanted and _is_small(kind, tiles) else None


def is_limited(kind: a.Kind, sizes: a.Sizes) -> bool:
    """Whether a key kernel with few rows was measured to be faster in fewer registers.

    Masks, dropout and lengths that are no multiple of a tile take registers of their own, and on
    other GPUs than a Hopper the kernel spills in its loops.
    """
    whole = sizes.n_q % 64 == 0 and sizes.n_k % 64 == 0 and not (kind.PER_ROW or kind.VALUES)
    more = kind.DROPOUT or kind.KEYS or kind.SEGMENTS or kind.FAR
    return on_hopper() and kind.CAUSAL and whole and not more


def _is_small(kind: a.Kind, tiles: Tiles) -> bool:
    """Whether a limit of registers was measured for heads, tiles and a dtype like these."""
    return max(kind.BLOCK_D, kind.BLOCK_DV) <= 64 and tiles.warps == 4 and kind.PRECISION != "ieee"


def _plain_causal_product(kind: a.Kind) -> bool:
    """Whether a causal call has a product as its band, and no dropout, mask or left limit."""
    more = kind.DROPOUT or kind.KEYS or kind.SEGMENTS or kind.BEFORE
    return kind.CAUSAL and kind.ENDS and not more


# Decoding: few queries attend to many keys, which are divided into shares, one for each program.
MOST_SHARES = 64
OVERHEAD = 1e-4  # the relative cost of one more share, whose results have to be merged


class ShareTiles(NamedTuple):
    """Keys of a tile, pipeline stages, and how many programs a multiprocessor holds."""

    keys: int
    stages: int
    at_once: int


# Measured on an H200, for heads up to 64 and up to 128.
NARROW, WIDE = ShareTiles(64, 3, 4), ShareTiles(128, 2, 2)
PLAIN = ShareTiles(64, 1, 2)  # for wider heads, and for float32


def share_tiles(width: int, dtype: torch.dtype, most_keys: int, most_stages: int) -> ShareTiles:
    """The tiles of a share for heads of this width, with at most these keys and stages."""
    tiles = NARROW if width <= 64 else WIDE
    if dtype.itemsize > 2 or width > 128:
        tiles = PLAIN
    keys, stages = min(tiles.keys, most_keys), min(tiles.stages, most_stages)
    return tiles._replace(keys=keys, stages=stages)


def shares(n_k: int, key_heads: int, slots: int, tile: int) -> tuple[int, int]:
    """The number of shares and the keys of each, so that `slots` programs are busy to the end."""
    count = max(1, min(_even(key_heads, slots), n_k // (2 * tile)))
    share = ceil_div(n_k, count * tile) * tile
    return ceil_div(n_k, share), share


@functools.cache
def _even(heads: int, slots: int) -> int:
    """The number of shares of a head that leaves the fewest of `slots` programs idle at the end."""

    def cost(count: int) -> float:
        rounds = ceil_div(heads * count, slots)
        return rounds / count + OVERHEAD * count

    return min(range(1, MOST_SHARES + 1), key=cost)


def on_hopper() -> bool:
    """Whether the current GPU, for which a plan is written, is a Hopper."""
    if triton.knobs.runtime.interpret or not torch.cuda.is_available():
        return False
    return torch.cuda.get_device_capability()[0] == 9


def narrowest() -> int:
    """The fewest columns of a head's tile.

    For a Hopper GPU, ptxas 12.8, which Triton 3.6 brings, may compile a product with fewer than 64
    columns so that it reads a register that was never set; 12.9 does not.
    """
    if not on_hopper():
        return 16
    version = tuple(int(part) for part in triton.knobs.nvidia.ptxas.version.split("."))
    return 64 if version < (12, 9) else 16


def split_by_warp(side: int, tiles: Tiles, dtype: torch.dtype) -> bool:
    """Whether tensor cores leave every 16 rows of a tile in one of four warps.

    `side` is the number of rows; in the key kernel, whose tiles are [keys, rows], that of keys.
    """
    return on_hopper() and (side, tiles.warps) == (64, 4) and dtype != torch.float32


def ceil_div(n: int, size: int) -> int:
    """n / size, rounded up."""
    return -(-n // size)  # triton.cdiv costs ten times as much


def power_of_two(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << (n - 1).bit_length()
