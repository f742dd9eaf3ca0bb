"""Lag biases that are evaluated only where somebody looks at their numbers.

A method says what the bias is made of: the parameters of a curve, or queries and a table. A kernel
that can evaluate such a bias by itself never makes the band. Everybody else reads `band`, `left`
and `right` as of any LagBias, and the band is then computed once and kept.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Hashable
from typing import ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import embedding

from whence.checks import broadcasts, require
from whence.lag.bias import LagBias
from whence.lag.line import Line
from whence.units import GAIN, in_float32

PIECE = 256  # rows of a product of queries and a table
ROUNDED_UP = 1 + 2**-20  # more than the rounding of the place at which a Gaussian becomes 0


class DeferredBias(LagBias):
    """A lag bias with tails that is computed from `tensors()` when its band is first read.

    Until then it refers to these tensors, so that writing into them changes the bias.

        >>> bias = CurveBias(LINE, 0, torch.tensor([1.0]))  # nothing is evaluated
        >>> isinstance(bias, DeferredBias), bias.right.slope.tolist()  # now it is
        (True, [[[-1.0]]])
    """

    def __init__(self) -> None:
        # By whether gradients were recorded: a band made without them has none to give later.
        self._evaluated: dict[bool, LagBias] = {}

    @abstractmethod
    def evaluate(self) -> LagBias:
        """The same bias with its band, by PyTorch's operations."""

    @property
    @abstractmethod
    def shape(self) -> tuple[int, ...]:
        """The shape of the band."""

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype:
        """The dtype of the band."""

    @abstractmethod
    def tensors(self) -> list[Tensor]:
        """What the bias is made of."""

    @abstractmethod
    def made_of(self, *tensors: Tensor) -> "DeferredBias":
        """The same bias of other tensors, which take the place of `tensors()`."""

    @abstractmethod
    def kind(self) -> Hashable:
        """Everything that makes the bias of its tensors: equal for biases that differ in them."""

    def evaluated(self) -> LagBias:
        """The same bias with its band, which is computed on the first call and kept."""
        recorded = torch.is_grad_enabled()
        if recorded not in self._evaluated:
            self._evaluated[recorded] = self.evaluate()
        return self._evaluated[recorded]

    @property
    def band(self) -> Float[Tensor, "b h q lag"]:  # type: ignore[override]
        """The band of the evaluated bias."""
        return self.evaluated().band

    @property
    def left(self) -> Line | None:  # type: ignore[override]
        """The left tail of the evaluated bias."""
        return self.evaluated().left

    @property
    def right(self) -> Line | None:  # type: ignore[override]
        """The right tail of the evaluated bias."""
        return self.evaluated().right

    @property
    def endless(self) -> bool:
        """It has tails."""
        return True

    @property
    def sloped(self) -> bool:
        """The tails are constant, unless a subclass says otherwise."""
        return False


class Curve(ABC):
    """A family of functions of the lag, one function for each head, with a few parameters.

    A kernel may have device code for a curve, which it finds by the curve's name.

        >>> LINE.at((torch.tensor([0.5]),), torch.arange(0, 4)).tolist()
        [[-0.0, -0.5, -1.0, -1.5]]
    """

    name: ClassVar[str]
    sloped: ClassVar[bool] = False  # whether a tail slopes
    clipped: ClassVar[bool] = False  # whether the tails are the ends of the band

    @abstractmethod
    def at(self, parameters: tuple[Tensor, ...], lag: Int[Tensor, " lag"]) -> Tensor:
        """The function at each lag, [h, lag], in float32 at least, with gradients."""

    @abstractmethod
    def n_heads(self, parameters: tuple[Tensor, ...]) -> int:
        """The number of functions."""

    def extent(self, parameters: tuple[Tensor, ...], longest: int) -> Int[Tensor, " h"] | None:
        """The |lag| beyond which the function of a head is exactly 0, at most `longest`."""
        return None

    def evaluate(self, parameters: tuple[Tensor, ...], reach: int) -> LagBias:
        """The bias: the function for |lag| <= reach, and 0 beyond."""
        return self._from_function(parameters, reach, Line(), Line())

    def _from_function(
        self, parameters: tuple[Tensor, ...], reach: int, left: Line, right: Line
    ) -> LagBias:
        return LagBias.from_function(
            lambda lag: self.at(parameters, lag),
            reach,
            left=left,
            right=right,
            extent=self.extent(parameters, reach),
            device=parameters[0].device,
        )


class GaussianSum(Curve):
    """sum_s a_s exp(-((lag / w_s) - u_s)^2 / 2), from three parameters [h, s] in units of GAIN.

    a = GAIN p_0 is the amplitude, w = exp(GAIN p_1) the width in lags and u = GAIN p_2 the offset
    in widths. A Gaussian that is below an eighth of its dtype's epsilon is taken as 0, which is the
    rounding of a sum with anything of size 1; so a head has an extent beyond which it is exactly 0.
    """

    name = "gaussians"

    def at(self, parameters: tuple[Tensor, ...], lag: Int[Tensor, " lag"]) -> Tensor:
        """The sum at each lag, [h, lag]."""
        amplitude, log_width, offset = (GAIN * in_float32(x) for x in parameters)
        return (amplitude[..., None] * gaussians(lag, log_width, offset)).sum(dim=1)

    def n_heads(self, parameters: tuple[Tensor, ...]) -> int:
        """The first axis of each parameter."""
        return parameters[0].shape[0]

    def extent(self, parameters: tuple[Tensor, ...], longest: int) -> Int[Tensor, " h"]:
        """The largest |lag| at which a Gaussian of a head is not 0, or the next.

        A parameter that is NaN, or an endless width, gives `longest`: nothing is cut off.
        """
        with torch.no_grad():
            amplitude, log_width, offset = (GAIN * in_float32(x) for x in parameters)
            width = _width(log_width)
            far = width * (offset.abs() + widths_to_zero(width.dtype)) * ROUNDED_UP
            far = far + 0 * amplitude  # NaN if not finite
            far = far.masked_fill(far.isnan(), float("inf"))
            return far.amax(dim=1).floor().clamp(0, longest).long()


class BucketTable(Curve):
    """table[bucket(lag), h], from a table [bucket, h] in units of GAIN and the buckets of lags.

    The buckets are those of the lags -reach..reach; beyond, the last one of each side goes on.
    """

    name = "buckets"
    clipped = True

    def at(self, parameters: tuple[Tensor, ...], lag: Int[Tensor, " lag"]) -> Tensor:
        """The numbers of the lags' buckets, [h, lag]."""
        table, bucket = parameters
        reach = bucket.shape[0] // 2
        return GAIN * embedding(bucket[lag.clamp(-reach, reach) + reach], in_float32(table)).T

    def n_heads(self, parameters: tuple[Tensor, ...]) -> int:
        """The second axis of the table."""
        return parameters[0].shape[1]

    def evaluate(self, parameters: tuple[Tensor, ...], reach: int) -> LagBias:
        """The bias: beyond the reach the ends of the band go on."""
        table, bucket = parameters
        band = GAIN * embedding(bucket, in_float32(table))
        return LagBias.clipped(band.T[None, :, None])


class FallingLine(Curve):
    """-slope_h |lag|, from slopes [h]. It needs no table at all: its reach is 0."""

    name = "line"
    sloped = True

    def at(self, parameters: tuple[Tensor, ...], lag: Int[Tensor, " lag"]) -> Tensor:
        """The line at each lag, [h, lag]."""
        return -in_float32(parameters[0])[:, None] * lag.abs()

    def n_heads(self, parameters: tuple[Tensor, ...]) -> int:
        """The number of slopes."""
        return parameters[0].shape[0]

    def evaluate(self, parameters: tuple[Tensor, ...], reach: int) -> LagBias:
        """The bias: a line on both sides."""
        return LagBias.line(-parameters[0])


BUCKETS, GAUSSIANS, LINE = BucketTable(), GaussianSum(), FallingLine()


def widths_to_zero(dtype: torch.dtype) -> float:
    """How many widths from its centre a Gaussian falls below an eighth of the dtype's epsilon."""
    return math.sqrt(2 * math.log(8 / torch.finfo(dtype).eps))


def gaussians(
    lag: Int[Tensor, " lag"], log_width: Float[Tensor, "h s"], offset: Float[Tensor, "h s"]
) -> Float[Tensor, "h s lag"]:
    """exp(-((lag / w) - u)^2 / 2), 0 where that is below an eighth of epsilon.

    It and its gradients are finite for every finite parameter, even where the width w is too small
    or too large for its dtype: a Gaussian that is 0 has gradients of 0.
    """
    log_width, offset = log_width[..., None], offset[..., None]
    scaled = lag.to(log_width.dtype) / _width(log_width.detach())
    # Comparing this way round lets NaN through.
    beyond = (scaled - offset.detach()).abs() > widths_to_zero(scaled.dtype)
    scaled = scaled.masked_fill(beyond, 0.0)  # it may be infinite, and 0 * inf is NaN
    # The second factor is 1; it has the gradient of 1 / w without dividing by w once more.
    distance = scaled * (log_width.detach() - log_width).exp() - offset
    return torch.where(beyond, 0.0, torch.exp(-0.5 * distance.square()))


def _width(log_width: Tensor) -> Tensor:
    """The width, at least the smallest normal number: 0 / 0 would be NaN."""
    return log_width.exp().clamp(min=torch.finfo(log_width.dtype).tiny)


class CurveBias(DeferredBias):
    """b_h(lag) = the curve of head h, the same for all queries.

    >>> bias = CurveBias(LINE, 0, torch.tensor([1.0, 0.5]))
    >>> bias
    CurveBias(line, heads 2, reach 0)
    >>> bias.to_dense(torch.arange(1), torch.arange(3))[0, :, 0].tolist()
    [[0.0, -1.0, -2.0], [0.0, -0.5, -1.0]]
    """

    def __init__(self, curve: Curve, reach: int, *parameters: Tensor) -> None:
        super().__init__()
        self.curve, self.longest, self.parameters = curve, reach, parameters

    def __repr__(self) -> str:
        return f"CurveBias({self.curve.name}, heads {self.shape[1]}, reach {self.reach})"

    def evaluate(self) -> LagBias:
        """The curve at the lags -reach..reach, and its tails."""
        return self.curve.evaluate(self.parameters, self.longest)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the band."""
        return (1, self.curve.n_heads(self.parameters), 1, 2 * self.longest + 1)

    @property
    def reach(self) -> int:
        """The largest |lag| in the band."""
        return self.longest

    @property
    def extent(self) -> Int[Tensor, " h"] | None:  # type: ignore[override]
        """The extent of the evaluated bias."""
        return self.evaluated().extent

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the band."""
        return torch.promote_types(self.parameters[0].dtype, torch.float32)

    @property
    def sloped(self) -> bool:
        """Whether a tail slopes."""
        return self.curve.sloped

    @property
    def ends(self) -> bool:  # type: ignore[override]
        """Whether the tails are the band's own end columns."""
        return self.curve.clipped

    def tensors(self) -> list[Tensor]:
        """The parameters."""
        return list(self.parameters)

    def made_of(self, *tensors: Tensor) -> "CurveBias":
        """The same curve with other parameters."""
        return CurveBias(self.curve, self.longest, *tensors)

    def kind(self) -> Hashable:
        """The curve and the reach."""
        return self.curve, self.longest

    def rows(self, start: int, stop: int) -> LagBias:
        """All queries share it."""
        return self


class QueryBias(DeferredBias):
    """b(lag) of query i = scale * query_i . table[clip(lag)]: a band for each query (Shaw's keys).

    The axes are [b, h, q, d] and [h|1, 2 * reach + 1, d]. Beyond the reach the end rows of the
    table go on for ever. The band, where it is asked for, has the dtype of the queries.

        >>> bias = QueryBias(torch.ones(1, 1, 1, 2), torch.tensor([[[1.0, 1], [2, 2], [3, 3]]]))
        >>> bias.to_dense(torch.arange(1), torch.arange(4))[0, 0].tolist()  # lags 0, 1, 2, 3
        [[4.0, 6.0, 6.0, 6.0]]
    """

    query: Float[Tensor, "b h q d"]
    table: Float[Tensor, "h_table lag d"]
    scale: float
    ends = True

    def __init__(
        self,
        query: Float[Tensor, "b h q d"],
        table: Float[Tensor, "..."],
        *,
        scale: float = 1.0,
    ) -> None:
        super().__init__()
        self.query, self.table, self.scale = query, table, scale
        require(
            query.ndim == 4,
            lambda: f"QueryBias needs queries [b, h, q, d], got shape {tuple(query.shape)}.",
        )
        h, d, shape = query.shape[1], query.shape[3], tuple(table.shape)
        require(
            len(shape) == 3 and broadcasts(shape[0], h) and shape[1] % 2 == 1 and shape[2] == d,
            lambda: (
                f"QueryBias needs a table [1 or {h}, lag, {d}] with an odd lag axis (lags "
                f"-reach..reach) for these queries, got shape {shape}."
            ),
        )

    def __repr__(self) -> str:
        shapes = f"query {tuple(self.query.shape)}, table {tuple(self.table.shape)}"
        return f"QueryBias({shapes}, scale={self.scale})"

    def evaluate(self) -> LagBias:
        """The product, with its end columns as the tails."""
        return clipped_product(self.query, self.table, self.scale)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the band."""
        return (*self.query.shape[:3], self.table.shape[1])

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the band."""
        return self.query.dtype

    def tensors(self) -> list[Tensor]:
        """The factors."""
        return [self.query, self.table]

    def made_of(self, *tensors: Tensor) -> "QueryBias":
        """The product of other factors."""
        query, table = tensors
        return QueryBias(query, table, scale=self.scale)

    def kind(self) -> Hashable:
        """The scale."""
        return float(self.scale)

    def rows(self, start: int, stop: int) -> LagBias:
        """The bias of query rows start..stop, which is not evaluated either."""
        if self.shape[2] == 1:
            return self
        return QueryBias(self.query[:, :, start:stop], self.table, scale=self.scale)


def clipped_product(query: Tensor, table: Tensor, scale: float) -> LagBias:
    """The bias of QueryBias, evaluated at once."""
    table = (table * scale).to(query.dtype)  # smaller than the product
    return LagBias.clipped(_product(query, table.transpose(-1, -2)))


def _product(q: Tensor, table: Tensor) -> Tensor:
    """q [b, h, n, d] @ table [h|1, d, lag], by pieces of rows where there are many.

    The table's gradient is a sum over all rows: as one product it would keep few processors busy.
    """
    n = q.shape[2]
    if torch.compiler.is_compiling() or n <= PIECE or n % PIECE:
        return q @ table
    pieces = q.reshape(*q.shape[:2], n // PIECE, PIECE, q.shape[-1])
    return (pieces @ table[:, None]).flatten(2, 3)
