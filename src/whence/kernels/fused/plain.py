"""Causal attention without a bias by the fastest kernel of the machine, with its log-sum-exp.

The backward function of each kernel also takes an output and a log-sum-exp that are not its own. If
they are those of a larger softmax, the gradients are those of its own keys as part of that softmax.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

aten = torch.ops.aten
HALF = (torch.float16, torch.bfloat16)


class Plain(NamedTuple):
    """forward(q, k, v, scale) gives out and lse; backward(d_out, q, k, v, out, lse, scale)."""

    name: str
    forward: Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]
    backward: Callable[..., tuple[Tensor, Tensor, Tensor]]
    grouped: bool  # whether it takes fewer heads of keys and values than of queries


def _cudnn_forward(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    found = aten._scaled_dot_product_cudnn_attention(
        q, k, v, None, True, 0.0, True, False, scale=scale
    )
    return found[0], found[1]


def _cudnn_backward(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float
) -> Any:
    unused = torch.empty((), dtype=torch.int64, device=q.device)  # the seed of a dropout of 0
    n = q.shape[2]
    return aten._scaled_dot_product_cudnn_attention_backward(
        d_out, q, k, v, out, lse[..., None], unused, unused, None, None, None, n, n, 0.0, True,
        scale=scale,
    )  # fmt: skip


def _flash_forward(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    found = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True, False, scale=scale)
    return found[0], found[1]


def _flash_backward(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float
) -> Any:
    unused = torch.empty((2,), dtype=torch.uint64, device=q.device)
    n = q.shape[2]
    return aten._scaled_dot_product_flash_attention_backward(
        d_out, q, k, v, out, lse, None, None, n, n, 0.0, True, unused, unused, scale=scale
    )


def _cpu_forward(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Any:
    return aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True, scale=scale)


def _cpu_backward(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float
) -> Any:
    return aten._scaled_dot_product_flash_attention_for_cpu_backward(
        d_out, q, k, v, out, lse, 0.0, True, scale=scale
    )


CUDNN = Plain("cuDNN", _cudnn_forward, _cudnn_backward, True)
FLASH = Plain("FlashAttention-2", _flash_forward, _flash_backward, False)
CPU = Plain("PyTorch's CPU flash", _cpu_forward, _cpu_backward, False)  # for Triton's interpreter


def fastest(q: Tensor, v: Tensor) -> Plain | None:
    """The fastest plain kernel for heads of this size, dtype and device, or None."""
    d = q.shape[-1]
    if q.device.type == "cpu":
        return CPU if d == v.shape[-1] else None
    if q.dtype not in HALF or d != v.shape[-1] or d % 8:
        return None
    if d <= 128 and _has_cudnn(q.device.index):
        return CUDNN
    return FLASH if d <= 256 else None


def _has_cudnn(index: int | None) -> bool:
    """Whether cuDNN's attention can be used. torch.compile takes the answer as a constant.

    On a machine without a GPU only `explain` asks, for fake tensors: then a recent GPU is assumed.
    """
    newer = not torch.cuda.is_available() or torch.cuda.get_device_capability(index) >= (9, 0)
    allowed: bool = torch.backends.cuda.cudnn_sdp_enabled()  # type: ignore[no-untyped-call]
    return newer and allowed


# What torch.compiler.assume_constant_result sets. To call that would import the compiler, which
# takes longer than to import all of torch.
_has_cudnn._dynamo_marked_constant = True  # type: ignore[attr-defined]
