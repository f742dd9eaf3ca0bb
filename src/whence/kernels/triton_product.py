"""The band of a block of rows that is a product of queries and a table, made in the kernel."""

import triton
import triton.language as tl

from whence.kernels.triton_tile import LOG2E


@triton.jit
def made_band(
    query_ptr,
    factor_ptr,
    band_ptr,
    tails_ptr,
    r,
    there,
    reach,
    scale,
    stride_query_n,
    stride_band_q,
    stride_tail_kind,
    stride_tail_q,
    D: tl.constexpr,
    EXACT: tl.constexpr,
):
    """scale * query @ factor^T of rows r, left where near tiles look it up, its ends as the tails.

    In base 2, the ends once more beyond them, as triton_edges.py has it. Gives the tails, in base 2
    too. The last lag is by itself: there is an odd number of them, and products take 32 at a time.
    """
    PIECE: tl.constexpr = 64 if D > 32 else 32
    last = 2 * reach
    left = tl.zeros(r.shape, dtype=tl.float32)
    right = tl.zeros(r.shape, dtype=tl.float32)
    for start in tl.static_range(0, D, PIECE):
        d = start + tl.arange(0, PIECE)
        on = there[:, None] & (d < D)[None, :]
        query = tl.load(query_ptr + r[:, None] * stride_query_n + d[None, :], mask=on, other=0.0)
        whole = query.to(tl.float32)
        first_lag = tl.load(factor_ptr + d, mask=d < D, other=0.0)
        last_lag = tl.load(factor_ptr + last * D + d, mask=d < D, other=0.0)
        left += tl.sum(whole * first_lag[None, :], 1)
        right += tl.sum(whole * last_lag[None, :], 1)
    left *= scale
    right *= scale
    tails = tails_ptr + r * stride_tail_q
    tl.store(tails, left, mask=there)
    tl.store(tails + 2 * stride_tail_kind, right, mask=there)
    left *= LOG2E
    right *= LOG2E
    band = band_ptr + r * stride_band_q
    tl.store(band, left, mask=there)
    tl.store(band + (last + 1), right, mask=there)
    tl.store(band + (last + 2), right, mask=there)
    for lag_start in tl.range(0, last, 32, num_stages=1):
        lag = lag_start + tl.arange(0, 32)
        bias = tl.zeros([r.shape[0], 32], dtype=tl.float32)
        for start in tl.static_range(0, D, PIECE):
            column = start + tl.arange(0, PIECE)[None, :]
            row = query_ptr + r[:, None] * stride_query_n + column
            piece = tl.load(row, mask=there[:, None] & (column < D), other=0.0)
            entry = factor_ptr + lag[:, None] * D + column
            factor = tl.load(entry, mask=(lag < last)[:, None] & (column < D), other=0.0)
            bias = tl.dot(piece.to(tl.float32), tl.trans(factor), bias, input_precision=EXACT)
        inside = there[:, None] & (lag < last)[None, :]
        cells = band_ptr + r[:, None] * stride_band_q + (1 + lag)[None, :]
        tl.store(cells, bias * (scale * LOG2E), mask=inside)
    tl.debug_barrier()  # the threads of this block look up what others of them wrote
    return left, right
