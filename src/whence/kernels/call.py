"""One attention call, checked and put into one form: the argument of every backend."""

import math
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from whence.checks import at_least, broadcasts, not_nested, require
from whence.kernels.mask import Mask, Sight, as_mask
from whence.lag import Bias, DenseBias, LagBias, LagValues, LowRankBias, Terms

PACK = (
    "Pack its sequences into one row: x.values()[None] of heads [b, h, n, d], with "
    "mask=Mask.packed(x.offsets(), total number of tokens)."
)


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
    (b, h, n_q, d), n_k = q.shape, k.shape[2]
    require(
        k.shape[0] == b and v.shape[0] == b,
        lambda: f"q, k and v must share the batch, {_shapes(q, k, v)}",
    )
    require(k.shape[3] == d, lambda: f"q and k must share the head size, {_shapes(q, k, v)}")
    require(v.shape[2] == n_k, lambda: f"k and v must have as many rows, {_shapes(q, k, v)}")
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
    sight = Sight(
        n_q, n_k, q_start, as_mask(mask, b, h, n_q, n_k), causal, _window(window), q.device
    )
    return AttentionCall(q, k, v, terms.lag, terms.dense, values, sight, scale, dropout)


def _shapes(q: Tensor, k: Tensor, v: Tensor) -> str:
    return f"got q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}."


def _check_terms(terms: Terms, b: int, h: int, n_q: int, n_k: int, q_start: int | Tensor) -> None:
    if terms.lag is not None:
        shape = terms.lag.shape
        fits = all(broadcasts(x, n) for x, n in zip(shape[:3], (b, h, n_q), strict=True))
        require(
            fits,
            lambda: (
                f"bias band must be [1 or {b}, 1 or {h}, 1 or {n_q}, lag] for this call, got "
                f"{shape}. Was the method built for another number of heads?"
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
    before, after = (window, window) if isinstance(window, int) else window
    for name, value in (("window before", before), ("window after", after)):
        if value is not None:
            at_least(0, **{name: value})
    return before, after
