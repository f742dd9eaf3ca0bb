"""Backward for short causal sequences in three tiles, without the fourth, which is masked out.

The rows and the keys are cut into two blocks each, and tile ij holds block i of the rows and block
j of the keys. Row i attends to no key beyond i, so that everything in tile 01 is masked out. Row
block 1 comes first: its two tiles are in registers together, so that softmax and delta see the
whole row. It completes dK and dV of key block 1; row block 0 completes those of key block 0.

Otherwise this kernel gives what `short_backward_kernel` gives, for a call without grouped heads,
tables and dropout. Tiles 00 and 11 have the same lags: they are added before their diagonals are
summed.
"""

import triton
import triton.language as tl

from whence.kernels.fused.device.arguments import VARYING
from whence.kernels.fused.device.short import (
    diagonal_sums,
    load_head,
    masked_logits,
    reciprocal,
    run_length,
    store_head,
    transposed_product,
)
from whence.kernels.fused.device.tile import exponential, sizes_of


@triton.jit
def load_block(
    x, b, h, FIRST: tl.constexpr, n, D: tl.constexpr, BLOCK_D: tl.constexpr, TILE: tl.constexpr
):
    """The block of rows or keys of one head from FIRST on."""
    return load_head(x, b, h, FIRST, n, TILE.KEYS // 2, D, BLOCK_D, TILE.EVEN)


@triton.jit
def store_block(
    ptr,
    tile,
    b,
    h,
    FIRST: tl.constexpr,
    n,
    sizes,
    D: tl.constexpr,
    KIND: tl.constexpr,
    TILE: tl.constexpr,
):
    """Store a gradient of the block of rows or keys of one head from FIRST on."""
    store_head(ptr, tile, b, h, FIRST, n, sizes.n_heads, D, KIND.TOKENS, TILE.EVEN)


@triton.jit
def finite(top):
    """The maximum to subtract from the logits of a row [row, 1]: 0 if all its keys are masked."""
    return tl.where(top == float("-inf"), 0.0, top)[:, None]


@triton.jit(do_not_specialize=["batch", *VARYING])
def short_triangle_kernel(
    operands,
    d_out,
    gradients,
    diagonals,
    batch,
    numbers,
    n_q,
    n_k,
    q_start,
    reach,
    edge,
    KIND: tl.constexpr,
    TILE: tl.constexpr,
    SHORT: tl.constexpr,
):
    """All gradients of one head of a run of sequences; TILE is the square of all rows and keys.

    A gradient is stored as soon as it is complete, which frees its registers.
    """
    sizes = sizes_of(numbers, n_q, n_k, q_start, reach, edge)
    BLOCK: tl.constexpr = TILE.KEYS // 2
    D: tl.constexpr = KIND.D
    D_V: tl.constexpr = KIND.D_V
    BLOCK_D: tl.constexpr = KIND.BLOCK_D
    BLOCK_DV: tl.constexpr = KIND.BLOCK_DV
    PRECISION: tl.constexpr = KIND.PRECISION
    run = tl.program_id(0).to(tl.int64) // sizes.n_heads
    h = tl.program_id(0) % sizes.n_heads
    r0 = tl.arange(0, BLOCK)[:, None]
    c0 = tl.arange(0, BLOCK)[None, :]
    r1 = BLOCK + r0
    c1 = BLOCK + c0
    # Sums of the diagonals c - r = -2 BLOCK..-BLOCK - 1, -BLOCK..-1 and 0..BLOCK - 1.
    far_left = tl.zeros([BLOCK], dtype=tl.float32)
    left = tl.zeros([BLOCK], dtype=tl.float32)
    right = tl.zeros([BLOCK], dtype=tl.float32)
    for each in tl.range(0, run_length(run, batch, SHORT), num_stages=TILE.STAGES):
        b = run * SHORT.RUN + each
        k0 = load_block(operands.k, b, h, 0, sizes.n_k, D, BLOCK_D, TILE)
        k1 = load_block(operands.k, b, h, BLOCK, sizes.n_k, D, BLOCK_D, TILE)
        q1 = load_block(operands.q, b, h, BLOCK, sizes.n_q, D, BLOCK_D, TILE)
        v0 = load_block(operands.v, b, h, 0, sizes.n_k, D_V, BLOCK_DV, TILE)
        v1 = load_block(operands.v, b, h, BLOCK, sizes.n_k, D_V, BLOCK_DV, TILE)
        d_out1 = load_block(d_out, b, h, BLOCK, sizes.n_q, D_V, BLOCK_DV, TILE)

        # Row block 1: weights p, their gradients d_p, those of the logits d_s.
        p10 = masked_logits(q1, k0, None, operands, b, h, r1, c0, sizes, KIND, TILE)
        p11 = masked_logits(q1, k1, None, operands, b, h, r1, c1, sizes, KIND, TILE)
        top = finite(tl.maximum(tl.max(p10, 1), tl.max(p11, 1)))
        p10 = exponential(p10 - top, KIND)
        p11 = exponential(p11 - top, KIND)
        scale = reciprocal(tl.sum(p10, 1) + tl.sum(p11, 1))
        p10 = p10 * scale
        p11 = p11 * scale
        d_p10 = tl.dot(d_out1, tl.trans(v0), input_precision=PRECISION)
        d_p11 = tl.dot(d_out1, tl.trans(v1), input_precision=PRECISION)
        delta = (tl.sum(p10 * d_p10, 1) + tl.sum(p11 * d_p11, 1))[:, None]
        d_s10 = p10 * (d_p10 - delta)
        if SHORT.DIAGONALS:
            more_right, more_left = diagonal_sums(d_s10)
            left += more_right
            far_left += more_left
        d_s11 = p11 * (d_p11 - delta)
        rounded10 = d_s10.to(q1.dtype)
        rounded11 = d_s11.to(q1.dtype)
        d_q1 = tl.dot(rounded10, k0, input_precision=PRECISION)
        d_q1 = tl.dot(rounded11, k1, d_q1, input_precision=PRECISION) * sizes.scale
        store_block(gradients.d_q, d_q1, b, h, BLOCK, sizes.n_q, sizes, D, KIND, TILE)
        zero = tl.zeros([BLOCK, BLOCK_DV], dtype=tl.float32)
        d_v1 = transposed_product(p11.to(d_out1.dtype), d_out1, zero, KIND)
        store_block(gradients.d_v, d_v1, b, h, BLOCK, sizes.n_k, sizes, D_V, KIND, TILE)
        d_v0 = transposed_product(p10.to(d_out1.dtype), d_out1, zero, KIND)
        zero = tl.zeros([BLOCK, BLOCK_D], dtype=tl.float32)
        d_k1 = transposed_product(rounded11, q1, zero, KIND) * sizes.scale
        store_block(gradients.d_k, d_k1, b, h, BLOCK, sizes.n_k, sizes, D, KIND, TILE)
        d_k0 = transposed_product(rounded10, q1, zero, KIND)

        # Row block 0.
        q0 = load_block(operands.q, b, h, 0, sizes.n_q, D, BLOCK_D, TILE)
        d_out0 = load_block(d_out, b, h, 0, sizes.n_q, D_V, BLOCK_DV, TILE)
        p00 = masked_logits(q0, k0, None, operands, b, h, r0, c0, sizes, KIND, TILE)
        p00 = exponential(p00 - finite(tl.max(p00, 1)), KIND)
        p00 = p00 * reciprocal(tl.sum(p00, 1))
        d_p00 = tl.dot(d_out0, tl.trans(v0), input_precision=PRECISION)
        d_s00 = p00 * (d_p00 - tl.sum(p00 * d_p00, 1)[:, None])
        d_v0 = transposed_product(p00.to(d_out0.dtype), d_out0, d_v0, KIND)
        store_block(gradients.d_v, d_v0, b, h, 0, sizes.n_k, sizes, D_V, KIND, TILE)
        rounded00 = d_s00.to(q0.dtype)
        d_k0 = transposed_product(rounded00, q0, d_k0, KIND) * sizes.scale
        store_block(gradients.d_k, d_k0, b, h, 0, sizes.n_k, sizes, D, KIND, TILE)
        d_q0 = tl.dot(rounded00, k0, input_precision=PRECISION) * sizes.scale
        store_block(gradients.d_q, d_q0, b, h, 0, sizes.n_q, sizes, D, KIND, TILE)
        if SHORT.DIAGONALS:
            more_right, more_left = diagonal_sums(d_s00 + d_s11)
            right += more_right
            left += more_left
    if SHORT.DIAGONALS:  # the sum of c - r = t lies at place t modulo 4 BLOCK
        part = run * sizes.n_heads + h
        place = diagonals + part * (4 * BLOCK) + tl.arange(0, BLOCK)
        tl.store(place, right)
        tl.store(place + BLOCK, tl.zeros([BLOCK], dtype=tl.float32))
        tl.store(place + 2 * BLOCK, far_left)
        tl.store(place + 3 * BLOCK, left)
