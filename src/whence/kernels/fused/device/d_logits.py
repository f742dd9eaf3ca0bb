"""One tile of backward: the weights, recomputed from the log-sum-exp, and the logits' gradient.

dS = P * (dP - delta), with dP = d_out v^T and delta = rowsum(out * d_out).
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from whence.kernels.fused.device.tile import (
    LOG2E,
    dropout_factor,
    far_line,
    near_bias,
    visible_cells,
)


class Queries(NamedTuple):
    """A block of rows: q [m, d], d_out [m, d_v], and lse and delta that broadcast to the tile."""

    q: Any
    d_out: Any
    lse: Any
    delta: Any


class MassGradient(NamedTuple):
    """The gradient of a value table's masses: its address, and those at the table's two ends."""

    ptr: Any
    left: Any
    right: Any


class TileGradient(NamedTuple):
    """The weights that multiplied the values (after dropout), the softmax's weights, and dS."""

    dropped: Any
    weights: Any
    d_logits: Any


@triton.jit
def tile_gradient(
    queries,
    k,  # [n, d]
    v,  # [n, d_v]
    place,
    head,
    d_mass,
    sizes,
    KIND: tl.constexpr,
    REGION: tl.constexpr,
    EVEN: tl.constexpr,  # no tile extends beyond the last row or key
    BY_KEYS: tl.constexpr,  # the tile is [keys, queries], not [queries, keys]
    PREPARED: tl.constexpr,  # lse and delta hold the constants of the far side already
    UNSTAGED: tl.constexpr,  # the load of a shared band is not staged through shared memory
):
    """Weights and dS of one tile."""
    if BY_KEYS:
        logits = tl.dot(k, tl.trans(queries.q), input_precision=KIND.PRECISION)
        logits = logits * (sizes.scale * LOG2E)
        d_weights = tl.dot(v, tl.trans(queries.d_out), input_precision=KIND.PRECISION)
    else:
        logits = tl.dot(queries.q, tl.trans(k), input_precision=KIND.PRECISION)
        logits = logits * (sizes.scale * LOG2E)
        d_weights = tl.dot(queries.d_out, tl.trans(v), input_precision=KIND.PRECISION)
    row = place.first_row + place.r
    col = place.first_key + place.c
    lse = queries.lse
    delta = queries.delta
    # A band that is laid out for a head holds the window: -inf beyond it.
    NEAR_BAND: tl.constexpr = KIND.BAND and REGION == 1
    WINDOWED: tl.constexpr = NEAR_BAND and not KIND.PER_ROW
    LEFT_EDGE: tl.constexpr = KIND.BEFORE and REGION < 2 and not WINDOWED
    RIGHT_EDGE: tl.constexpr = KIND.AFTER and REGION > 0 and not WINDOWED
    if NEAR_BAND:
        if UNSTAGED and not KIND.PER_ROW:
            if sizes.reach >= 0:  # always so; see near_bias. The sum within it saves registers.
                logits += near_bias(head, place, row < sizes.n_q, sizes, KIND, BY_KEYS, True)
        else:
            logits += near_bias(head, place, row < sizes.n_q, sizes, KIND, BY_KEYS, False)
    if KIND.TAILS and REGION != 1 and not PREPARED:
        ahead = place.first_row + sizes.q_start - place.first_key
        LEVEL: tl.constexpr = BY_KEYS and not KIND.PER_ROW
        line = far_line(head.tails, ahead, place.r, REGION, KIND.SLOPES, LEVEL)
        lse = lse - line.shift
        if KIND.SLOPES:
            logits += line.level + line.tilt * place.c.to(tl.float32)
    weights = tl.exp2(logits - lse)
    if KIND.KEYS or KIND.SEGMENTS or LEFT_EDGE or RIGHT_EDGE or not EVEN:
        seen = visible_cells(row, col, head, sizes, KIND, LEFT_EDGE, RIGHT_EDGE)
        weights = tl.where(seen & (row < sizes.n_q), weights, 0.0)
    if KIND.VALUES and not PREPARED:
        reach = sizes.value_reach
        if REGION == 1:
            lag = col - (row + sizes.q_start)
            index = tl.minimum(tl.maximum(lag, -reach), reach)
            index += place.r * (2 * reach + 1) + reach
            if BY_KEYS:
                if sizes.reach >= 0:  # always so; see near_bias
                    d_weights += tl.load(d_mass.ptr + index, mask=row < sizes.n_q, other=0.0)
            else:
                d_weights += tl.load(d_mass.ptr + index, mask=row < sizes.n_q, other=0.0)
        else:  # all keys of a far tile take an end row of the table: one number a query row
            d_end = d_mass.left
            if REGION == 2:
                d_end = d_mass.right
            if KIND.DROPOUT:
                d_weights += d_end
            else:
                delta = delta - d_end
    dropped = weights
    if KIND.DROPOUT:
        keep = dropout_factor(head.seed, row, col, sizes.dropout)
        dropped = weights * keep
        d_weights = d_weights * keep
    return TileGradient(dropped, weights, weights * (d_weights - delta))
