"""Launching a kernel again without Triton's look at every argument.

Triton finds the compiled kernel anew for each launch, by the type, alignment and divisibility of
some seventy arguments; at small sizes that takes longer than the GPU does. A launch with the same
numbers, types and alignments as before needs the same kernel: it is kept here.
"""

from typing import Any

import torch
from torch import Tensor

MOST = 4096  # kept launches; a model has a few dozen, a decoder one more a step

_known: dict[tuple[object, ...], tuple[Any, tuple[object, ...]]] = {}


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
    if device.type != "cuda":  # Triton's interpreter
        kernel[grid](*tensors, *numbers, **options)
        return
    if device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            launch(kernel, grid, tensors, numbers, **options)
        return
    places = [None if x is None else x.data_ptr() for x in tensors]
    key = (
        id(kernel),  # kernels live as long as the program
        device.index,
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
        compiled, constants = found
        compiled[(*grid, 1, 1)[:3]](*places, *numbers, *constants)
        return
    compiled = kernel[grid](*tensors, *numbers, **options)
    if compiled is None:  # Triton's interpreter, with tensors of a GPU
        return
    if len(_known) >= MOST:
        _known.clear()
    constants = tuple(options[name] for name in kernel.arg_names if name in options)
    _known[key] = (compiled, constants)
