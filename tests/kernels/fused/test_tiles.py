"""The tiles that a call takes."""

import itertools

import pytest
import torch

pytest.importorskip("triton", reason="Triton is a Linux package")

from whence.kernels.fused import tiles as tiling
from whence.kernels.fused.backend import FARTHEST, as_rows
from whence.kernels.fused.tiles import TABLE, TileKind, Tiles, key_tiles, split_by_warp


def test_diagonals_are_summed_in_near_and_far_tiles_of_as_many_rows() -> None:
    built_in = [tiles.by_keys for row in TABLE.values() for tiles in row.sizes.values()]
    tuned = [Tiles(rows, 64, 4, stages) for rows in (16, 32, 64, 128) for stages in (1, 3)]
    flags = (False, True)
    for tiles, d, n, by_row, alone, causal, tails in itertools.product(
        [*built_in, *tuned], (32, 64, 128, 256), (100, 512, 2048), flags, flags, flags, flags
    ):
        kind = TileKind(d, n, by_row, alone, causal, False, tail_sums=tails, striped=True)
        found, near = key_tiles(tiles, kind)
        assert near == found.rows <= tiles.rows


def test_warps_share_memory_only_in_tiles_for_four_of_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tiling, "on_hopper", lambda: True)
    found = {
        (side, warps): split_by_warp(side, Tiles(64, 64, warps, 2), torch.bfloat16)
        for side in (16, 32, 64, 128)
        for warps in (1, 2, 4, 8)
    }
    assert [shape for shape, shared in found.items() if shared] == [(64, 4)]


def test_rows_too_far_apart_for_32_bits_are_copied() -> None:
    near, far = (
        torch.empty_strided((1, 1, 2, 4), (0, 0, stride, 1), device="meta")
        for stride in (FARTHEST - 1, FARTHEST)
    )
    assert as_rows(near) is near
    assert as_rows(far).stride(-2) == 4
