"""One tile of backward: the weights again, and the gradient of the logits."""

import triton
import triton.language as tl

from whence.kernels.triton_tile import (
    far_line,
    kept,
    near_bias,
    visible,
)


@triton.jit
def weights_and_slopes(
    q,
    k,
    v,
    d_out,
    lse,
    delta,
    first_row,
    r,  # the row counted from first_row, where band_ptr and d_mass_ptr stand
    first,
    c,  # the key counted from `first`
    band_ptr,
    left,
    left_slope,
    right,
    right_slope,
    keys_ptr,
    q_segment,
    k_segment_ptr,
    d_mass_ptr,
    d_left_mass,
    d_right_mass,
    seed,
    n_q,
    n_k,
    q_start,
    reach,
    edge,
    value_reach,
    before,
    after,
    scale2,
    dropout,
    stride_band_q,
    REGION: tl.constexpr,
    BY_KEYS: tl.constexpr,  # the tile is [keys, queries], not [queries, keys]
    EVEN: tl.constexpr,  # no tile hangs over the last row or key
    BAND: tl.constexpr,
    TAILS: tl.constexpr,
    SLOPES: tl.constexpr,
    PER_ROW: tl.constexpr,
    VALUES: tl.constexpr,
    BEFORE: tl.constexpr,
    AFTER: tl.constexpr,
    KEYS: tl.constexpr,
    SEGMENTS: tl.constexpr,
    DROPOUT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The weights that met the values, the weights, and the logits' gradient, of one tile.

    q, d_out are [m, d] and k, v [n, d]; whatever belongs to a row or a key broadcasts to the tile.
    """
    if BY_KEYS:
        logits = tl.dot(k, tl.trans(q), input_precision=PRECISION) * scale2
        d_weights = tl.dot(v, tl.trans(d_out), input_precision=PRECISION)
    else:
        logits = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale2
        d_weights = tl.dot(d_out, tl.trans(v), input_precision=PRECISION)
    row = first_row + r
    col = first + c
    if BAND and REGION == 1:
        logits += near_bias(
            band_ptr,
            first_row + q_start,
            first,
            r,
            c,
            row < n_q,
            reach,
            edge,
            stride_band_q,
            left,
            left_slope,
            right,
            right_slope,
            TAILS,
            SLOPES,
            PER_ROW,
            False,
            BY_KEYS,
        )
    if TAILS and REGION != 1:
        ahead = first_row + q_start - first
        shift, level, tilt = far_line(
            left, left_slope, right, right_slope, ahead, r, REGION, SLOPES, BY_KEYS and not PER_ROW
        )
        lse = lse - shift
        if SLOPES:
            logits += level + tilt * c.to(tl.float32)
    weights = tl.exp2(logits - lse)
    LAID_OUT: tl.constexpr = BAND and REGION == 1 and not PER_ROW  # the window is in the band
    LEFT_EDGE: tl.constexpr = BEFORE and REGION < 2 and not LAID_OUT
    RIGHT_EDGE: tl.constexpr = AFTER and REGION > 0 and not LAID_OUT
    if KEYS or SEGMENTS or LEFT_EDGE or RIGHT_EDGE or not EVEN:
        seen = visible(
            row,
            col,
            n_k,
            q_start,
            before,
            after,
            keys_ptr,
            q_segment,
            k_segment_ptr,
            LEFT_EDGE,
            RIGHT_EDGE,
            KEYS,
            SEGMENTS,
        )
        weights = tl.where(seen & (row < n_q), weights, 0.0)
    if VALUES:
        if REGION == 1:
            lag = col - (row + q_start)
            place = tl.minimum(tl.maximum(lag, -value_reach), value_reach)
            place += r * (2 * value_reach + 1) + value_reach
            if BY_KEYS:
                if reach >= 0:  # always so: see near_bias
                    d_weights += tl.load(d_mass_ptr + place, mask=row < n_q, other=0.0)
            else:
                d_weights += tl.load(d_mass_ptr + place, mask=row < n_q, other=0.0)
        else:  # a far tile lies in an end row of the table: one number a query row
            d_mass = d_left_mass
            if REGION == 2:
                d_mass = d_right_mass
            if DROPOUT:
                d_weights += d_mass
            else:
                delta = delta - d_mass
    met = weights
    if DROPOUT:
        keep = kept(seed, row, col, dropout)
        met = weights * keep
        d_weights = d_weights * keep
    return met, weights, weights * (d_weights - delta)
