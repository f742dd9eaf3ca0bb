"""A value table's part of a block of rows: the mass of every lag in forward, d_mass in backward.

out_i += sum_lag mass_i(lag) table(lag), where the mass of a lag is the probability at that lag, and
at the table's two ends also that of all lags beyond. A table has an odd number of lags and a
product takes 32 at a time, so the last lag is computed by itself.
"""

import triton
import triton.language as tl

from whence.kernels.fused.device.tile import table_product


@triton.jit
def with_table(
    out,
    mass,  # address of the first row's masses
    table,  # address of the head's table
    lse,
    left_mass,
    right_mass,
    rows,
    keys,
    sizes,
    KIND: tl.constexpr,
):
    """out + mass @ table. Near tiles stored logits at `mass`, which the masses replace."""
    last = 2 * sizes.value_reach
    width = last + 1
    first = rows.first_row + sizes.q_start
    low = keys.low
    high = tl.minimum(keys.high, sizes.n_k)
    r = rows.r
    there = rows.there
    d_v = tl.arange(0, KIND.BLOCK_DV)
    tl.debug_barrier()  # other threads of this program wrote what is read here
    cells = mass + r * width + last
    col = first + r + sizes.value_reach
    logits = tl.load(cells, mask=there & (col >= low) & (col < high), other=float("-inf"))
    last_mass = tl.exp2(logits - lse) / (1.0 - sizes.dropout) + right_mass
    last_mass += tl.where(last == 0, left_mass, 0.0)
    tl.store(cells, last_mass, mask=there)
    vector = tl.load(table + last * KIND.D_V + d_v, mask=d_v < KIND.D_V, other=0.0)
    out += last_mass[:, None] * vector[None, :]
    for start in tl.range(0, last, 32, num_stages=1):
        lag = start + tl.arange(0, 32)
        cols = first + r[:, None] + (lag - sizes.value_reach)[None, :]
        places = mass + r[:, None] * width + lag[None, :]
        inside = there[:, None] & (lag < last)[None, :]
        tile = tl.load(places, mask=inside & (cols >= low) & (cols < high), other=float("-inf"))
        masses = tl.exp2(tile - lse[:, None]) / (1.0 - sizes.dropout)
        masses += tl.where((lag == 0)[None, :], left_mass[:, None], 0.0)
        tl.store(places, masses, mask=inside)
        vectors = tl.load(
            table + lag[:, None] * KIND.D_V + d_v[None, :],
            mask=(lag < last)[:, None] & (d_v < KIND.D_V)[None, :],
            other=0.0,
        )
        out = tl.dot(masses, vectors, out, input_precision=KIND.EXACT)
    return out


@triton.jit
def mass_gradients(d_mass, table, d_out, rows, sizes, KIND: tl.constexpr):
    """Stores d_mass = d_out @ table^T for near tiles; returns those of the first and last lag."""
    last = 2 * sizes.value_reach
    width = last + 1
    there = rows.there
    d_v = tl.arange(0, KIND.BLOCK_DV)
    vector = tl.load(table + last * KIND.D_V + d_v, mask=d_v < KIND.D_V, other=0.0)
    d_right = tl.sum(d_out.to(tl.float32) * vector[None, :], 1)
    end = d_mass + rows.r * width
    tl.store(end + last, d_right, mask=there)
    for start in tl.range(0, last, 32, num_stages=1):
        lag = start + tl.arange(0, 32)
        vectors = tl.load(
            table + lag[:, None] * KIND.D_V + d_v[None, :],
            mask=(lag < last)[:, None] & (d_v < KIND.D_V)[None, :],
            other=0.0,
        )
        part = tl.zeros([d_out.shape[0], 32], dtype=tl.float32)
        part = table_product(d_out, vectors, part, KIND)
        inside = there[:, None] & (lag < last)[None, :]
        tl.store(d_mass + rows.r[:, None] * width + lag[None, :], part, mask=inside)
    tl.debug_barrier()  # the threads of this program read what others of them wrote
    return tl.load(end, mask=there, other=0.0), d_right
