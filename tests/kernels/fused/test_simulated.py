"""What Triton compiles for an H200, run on a simulated one: inline assembly, tensor cores, barriers.

The error of the output and of every gradient is at most twice PyTorch's in the same dtype, no kernel
reads or writes outside of its tensors, and no two warps race.
"""

import os
import re
from typing import Any
from unittest.mock import patch

import pytest
import torch

import gpu_exactness
from whence.kernels.fused import backend

pytestmark = pytest.mark.compiled  # run-time shape checks change the source that Triton reads

CALL = {
    **{"seed": 0, "b": 1, "h": 1, "h_kv": 1, "d": 64, "d_v": 64, "n_q": 128, "n_k": 128},
    **{"mode": "one pass", "dtype": "bfloat16", "bias": "none", "reach": 9, "causal": True},
    **{"low_rank": False, "dropout": 0.0, "per_row": False, "by_token": True, "apart": False},
    **{"per_batch": False, "value_reach": None, "mask": "none", "long_segments": False},
    **{"window": None, "q_start": None, "scale": None},
}
# The options of a call, and kernels that it must have started.
CASES: dict[str, tuple[dict[str, Any], str]] = {
    "Gaussians over whole tiles": (
        {"bias": "gaussians", "reach": 511, "n_q": 512, "n_k": 512},
        "head_layout forward query key stripe gaussians_gradient",
    ),
    "buckets in a window, not causal": (
        {"bias": "buckets", "reach": 200, "causal": False, "window": 100, "dtype": "float16"}
        | {"n_q": 150, "n_k": 150},
        "forward query key buckets_gradient",
    ),
    "slopes in float32": (
        {"bias": "sloped", "dtype": "float32", "causal": False, "n_q": 40, "n_k": 70, "d": 16},
        "forward query key",
    ),
    "short in float32": (
        {"bias": "gaussians", "mode": "short", "dtype": "float32", "n_q": 40, "n_k": 40, "d": 16},
        "short_forward short_backward",
    ),
    "one query in float32": (
        {"bias": "line", "mode": "decode", "dtype": "float32", "n_q": 1, "n_k": 100, "d": 16},
        "query key",
    ),
    "a product and a value table": (
        {"bias": "product", "value_reach": 9, "mask": "keys"},
        "forward query key product_gradient table_sum",
    ),
    "short": (
        {"bias": "gaussians", "mode": "short", "n_q": 33, "n_k": 33, "mask": "packed"},
        "short_forward short_backward",
    ),
    "short, in three tiles": (
        {"bias": "buckets", "reach": 99, "mode": "short", "n_q": 100, "n_k": 100},
        "short_forward short_triangle",
    ),
    "short, a product": (
        {"bias": "product", "mode": "short", "n_q": 20, "n_k": 20, "value_reach": 9},
        "short_forward short_backward",
    ),
    "a band of each query": (
        {"bias": "band", "per_row": True, "n_q": 70, "n_k": 130, "dropout": 0.2, "d": 40},
        "forward query key",
    ),
    "decoding": (
        {"bias": "line", "mode": "decode", "n_q": 1, "n_k": 700, "h": 4, "dtype": "float16"},
        "share merge",
    ),
    "beside a plain kernel": (
        {"bias": "constant", "mode": "split", "n_q": 300, "n_k": 300},
        "forward query key",
    ),
}
MOST = (
    *("Gaussians over whole tiles", "a product and a value table", "short", "short in float32"),
    *("slopes in float32", "one query in float32"),
)


@pytest.fixture(autouse=True)
def _compiles() -> Any:
    if os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("with TRITON_INTERPRET=1 nothing is compiled")
    pytest.importorskip("triton", reason="Triton is a Linux package")
    with patch.object(backend, "SHORTEST", backend.SHORTEST):
        yield


@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=() if x in MOST else pytest.mark.slow) for x in CASES]
)
def test_machine_code_is_as_exact_as_pytorch(name: str) -> None:
    from simulated_gpu import simulated_gpu

    options, kernels = CASES[name]
    draws = 3 if options.get("dtype") == "float32" else 1
    with simulated_gpu() as started:
        found = gpu_exactness.judged(CALL | options, draws, "cpu", floor=1e-7)
    assert not found["bad"]
    assert {f"{kernel}_kernel" for kernel in kernels.split()} <= set(started)


@pytest.mark.parametrize(
    "dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)]
)
def test_rotations_are_turned_as_by_definition(dtype: torch.dtype) -> None:
    from simulated_gpu import simulated_gpu
    from whence.methods import build
    from whence.nn import positioned_attention

    rope = build("rope", n_heads=2, d_head=32)
    q, k, v = (torch.randn(1, 2, 20, 32, dtype=dtype).requires_grad_() for _ in range(3))
    truth = positioned_attention(rope, *(x.double() for x in (q, k, v)), causal=True)
    with simulated_gpu() as started:
        out = positioned_attention(rope, q, k, v, causal=True, backend="fused")
        found = torch.autograd.grad(out.double().square().sum(), [q, k])
    assert started.count("turn_kernel") == 2
    wanted = torch.autograd.grad(truth.square().sum(), [q, k])
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(out.double(), truth, rtol=8 * eps, atol=4 * eps)
    torch.testing.assert_close(found, wanted, rtol=30 * eps, atol=30 * eps)


@pytest.mark.parametrize(
    ("mode", "missing", "instead", "message"),
    [
        ("short", r"bar\.sync\s+0", "bar.warp.sync -1", "without a barrier between"),
        ("one pass", r"cp\.async\.wait_group[^;]*", "", "a copy"),
        ("one pass", r"wgmma\.wait_group[^;]*", "", "a product in flight"),
        ("one pass", r"fence\.proxy\.async[^;]*", "", "without a fence"),
    ],
)
def test_a_kernel_that_does_not_wait_is_found(
    mode: str, missing: str, instead: str, message: str
) -> None:
    import simulated_gpu
    from ptx import Kernel
    from ptx_machine import GpuError

    def changed(ptx: str) -> Kernel:
        return Kernel(re.sub(missing, instead, ptx))

    length = 20 if mode == "short" else 512
    call = CALL | {"bias": "gaussians", "mode": mode, "n_q": length, "n_k": length, "reach": 511}
    gpu_exactness.set_mode(mode)
    drawn = gpu_exactness.Drawn(call, 0, "cpu")
    with (
        patch.object(simulated_gpu, "Kernel", changed),
        patch.object(simulated_gpu, "TRANSLATED", {}),
        simulated_gpu.simulated_gpu(),
        pytest.raises(GpuError, match=message),
    ):
        drawn.run("fused")
