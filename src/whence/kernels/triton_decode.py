"""Few queries against many keys: the keys are shared out, and a second kernel merges the shares.

One program takes one share of the keys for all query heads of one key head, so that a grouped
cache is read once. A row of its tile is one query of one head.
"""

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from whence.kernels.triton_edges import shared
from whence.kernels.triton_shares import merge_kernel, share_kernel
from whence.lag import Curve
from whence.launcher import launch

ROWS = 16  # the least that a tensor core multiplies, and the most that is called few
LEAST = 256  # keys that are worth sharing out
MOST = 64  # shares
OVERHEAD = 1e-4  # of one more share: what it leaves has to be merged


class ShareTiles(NamedTuple):
    """Keys a tile, how the compiler is to run it, and how many programs a processor holds."""

    keys: int
    stages: int
    at_once: int


# Measured on an H200, for heads to 64 and to 128.
NARROW, WIDE = ShareTiles(64, 3, 4), ShareTiles(128, 2, 2)
PLAIN = ShareTiles(64, 1, 2)  # wider heads, and float32
INTERPRETED = ShareTiles(16, 1, 4)


def tiles_of(width: int, q: Tensor, most_keys: int, most_stages: int) -> ShareTiles:
    """For heads of this width, no larger than a GPU has room for."""
    if not q.is_cuda:
        return INTERPRETED
    tiles = NARROW if width <= 64 else WIDE
    if q.element_size() > 2 or width > 128:
        tiles = PLAIN
    keys, stages = min(tiles.keys, most_keys), min(tiles.stages, most_stages)
    return tiles._replace(keys=keys, stages=stages)


def few(n_q: int, n_k: int, groups: int) -> bool:
    """Whether a call has so few rows and so many keys that its keys are shared out."""
    return n_q * groups <= ROWS and n_k >= LEAST


def shares(n_k: int, key_heads: int, slots: int, tile: int) -> tuple[int, int]:
    """How many shares, and keys a share: as many as keep `slots` programs busy to the end."""
    count = max(1, min(_even(key_heads, slots), n_k // (2 * tile)))
    share = -(-n_k // (count * tile)) * tile
    return -(-n_k // share), share


@functools.cache
def _even(heads: int, slots: int) -> int:
    """The number of shares a head for which rounds of `slots` programs waste the least."""

    def cost(count: int) -> float:
        rounds = -(-heads * count // slots)
        return rounds / count + OVERHEAD * count

    return min(range(1, MOST + 1), key=cost)


def decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pointers: tuple[Tensor | None, ...],  # band, extent, tails, keys, segments
    strides: tuple[int, ...],  # theirs
    table: Tensor | None,
    results: tuple[Tensor | None, ...],  # out, rest, lse, mass: to be filled
    *,
    reach: int,
    q_start: int,
    before: int,
    after: int,
    scale: float,
    flags: dict[str, bool],
    shape: dict[str, int],
    precision: str,
    most_keys: int,
    most_stages: int,
    curve: tuple[Curve, tuple[Tensor, ...]] | None = None,  # with its parameters, float32
) -> None:
    """Two launches in place of the forward kernel's one; of a curve, `band` is room for it."""
    (b, h, n_q, _), (_, h_kv, n_k, d_v) = q.shape, v.shape
    out, rest, lse, mass = results
    band = pointers[0]
    width = max(shape["BLOCK_D"], shape["BLOCK_DV"])
    tile, stages, at_once = tiles_of(width, q, most_keys, most_stages)
    count, share = shares(n_k, b * h_kv, at_once * _processors(q.device), tile)
    part = torch.empty(count, b, h, n_q, d_v, dtype=torch.float32, device=q.device)
    state = torch.empty(count, b, h, n_q, 4, dtype=torch.float32, device=q.device)
    value_reach = 0 if table is None else table.shape[1] // 2
    curve_at = curve_extent = None
    parameters: tuple[Tensor | None, ...] = (None,) * 3
    curve_count = 1
    if curve is not None:
        curve_at, curve_extent = curve[0].at, curve[0].extent_of
        parameters, curve_count = curve[1], curve[1][0].shape[1]
    launch(
        share_kernel,
        (count, b * h_kv),
        (q, k, v, part, state, mass, *pointers, *parameters),
        (
            *(*q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *strides),
            *(h, h // h_kv, n_q, n_k, q_start, reach),
            *(value_reach, before, after, share, curve_count, scale),
        ),
        **shape,
        **flags,
        BLOCK_M=ROWS,
        BLOCK_N=tile,
        BAND=band is not None,
        EVEN_N=n_k % tile == 0,
        STAGES=stages,
        PRECISION=precision,
        CURVE=curve is not None,
        CURVE_AT=curve_at,
        CURVE_EXTENT=curve_extent,
        CURVE_COUNT=1 << (curve_count - 1).bit_length(),
        num_warps=4,
        num_stages=stages,
    )
    launch(
        merge_kernel,
        (b * h * n_q,),
        (part, state, mass, table, out, rest, lse),
        (
            0 if table is None else shared(table, 0)[0],
            *(h, n_q, n_k, q_start, value_reach, before, after, count),
        ),
        D_V=d_v,
        BLOCK_DV=shape["BLOCK_DV"],
        SHARES=1 << (count - 1).bit_length(),
        VALUES=table is not None,
        BEFORE=before >= 0,
        AFTER=after >= 0,
        REST=rest is not None,
    )


@functools.cache
def _processors(device: torch.device) -> int:
    if device.type != "cuda":
        return 4
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return count
