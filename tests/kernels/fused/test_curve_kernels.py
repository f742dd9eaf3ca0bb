"""Triton's compiler takes the gradient kernels of all curves; its interpreter is less strict."""

import os
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.compiled  # run-time shape checks change the source that Triton reads

CURVES = {
    "gaussians": [torch.ones(2, 3), torch.ones(2, 3), torch.ones(2, 3)],
    "buckets": [torch.ones(4, 2), torch.zeros(9, dtype=torch.int64), None],
    "line": [torch.ones(2), None, None],
}


class Hopper:
    """A GPU to compile for, which need not be there."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)


class Compiling:
    """A plan that compiles kernels and starts none."""

    def __init__(self) -> None:
        self.compiled: list[Any] = []

    def empty(self, shape: Any, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(*shape, dtype=dtype)

    def launch(
        self, kernel: Any, grid: Any, *groups: Any, side: bool = False, **constants: Any
    ) -> None:
        compiled = kernel.warmup(*groups, grid=grid, enable_fp_fusion=True, **constants)
        self.compiled.append(compiled)


@pytest.mark.parametrize("name", CURVES)
def test_a_curve_s_gradient_kernel_compiles(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("with TRITON_INTERPRET=1 nothing is compiled")
    pytest.importorskip("triton", reason="Triton is a Linux package")
    from triton.runtime import driver

    from whence.kernels.fused.backend import CurveBand
    from whence.kernels.fused.launch import _curve_gradient

    monkeypatch.setattr(driver, "_active", Hopper())
    plan: Any = Compiling()
    curve = CurveBand(name, 4, CURVES[name])
    extent = None if curve.tails else torch.ones(2, dtype=torch.int32)
    d_tails = torch.ones(4, 3, 2, 5) if curve.tails else None
    _curve_gradient(plan, curve, extent, torch.ones(1, 2, 1, 13), d_tails, False)
    assert all("ptx" in kernel.asm for kernel in plan.compiled)
    assert len(plan.compiled) == 1
