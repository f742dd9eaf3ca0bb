"""Copies of rows for the split strategy: in reverse order, or with a vector subtracted."""

import triton
import triton.language as tl


@triton.jit
def rows_kernel(
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
