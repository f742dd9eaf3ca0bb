"""Rows of all heads: the two ways they lie in memory, and copies, in reverse or less a vector."""

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
    stride_out_b,
    stride_out_h,
    stride_out_n,
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
    cells = (
        out_ptr + b * stride_out_b + h * stride_out_h + rows.to(tl.int64)[:, None] * stride_out_n
    )
    tl.store(cells + d[None, :], x, mask=there)


def by_token(q: Tensor) -> bool:
    """Whether q [b, h, n, d] is [b, n, h, d] in memory, as projections leave it."""
    return q.shape[1] > 1 and q.shape[2] > 1 and q.stride(1) < q.stride(2)


def empty_rows(shape: tuple[int, ...], like: Tensor, tokens: bool) -> Tensor:
    """Room for [b, h, n, d], which with `tokens` is [b, n, h, d] in memory."""
    b, h, n, d = shape
    return like.new_empty(b, n, h, d).transpose(1, 2) if tokens else like.new_empty(b, h, n, d)


def packed(x: Tensor, tokens: bool) -> Tensor:
    """x [b, h, n, d] without gaps, with `tokens` as [b, n, h, d]: itself if it is so already."""
    lies = x.transpose(1, 2) if tokens else x
    if lies.is_contiguous():
        return x
    return lies.contiguous().transpose(1, 2) if tokens else lies.contiguous()


def copied(
    x: Tensor, start: int, out: Tensor, *, reverse: bool = False, minus: Tensor | None = None
) -> Tensor:
    """`out` [b, h, length, d], filled with the rows of x from `start` on, less minus [h|1, d]."""
    b, h, length, d = out.shape
    launch(
        _rows_kernel,
        (triton.cdiv(length, 64), b * h),
        (x, minus, out),
        (
            *x.stride()[:3],
            0 if minus is None or minus.shape[0] == 1 else minus.stride(0),
            *out.stride()[:3],
            *(h, start, length),
        ),
        D=d,
        BLOCK_D=triton.next_power_of_2(d),
        BLOCK=64,
        REVERSE=reverse,
        MINUS=minus is not None,
    )
    return out
