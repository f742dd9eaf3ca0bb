"""The GPU kernels of the fused backend, in Triton. This page says how they work together.

**The task.** For every query row i of a head, out_i = sum_j p_ij v_j with
p_ij = softmax_j(scale * q_i.k_j + bias(lag)), lag = j - (q_start + i). The bias depends on the lag
alone: a *band* holds it for |lag| <= reach, and two *tails*, straight lines in |lag|, hold it
beyond. A band belongs to a head, or to each query row. A *value table* adds a vector for each lag
to the values: out_i += sum_j p_ij table[clip(lag)].

**Near tiles and far ranges.** A program takes a block of rows and walks over the keys in tiles.
Keys that no row of the block reaches with its band lie in a *far range*, to the left (region 0) or
to the right (region 2); the bias there is a line, which is nearly free (in float32 a slope is
multiplied in every cell). The keys between, the *near tiles* (region 1), look the bias up cell by
cell. An `extent` makes the near part smaller still: it is the largest |lag| at which a head's band
is not exactly 0.

**The base of logits.** In half precision logits and log-sum-exp are multiplied by log2(e), so that
the hardware's exp2 serves in place of exp. In float32 they stay in base e, since the product with
log2(e) would be one more rounding, and `exponential` in tile.py is an exp with all digits. Beside a
plain kernel for the far keys they are in base 2 there too (in_base_e in tile.py).

**The laid-out band** (band.py) is a head's band with its tails on both sides as far as a near tile
can touch, and with -inf outside the window: a near tile then needs no comparison. In half precision
it is divided by the scale, if that is not tiny, and the tensor cores' product of a near tile starts
from it (STARTED). In float32 and in short kernels it is in the base of the logits and is added. The
band of each query row, in that base, holds the lags that the row sees, at the *places* 0 to LAST:
lag = place - reach. A near tile compares lags to find the tails (row_numbers and load_between_ends
in tile.py).

**Forward** (forward.py) is one kernel: the online softmax over the three regions. A band that is a
product of queries and a table (Shaw et al.) is computed by the same program before it starts. It
writes `out`, the log-sum-exp of every row (in float32 in two numbers: row_lse in tile.py), and, in
half precision with a bias, the rounding residual of `out`. A value table's part needs the
probability mass of every lag.

**Backward** (backward.py) recomputes the weights from the log-sum-exp and sums them in three ways,
so that no kernel needs atomics and every sum has a fixed order:

1. query_kernel, by blocks of rows: dQ, and whatever belongs to a row: delta = rowsum(out * d_out),
   which it writes beside the log-sum-exp for the others, d_band of a row's own band, d_tails.
2. d_band.py, by block-diagonals: the gradient of a band that all rows share.
3. key_kernel, by blocks of keys: dK and dV. Where a block of keys meets few rows (up to 2,048
   tokens, or in a window of at most 752 lags, also beside a plain kernel), it also sums dS by lag
   within small stripes of keys, which d_band.py adds up; step 2 is then left out. On a Hopper GPU
   every warp sums the stripe that it holds (store_stripes), elsewhere all warps together
   (stripe_sums). Where there is room, the sums stay in shared memory until the last tile
   (store_held).

In half precision on a Hopper GPU, a warp of either kernel loads what its next near tile needs of a
band without tails one tile ahead (BandLine in band.py; `_lines` in launch.py says when). Forward
looks the band up cell by cell on every GPU: there more programs run beside each other, and one of
them waits while others compute.

The gradient of a head's tails is a sum over far tiles and over those cells of near tiles that lie
in a tail; query_kernel stores one number for a block of rows. Where the key kernel sums diagonals
and the tails are constants of a curve (T5), it sums these cells too, as diagonals beyond the reach,
and query_kernel compares no lags. Both kernels must then agree on which tiles are near: KIND.GRAIN.

d_product.py then takes the gradient of a product's band to its factors, and a value table's masses
to the table's gradient; band.py takes a band's gradient to the parameters of its curve.

On a Hopper GPU most kernels of one pass are chained from 512 queries on (pdl_wait in tile.py): one
is made ready while the one before it ends.

**Few queries** (decode.py): the keys are shared out to many programs, and a second kernel merges
the shares.

**Short sequences** (short.py): one tile holds all keys of a head, so that forward and backward are
one kernel each and backward needs nothing from forward. Shaw's tables are products in registers.
short_triangle.py is the backward kernel of causal calls with more than 64 tokens and no table, in
three tiles of 64 x 64.

**Arguments** come in groups (arguments.py): NamedTuples, which Triton takes as they are. `KIND`,
one constant object for all kernels of a call, holds head sizes and flags; `TILE` holds the sizes of
one kernel's tiles. Lengths are scalars, not part of a group: Triton compiles a kernel anew when a
number in a tuple becomes 1 or a multiple of 16, and only of scalars can it be told not to. A field
of a constant NamedTuple is a plain number inside a kernel, and Triton 3.6 wants constants in the
shape of a tile: hence lines such as `ROWS: tl.constexpr = TILE.ROWS`.
"""
