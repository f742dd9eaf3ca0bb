"""A value table's part of a block of rows: masses a lag in forward, their gradients in backward.

A table has an odd number of lags and products take 32 at a time, so the last lag is by itself.
"""

import triton
import triton.language as tl


@triton.jit
def with_table(
    out,
    mass_ptr,
    table_ptr,
    lse,
    left_mass,
    right_mass,
    r,
    there,
    first,
    low,
    high,
    value_reach,
    dropout,
    D_V: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    EXACT: tl.constexpr,
):
    """out + mass @ table. The near tiles left their logits at mass_ptr: they become the masses."""
    last = 2 * value_reach
    width = last + 1
    d_v = tl.arange(0, BLOCK_DV)
    tl.debug_barrier()  # other threads of this block wrote what is read here
    cells = mass_ptr + r * width + last
    col = first + r + value_reach
    logits = tl.load(cells, mask=there & (col >= low) & (col < high), other=float("-inf"))
    mass = tl.exp2(logits - lse) / (1.0 - dropout) + right_mass
    mass += tl.where(last == 0, left_mass, 0.0)
    tl.store(cells, mass, mask=there)
    out += mass[:, None] * tl.load(table_ptr + last * D_V + d_v, mask=d_v < D_V, other=0.0)[None, :]
    for start in tl.range(0, last, 32, num_stages=1):
        lag = start + tl.arange(0, 32)
        cols = first + r[:, None] + (lag - value_reach)[None, :]
        places = mass_ptr + r[:, None] * width + lag[None, :]
        inside = there[:, None] & (lag < last)[None, :]
        tile = tl.load(places, mask=inside & (cols >= low) & (cols < high), other=float("-inf"))
        masses = tl.exp2(tile - lse[:, None]) / (1.0 - dropout)
        masses += tl.where((lag == 0)[None, :], left_mass[:, None], 0.0)
        tl.store(places, masses, mask=inside)
        table = tl.load(
            table_ptr + lag[:, None] * D_V + d_v[None, :],
            mask=(lag < last)[:, None] & (d_v < D_V)[None, :],
            other=0.0,
        )
        out = tl.dot(masses, table, out, input_precision=EXACT)
    return out


@triton.jit
def mass_gradients(
    d_mass_ptr,
    table_ptr,
    d_out,
    r,
    there,
    value_reach,
    D_V: tl.constexpr,
    EXACT: tl.constexpr,
):
    """d_out @ table^T, left at d_mass_ptr for near tiles; gives those of the first and last lag."""
    last = 2 * value_reach
    width = last + 1
    d_v = tl.arange(0, d_out.shape[1])
    vector = tl.load(table_ptr + last * D_V + d_v, mask=d_v < D_V, other=0.0)
    d_right = tl.sum(d_out.to(tl.float32) * vector[None, :], 1)
    end = d_mass_ptr + r * width
    tl.store(end + last, d_right, mask=there)
    for start in tl.range(0, last, 32, num_stages=1):
        lag = start + tl.arange(0, 32)
        table = tl.load(
            table_ptr + lag[:, None] * D_V + d_v[None, :],
            mask=(lag < last)[:, None] & (d_v < D_V)[None, :],
            other=0.0,
        )
        d_mass = tl.dot(d_out.to(tl.float32), tl.trans(table), input_precision=EXACT)
        inside = there[:, None] & (lag < last)[None, :]
        tl.store(d_mass_ptr + r[:, None] * width + lag[None, :], d_mass, mask=inside)
    tl.debug_barrier()  # the threads of this block read what others of them wrote
    return tl.load(end, mask=there, other=0.0), d_right
