"""Rows of every head copied, in reverse if wanted, less one vector a head if there is one."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from whence.launcher import launch


@triton.jit
def _rows_kernel(
    x_ptr,
    minus_ptr,
    out_ptr,
    stride_b,
    stride_h,
    stride_n,
    stride_minus_h,
    n_heads,
    start,
    length,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK: tl.constexpr,
    REVERSE: tl.constexpr,
    MINUS: tl.constexpr,
):
    """One block of rows of one head."""
    bh = tl.program_id(1).to(tl.int64)
    b = bh // n_heads
    h = bh % n_heads
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    d = tl.arange(0, BLOCK_D)
    there = (rows < length)[:, None] & (d < D)[None, :]
    source = start + rows
    if REVERSE:
        source = start + (length - 1 - rows)
    place = x_ptr + b * stride_b + h * stride_h + source.to(tl.int64)[:, None] * stride_n
    x = tl.load(place + d[None, :], mask=there, other=0.0)
    if MINUS:
        minus = tl.load(minus_ptr + h * stride_minus_h + d, mask=d < D, other=0.0)
        x = (x.to(tl.float32) - minus[None, :]).to(x.dtype)
    cells = (bh * length + rows.to(tl.int64))[:, None] * D + d[None, :]
    tl.store(out_ptr + cells, x, mask=there)


def copied(
    x: Tensor, start: int, length: int, *, reverse: bool = False, minus: Tensor | None = None
) -> Tensor:
    """Rows start..start + length of x [b, h, n, d], packed; minus is float32 [h|1, d]."""
    b, h, _, d = x.shape
    out = torch.empty(b, h, length, d, dtype=x.dtype, device=x.device)
    launch(
        _rows_kernel,
        (triton.cdiv(length, 64), b * h),
        (x, minus, out),
        (
            *x.stride()[:3],
            0 if minus is None or minus.shape[0] == 1 else minus.stride(0),
            *(h, start, length),
        ),
        D=d,
        BLOCK_D=triton.next_power_of_2(d),
        BLOCK=64,
        REVERSE=reverse,
        MINUS=minus is not None,
    )
    return out
