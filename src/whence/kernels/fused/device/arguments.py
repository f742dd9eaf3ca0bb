"""The groups of arguments that the kernels take.

A tensor that a call does not have is None in its group, and its strides are 0; a group of which a
call has nothing is None itself, since Triton reads each argument at every launch. The stride of an
axis that broadcasts is 0 too. Fields in capitals are compile-time constants.

The functions at the end make groups of what a call has. Of a tensor, or a slot of a plan, they read
shape, strides and dtype alone.
"""

from typing import Any, NamedTuple

import torch
import triton.language as tl


class Rows(NamedTuple):
    """Rows [b, h, n, d] whose last axis is contiguous."""

    ptr: Any
    stride_b: Any
    stride_h: Any
    stride_n: Any  # a compile-time constant, unless it may change with the batch (rows_of)


class Bias(NamedTuple):
    """The band, how far it reaches in each head, and its tails."""

    band: Any  # float32 [b, h, q, lag]: laid out (band.py), or with RAW_BAND as the caller gave it
    extent: Any  # int32 [h]: the largest |lag| at which the band is not 0
    tails: Any  # float32 [4, b, h, q]: left constant, left slope, right constant, right slope
    band_b: Any  # strides
    band_h: Any
    band_q: Any
    tail_kind: Any
    tail_b: Any
    tail_h: Any
    tail_q: Any


class Visible(NamedTuple):
    """Which keys a query may attend to, besides the window."""

    keys: Any  # uint8 [b, k]: 0 for padding
    q_segment: Any  # integers [b, q]: a query attends to the keys of its own segment
    k_segment: Any  # integers [b, k]
    keys_b: Any  # strides
    q_segment_b: Any
    k_segment_b: Any


class Table(NamedTuple):
    """A table float32 [h, lag, d] whose last two axes are contiguous."""

    ptr: Any
    stride_h: Any


class Product(NamedTuple):
    """The factors of a band that is scale * query @ factor^T."""

    query: Rows  # its address is None if it is q and forward holds all columns in one tile
    factor: Table
    scale: Any


class Parameters(NamedTuple):
    """The parameters of a curve, or their gradients; None for those that the curve does not use.

    `count` is the last axis of the first one: the Gaussians of a head, or the heads of slopes and
    of a table of buckets.
    """

    first: Any
    second: Any
    third: Any
    count: Any


class FarSide(NamedTuple):
    """What a plain kernel computed for the far keys of one side; its n - far_start rows are packed.

    The right side was computed with all rows in reverse order.
    """

    out: Any
    lse: Any  # in base e
    d_q: Any
    d_k: Any
    d_v: Any


class Far(NamedTuple):
    """The far keys of both sides, where a plain kernel attends to them."""

    left: FarSide
    right: FarSide


class Output(NamedTuple):
    """The outputs of the forward kernel."""

    out: Any  # [b, h, q, d_v]
    residual: Any  # float16, in the layout of out: its rounding error times RESIDUAL_SCALE
    # float32 [b, h, q] in base 2; in base e two numbers, [2, b, h, q] (row_lse in tile.py)
    lse: Any
    mass: Any  # float32 [b, h, q, lag]: probability mass of the value table's visible lags


class ShareSums(NamedTuple):
    """The softmax of every share of the keys, in decoding; float32 and packed."""

    acc: Any  # [shares, b, h, q, d_v]
    state: Any  # [shares, b, h, q, 4]: top, total, left_mass and right_mass


class RowStatistics(NamedTuple):
    """What the query kernel writes for the other kernels of backward; all float32 and packed."""

    lse_delta: Any  # [b, h, q, 2]: lse (row_lse in tile.py), and delta = rowsum(out * d_out)
    far_lse_delta: Any  # [2, b, h, q, 2]: the same for far tiles, with what a row adds there
    d_mass: Any  # [b, h, q, lag]: d_out @ table^T
    norm: Any  # [b, h, q]: of a float32 call (row_lse in tile.py)


class QueryGradients(NamedTuple):
    """The outputs of the query kernel."""

    d_q: Any  # [b, h, q, d]
    d_band: Any  # float32 [b, h, q, lag], of a band that belongs to a row
    d_tails: Any  # float32 [4, b, h, q]; of tails that belong to a head [4, b, h, block of rows]


class KeyGradients(NamedTuple):
    """The outputs of the key kernel."""

    d_k: Any  # [b, h_kv, k, d]
    d_v: Any
    # float32 [b, h, stripe, stripe_length]: sums of the diagonals of dS within stripes of
    # stripe_width keys (d_band.py)
    stripes: Any


class Numbers(NamedTuple):
    """The numbers of a call that do not change with the lengths of its sequences."""

    n_heads: Any
    value_reach: Any  # the largest |lag| in the value table
    before: Any  # the window: a query sees -before <= lag <= after
    after: Any
    far_start: Any  # the |lag| from which a plain kernel attends
    scale: Any
    dropout: Any


class Sizes(NamedTuple):
    """All numbers of a call. Kernels take them as `Numbers` and as the scalars of `VARYING`.

    Triton compiles a kernel anew when a whole number becomes 1 or a multiple of 16. Of a scalar
    argument it can be told not to, by `do_not_specialize`; of the fields of a tuple it cannot.
    """

    n_q: Any
    n_k: Any
    q_start: Any  # the key position of query row 0
    reach: Any  # the largest |lag| in the band
    edge: Any  # the largest |lag| in the laid-out band
    n_heads: Any
    value_reach: Any
    before: Any
    after: Any
    far_start: Any
    scale: Any
    dropout: Any


VARYING = Sizes._fields[: -len(Numbers._fields)]


def scalars(sizes: Sizes) -> tuple[Any, ...]:
    """The numbers of a call as kernels take them."""
    count = len(VARYING)
    return (Numbers(*sizes[count:]), *sizes[:count])


class Kind(NamedTuple):
    """The compile-time constants that all kernels of a call share."""

    D: int  # head size of q and k
    D_V: int  # head size of v
    BLOCK_D: int  # the powers of two that hold them
    BLOCK_DV: int
    GROUPS: int  # query heads of one key head
    BAND: bool
    # The band is read as the caller gave it: by the kernels that lay it out, and in decoding, where
    # a tile has rows of several heads.
    RAW_BAND: bool
    EXTENT: bool
    TAILS: bool
    SLOPES: bool  # some tail is not constant
    PER_ROW: bool  # every query row has a band or tails of its own
    VALUES: bool  # there is a value table
    BEFORE: bool  # the window is limited to the left
    AFTER: bool  # the window is limited to the right
    CAUSAL: bool  # and limited to lag <= 0
    KEYS: bool  # some keys are padding
    SEGMENTS: bool
    DROPOUT: bool
    NEGATIVE: bool  # the scale is negative
    FAR: bool  # a plain kernel attends to the far keys
    TOKENS: bool  # out, gradients and a plain kernel's results are [b, n, h, d] in memory
    PRECISION: str  # tl.dot's input_precision for q, k, v and their gradients
    ENDS: bool  # the band of a row ends in its tails: it is a product with a clipped table
    LAST: int  # the last place of a product's row: that of lag `reach`, or of lag 0 if causal
    VALUE_LAST: int  # the last place of a row of masses, likewise
    MARGIN: int  # numbers around a matrix [row, lag] that near tiles read (row_numbers in tile.py)
    LAGS: int  # lags in one step of a product with a table; in short kernels, all of its lags
    # If it is not 0, all kernels of backward decide what is near for the same squares of this side,
    # and near cells of a tail are summed with the band's diagonals. If 0, each uses its own tiles.
    GRAIN: int = 0
    # A head's laid-out band is in units of q.k, not as logits are, and the accumulator of a near
    # tile's product starts from it, which saves an addition in every cell.
    STARTED: bool = False
    CHAINED: bool = False  # a kernel is made ready while the one before ends (pdl_wait in tile.py)


class Tile(NamedTuple):
    """The sizes of a kernel's tiles."""

    ROWS: int
    KEYS: int
    NEAR: int  # keys a step in near tiles, or rows a step in the key kernel
    STAGES: int  # of the software pipeline
    EVEN: bool  # no tile extends beyond the last row or key that it loads
    ALL_NEAR: bool = False  # all that a block touches is near
    LINES: bool = False  # a warp loads what it needs of a head's band ahead (BandLine in band.py)
    TURNS: bool = False  # heads take turns (program_of in tile.py)
    HELD: int = 0  # sums of diagonals that fit in each warp's shared memory (StripeRooms)


def rows_of(x: Any) -> Rows:
    """Rows [b, h, n, d], or no rows.

    As a constant, the stride from row to row saves registers and instructions in every tile. It
    depends on the model alone, unless the batch lies within the rows ([n, b, h, d] in memory).
    There it is a number like the others, so that a new batch compiles nothing.
    """
    if x is None:
        return Rows(None, 0, 0, 0)
    stride_b, stride_h, stride_n = x.stride()[:3]
    outer = x.shape[0] == 1 or stride_b >= stride_n
    return Rows(x, stride_b, stride_h, tl.constexpr(stride_n) if outer else stride_n)


def table_of(x: Any) -> Table | None:
    """A table [h|1, lag, d]."""
    return None if x is None else Table(x, *strides_of(x, 0))


def visible_of(inputs: Any) -> Visible | None:
    """The padding mask and the segments of a call's `Inputs`."""
    given = (inputs.keys, inputs.q_segment, inputs.k_segment)
    if all(x is None for x in given):
        return None
    return Visible(*given, *[stride for x in given for stride in strides_of(x, 0)])


def product_of(q: Any, product: Any) -> Product | None:
    """The factors of a band that is a product."""
    if product is None:
        return None
    query = product.query
    if query is None and q.shape[-1] > 64:  # read in pieces
        query = q
    table = Table(product.factor, *strides_of(product.factor, 0))
    return Product(rows_of(query), table, product.scale)


def strides_of(x: Any, *axes: int) -> tuple[int, ...]:
    """The strides of these axes; 0 for an axis of size 1, which broadcasts, or without a tensor."""
    if x is None:
        return (0,) * len(axes)
    return tuple([0 if x.shape[axis] == 1 else x.stride(axis) for axis in axes])


def last_place(reach: int, numbers: Any) -> int:
    """The last place of a row of lags from -reach on: that of lag 0 in a causal call."""
    return reach if numbers.causal else 2 * reach


def precision_of(q: Any) -> str:
    """float32 is multiplied in full precision: TF32 keeps 11 of its 24 significant bits."""
    return "ieee" if q.dtype == torch.float32 else "tf32"
