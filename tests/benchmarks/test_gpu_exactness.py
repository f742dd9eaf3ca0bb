"""The random calls of the GPU's exactness benchmark: what they draw, and that they can be run."""

import os
from collections.abc import Iterator

import pytest
import torch

import gpu
import gpu_exactness
from whence.kernels.fused import backend

CALLS = [gpu_exactness.call_of(seed) for seed in range(1_000_000, 1_001_000)]


@pytest.fixture
def _split_as_before() -> Iterator[None]:
    shortest = backend.SHORTEST
    yield
    backend.SHORTEST = shortest


def test_a_thousand_calls_reach_every_mode_with_every_bias() -> None:
    found = {(call["mode"], call["bias"]) for call in CALLS}
    assert found == set(gpu_exactness.PAIRS)
    assert {mode for mode, _ in found} == set(gpu_exactness.MODES)
    assert {("short", curve) for curve in gpu_exactness.CURVES} <= found
    assert {("decode", curve) for curve in gpu_exactness.CURVES} <= found
    assert {call["n_k"] for call in CALLS if call["mode"] == "short"} >= {16, 64, 128}
    assert any(call["mask"] == "packed" and call["long_segments"] for call in CALLS)


def test_calls_of_one_kind_share_what_a_kernel_is_compiled_for() -> None:
    shared = ("mode", "dtype", "d", "d_v", "bias", "per_row", "mask", "causal", "by_token")
    kinds = {(call["seed"] // gpu_exactness.SHARED, *(call[x] for x in shared)) for call in CALLS}
    assert len(kinds) == len(CALLS) // gpu_exactness.SHARED


@pytest.mark.triton
@pytest.mark.usefixtures("_split_as_before")
@pytest.mark.parametrize(
    ("mode", "bias"),
    [
        ("short", "gaussians"),
        ("short", "buckets"),
        ("short", "line"),
        ("decode", "gaussians"),
        pytest.param("decode", "buckets", marks=pytest.mark.slow),
        pytest.param("decode", "line", marks=pytest.mark.slow),
    ],
)
def test_a_drawn_call_runs_in_the_kernels_as_by_the_definition(mode: str, bias: str) -> None:
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("run with TRITON_INTERPRET=1, as `make test` does")
    pytest.importorskip("triton", reason="Triton is a Linux package")
    size = {"d": 16, "d_v": 16, "b": 1, "h": 1, "h_kv": 1, "dtype": "float32"}
    size |= {"n_q": 20, "n_k": 20} if mode == "short" else {"n_q": 2, "n_k": 300}
    call = {**CALLS[0], **size, "mode": mode, "bias": bias, "dropout": 0.0}
    call["mask"] = "packed" if mode == "short" else "keys"
    call |= {"window": None, "value_reach": None, "low_rank": False, "q_start": None, "scale": None}
    gpu_exactness.set_mode(mode)
    drawn = gpu_exactness.Drawn(call, 0, "cpu")
    for ours, truth in zip(drawn.run("fused"), drawn.run("float64"), strict=True):
        torch.testing.assert_close(ours.double(), truth, rtol=1e-4, atol=1e-4)


def test_new_bars_can_be_picked_by_their_names() -> None:
    names = [bar.what for bar in gpu.chosen("one layer;decode, one sequence", None)]
    assert names == [
        "TISA, one layer, as called, over FA2 without bias, n=128",
        "TISA, one layer, as called, over FA2 without bias, n=512",
        "decode, one sequence, cache of 32,768, as called, over SDPA",
    ]
    assert all(bar.limit is None for bar in gpu.chosen("released", None))
    every = [bar.what for bar in gpu.bars()]
    assert len(set(every)) == len(every)
    assert not any("Flex" in bar.what for bar in gpu.chosen(None, "flex;shaw"))
