"""The laid-out band, in which near tiles look the bias up, made from a caller's band or a curve.

The laid-out band is in the base of the logits (unit_of in tile.py) or, where products start from it
(STARTED of the kernels that read it), in units of q.k. For a head it extends as far as a near tile
can touch, with its tails beyond its reach and -inf outside the window; its *edge* is the largest
|lag| in it. The band of a row extends to its reach, or to lag 0 in a causal call, and is in the
base of the logits.

Near tiles look cells up one by one (near_bias in tile.py), or in backward on a Hopper GPU in a line
that a warp loads ahead (BandLine).

A curve has up to three parameter tensors (whence.lag.deferred says what they are). Kernels evaluate
it through device functions of a head h and a block of lags, which they take as compile-time
constants:

    at(h, lag, reach, parameters, COUNT)        the function at each of these lags
    extent_of(h, reach, parameters, COUNT)      the |lag| beyond which it is exactly 0
    tails_of(h, reach, parameters)              left constant and slope, right constant and slope

COUNT is `parameters.count`, rounded up to a power of two. A curve without an extent or without
tails has None in their place.

All gradient kernels take the same arguments, and ignore those that their curve has no use for.
d_band [h, 2 * (reach + beyond) + 1] is summed over everything that shares the band; its outermost
`beyond` lags on either side belong to the tails (KIND.GRAIN). d_tails [4, batches, h, blocks] has a
sum of the query kernel for each sequence and each block of rows, which are still to be added up.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from whence.kernels.fused.device.arguments import VARYING
from whence.kernels.fused.device.tile import exact_exp, pdl_wait, reserve, sizes_of, thread_number
from whence.lag.deferred import ROUNDED_UP, widths_to_zero
from whence.units import GAIN

SCALE = tl.constexpr(GAIN)
WIDTHS_TO_ZERO = tl.constexpr(widths_to_zero(torch.float32))
SMALLEST = tl.constexpr(torch.finfo(torch.float32).tiny)
SLACK = tl.constexpr(ROUNDED_UP)


@triton.jit(do_not_specialize=[*VARYING])
def head_layout_kernel(
    laid_out,  # float32 [b, h, 2 * edge + 1]
    bias,  # the band as the caller gave it; for a curve, this kernel writes extent and tails
    parameters,
    unit,  # the factor of a laid-out band
    numbers,
    n_q,
    n_k,
    q_start,
    reach,
    edge,
    KIND: tl.constexpr,
    BLOCK: tl.constexpr,
    LAID_OUT: tl.constexpr,  # else the curve is only evaluated, as decoding needs it
    CURVE_AT: tl.constexpr,  # the functions of a curve that makes the band, or None
    CURVE_EXTENT: tl.constexpr,
    CURVE_TAILS: tl.constexpr,
    COUNT: tl.constexpr,
):
    """One block of lags (program 0) of one head of one sequence (program 1)."""
    pdl_wait(KIND.CHAINED)
    sizes = sizes_of(numbers, n_q, n_k, q_start, reach, edge)
    bh = tl.program_id(1).to(tl.int64)
    b = bh // sizes.n_heads
    h = bh % sizes.n_heads
    length = 2 * edge + 1
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    lag = place - edge
    inside = (lag >= -reach) & (lag <= reach)
    if CURVE_EXTENT is not None:
        extent = CURVE_EXTENT(h, reach, parameters, COUNT)
        if tl.program_id(0) == 0:
            tl.store(bias.extent + h, extent)
        cells = tl.zeros([BLOCK], dtype=tl.float32)
        if tl.min(tl.abs(lag)) <= extent:
            cells = CURVE_AT(h, lag, reach, parameters, COUNT)
        cells = tl.where(inside, cells, 0.0)
    elif CURVE_AT is not None:
        cells = tl.where(inside, CURVE_AT(h, lag, reach, parameters, COUNT), 0.0)
    else:
        band = bias.band + b * bias.band_b + h * bias.band_h
        cells = tl.load(band + (lag + reach), mask=inside, other=0.0)
    if KIND.TAILS:
        tails = bias.tails + b * bias.tail_b + h * bias.tail_h
        stride = bias.tail_kind
        if CURVE_TAILS is not None:
            left, left_slope, right, right_slope = CURVE_TAILS(h, reach, parameters)
            if tl.program_id(0) == 0:
                tl.store(tails, left)
                tl.store(tails + stride, left_slope)
                tl.store(tails + 2 * stride, right)
                tl.store(tails + 3 * stride, right_slope)
        else:
            left = tl.load(tails)
            left_slope = tl.load(tails + stride)
            right = tl.load(tails + 2 * stride)
            right_slope = tl.load(tails + 3 * stride)
        distance = tl.abs(lag).to(tl.float32)
        left = left + left_slope * distance
        right = right + right_slope * distance
        cells = tl.where(inside, cells, tl.where(lag < 0, left, right))
    if LAID_OUT:
        cells = cells * unit
        if KIND.BEFORE:
            cells = tl.where(lag < -sizes.before, float("-inf"), cells)
        if KIND.AFTER:
            cells = tl.where(lag > sizes.after, float("-inf"), cells)
    tl.store(laid_out + bh * length + place, cells, mask=place < length)


@triton.jit(do_not_specialize=[*VARYING])
def row_layout_kernel(
    laid_out,  # float32 [b, h, q, lag], with KIND.MARGIN on both sides
    bias,
    unit,  # the factor of a laid-out band
    numbers,
    n_q,
    n_k,
    q_start,
    reach,
    edge,
    KIND: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One block of rows (program 0) of one head of one sequence (program 1)."""
    sizes = sizes_of(numbers, n_q, n_k, q_start, reach, edge)
    bh = tl.program_id(1).to(tl.int64)
    b = bh // sizes.n_heads
    h = bh % sizes.n_heads
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    there = (row < sizes.n_q)[:, None]
    width = (sizes.reach if KIND.CAUSAL else 2 * sizes.reach) + 1
    band = bias.band + b * bias.band_b + h * bias.band_h + row[:, None] * bias.band_q
    for start in range(0, width, BLOCK):
        place = (start + tl.arange(0, BLOCK))[None, :]
        inside = there & (place < width)
        cells = tl.load(band + place, mask=inside, other=0.0)
        out = laid_out + KIND.MARGIN + (bh * sizes.n_q + row)[:, None] * width + place
        tl.store(out, cells * unit, mask=inside)


class BandLine(NamedTuple):
    """What one warp needs of a head's laid-out band for a near tile: three numbers a lane.

    A warp holds 16 rows of a tile [rows, keys], or 16 keys of a tile [keys, rows], so its cells
    have at most 16 + 64 lags. Loads return in order, and before a load of the band there are loads
    of whole tiles, which take hundreds of cycles. So in backward, where few programs run beside
    each other, a warp loads the line of its next tile one tile ahead. Its lanes then exchange the
    numbers in the warp's own shared memory, so that it waits for no other warp.
    """

    room: Any  # address of the shared memory of all warps
    of_lane: Any  # address of this lane's first number in it
    source: Any  # address of this lane's first number in the band
    first: Any
    second: Any  # 32 lags after the first
    third: Any  # 64 lags after it


# Numbers between the lines of two warps in shared memory. A line has 96, and the memory of four
# warps is a multiple of 1,024 bytes (reserve).
LINE_PITCH = tl.constexpr(128)


@triton.jit
def first_line(head, lag, sizes, SIDE: tl.constexpr, BY_KEYS: tl.constexpr):
    """The line of the first near tile; `lag` is the smallest of warp 0.

    SIDE is the number of rows of a tile, or with BY_KEYS, in tiles [keys, rows], that of keys.
    """
    room = tl.inline_asm_elementwise(
        *(reserve("lines", SIDE // 16 * LINE_PITCH * 4), "=r,r", [0]),
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
    lane, warp = thread_number() % 32, thread_number() // 32
    offset = lane + 16 * warp if BY_KEYS else lane - 16 * warp  # -48..79, and 64 more are loaded
    # The limits are for a program without near tiles, whose lags may lie outside the band.
    place = tl.minimum(tl.maximum(lag + sizes.edge, 48), 2 * sizes.edge - 143)
    source = head.band + (place + offset)
    line = BandLine(room, room + (warp * LINE_PITCH + lane) * 4, source, 0.0, 0.0, 0.0)
    return next_line(line, 0)


@triton.jit
def next_line(line, step):
    """The line of the near tile whose lags are `step` larger.

    A line extends beyond its tile, and one is loaded after the last tile, too: the laid-out band
    has room for both.
    """
    source = line.source + step
    first, second, third = tl.inline_asm_elementwise(
        load_line(),
        "=f,=f,=f,l",
        [source.to(tl.int64)],
        dtype=(tl.float32, tl.float32, tl.float32),
        is_pure=False,
        pack=1,
    )
    return BandLine(line.room, line.of_lane, source, first, second, third)


@triton.constexpr_function
def load_line():
    """Instructions that load three numbers, 32 places apart.

    The compiler does not move the loads past the warp barrier that ends them, so they are started
    here and not where their results are needed.
    """
    loads = "ld.global.f32 $0, [$3]; ld.global.f32 $1, [$3+128]; ld.global.f32 $2, [$3+256];"
    return f"{loads} bar.warp.sync 0xffffffff;"


@triton.constexpr_function
def share_line():
    """Instructions that store a lane's numbers at $1, and then copy the address $2 to $0.

    A load from $0 therefore comes after the stores. The warp is synchronised twice: after it has
    read the previous line, and after it has stored this one.
    """
    stores = "st.shared.f32 [$1], $3; st.shared.f32 [$1+128], $4; st.shared.f32 [$1+256], $5;"
    together = "bar.warp.sync 0xffffffff;"
    return f"{together} {stores} {together} mov.u32 $0, $2;"


@triton.jit
def line_bias(line, place, BY_KEYS: tl.constexpr):
    """The bias of every cell of a near tile from the line that was loaded for it.

    Addresses are a number of the thread plus one of the register (see lags_of in tile.py).
    """
    room = tl.inline_asm_elementwise(
        share_line(),
        "=r,r,r,f,f,f",
        [line.of_lane, line.room, line.first, line.second, line.third],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
    r, c = place.r, place.c
    if BY_KEYS:
        ROWS: tl.constexpr = r.shape[0] * r.shape[1]
        of_thread = (c // 16) * LINE_PITCH + (c & 7) - (r & 6)
        of_register = (c & 8) + (ROWS - 1) - (r & ~6)
    else:
        of_thread = (r // 16) * LINE_PITCH - (r & 7) + (c & 6)
        of_register = 15 - (r & 8) + (c & ~6)
    return tl.inline_asm_elementwise(
        *("ld.shared.f32 $0, [$1];", "=f,r", [(room + of_thread * 4) + of_register * 4]),
        dtype=tl.float32,
        is_pure=True,
        pack=1,
    )


class DeviceCurve(NamedTuple):
    """The device functions of a curve, and the kernel of its parameters' gradients."""

    at: Any
    extent_of: Any
    tails_of: Any
    gradient_kernel: Any


@triton.jit
def _width(raw):
    """The width of a Gaussian, at least the smallest normal number: 0 / 0 is NaN. NaN stays NaN."""
    w = exact_exp(raw * SCALE)
    return tl.where(w < SMALLEST, SMALLEST, w)


@triton.jit
def _gaussians_of(h, parameters, COUNT: tl.constexpr):
    """Amplitudes, widths in lags and offsets in widths of head h, and which of them exist."""
    s = tl.arange(0, COUNT)
    there = s < parameters.count
    place = h * parameters.count + s
    a = tl.load(parameters.first + place, mask=there, other=0.0) * SCALE
    w = _width(tl.load(parameters.second + place, mask=there, other=0.0))
    u = tl.load(parameters.third + place, mask=there, other=0.0) * SCALE
    return a, w, u, there


@triton.jit
def _gaussian(distance):
    """exp(-distance^2 / 2), and 0 where that is an eighth of epsilon or less. NaN stays NaN."""
    return tl.where(tl.abs(distance) > WIDTHS_TO_ZERO, 0.0, exact_exp(-0.5 * distance * distance))


@triton.jit
def gaussians_at(h, lag, reach, parameters, COUNT: tl.constexpr):
    """The sum of the Gaussians of head h at each of these lags."""
    a, w, u, there = _gaussians_of(h, parameters, COUNT)
    distance = lag.to(tl.float32)[None, :] / w[:, None] - u[:, None]
    return tl.sum(tl.where(there[:, None], a[:, None] * _gaussian(distance), 0.0), 0)


@triton.jit
def gaussians_extent(h, reach, parameters, COUNT: tl.constexpr):
    """The extent of head h as GaussianSum has it, at most the reach."""
    a, w, u, there = _gaussians_of(h, parameters, COUNT)
    last = tl.where(there, w * (tl.abs(u) + WIDTHS_TO_ZERO) * SLACK, 0.0)
    # With a NaN, which fails every comparison, or an infinite width, nothing may be cut off.
    sound = (last < reach) & (tl.abs(a) < float("inf"))
    far = tl.max(tl.where(sound, last, reach * 1.0), 0)
    return tl.minimum(tl.floor(far).to(tl.int32), reach)


@triton.jit(do_not_specialize=["reach", "beyond", "batches", "blocks"])
def gaussians_gradient_kernel(
    parameters,
    extent,
    d_band,  # float32 [h, 2 * reach + 1]
    d_tails,
    gradients,
    reach,
    beyond,
    batches,
    blocks,
    BLOCK: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """One Gaussian (program 1) of one head (program 0), over the lags within the head's extent."""
    pdl_wait(CHAINED)
    h = tl.program_id(0)
    place = h * parameters.count + tl.program_id(1)
    a = tl.load(parameters.first + place) * SCALE
    w = _width(tl.load(parameters.second + place))
    u = tl.load(parameters.third + place) * SCALE
    last = tl.load(extent + h)
    d_a = tl.zeros([BLOCK], dtype=tl.float32)
    d_w = tl.zeros([BLOCK], dtype=tl.float32)
    d_u = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(-last, last + 1, BLOCK):
        lag = start + tl.arange(0, BLOCK)
        cells = d_band + h * (2 * reach + 1) + lag + reach
        d_f = tl.load(cells, mask=lag <= last, other=0.0)
        scaled = lag.to(tl.float32) / w
        distance = scaled - u
        # They may be infinite where the Gaussian is 0, and 0 * inf is NaN.
        is_zero = tl.abs(distance) > WIDTHS_TO_ZERO
        scaled = tl.where(is_zero, 0.0, scaled)
        part = d_f * _gaussian(distance)
        distance = tl.where(is_zero, 0.0, distance)
        d_a += part
        d_w += part * distance * scaled  # of the logarithm of the width
        d_u += part * distance
    tl.store(gradients.first + place, tl.sum(d_a, 0) * SCALE)
    tl.store(gradients.second + place, tl.sum(d_w, 0) * a * SCALE)
    tl.store(gradients.third + place, tl.sum(d_u, 0) * a * SCALE)


@triton.jit
def tail_sums(d_tails, kind, h, heads, batches, blocks, BLOCK: tl.constexpr):
    """The gradient of one kind of tail of head h, in BLOCK sums of its parts in a fixed order."""
    of_kind = d_tails + kind * batches * heads * blocks
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, batches * blocks, BLOCK):
        part = start + tl.arange(0, BLOCK)
        cells = of_kind + (part // blocks * heads + h) * blocks + part % blocks
        total += tl.load(cells, mask=part < batches * blocks, other=0.0)
    return total


@triton.jit
def buckets_at(h, lag, reach, parameters, COUNT: tl.constexpr):
    """The table's number for the bucket of each of these lags; `count` is the number of heads."""
    place = tl.minimum(tl.maximum(lag, -reach), reach) + reach
    bucket = tl.load(parameters.second + place)
    return tl.load(parameters.first + bucket * parameters.count + h) * SCALE


@triton.jit
def buckets_tails(h, reach, parameters):
    """The numbers of the outermost buckets, without slopes."""
    first = tl.load(parameters.second)
    last = tl.load(parameters.second + 2 * reach)
    left = tl.load(parameters.first + first * parameters.count + h) * SCALE
    right = tl.load(parameters.first + last * parameters.count + h) * SCALE
    return left, 0.0, right, 0.0


@triton.jit(do_not_specialize=["reach", "beyond", "batches", "blocks"])
def buckets_gradient_kernel(
    parameters,
    extent,
    d_band,  # float32 [h, 2 * (reach + beyond) + 1]
    d_tails,  # float32 [4, batches, h, blocks]
    gradients,
    reach,
    beyond,
    batches,
    blocks,
    BLOCK: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """One bucket (program 1) of one head (program 0): the sum over its lags and its tails."""
    pdl_wait(CHAINED)
    h = tl.program_id(0)
    bucket = tl.program_id(1)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    last = 2 * (reach + beyond)
    for start in range(0, last + 1, BLOCK):
        place = start + tl.arange(0, BLOCK)
        there = place <= last
        inside = tl.minimum(tl.maximum(place - beyond, 0), 2 * reach)
        mine = tl.load(parameters.second + inside, mask=there, other=-1) == bucket
        d_f = tl.load(d_band + h * (last + 1) + place, mask=there, other=0.0)
        total += tl.where(mine, d_f, 0.0)
    heads = parameters.count
    if tl.load(parameters.second) == bucket:
        total += tail_sums(d_tails, 0, h, heads, batches, blocks, BLOCK)
    if tl.load(parameters.second + 2 * reach) == bucket:
        total += tail_sums(d_tails, 2, h, heads, batches, blocks, BLOCK)
    d_bucket = tl.sum(total, 0)
    tl.store(gradients.first + bucket * parameters.count + h, d_bucket * SCALE)


@triton.jit
def line_at(h, lag, reach, parameters, COUNT: tl.constexpr):
    """-slope * |lag| at each of these lags."""
    return -tl.load(parameters.first + h) * tl.abs(lag).to(tl.float32)


@triton.jit
def line_tails(h, reach, parameters):
    """The same slope on both sides."""
    slope = -tl.load(parameters.first + h)
    return 0.0, slope, 0.0, slope


@triton.jit(do_not_specialize=["reach", "beyond", "batches", "blocks"])
def line_gradient_kernel(
    parameters,
    extent,
    d_band,
    d_tails,  # float32 [4, batches, h, blocks]
    gradients,
    reach,
    beyond,
    batches,
    blocks,
    BLOCK: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """The slope of one head (program 0)."""
    pdl_wait(CHAINED)
    h = tl.program_id(0)
    total = tail_sums(d_tails, 1, h, parameters.count, batches, blocks, BLOCK)
    total += tail_sums(d_tails, 3, h, parameters.count, batches, blocks, BLOCK)
    tl.store(gradients.first + h, -tl.sum(total, 0))


CURVES = {  # by the names that whence.lag gives them
    "gaussians": DeviceCurve(gaussians_at, gaussians_extent, None, gaussians_gradient_kernel),
    "buckets": DeviceCurve(buckets_at, None, buckets_tails, buckets_gradient_kernel),
    "line": DeviceCurve(line_at, None, line_tails, line_gradient_kernel),
}
