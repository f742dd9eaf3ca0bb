"""The gradients of a product's factors, from the gradient of the band that the product is.

band = scale * query @ table^T, so d_query = scale * d_band @ table, and d_table is the sum over
rows of scale * d_band^T query. The gradient of a value table is the same sum, of mass^T d_out.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from whence.kernels.fused.device.tile import (
    head_rows,
    in_two,
    pdl_wait,
    product_in_parts,
    third_part,
)


class Seen(NamedTuple):
    """The cells of a band's gradient that were written: both ends, and visible keys between."""

    start: Any  # the key position of row 0 at place 0
    n_k: Any
    first: Any  # the first place in the window
    final: Any  # and the last
    right: Any  # the place of the right end, if there is one


@triton.jit
def gradient_tile(d_band, bh, first_row, r, place, n_q, seen, KIND: tl.constexpr):
    """A tile of the band's gradient."""
    WIDTH: tl.constexpr = KIND.LAST + 1
    cells = d_band + (bh * n_q + first_row) * WIDTH + (r[:, None] * WIDTH + place)
    written = place < WIDTH
    if not KIND.EVEN:
        written = written & (first_row + r < n_q)[:, None]
    if KIND.PARTLY:
        key = seen.start + first_row + (r[:, None] + place)
        inner = (key.to(tl.uint32) < seen.n_k.to(tl.uint32)) & (place >= seen.first)
        inner = inner & (place <= seen.final)
        written = written & (inner | (place == 0) | (place == seen.right))
    return tl.load(cells, mask=written, other=0.0)


class ProductKind(NamedTuple):
    """The compile-time constants of a product's gradients."""

    LAST: int  # the last place of a row of the band's gradient
    D: int  # head size
    PIECE: int  # columns of the head of one program
    ROWS: int  # of one step
    LAGS: int  # of one program
    ADDED: bool  # d_query is added to what is there
    PARTLY: bool  # some cells of the band's gradient were not written
    EVEN: bool  # all rows of all steps exist
    PRECISION: str
    PARTS: int  # numbers of the dtype, 2 or 3, that represent a float32 in the table's gradient
    CHAINED: bool  # see pdl_wait in tile.py


@triton.jit(do_not_specialize=["n_q", "start", "n_k", "first", "final", "right", "blocks", "steps"])
def product_gradient_kernel(
    gradient,  # float32 [b, h, q, place]: d_band, or the masses
    query,
    table,
    d_query,  # its address is None if it is not wanted
    sums,  # float32 [runs, h, place, d]: d_table of every run of rows; None if it is not wanted
    n_q,
    start,  # see Seen
    n_k,
    first,
    final,
    right,
    blocks,  # of rows, of all sequences
    steps,  # how many of them one program takes
    scale,
    KIND: tl.constexpr,
):
    """A run of rows (program 0) of one head (program 1): some lags and some columns (program 2).

    The programs with the first block of lags also compute d_query, a sum over all lags.
    """
    pdl_wait(KIND.CHAINED)
    seen = Seen(start, n_k, first, final, right)
    D: tl.constexpr = KIND.D
    PIECE: tl.constexpr = KIND.PIECE
    ROWS: tl.constexpr = KIND.ROWS
    LAGS: tl.constexpr = KIND.LAGS
    PRECISION: tl.constexpr = KIND.PRECISION
    WIDTH: tl.constexpr = KIND.LAST + 1
    WHOLE: tl.constexpr = WIDTH <= LAGS
    h = tl.program_id(1).to(tl.int64)
    of_sequence = (n_q + ROWS - 1) // ROWS
    PIECES: tl.constexpr = (D + PIECE - 1) // PIECE
    lag_block = tl.program_id(2) // PIECES
    d = (tl.program_id(2) % PIECES) * PIECE + tl.arange(0, PIECE)
    on_d = (d < D)[None, :]
    lag = lag_block * LAGS + tl.arange(0, LAGS)
    total = tl.zeros([PIECE, LAGS], dtype=tl.float32)
    if d_query.ptr is not None:
        DTYPE: tl.constexpr = tl.float32 if PRECISION == "ieee" else d_query.ptr.dtype.element_ty
        factor = table.ptr + h * table.stride_h + d[None, :]
        if WHOLE:
            on_table = (lag < WIDTH)[:, None] & on_d
            vectors = tl.load(factor + lag[:, None] * D, mask=on_table, other=0.0)
            table_leading, table_lower = in_two(vectors, DTYPE)
    r = tl.arange(0, ROWS)
    for step in tl.range(0, steps, num_stages=1):
        block = tl.program_id(0) * steps + step
        b = (block // of_sequence).to(tl.int64)
        first_row = block % of_sequence * ROWS
        if not KIND.EVEN:  # of a block that does not exist, no row does
            b = tl.where(block < blocks, b, 0)
            first_row = tl.where(block < blocks, first_row, n_q)
        bh = b * tl.num_programs(1) + h
        row = first_row + r
        there = on_d
        if not KIND.EVEN:
            there = there & (row < n_q)[:, None]
        d_band = gradient_tile(gradient, bh, first_row, r, lag[None, :], n_q, seen, KIND)
        if sums is not None:
            source = head_rows(query, b, h).ptr + d[None, :]
            place = source + row.to(tl.int64)[:, None] * query.stride_n
            rows = tl.load(place, mask=there, other=0.0)
            leading = d_band
            if PRECISION == "ieee":
                rows = rows.to(tl.float32)
            else:
                leading, lower = in_two(d_band, rows.dtype)
                if KIND.PARTS == 3:
                    lowest = third_part(d_band, leading, lower)
                    total = tl.dot(tl.trans(rows), lowest, total)
                total = tl.dot(tl.trans(rows), lower, total)
            total = tl.dot(tl.trans(rows), leading, total, input_precision=PRECISION)
        if d_query.ptr is not None:
            target = head_rows(d_query, b, h).ptr + d[None, :]
            cells = target + row.to(tl.int64)[:, None] * d_query.stride_n
            if lag_block == 0:
                d_rows = tl.zeros([ROWS, PIECE], dtype=tl.float32)
                if WHOLE:
                    d_rows = product_in_parts(d_band, table_leading, table_lower, d_rows, KIND)
                else:
                    for other in tl.range(0, WIDTH, LAGS, num_stages=1):
                        each = other + tl.arange(0, LAGS)
                        d_each = gradient_tile(
                            gradient, bh, first_row, r, each[None, :], n_q, seen, KIND
                        )
                        on_table = (each < WIDTH)[:, None] & on_d
                        part = tl.load(factor + each[:, None] * D, mask=on_table, other=0.0)
                        table_leading, table_lower = in_two(part, DTYPE)
                        d_rows = product_in_parts(d_each, table_leading, table_lower, d_rows, KIND)
                d_rows *= scale
                if KIND.ADDED:
                    d_rows += tl.load(cells, mask=there, other=0.0).to(tl.float32)
                tl.store(cells, d_rows.to(d_query.ptr.dtype.element_ty), mask=there)
    if sums is not None:
        run = tl.program_id(0) * tl.num_programs(1) + h
        out = sums + run * WIDTH * D
        on_part = (lag < WIDTH)[:, None] & on_d
        tl.store(out + lag[:, None] * D + d[None, :], tl.trans(total) * scale, mask=on_part)


@triton.jit(do_not_specialize=["parts", "last"])
def table_sum_kernel(
    sums,  # float32 [parts, heads of the table, place, d]
    d_table,  # float32 [heads of the table, lag, d]
    parts,
    last,  # the last place; the lags beyond it are never seen
    D: tl.constexpr,
    COLUMNS: tl.constexpr,
    PARTS: tl.constexpr,  # added up at once
    CHAINED: tl.constexpr,
):
    """Some columns (program 1) of one lag (program 0) of one head (program 2), in a fixed order."""
    pdl_wait(CHAINED)
    lag = tl.program_id(0)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    h = tl.program_id(2)
    total = tl.zeros([COLUMNS], dtype=tl.float32)
    if lag <= last:
        of_part = tl.num_programs(2).to(tl.int64) * (last + 1) * D
        place = sums + (h * (last + 1) + lag) * D + column
        for start in tl.range(0, parts, PARTS, num_stages=1):
            part = start + tl.arange(0, PARTS)
            total += tl.sum(
                tl.load(
                    place[None, :] + part[:, None] * of_part,
                    mask=(part < parts)[:, None] & (column < D)[None, :],
                    other=0.0,
                ),
                0,
            )
    out = d_table + (h * tl.num_programs(0) + lag) * D + column
    tl.store(out, total, mask=column < D)
