"""Launching a kernel again without Triton's look at every argument.

Triton finds the compiled kernel anew for each launch, by the type, alignment and divisibility of
some seventy arguments; at small sizes that takes longer than the GPU does. A launch with the same
numbers, types and alignments as before needs the same kernel: it is kept here.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

# Of these versions the call behind `kernel[grid]` is known; others are asked the longer way.
DIRECT = (3, 6) <= tuple(int(x) for x in triton.__version__.split(".")[:2]) <= (3, 9)
MOST = 4096  # kept launches; a model has a few dozen, a decoder one more a step

_known: dict[tuple[object, ...], tuple[Any, tuple[object, ...]]] = {}


class Launch(NamedTuple):
    """One launch as it was done; compiled is None in Triton's interpreter."""

    kernel: Any
    grid: tuple[int, ...]
    tensors: tuple[Tensor | None, ...]
    numbers: tuple[int | float, ...]
    options: dict[str, object]
    compiled: Any
    constants: tuple[object, ...]  # those of the options that are the kernel's own arguments


class _Listener(threading.local):
    hears: Callable[[Launch], None] | None = None
    launching = False


_listener = _Listener()  # of this thread: autograd has threads of its own


@contextmanager
def listening(hears: Callable[[Launch], None]) -> Iterator[None]:
    """Every launch within is told to `hears` once it is done."""
    before, _listener.hears = _listener.hears, hears
    try:
        yield
    finally:
        _listener.hears = before


def launching() -> bool:
    """Whether this thread is within a launch: Triton's interpreter then computes with PyTorch."""
    return _listener.launching


def launch(
    kernel: Any,
    grid: tuple[int, ...],
    tensors: tuple[Tensor | None, ...],
    numbers: tuple[int | float, ...],
    **options: object,
) -> None:
    """kernel[grid](*tensors, *numbers, **options), tensors and numbers in the kernel's order.

    None stands for a tensor that the call has not; the first one is always there.
    """
    assert tensors[0] is not None
    device = tensors[0].device
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            launch(kernel, grid, tensors, numbers, **options)
        return
    hears = _listener.hears
    if hears is None:
        _launched(kernel, grid, tensors, numbers, options)
        return
    _listener.launching = True
    try:
        compiled, constants = _launched(kernel, grid, tensors, numbers, options)
    finally:
        _listener.launching = False
    hears(Launch(kernel, grid, tensors, numbers, options, compiled, constants))


def _launched(
    kernel: Any,
    grid: tuple[int, ...],
    tensors: tuple[Tensor | None, ...],
    numbers: tuple[int | float, ...],
    options: dict[str, object],
) -> tuple[Any, tuple[object, ...]]:
    """The compiled kernel and its constants, after its launch; None in Triton's interpreter."""
    if tensors[0] is None or not tensors[0].is_cuda:
        kernel[grid](*tensors, *numbers, **options)
        return None, ()
    places = [None if x is None else x.data_ptr() for x in tensors]
    key = (
        id(kernel),  # kernels live as long as the program
        numbers,
        tuple(options.values()),
        tuple(
            [
                None if x is None or place is None else (x.dtype, x.get_device(), place & 15 == 0)
                for x, place in zip(tensors, places, strict=True)
            ]
        ),
    )
    found = _known.get(key)
    if found is not None:  # addresses: of a tensor Triton asks the driver what it is
        start(found[0], (*grid, 1, 1)[:3], stream_of(tensors[0]), (*places, *numbers, *found[1]))
        return found
    compiled = kernel[grid](*tensors, *numbers, **options)
    constants = tuple(options[name] for name in kernel.arg_names if name in options)
    if compiled is not None:  # the interpreter takes a GPU's tensors too
        if len(_known) >= MOST:
            _known.clear()
        _known[key] = (compiled, constants)
    return compiled, constants


def start(compiled: Any, grid: tuple[int, ...], stream: int, arguments: tuple[object, ...]) -> None:
    """Launch a compiled kernel on a stream, with addresses in place of tensors."""
    if not unwatched():
        compiled[grid](*arguments, stream=stream)
        return
    compiled.run(
        *(*grid, stream, compiled.function, compiled.packed_metadata, None, None, None),
        *arguments,
    )


def unwatched() -> bool:
    """Whether a launch may skip what Triton does before it: nobody is to be told of it."""
    hooks = triton.knobs.runtime  # profilers have themselves called before and after a launch
    enter, leave = hooks.launch_enter_hook, hooks.launch_exit_hook
    # Lists of hooks; what somebody put in their place may be one hook, or None.
    return DIRECT and not (getattr(enter, "calls", enter) or getattr(leave, "calls", leave))


def stream_of(x: Tensor | None) -> int:
    """The handle of the current stream of a tensor's GPU."""
    assert x is not None
    handle: int = torch._C._cuda_getCurrentRawStream(x.get_device())
    return handle
