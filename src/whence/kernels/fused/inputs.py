"""The parts of a call to the fused backend: tensors and numbers, as `launch` takes them.

A tensor may be anything with a shape, strides and a dtype: a plan records a call from those alone.
"""

from typing import Any, NamedTuple


class Tiles(NamedTuple):
    """Rows and keys of a tile, and how many warps and pipeline stages run it."""

    rows: int
    keys: int
    warps: int
    stages: int


class Inputs(NamedTuple):
    """The tensors of a call besides q, k and v; None where the call has no such thing."""

    band: Any = None  # float32 [b|1, h|1, q|1, lag]
    extent: Any = None  # int32 [h]
    tails: Any = None  # float32 [4, b|1, h|1, q|1]
    table: Any = None  # float32 [h|1, lag, d_v]
    keys: Any = None  # uint8 [b|1, k]
    q_segment: Any = None  # int32 [b|1, q]
    k_segment: Any = None  # int32 [b|1, k]
    seed: Any = None  # int64 []


class Numbers(NamedTuple):
    """The numbers of a call. before and after are -1 without a limit.

    Keys at |lag| >= far are left to a plain kernel; 0 means that none are. Then before and after
    are those of the near keys.
    """

    scale: float
    q_start: int
    before: int
    after: int
    dropout: float
    slopes: bool
    far: int = 0


class Product(NamedTuple):
    """A band scale * query @ table^T, computed in the kernel, whose end columns are its tails."""

    scale: float
    query: Any  # [b, h, q, d]; None: the q of the attention
    table: Any  # float32 [h|1, lag, d], contiguous


class CurveBand(NamedTuple):
    """A band that is a curve of three parameters, computed in the kernel, and 0 beyond its reach.

    `functions` has the device functions at and extent_of, and gradient_kernel (device/curve.py is
    an example). The parameters are float32 [h, count] and contiguous.
    """

    functions: Any
    reach: int
    parameters: tuple[Any, Any, Any]


class Far(NamedTuple):
    """Attention to the keys at |lag| >= start, computed elsewhere; the right side in reverse.

    out is [b, h, n - start, d_v] and lse, in base e, [b, h, n - start]; both lie in memory as `out`
    does. A causal call has nothing on its right: those are None.
    """

    start: int
    left: Any  # None too where only the gradients are wanted
    left_lse: Any
    right: Any
    right_lse: Any


class FarGradients(NamedTuple):
    """What the far keys give to the gradients of q, k and v, in the same order of rows."""

    left: tuple[Any, Any, Any]
    right: tuple[Any, Any, Any] | None


class Kept(NamedTuple):
    """What forward leaves for backward; None for what the call does not need."""

    out: Any
    lse: Any  # in base 2
    out_residual: Any  # what rounding took from out
    mass: Any  # of every lag of the value table
    band: Any  # laid out
    extent: Any  # of a curve
    tails: Any  # of a product


class Wanted(NamedTuple):
    """Which gradients are asked for, besides those of q, k, v and the value table.

    `band` and `tails` are also those of the band that a product or a curve makes.
    """

    band: bool
    tails: bool
    query: bool = False  # of a product; q itself, if that is the product's query
    factor: bool = False  # of a product's table


class Gradients(NamedTuple):
    """The gradients of a call; None for what is not there or not wanted."""

    q: Any
    k: Any
    v: Any
    query: Any  # of a product; None if the query is q, whose gradient holds it
    factor: Any
    band: Any
    tails: Any
    table: Any
    parameters: tuple[Any, ...]  # of a curve
