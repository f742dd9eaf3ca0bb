"""The rotation of queries and keys by their positions, both in one launch.

A program turns a block of rows of a few heads. All heads turn alike, so it computes the angles of
its rows once, from positions and frequencies, and no table of sines is kept in memory. Results are
rounded where PyTorch's operations round: sine and cosine, each product, and their sum.
"""

import math
from typing import Any, NamedTuple

import triton
import triton.language as tl

TAU = tl.constexpr(2 * math.pi)
TURN = tl.constexpr(1 / (2 * math.pi))


class Heads(NamedTuple):
    """Queries or keys [b, h, n, d_head], where their result goes, and what turns them.

    frequency is [b|1, pairs], pos is [b|1, n] or None where positions are a range; a stride is 0
    where an axis is broadcast. The last axis of x and out is contiguous.
    """

    x: Any
    x_stride_b: int
    x_stride_h: int
    x_stride_n: int
    out: Any
    out_stride_b: int
    out_stride_h: int
    out_stride_n: int
    frequency: Any
    frequency_stride_b: int
    pos: Any
    pos_stride_b: int
    pos_stride_n: int


class Sizes(NamedTuple):
    """Numbers that change from call to call, for which no kernel is compiled anew.

    start is the first position of a range, programs the number of programs of these heads.
    """

    n_heads: int
    n: int
    start: int
    programs: int


class Kind(NamedTuple):
    """What a kernel is compiled for: widths, the layout of pairs, the tile of a program."""

    D: int  # columns that turn
    D_HEAD: int
    INTERLEAVED: bool
    OPPOSITE: bool  # turn by -angle, as gradients do
    ROWS: int
    HEADS: int
    PAIRS: int  # a power of two, at least D / 2
    REST: int  # a power of two, at least D_HEAD - D


@triton.jit
def _rounded(x, like):
    """x in float32 after rounding to the dtype of another tensor."""
    return x.to(like.dtype).to(tl.float32)


@triton.jit
def _angles(heads, sizes, b, row, there, KIND: tl.constexpr):
    """pos * frequency for a block of rows, in float32 from -pi to pi.

    The number of turns is computed in float64 and whole turns are dropped before it is rounded.
    """
    pair = tl.arange(0, KIND.PAIRS)
    if heads.pos is None:
        pos = sizes.start + row
    else:
        cells = heads.pos + b * heads.pos_stride_b + row.to(tl.int64) * heads.pos_stride_n
        pos = tl.load(cells, mask=there, other=0)
    cells = heads.frequency + b * heads.frequency_stride_b + pair
    frequency = tl.load(cells, mask=pair < KIND.D // 2, other=0.0)
    turns = pos.to(tl.float64)[:, None] * (frequency.to(tl.float64) * TURN)[None, :]
    return ((turns - tl.floor(turns + 0.5)) * TAU).to(tl.float32)


@triton.jit
def _cos_and_sin(angle):
    """Both in float32, of angles from -pi to pi.

    These are the steps that CUDA's cosf and sinf take for such angles, within 1.5 ulp. Those also
    reduce large angles, in branches that would more than double this kernel.
    """
    quarter = (angle * 0.63661975 + 12582912.0) - 12582912.0  # 1.5 * 2^23: rounds to even
    x = tl.fma(quarter, -1.570796251296997, angle)
    x = tl.fma(quarter, -7.549789415861596e-08, x)
    x = tl.fma(quarter, -5.390302953474238e-15, x)
    square = x * x
    near_cos = tl.fma(square, 2.4279579520225525e-05, -0.0013887860113754869)
    near_cos = tl.fma(near_cos, square, 0.041666727513074875)
    near_cos = tl.fma(near_cos, square, -0.4999999701976776)
    near_cos = tl.fma(near_cos, square, 1.0)
    near_sin = tl.fma(square, -0.00019574658654164523, 0.00833270326256752)
    near_sin = tl.fma(near_sin, square, -0.16666662693023682)
    near_sin = tl.fma(near_sin, square * x, x)
    quarter = quarter.to(tl.int32)
    swapped = (quarter & 1) != 0
    cos = tl.where(swapped, near_sin, near_cos)
    sin = tl.where(swapped, near_cos, near_sin)
    cos = tl.where(((quarter + 1) & 2) == 0, cos, -cos)
    return cos, tl.where((quarter & 2) == 0, sin, -sin)


@triton.jit
def _turned(a, b, cos, sin):
    """(a cos - b sin, b cos + a sin), each product rounded to the dtype of a and b."""
    wide_a = a.to(tl.float32)
    wide_b = b.to(tl.float32)
    first = _rounded(wide_a * cos, a) - _rounded(wide_b * sin, a)
    second = _rounded(wide_b * cos, a) + _rounded(wide_a * sin, a)
    return first.to(a.dtype), second.to(a.dtype)


@triton.jit
def _turn_block(heads, sizes, program, size, KIND: tl.constexpr):
    """Turn ROWS rows of HEADS heads."""
    groups = tl.cdiv(sizes.n_heads, KIND.HEADS)
    blocks = tl.cdiv(sizes.n, KIND.ROWS)
    group = program % groups  # neighbours share tokens: a projection puts a token's heads together
    block = program // groups % blocks
    b = (program // groups // blocks).to(tl.int64)
    row = block * KIND.ROWS + tl.arange(0, KIND.ROWS)
    there = row < sizes.n
    angle = _angles(heads, sizes, b, row, there, KIND)
    dtype = heads.x.dtype.element_ty
    cos, sin = _cos_and_sin(angle)
    cos = (cos * size).to(dtype).to(tl.float32)
    sin = (sin * size).to(dtype).to(tl.float32)
    if KIND.OPPOSITE:
        sin = -sin
    rows = row.to(tl.int64)[:, None]
    x_rows = heads.x + b * heads.x_stride_b + rows * heads.x_stride_n
    out_rows = heads.out + b * heads.out_stride_b + rows * heads.out_stride_n
    HEADS: tl.constexpr = KIND.HEADS
    for i in tl.static_range(HEADS):
        h = (group * KIND.HEADS + i).to(tl.int64)
        of_head = (row < tl.where(h < sizes.n_heads, sizes.n, 0))[:, None]
        x = x_rows + h * heads.x_stride_h
        out = out_rows + h * heads.out_stride_h
        if KIND.INTERLEAVED:
            column = tl.arange(0, 2 * KIND.PAIRS)[None, :]
            mask = of_head & (column < KIND.D)
            pairs = tl.load(x + column, mask=mask, other=0.0)
            first, second = tl.split(tl.reshape(pairs, (KIND.ROWS, KIND.PAIRS, 2)))
            first, second = _turned(first, second, cos, sin)
            pairs = tl.reshape(tl.join(first, second), (KIND.ROWS, 2 * KIND.PAIRS))
            tl.store(out + column, pairs, mask=mask)
        else:
            column = tl.arange(0, KIND.PAIRS)[None, :]
            mask = of_head & (column < KIND.D // 2)
            first = tl.load(x + column, mask=mask, other=0.0)
            second = tl.load(x + KIND.D // 2 + column, mask=mask, other=0.0)
            first, second = _turned(first, second, cos, sin)
            tl.store(out + column, first, mask=mask)
            tl.store(out + KIND.D // 2 + column, second, mask=mask)
        if KIND.D < KIND.D_HEAD:
            column = KIND.D + tl.arange(0, KIND.REST)[None, :]
            mask = of_head & (column < KIND.D_HEAD)
            tl.store(out + column, tl.load(x + column, mask=mask, other=0.0), mask=mask)


_SCALARS = [f"{side}_{name}" for side in ("q", "k") for name in Sizes._fields]


@triton.jit(do_not_specialize=[*_SCALARS, "size"])
def turn_kernel(
    q,
    k,
    q_n_heads,  # the fields of `Sizes` of each side, as scalars: in a tuple they are specialised
    q_n,
    q_start,
    q_programs,
    k_n_heads,
    k_n,
    k_start,
    k_programs,
    size,
    KIND: tl.constexpr,
):
    """The first programs turn the queries, the others the keys."""
    program = tl.program_id(0)
    if program < q_programs:
        _turn_block(q, Sizes(q_n_heads, q_n, q_start, q_programs), program, size, KIND)
    else:
        sizes = Sizes(k_n_heads, k_n, k_start, k_programs)
        _turn_block(k, sizes, program - q_programs, size, KIND)
