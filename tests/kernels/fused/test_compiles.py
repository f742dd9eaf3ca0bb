"""Triton's compiler takes the kernels; its interpreter, in which they are tested, is less strict."""

import ast
import os
import re
from typing import Any

import pytest
import torch

from simulated_gpu import Hopper
from whence.methods import build
from whence.nn import positioned_attention

pytestmark = pytest.mark.compiled  # run-time shape checks change the source that Triton reads

CURVES = {
    "gaussians": [torch.ones(2, 3), torch.ones(2, 3), torch.ones(2, 3)],
    "buckets": [torch.ones(4, 2), torch.zeros(9, dtype=torch.int64), None],
    "line": [torch.ones(2), None, None],
}


class Compiling:
    """A plan that compiles kernels and starts none."""

    def __init__(self) -> None:
        self.compiled: list[Any] = []

    def empty(self, shape: Any, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(*shape, dtype=dtype)

    def launch(
        self,
        kernel: Any,
        grid: Any,
        *groups: Any,
        chained: bool = False,
        side: bool = False,
        **constants: Any,
    ) -> None:
        compiled = kernel.warmup(*groups, grid=grid, enable_fp_fusion=True, **constants)
        self.compiled.append(compiled)


@pytest.fixture(autouse=True)
def _hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    if os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("with TRITON_INTERPRET=1 nothing is compiled")
    pytest.importorskip("triton", reason="Triton is a Linux package")
    from triton.runtime import driver

    monkeypatch.setattr(driver, "_active", Hopper())


@pytest.mark.parametrize("name", CURVES)
def test_a_curve_s_gradient_kernel_compiles(name: str) -> None:
    from whence.kernels.fused.backend import CurveBand
    from whence.kernels.fused.launch import _curve_gradient

    plan: Any = Compiling()
    curve = CurveBand(name, 4, CURVES[name])
    extent = None if curve.tails else torch.ones(2, dtype=torch.int32)
    d_tails = torch.ones(4, 3, 2, 5) if curve.tails else None
    _curve_gradient(plan, curve, extent, torch.ones(1, 2, 1, 13), d_tails)
    assert all("ptx" in kernel.asm for kernel in plan.compiled)
    assert len(plan.compiled) == 1


def assert_a_warp_stores_one_stripe(ttgir: str) -> None:
    """Each warp waits for itself alone, so no other one may store into its stripe's room."""
    layouts = dict(re.findall(r"^(#\w+) = (#ttg\..*)$", ttgir, re.MULTILINE))
    stores = [line for line in ttgir.splitlines() if "st.shared.v2" in line]
    assert stores
    for name in {x for line in stores for x in re.findall(r"tensor<[^,>]*, (#\w+)>", line)}:
        bases = {
            part: ast.literal_eval(found.group(1))
            for part in ("lane", "warp")
            if (found := re.search(rf"{part} = (\[\[.*?\]\])", layouts[name]))
        }
        assert bases["warp"] == [[1, 0, 0, 0], [2, 0, 0, 0]]
        assert all(base[0] == 0 for base in bases["lane"])


def assert_it_waits_before_it_touches_memory(ptx: str) -> None:
    """A chained kernel may start before the one before it is done."""
    waits = ptx.index("griddepcontrol.wait")
    touched = re.search(r"\b(ld|st|atom|red)\.global|cp\.async", ptx)
    assert touched is not None
    assert waits < touched.start()


def assert_a_warp_reads_its_own_line(ttgir: str) -> None:
    """Each warp stores the line of its 16 rows, so it must hold the cells of these and no others."""
    layouts = dict(re.findall(r"^(#\w+) = (#ttg\..*)$", ttgir, re.MULTILINE))
    reads = [line for line in ttgir.splitlines() if '"ld.shared.f32' in line]
    assert reads
    for name in {x for line in reads for x in re.findall(r"tensor<[^,>]*, (#\w+)>", line)}:
        assert "nvidia_mma<{versionMajor = 3" in layouts[name]
        assert "warpsPerCTA = [4, 1]" in layouts[name]


@pytest.mark.slow
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    ("spec", "n"),
    [
        ("tisa", 1024),
        ("tisa", 512),
        ("tisa", 200),
        ("tisa", 2048),
        ("t5", 1024),
        ("t5", 200),
        ("t5", 128),
        ("shaw:clip=16", 512),
        ("shaw:clip=16", 48),
    ],
)
def test_every_kernel_of_a_training_call_compiles(
    spec: str, n: int, causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from whence.kernels.fused import backend, tiles
    from whence.kernels.fused.plan import PLANS, RESERVED, Plan, needs_more_memory
    from whence.kernels.fused.tiles import TABLE, TILES

    names: list[str] = []
    lines, turns, held = [], [], []

    def launch(
        plan: Plan,
        kernel: Any,
        grid: Any,
        *groups: Any,
        warps: int = 4,
        stages: int = 3,
        registers: int | None = None,
        fusion: bool = True,
        chained: bool = False,
        side: bool = False,
        **constants: Any,
    ) -> None:
        options = {"num_warps": warps, "num_stages": stages, "enable_fp_fusion": fusion}
        limit = {} if registers is None else {"maxnreg": registers}
        limit |= {"launch_pdl": True} if chained else {}
        found = kernel.warmup(*groups, grid=(*grid, 1, 1)[:3], **constants, **options, **limit)
        assert "cubin" in found.asm
        assert not needs_more_memory(found.metadata.shared, found.asm["ptx"])
        names.append(kernel.fn.__name__)
        if names[-1] == "forward_kernel" and constants["TILE"].EVEN and not spec.startswith("shaw"):
            assert registers == 128  # four programs of four warps on a multiprocessor
        if chained:
            assert_it_waits_before_it_touches_memory(found.asm["ptx"])
            turns.append(names[-1])
        if constants.get("BY_WARP"):
            assert_a_warp_stores_one_stripe(found.asm["ttgir"])
        if names[-1] == "key_kernel" and constants["TILE"].HELD:
            held.append(names[-1])
            reserved = sum(int(size) for size in RESERVED.findall(found.asm["ptx"]))
            each = found.metadata.shared + reserved + (1 << 10)  # of which CUDA takes the last
            assert 2 * each <= 228 << 10  # two programs on a multiprocessor
            assert reserved <= 48 << 10
        if names[-1] in ("query_kernel", "key_kernel") and constants["TILE"].LINES:
            assert_a_warp_reads_its_own_line(found.asm["ttgir"])
            lines.append(names[-1])
            assert needs_more_memory(48 << 10, found.asm["ptx"])  # it sees what is reserved

    monkeypatch.setattr(Plan, "launch", launch)
    monkeypatch.setattr(backend, "refuse", lambda call: None)
    monkeypatch.setattr(tiles, "on_hopper", lambda: True)
    method = build(spec, n_heads=2, d_head=64, causal=causal, max_length=n)
    q, k, v = (torch.zeros(2, 2, n, 64, dtype=torch.bfloat16).requires_grad_() for _ in range(3))
    PLANS.forget()
    try:
        with TILES.forced(TABLE[(9, 0)].sizes[64]):
            out = positioned_attention(method, q, k, v, causal=causal, backend="fused")
            out.backward(torch.zeros_like(out))
    finally:
        PLANS.forget()
    assert len(names) >= 3
    loading = ["query_kernel", "key_kernel"] if causal or n <= 1024 else ["key_kernel"]
    assert lines == (loading if spec == "tisa" else [])
    assert ("key_kernel" in turns) == (n >= 512)
    assert bool(held) == (spec == "tisa" and n > (512 if causal else 1024))
