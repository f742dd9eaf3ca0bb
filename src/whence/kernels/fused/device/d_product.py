"""The gradients of a product's factors, from the gradient of the band that the product is.

band = scale * query @ table^T, so d_query = scale * d_band @ table, and d_table is the sum over
rows of scale * d_band^T query. The gradient of a value table is the same sum, of mass^T d_out.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from whence.kernels.fused.device.tile import head_rows


class BandGradient(NamedTuple):
    """The gradient of a band float32 [b, h, q, place] and of its tails [4, b, h, q], packed."""

    d_band: Any
    d_tails: Any  # None if the tails are not the ends of the band, or have no gradient


class Seen(NamedTuple):
    """The cells of a band's gradient that were written: their key exists and is in the window."""

    start: Any  # the key position of row 0 at place 0
    n_k: Any
    first: Any  # the places in the window
    last: Any


@triton.jit
def gradient_tile(gradient, bh, row, place, n_q, seen, CAUSAL: tl.constexpr):
    """A tile of the band's gradient, with those of the tails added at its ends."""
    cell = bh * n_q + row.to(tl.int64)
    there = row < n_q
    key = (row + seen.start)[:, None] + place[None, :]
    written = there[:, None] & (key >= 0) & (key < seen.n_k)
    written = written & ((place >= seen.first) & (place <= seen.last))[None, :]
    width = seen.last + 1
    d_band = tl.load(
        gradient.d_band + cell[:, None] * width + place[None, :], mask=written, other=0.0
    )
    if gradient.d_tails is not None:
        left = tl.load(gradient.d_tails + cell, mask=there, other=0.0)
        d_band += tl.where(place[None, :] == 0, left[:, None], 0.0)
        if not CAUSAL:
            kind = tl.num_programs(1).to(tl.int64) * n_q
            right = tl.load(gradient.d_tails + 2 * kind + cell, mask=there, other=0.0)
            d_band += tl.where(place[None, :] == width - 1, right[:, None], 0.0)
    return d_band


@triton.jit(do_not_specialize=["n_q", "start", "n_k", "first", "last", "steps"])
def product_gradient_kernel(
    gradient,
    query,
    table,
    d_query,  # its address is None if it is not wanted
    sums,  # float32 [b, runs, h, place, d]: d_table of every run of rows; None if it is not wanted
    n_heads,
    n_q,
    start,  # see Seen
    n_k,
    first,
    last,
    steps,  # how many blocks of rows one program takes
    scale,
    D: tl.constexpr,
    PIECE: tl.constexpr,  # columns of the head of one program
    ROWS: tl.constexpr,
    LAGS: tl.constexpr,  # of one program
    ADDED: tl.constexpr,  # d_query is added to what is there
    WHOLE: tl.constexpr,  # LAGS holds all lags
    CAUSAL: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    """A run of rows (program 0) of one head (program 1): some lags and some columns (program 2).

    The programs with the first block of lags also compute d_query, a sum over all lags.
    """
    seen = Seen(start, n_k, first, last)
    width = last + 1
    bh = tl.program_id(1).to(tl.int64)
    b = bh // n_heads
    h = bh % n_heads
    PIECES: tl.constexpr = (D + PIECE - 1) // PIECE
    lag_block = tl.program_id(2) // PIECES
    d = (tl.program_id(2) % PIECES) * PIECE + tl.arange(0, PIECE)
    on_d = (d < D)[None, :]
    lag = lag_block * LAGS + tl.arange(0, LAGS)
    source = head_rows(query, b, h).ptr + d[None, :]
    total = tl.zeros([LAGS, PIECE], dtype=tl.float32)
    if d_query.ptr is not None:
        target = head_rows(d_query, b, h).ptr + d[None, :]
        factor = table.ptr + h * table.stride_h + d[None, :]
        if WHOLE:
            on_table = (lag < width)[:, None] & on_d
            vectors = tl.load(factor + lag[:, None] * D, mask=on_table, other=0.0)
    for step in tl.range(0, steps, num_stages=STAGES):
        row = (tl.program_id(0) * steps + step) * ROWS + tl.arange(0, ROWS)
        there = (row < n_q)[:, None] & on_d
        d_band = gradient_tile(gradient, bh, row, lag, n_q, seen, CAUSAL)
        if sums is not None:
            place = source + row.to(tl.int64)[:, None] * query.stride_n
            rows = tl.load(place, mask=there, other=0.0)
            leading = d_band
            if PRECISION == "ieee":
                rows = rows.to(tl.float32)
            else:  # two products, of leading and lower digits
                leading = d_band.to(rows.dtype)
                lower = (d_band - leading.to(tl.float32)).to(rows.dtype)
                total = tl.dot(tl.trans(lower), rows, total)
            total = tl.dot(tl.trans(leading), rows, total, input_precision=PRECISION)
        if d_query.ptr is not None:
            cells = target + row.to(tl.int64)[:, None] * d_query.stride_n
            if lag_block == 0:
                d_rows = tl.zeros([ROWS, PIECE], dtype=tl.float32)
                if WHOLE:
                    d_rows = tl.dot(d_band, vectors, d_rows, input_precision=PRECISION)
                else:
                    for other in tl.range(0, width, LAGS, num_stages=1):
                        each = other + tl.arange(0, LAGS)
                        d_each = gradient_tile(gradient, bh, row, each, n_q, seen, CAUSAL)
                        on_table = (each < width)[:, None] & on_d
                        part = tl.load(factor + each[:, None] * D, mask=on_table, other=0.0)
                        d_rows = tl.dot(d_each, part, d_rows, input_precision=PRECISION)
                d_rows *= scale
                if ADDED:
                    d_rows += tl.load(cells, mask=there, other=0.0).to(tl.float32)
                tl.store(cells, d_rows.to(d_query.ptr.dtype.element_ty), mask=there)
    if sums is not None:
        run = (b * tl.num_programs(0) + tl.program_id(0)) * n_heads + h
        out = sums + run * width * D
        on_part = (lag < width)[:, None] & on_d
        tl.store(out + lag[:, None] * D + d[None, :], total * scale, mask=on_part)


@triton.jit(do_not_specialize=["parts", "last"])
def table_sum_kernel(
    sums,  # float32 [parts, heads of the table, place, d]
    d_table,  # float32 [heads of the table, lag, d]
    parts,
    last,  # the last place; the lags beyond it are never seen
    D: tl.constexpr,
    COLUMNS: tl.constexpr,
    PARTS: tl.constexpr,  # added up at once
):
    """Some columns (program 1) of one lag (program 0) of one head (program 2), in a fixed order."""
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
