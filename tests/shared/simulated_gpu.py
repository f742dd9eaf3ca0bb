"""The fused backend on a simulated Hopper GPU: what Triton compiles for one, run by ptx_machine.py.

    with simulated_gpu() as started:
        attend(q, k, v, bias=bias, backend="fused")     # on tensors of the CPU
    print(started)                                      # the names of the kernels

Triton's interpreter runs the source of the kernels; this runs the PTX that a GPU's driver compiles,
with the tiles of an H200: inline assembly, layouts of tensor cores, shared memory and barriers
included. It needs Triton, and no TRITON_INTERPRET.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from ptx import Kernel
from ptx_machine import GlobalMemory, GpuError, Machine

CAPABILITY, PROCESSORS, SHARED = (9, 0), 132, 227 << 10  # of an H200
TRANSLATED: dict[Any, Kernel] = {}  # Triton's compiled kernel -> its translation


class Hopper:
    """A GPU to compile for, which need not be there."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 10 * CAPABILITY[0] + CAPABILITY[1], 32)


Launch = Callable[[Any, tuple[int, int, int], Any], None]  # a compiled kernel, a grid, arguments


@contextmanager
def simulated_gpu(*, checked: bool = True, launch: Launch | None = None) -> Iterator[list[str]]:
    """A context in which fused kernels run on tensors of the CPU.

    It yields a list to which the names of started kernels are added. Unchecked it takes half the
    time and looks at addresses alone: not for races, fences or constants that were written. With
    `launch` kernels are compiled and given to it, and are not run.
    """
    from triton.runtime import JITFunction, driver

    from whence.kernels import rotary
    from whence.kernels.fused import backend, tiles
    from whence.kernels.fused import launch as launching
    from whence.kernels.fused.plan import PLANS

    started: list[str] = []
    compile_or_run = JITFunction.run

    def run(self: Any, *given: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        compiled = compile_or_run(self, *given, grid=grid, warmup=True, **options)
        if not warmup:
            started.append(self.fn.__name__)
            whole_grid = (*grid, 1, 1)[:3]
            if launch is None:
                start(compiled, whole_grid, given, checked)
            else:
                launch(compiled, whole_grid, given)
        return compiled

    def lookup(width: int, dtype: torch.dtype, device: torch.device) -> Any:
        return tiles.built_in(width, dtype, CAPABILITY, SHARED)

    replaced = [
        (driver, "_active", Hopper()),
        (JITFunction, "run", run),
        (tiles, "lookup", lookup),
        (tiles, "on_hopper", lambda: True),
        (launching, "processors", lambda device: PROCESSORS),
        (backend, "DEVICES", ("cuda", "cpu")),
        (rotary, "DEVICES", ("cuda", "cpu")),
    ]
    with ExitStack() as stack:
        for where, name, value in replaced:
            stack.enter_context(patch.object(where, name, value))
        PLANS.forget()
        stack.callback(PLANS.forget)
        yield started


def start(compiled: Any, grid: tuple[int, int, int], given: Any, checked: bool) -> None:
    """Run a compiled kernel on tensors of the CPU."""
    if compiled not in TRANSLATED:
        TRANSLATED[compiled] = Kernel(compiled.asm["ptx"])
    memory = GlobalMemory(list(tensors_in(given)))
    params = [
        memory.address(x) if isinstance(x, Tensor) else x
        for kind, x in zip(compiled.src.signature.values(), given, strict=False)
        for x in arguments(kind, x)
    ]
    params += [0, 0]  # memory for the whole grid and for a profiler, which these kernels do not use
    machine = Machine(
        TRANSLATED[compiled],
        memory,
        shared=compiled.metadata.shared,
        threads=32 * compiled.metadata.num_warps,
        grid=grid,
        params=params,
        checked=checked,
    )
    if machine.shared_bytes > SHARED:
        raise GpuError(f"{machine.shared_bytes} bytes of shared memory, and there are {SHARED}")
    machine.run()
    memory.give_back()


def arguments(kind: Any, given: Any) -> Iterator[Any]:
    """The parts of an argument that are no constants, as a compiled kernel takes them."""
    if isinstance(kind, tuple):
        for inner, part in zip(kind, given, strict=True):
            yield from arguments(inner, part)
    elif kind != "constexpr":
        yield given


def tensors_in(given: Any) -> Iterator[Tensor]:
    """All tensors in groups of arguments."""
    if isinstance(given, tuple):
        for part in given:
            yield from tensors_in(part)
    elif isinstance(given, Tensor):
        yield given
