"""A band that is a product of queries and a table: room for it, and its gradients."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from whence.kernels.triton_edges import shared
from whence.kernels.triton_inputs import precision_of
from whence.launcher import launch

ROWS = 64  # a step
MOST = 64  # lags, and columns of a head, a tile
BUSY = 1024  # programs that sum over rows: enough to fill a GPU


@triton.jit
def _leading(x):
    """float32 cut to the digits that tensor cores read.

    Two products, of these and of what they leave, have float32's digits where the other factor was
    in half precision, which they read whole.
    """
    return (x.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)


def band_room(query: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    """Room for the band that query [b, h, q, d] and table [h|1, lag, d] make, and for its tails.

    The forward kernel fills it in (triton_product.py); the tails [4, b, h, q] have no slopes, so
    those places stay unwritten.
    """
    (b, h, n_q, _), width = query.shape, table.shape[1]
    band = torch.empty(b, h, n_q, width + 2, dtype=torch.float32, device=query.device)
    return band, torch.empty(4, b, h, n_q, dtype=torch.float32, device=query.device)


@triton.jit
def _band_gradient(d_band_ptr, d_tails_ptr, bh, row, lag, n_q, width, TAILS: tl.constexpr):
    """A tile of the band's gradient, with those of the tails at its ends."""
    cell = bh * n_q + row.to(tl.int64)
    d_band = tl.load(
        d_band_ptr + cell[:, None] * width + lag[None, :],
        mask=(row < n_q)[:, None] & (lag < width)[None, :],
        other=0.0,
    )
    if TAILS:
        kind = tl.num_programs(1).to(tl.int64) * n_q
        left = tl.load(d_tails_ptr + cell, mask=row < n_q, other=0.0)
        right = tl.load(d_tails_ptr + 2 * kind + cell, mask=row < n_q, other=0.0)
        d_band += tl.where(lag[None, :] == 0, left[:, None], 0.0)
        d_band += tl.where(lag[None, :] == width - 1, right[:, None], 0.0)
    return d_band


@triton.jit(do_not_specialize=["n_q", "width", "steps"])
def _gradient_kernel(
    d_band_ptr,
    d_tails_ptr,
    query_ptr,
    table_ptr,
    d_query_ptr,
    part_ptr,
    stride_b,
    stride_h,
    stride_n,
    stride_d_b,
    stride_d_h,
    stride_d_n,
    stride_table_h,
    n_heads,
    n_q,
    width,
    steps,
    scale,
    D: tl.constexpr,
    PIECE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_L: tl.constexpr,
    TAILS: tl.constexpr,
    QUERY: tl.constexpr,  # the queries' gradient is wanted
    INTO: tl.constexpr,  # and added to what is there
    TABLE: tl.constexpr,  # the table's is wanted, as this program's part of the sum over rows
    WHOLE: tl.constexpr,  # one block holds all lags
    PRECISION: tl.constexpr,
):
    """A run of rows of one head: some lags of the table, some columns of the head.

    The programs of the first lags take all lags of the queries' gradient.
    """
    bh = tl.program_id(1).to(tl.int64)
    b = bh // n_heads
    h = bh % n_heads
    PIECES: tl.constexpr = (D + PIECE - 1) // PIECE
    lag_block = tl.program_id(2) // PIECES
    d = (tl.program_id(2) % PIECES) * PIECE + tl.arange(0, PIECE)
    on_d = (d < D)[None, :]
    lag = lag_block * BLOCK_L + tl.arange(0, BLOCK_L)
    query_ptr += b * stride_b + h * stride_h + d[None, :]
    sums = tl.zeros([BLOCK_L, PIECE], dtype=tl.float32)
    if QUERY:
        d_query_ptr += b * stride_d_b + h * stride_d_h + d[None, :]
        table_ptr += h * stride_table_h + d[None, :]
        if WHOLE:
            on_table = (lag < width)[:, None] & on_d
            table = tl.load(table_ptr + lag[:, None] * D, mask=on_table, other=0.0)
    for step in tl.range(0, steps, num_stages=1):
        row = (tl.program_id(0) * steps + step) * BLOCK_M + tl.arange(0, BLOCK_M)
        there = (row < n_q)[:, None] & on_d
        d_band = _band_gradient(d_band_ptr, d_tails_ptr, bh, row, lag, n_q, width, TAILS)
        whole = d_band
        if TABLE:
            query = tl.load(query_ptr + row.to(tl.int64)[:, None] * stride_n, mask=there, other=0.0)
            query = query.to(tl.float32)
            if PRECISION != "ieee":
                rest = d_band - _leading(d_band)
                sums = tl.dot(tl.trans(rest), query, sums, input_precision=PRECISION)
                d_band -= rest
            sums = tl.dot(tl.trans(d_band), query, sums, input_precision=PRECISION)
        if QUERY:
            place = d_query_ptr + row.to(tl.int64)[:, None] * stride_d_n
            if lag_block == 0:
                d_query = tl.zeros([BLOCK_M, PIECE], dtype=tl.float32)
                if WHOLE:
                    d_query = tl.dot(whole, table, d_query, input_precision=PRECISION)
                else:
                    for start in tl.range(0, width, BLOCK_L, num_stages=1):
                        each = start + tl.arange(0, BLOCK_L)
                        d_each = _band_gradient(
                            d_band_ptr, d_tails_ptr, bh, row, each, n_q, width, TAILS
                        )
                        on_table = (each < width)[:, None] & on_d
                        part_table = tl.load(
                            table_ptr + each[:, None] * D, mask=on_table, other=0.0
                        )
                        d_query = tl.dot(d_each, part_table, d_query, input_precision=PRECISION)
                d_query *= scale
                if INTO:
                    d_query += tl.load(place, mask=there, other=0.0).to(tl.float32)
                tl.store(place, d_query.to(d_query_ptr.dtype.element_ty), mask=there)
    if TABLE:
        part = part_ptr + (bh * tl.num_programs(0) + tl.program_id(0)) * width * D
        on_part = (lag < width)[:, None] & on_d
        tl.store(part + lag[:, None] * D + d[None, :], sums * scale, mask=on_part)


def band_gradients(
    d_band: Tensor,
    d_tails: Tensor | None,
    query: Tensor,
    table: Tensor,
    scale: float,
    *,
    into: Tensor | None = None,
    query_too: bool = True,
    table_too: bool = True,
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of the product's factors from float32 d_band [b, h, q, lag] and d_tails, packed.

    That of the queries is added to `into`, if it is given, and is new in their dtype if not.
    """
    (b, h, n_q, d), width = query.shape, table.shape[1]
    d_query = part = None
    if query_too:
        d_query = torch.empty_like(query) if into is None else into
    runs, steps = _runs(n_q, b * h)
    if table_too:
        part = torch.empty(b, h, runs, width, d, dtype=torch.float32, device=query.device)
    block, piece = _padded(width), _padded(d)
    lag_blocks = -(-width // block) if table_too else 1
    launch(
        _gradient_kernel,
        (runs, b * h, lag_blocks * -(-d // piece)),
        (d_band, d_tails, query, table, d_query, part),
        (
            *query.stride()[:3],
            *((0, 0, 0) if d_query is None else d_query.stride()[:3]),
            *(*shared(table, 0), h, n_q, width, steps, scale),
        ),
        D=d,
        PIECE=piece,
        BLOCK_M=ROWS,
        BLOCK_L=block,
        TAILS=d_tails is not None,
        QUERY=query_too,
        INTO=into is not None,
        TABLE=table_too,
        WHOLE=width <= block,
        PRECISION=precision_of(query),
        num_warps=_warps(query),
    )
    if part is None:
        return d_query, None
    return d_query, part.sum((0, 2)) if len(table) > 1 else part.flatten(0, 2).sum(0, keepdim=True)


def value_table_gradient(mass: Tensor, d_out: Tensor, table: Tensor) -> Tensor:
    """The sum over rows of mass^T d_out, of the table's shape; mass float32 [b, h, q, lag]."""
    _, d_table = band_gradients(mass, None, d_out, table, 1.0, query_too=False)
    assert d_table is not None
    return d_table


def _runs(n_q: int, heads: int) -> tuple[int, int]:
    """How many runs of rows a head, and steps a run."""
    tiles = -(-n_q // ROWS)
    steps = -(-tiles // max(1, min(tiles, BUSY // heads)))
    return -(-tiles // steps), steps


def _padded(size: int) -> int:
    return min(MOST, max(16, 1 << (size - 1).bit_length()))


def _warps(query: Tensor) -> int:
    return 8 if query.dtype == torch.float32 else 4  # without tensor cores: more registers
