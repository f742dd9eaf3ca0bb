"""One attention call, checked and put into one form: the argument of every backend."""

import math
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from whence.checks import at_least, broadcasts, is_symbolic, not_nested, require, whole
from whence.kernels.mask import Mask, as_mask
from whence.lag import Bias, DenseBias, LagBias, LagValues, LowRankBias, Terms
from whence.lag.deferred import DeferredBias

PACK = (
    "Pack its sequences into one row: x.values()[None] of heads [b, h, n, d], with "
    "mask=Mask.packed(x.offsets(), total number of tokens)."
)


@dataclass(frozen=True, eq=False)
class Sight:
    """Which keys each query row may look at: the mask, causality and the window together.

    Query row i stands at key position start + i. The window is (before, after): a query looks at
    lags -before..after, and None is no limit. The start is a tensor of one number in a compiled
    step of decoding, which must not depend on it.
    """

    n_q: int
    n_k: int
    start: int | Tensor
    mask: Mask | None
    causal: bool
    window: tuple[int | None, int | None]
    device: torch.device

    @property
    def is_known(self) -> bool:
        """Whether the start is a whole number, so that keys can be chosen by it."""
        return not isinstance(self.start, Tensor)

    @property
    def q_start(self) -> int:
        """The start, where it is known."""
        assert not isinstance(self.start, Tensor)
        return self.start

    def _lag_limits(self) -> tuple[int | None, int | None]:
        before, after = self.window
        return before, 0 if self.causal else after

    def key_range(self, rows: slice) -> slice:
        """The range of keys that causality and the window leave to any of these query rows."""
        before, after = self._lag_limits()
        first, last = self.q_start + rows.start, self.q_start + rows.stop - 1
        low = 0 if before is None else min(max(0, first - before), self.n_k)
        high = self.n_k if after is None else min(self.n_k, max(0, last + after + 1))
        return slice(low, max(low, high))

    def allowed(self, rows: slice, keys: slice) -> Bool[Tensor, "b h q k"] | None:
        """The allowed pairs among these query rows and keys, or None if all are allowed."""
        allowed = None if self.mask is None else self.mask.tile(rows, keys)
        before, after = self._lag_limits()
        cut_left, cut_right = before is not None, after is not None
        if self.is_known:  # else both limits have to be applied: they may cut something
            first, last = self.q_start + rows.start, self.q_start + rows.stop - 1
            cut_left = before is not None and keys.start < last - before
            cut_right = after is not None and keys.stop - 1 > first + after
        if not (cut_left or cut_right):
            return allowed
        q_place = torch.arange(rows.start, rows.stop, device=self.device) + self.start
        lag = torch.arange(keys.start, keys.stop, device=self.device) - q_place[:, None]
        near = torch.ones_like(lag, dtype=torch.bool)
        if before is not None:
            near = near & (lag >= -before)
        if after is not None:
            near = near & (lag <= after)
        return near[None, None] if allowed is None else allowed & near


@dataclass(frozen=True, eq=False)
class AttentionCall:
    """The arguments of `attend`, checked, with the bias sorted by kind.

    A low-rank bias is already part of q and k, as extra columns. Scale is 0 where the logits are
    the bias alone.
    """

    q: Float[Tensor, "b h q d"]
    k: Float[Tensor, "b h_kv k d"]
    v: Float[Tensor, "b h_kv k d_v"]
    lag: LagBias | None
    dense: tuple[DenseBias, ...]
    values: LagValues | None
    sight: Sight
    scale: float
    dropout: float

    def tensors(self) -> list[Tensor]:
        """Every tensor that can have a gradient, but those inside of a dense bias' function."""
        found = [self.q, self.k, self.v, *(x for term in self.dense for x in term.per_query)]
        if self.lag is not None:
            found += self.lag.tensors()
        return found if self.values is None else [*found, self.values.table]

    def caveat(self) -> str:
        """What `explain` adds where each query has a band as long as the keys: n x n numbers."""
        if self.lag is None or self.lag.shape[2] == 1:
            return ""
        width = self.lag.shape[-1]
        return f"; the bias is {width} lags for each query" if width > self.sight.n_k else ""

    def with_kv_heads_expanded(self) -> "AttentionCall":
        """The same call with a key and value head for every query head."""
        groups = self.q.shape[1] // self.k.shape[1]
        if groups == 1:
            return self
        k, v = (x.repeat_interleave(groups, dim=1) for x in (self.k, self.v))
        return replace(self, k=k, v=v)


def as_call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    bias: Bias | None,
    values: LagValues | None,
    mask: Mask | Tensor | None,
    causal: bool,
    window: int | tuple[int | None, int | None] | None,
    scale: float | None,
    dropout: float,
    q_start: int | Tensor | None,
) -> AttentionCall:
    """Check the arguments of `attend` and put them into one form."""
    not_nested(PACK, q=q, k=k, v=v)
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.ndim != 4 or not x.is_floating_point():
            raise ValueError(
                f"attend needs {name} as floating point [b, h, n, d], "
                f"got {x.dtype} {tuple(x.shape)}."
            )
        if x.shape[1] == 0 or x.shape[3] == 0:
            raise ValueError(
                f"attend needs one head and one column or more in {name}, got {tuple(x.shape)}."
            )
    (b, h, n_q, d), n_k = q.shape, k.shape[2]
    require(
        k.shape[0] == b and v.shape[0] == b,
        lambda: f"q, k and v must share the batch, {_shapes(q, k, v)}",
    )
    require(k.shape[3] == d, lambda: f"q and k must share the head size, {_shapes(q, k, v)}")
    require(v.shape[2] == n_k, lambda: f"k and v must share the length, {_shapes(q, k, v)}")
    require(
        h % k.shape[1] == 0 and h % v.shape[1] == 0,
        lambda: (
            "the number of query heads must be a multiple of the key and value heads, "
            + _shapes(q, k, v)
        ),
    )
    require(
        q.dtype == k.dtype == v.dtype,
        lambda: f"q, k and v must share a dtype, got {q.dtype}, {k.dtype}, {v.dtype}.",
    )
    require(0.0 <= dropout < 1.0, lambda: f"dropout must be in [0, 1), got {dropout}.")
    if q_start is None:
        q_start = n_k - n_q
    check_start(q_start)
    terms = Terms() if bias is None else bias.terms()
    _check_terms(terms, b, h, n_q, n_k, q_start)
    if values is not None:
        require(
            broadcasts(values.table.shape[0], h) and values.table.shape[2] == v.shape[3],
            lambda: (
                f"values must be a LagValues table [1 or {h}, lag, {v.shape[3]}] for this call, "
                f"got {tuple(values.table.shape)}."
            ),
        )
    scale = float(d**-0.5) if scale is None else scale  # under a compiler d may be symbolic
    if k.shape[1] != v.shape[1]:  # as when a method gives each query head keys of its own
        most = max(k.shape[1], v.shape[1])
        k, v = (x.repeat_interleave(most // x.shape[1], dim=1) for x in (k, v))
    if terms.low_rank is not None:
        q, k, v, scale = _widened(q, k, v, scale, terms.low_rank)
    checked = None if mask is None else as_mask(mask, b, h, n_q, n_k)
    sight = Sight(n_q, n_k, q_start, checked, causal, _window(window), q.device)
    if sight.is_known and not is_symbolic(n_q, n_k, sight.q_start):
        reaches = [0 if x is None else x.reach for x in (terms.lag, values)]
        sight = _nearer(sight, max(reaches) + 1)
    return AttentionCall(q, k, v, terms.lag, terms.dense, values, sight, scale, dropout)


def check_start(q_start: int | Tensor) -> None:
    """Raise unless `q_start` is a whole number, or a tensor of one."""
    if not isinstance(q_start, Tensor):
        whole(q_start=q_start)
    elif q_start.numel() != 1 or q_start.dtype not in (torch.int32, torch.int64):
        raise TypeError(
            "q_start must be a whole number, or an int32 or int64 tensor of one, got a tensor of "
            f"{q_start.dtype} {tuple(q_start.shape)}."
        )


def _nearer(sight: Sight, gap: int) -> Sight:
    """A sight with the same weights, in which some query is within `gap` of the keys.

    If all queries are further away, they move together until the nearest is at `gap`. That is
    beyond the reach of the bias, so all logits of a row are on one line: moving the row adds one
    number to them, which does not change a softmax. Without the move, large lags would be rounded
    in float32 and overflow int32. The window is shortened so that it allows the same keys.
    """
    before, after = sight.window
    last = sight.n_k + gap - 1  # the place of the first query, if queries are after the keys
    first = -gap - (sight.n_q - 1)  # and if they are before them
    if sight.q_start > last:
        before = None if before is None else max(0, before - (sight.q_start - last))
        return replace(sight, start=last, window=(before, after))
    if sight.q_start < first:
        after = None if after is None else max(0, after - (first - sight.q_start))
        return replace(sight, start=first, window=(before, after))
    return sight


def _shapes(q: Tensor, k: Tensor, v: Tensor) -> str:
    return f"got q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}."


def _check_terms(terms: Terms, b: int, h: int, n_q: int, n_k: int, q_start: int | Tensor) -> None:
    if terms.lag is not None:
        shape, axes = terms.lag.shape, (b, h, n_q)
        require(
            _all_broadcast(shape[:3], axes),
            lambda: (
                f"bias band must be [1 or {b}, 1 or {h}, 1 or {n_q}, lag] for this call, got "
                f"{shape}. Was the method built for another number of heads?"
            ),
        )
        tails = [tuple(tail.shape) for tail in _tails(terms.lag)]
        require(
            all(len(tail) == 3 and _all_broadcast(tail, axes) for tail in tails),
            lambda: (
                f"a bias' tails must be [1 or {b}, 1 or {h}, 1 or {n_q}] for this call, got "
                f"{' and '.join(map(str, tails))}."
            ),
        )
        if isinstance(q_start, Tensor):  # any place among the keys
            terms.lag.check(1 - n_k, n_k - 1)
        elif n_q and n_k:
            terms.lag.check(-(q_start + n_q - 1), n_k - 1 - q_start)
    if terms.low_rank is not None:
        u, w = terms.low_rank.query, terms.low_rank.key
        fits = (
            u.shape[2] == n_q
            and w.shape[2] == n_k
            and all(broadcasts(x.shape[0], b) and broadcasts(x.shape[1], h) for x in (u, w))
        )
        require(
            fits,
            lambda: (
                f"low-rank bias must be [1 or {b}, 1 or {h}, {n_q} and {n_k}, r] for this call, "
                f"got {tuple(u.shape)} and {tuple(w.shape)}."
            ),
        )
    for term in terms.dense:
        _check_dense(term, n_q, n_k)


def _all_broadcast(shape: tuple[int, ...], axes: tuple[int, ...]) -> bool:
    return all(broadcasts(x, n) for x, n in zip(shape, axes, strict=True))


def _tails(bias: LagBias) -> list[Tensor]:
    """The tails' constants and slopes that need checking: a deferred bias makes its own to fit."""
    if isinstance(bias, DeferredBias):
        return []
    lines = [line for line in (bias.left, bias.right) if line is not None]
    return [x for line in lines for x in (line.const, line.slope) if x is not None]


def _check_dense(term: DenseBias, n_q: int, n_k: int) -> None:
    made = (term.q_pos.shape[0], term.k_pos.shape[0])
    require(
        made == (n_q, n_k),
        lambda: (
            f"this DenseBias was made for (queries, keys) = {made}, this call has {(n_q, n_k)}."
        ),
    )


def _widened(
    q: Tensor, k: Tensor, v: Tensor, scale: float, extra: LowRankBias
) -> tuple[Tensor, Tensor, Tensor, float]:
    """q, k and v with the factors of a low-rank bias as extra columns, and the scale left: 1.

    scale * q.k + u.w is one product of [root * q, u] and [root * k, w] with root = sqrt(scale).
    """
    (b, h), groups = q.shape[:2], q.shape[1] // k.shape[1]
    u, w = (x.to(q.dtype).expand(b, h, -1, -1) for x in (extra.query, extra.key))
    if scale == 0.0:
        return u, w, v.repeat_interleave(groups, dim=1), 1.0
    k, v = (x.repeat_interleave(groups, dim=1) for x in (k, v))
    # The root on both sides, so that neither grows too large for half precision.
    root = math.sqrt(abs(scale))
    sign = math.copysign(1.0, scale)
    return torch.cat([sign * root * q, u], -1), torch.cat([root * k, w], -1), v, 1.0


def _window(
    window: int | tuple[int | None, int | None] | None,
) -> tuple[int | None, int | None]:
    if window is None:
        return None, None
    # Not tuple | list, which PyTorch 2.9 cannot compile.
    pair = window if isinstance(window, (tuple, list)) else (window, window)
    require(
        len(pair) == 2,
        lambda: f"window must be one number or (before, after), got {window!r}.",
    )
    before, after = pair
    for name, value in (("window before", before), ("window after", after)):
        if value is not None:
            at_least(0, **{name: value})
    return before, after
