"""The parts of a call to the fused backend: tensors and numbers, as plans and kernels take them.

A tensor may be anything with a shape, strides and a dtype, a slot of a plan too.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

# The curves with device code (device/curve.py), and whether they have tails that are not 0.
CURVES = {"gaussians": False, "buckets": True, "line": True}
FEW_ROWS = 16  # the least that a tensor core multiplies, and the most queries that are called few
MANY_KEYS = 256  # from so many on it is worth sharing the keys out over programs


class Inputs(NamedTuple):
    """The tensors of a call besides q, k and v; None where the call has no such thing."""

    band: Any = None  # float32 [b|1, h|1, q|1, lag]
    extent: Any = None  # int32 [h]
    tails: Any = None  # float32 [4, b|1, h|1, q|1]
    table: Any = None  # float32 [h|1, lag, d_v]
    keys: Any = None  # uint8 [b|1, k]
    q_segment: Any = None  # int32 or int64 [b|1, q]
    k_segment: Any = None  # int32 or int64 [b|1, k]
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
    """A band that is a curve of a few parameters, which the kernels evaluate.

    The parameters are contiguous, in float32 or whole numbers; None for those a curve has not.
    """

    name: str
    reach: int
    parameters: Sequence[Any]

    @property
    def tails(self) -> bool:
        """Whether the curve goes on beyond its reach."""
        return CURVES[self.name]


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
    tails: Any  # of a product or a curve


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
    band: Any = None
    tails: Any = None
    table: Any = None
    query: Any = None  # of a product; None if the query is q, whose gradient holds it
    factor: Any = None
    parameters: Sequence[Any] = (None, None, None)  # of a curve


class Given(NamedTuple):
    """All tensors of a call, in the order in which plans and operators take them."""

    q: Any
    k: Any
    v: Any
    band: Any = None
    extent: Any = None
    tails: Any = None
    table: Any = None
    keys: Any = None
    q_segment: Any = None
    k_segment: Any = None
    seed: Any = None
    query: Any = None  # of a product
    factor: Any = None
    first: Any = None  # the parameters of a curve
    second: Any = None
    third: Any = None

    @classmethod
    def ordered(cls, found: Gradients) -> "Given":
        """Gradients in the order of the tensors that they belong to."""
        first, second, third = found.parameters
        return cls(
            found.q,
            found.k,
            found.v,
            band=found.band,
            tails=found.tails,
            table=found.table,
            query=found.query,
            factor=found.factor,
            first=first,
            second=second,
            third=third,
        )

    @property
    def inputs(self) -> Inputs:
        """The tensors that `Inputs` names."""
        return Inputs(*self[3:11])


class Call(NamedTuple):
    """All of a call but its tensors: with how those lie in memory, it decides what is launched."""

    numbers: Numbers
    product_scale: float = 1.0
    curve: str = ""  # the name of a curve with device code; "" where there is none
    reach: int = 0  # of the curve

    def flat(self) -> tuple[Any, ...]:
        """The numbers one by one, as an operator takes them."""
        return (*self.numbers, *self[1:])

    @classmethod
    def from_flat(cls, numbers: Sequence[Any]) -> "Call":
        """The call from what `flat` gave."""
        count = len(Numbers._fields)
        return cls(Numbers(*numbers[:count]), *numbers[count:])

    def product(self, given: Given) -> Product | None:
        """The product that makes the band, if one does."""
        if given.factor is None:
            return None
        return Product(self.product_scale, given.query, given.factor)

    def curve_band(self, given: Given) -> CurveBand | None:
        """The curve that makes the band, if one does."""
        return CurveBand(self.curve, self.reach, given[13:]) if self.curve else None


def decoded(q: Any, k: Any, numbers: Numbers) -> bool:
    """Whether few queries meet many keys: then forward shares the keys out and lays no band out."""
    rows = q.shape[2] * (q.shape[1] // k.shape[1])
    few = rows <= FEW_ROWS and k.shape[2] >= MANY_KEYS
    return bool(few and not (numbers.far or numbers.dropout))


def by_token(q: Any) -> bool:
    """Whether q [b, h, n, d] is [b, n, h, d] in memory, as projections leave it."""
    return bool(q.shape[1] > 1 and q.shape[2] > 1 and q.stride(1) < q.stride(2))


def packed(x: Tensor, tokens: bool) -> Tensor:
    """x [b, h, n, d] without gaps, with `tokens` as [b, n, h, d]: itself if it is so already."""
    lies = x.transpose(1, 2) if tokens else x
    if lies.is_contiguous():
        return x
    return lies.contiguous().transpose(1, 2) if tokens else lies.contiguous()
