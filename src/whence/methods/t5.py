"""T5 (Raffel et al., 2020): one learned number for each head and bucket of lags."""

import math
from collections.abc import Callable
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import one_hot

from whence.checks import at_least, one_of, require
from whence.lag import BUCKETS, CurveBias, LagBias
from whence.method import Content, PositionMethod
from whence.methods.starts import falling
from whence.units import Scaled, unset_numbers

STARTS = ("local", "normal", "zero")


class T5(PositionMethod):
    """b_h(lag) = table[bucket(lag), h]; exact buckets near, then logarithmic ones to max_distance.

    All lags beyond share the last one. Bidirectional models spend half of the buckets on lags > 0;
    causal ones put all of those into bucket 0.
    `table` is [buckets, n_heads]: read it, or assign to it. What is trained is table / GAIN, so
    that it learns at the rate of the other weights (whence.units).

    start="local" prefers near keys: head h falls as -p_h log(1 + |lag|), steep heads first, as
    TISA's do. "normal" is N(0, 0.02), from which a model trained from nothing learns less
    (docs/training.md), and "zero" is for a model that is trained already.
    T5 itself does not scale q.k by 1/sqrt(d) (pass scale=1.0), has no bias in cross-attention, and
    shares one table between its layers.

        >>> method, pos = T5(2, buckets=8, max_distance=16), torch.arange(64)
        >>> method.score_term(torch.zeros(1, 2, 64, 8), pos, pos).reach
        7
    """

    paper = "Raffel et al. 2020, arXiv:1910.10683"
    formula = "buckets * n_heads"
    logit_sized = True
    shared_by_layers = True
    lengths_only = True
    former_names = {"table": "raw_table"}  # noqa: RUF012

    table = Scaled()
    bucket: Tensor

    def __init__(
        self,
        n_heads: int,
        *,
        buckets: int = 32,
        max_distance: int = 128,
        causal: bool = False,
        start: Literal["local", "normal", "zero"] = "local",
    ) -> None:
        super().__init__()
        one_of("start", start, STARTS)
        at_least(1, n_heads=n_heads)
        at_least(2 if causal else 4, buckets=buckets)
        exact = (buckets if causal else buckets // 2) // 2
        require(
            max_distance > exact,
            f"max_distance must be above {exact}, the buckets of one lag each, got {max_distance}.",
        )
        self.n_heads, self.buckets, self.causal = n_heads, buckets, causal
        self.max_distance, self.start = max_distance, start
        self.reach = _reach(buckets if causal else buckets // 2, max_distance)
        self.raw_table = unset_numbers(buckets, n_heads)
        self.register_buffer("bucket", self._buckets(), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """As `start` says."""
        self.bucket = self._buckets(self.bucket.device)
        if self.start == "local":
            self.table = self._local()
        else:
            self.table = torch.normal(0.0, 0.02 * (self.start == "normal"), self.raw_table.shape)

    def _buckets(self, device: torch.device | None = None) -> Int[Tensor, " lag"]:
        lag = torch.arange(-self.reach, self.reach + 1, device=device)
        return t5_bucket(lag, self.buckets, self.max_distance, causal=self.causal)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "T5":
        """As a module's, and the buckets are found anew: `to_empty` leaves them unset."""
        super()._apply(fn, recurse)
        self.bucket = self._buckets(self.bucket.device)
        return self

    def _local(self) -> Float[Tensor, "buckets h"]:
        """The mean of the curve over the lags of each bucket; 0 in a bucket without any."""
        lag = torch.arange(-self.max_distance, 1 if self.causal else self.max_distance + 1)
        bucket = t5_bucket(lag, self.buckets, self.max_distance, causal=self.causal)
        member = one_hot(bucket, self.buckets).float()
        share = member / member.sum(0).clamp(min=1)
        return share.T @ falling(lag.abs().float(), self.n_heads)

    def score_term(
        self,
        q: Float[Tensor, "b h q d"],
        q_pos: Int[Tensor, " q"],
        k_pos: Int[Tensor, " k"],
        *,
        content: Content | None = None,
    ) -> LagBias:
        """A band to where the last buckets begin, and constant tails."""
        return CurveBias(BUCKETS, self.reach, self.raw_table, self.bucket)


def _reach(buckets: int, max_distance: int) -> int:
    """The distance from which on all lags of a side are in its last bucket, and one for rounding.

    With T5's own numbers it is 92 and not 128: near tiles are what a bias costs.
    """
    exact = buckets // 2
    start = exact * (max_distance / exact) ** (1 - 1 / (buckets - exact))
    return min(max_distance, math.ceil(float(start)) + 1)


def t5_bucket(
    lag: Int[Tensor, "*lags"], buckets: int, max_distance: int, *, causal: bool
) -> Int[Tensor, "*lags"]:
    """The bucket of each lag. The logarithm is float32's: in another precision boundaries move."""
    if causal:
        start, distance = torch.zeros_like(lag), (-lag).clamp(min=0)
    else:
        buckets //= 2
        start, distance = (lag > 0) * buckets, lag.abs()
    exact = buckets // 2
    ratio = torch.log(distance.clamp(min=1).float() / exact) / math.log(max_distance / exact)
    far = exact + (ratio * (buckets - exact)).long()
    return start + torch.where(distance < exact, distance, far.clamp(max=buckets - 1))
