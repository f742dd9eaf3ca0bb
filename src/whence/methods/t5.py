"""T5 (Raffel et al., 2020): one learned number for each head and bucket of lags."""

import math
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import embedding, one_hot

from whence.checks import at_least, one_of, require
from whence.lag import LagBias
from whence.method import Content, PositionMethod
from whence.methods.starts import falling
from whence.units import GAIN, Scaled, in_float32, unset_numbers

STARTS = ("local", "normal", "zero")


class T5(PositionMethod):
    """b_h(lag) = table[bucket(lag), h]; exact buckets near, then logarithmic ones to max_distance.

    All lags beyond share the last one. Bidirectional models spend half of the buckets on lags > 0;
    causal ones put all of those into bucket 0.
    `table` is [buckets, n_heads]: read it, or assign to it. What is trained is table / GAIN, so
    that it learns at the rate of the other weights (whence.units).

    start="local" prefers near keys: head h falls as -p_h log(1 + |lag|), steep heads first, as
    TISA's do. "normal" is N(0, 0.02), from which a model trained from nothing learns less
    (docs/lm_results.md), and "zero" is for a model that is trained already.
    T5 itself does not scale q.k by 1/sqrt(d) (pass scale=1.0), has no bias in cross-attention, and
    shares one table between its layers.
    """

    paper = "Raffel et al. 2020, arXiv:1910.10683"
    formula = "buckets * n_heads"
    logit_sized = True
    shared_by_layers = True
    lengths_only = True
    former_names = {"table": "raw_table"}  # noqa: RUF012

    table = Scaled()

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
        self._bucket: Tensor | None = None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """As `start` says."""
        if self.start == "local":
            self.table = self._local()
        else:
            self.table = torch.normal(0.0, 0.02 * (self.start == "normal"), self.raw_table.shape)

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
        band = GAIN * embedding(self._buckets(), in_float32(self.raw_table))
        return LagBias.clipped(band.T[None, :, None])

    def _buckets(self) -> Int[Tensor, " lag"]:
        """Of the lags to the reach; they never change, so they are found once on a device."""
        if self._bucket is not None and self._bucket.device == self.raw_table.device:
            return self._bucket
        if torch.compiler.is_compiling():
            return self._found()
        with torch.inference_mode(mode=False):
            bucket = self._found()
        # What a fake mode, a transform of torch.func or a CUDA graph made ends with it.
        wrapped = torch._C._functorch.is_functorch_wrapped_tensor(bucket)
        captured = bucket.is_cuda and torch.cuda.is_current_stream_capturing()
        if type(bucket) is Tensor and not wrapped and not captured:
            self._bucket = bucket
        return bucket

    def _found(self) -> Int[Tensor, " lag"]:
        lag = torch.arange(-self.reach, self.reach + 1, device=self.raw_table.device)
        return t5_bucket(lag, self.buckets, self.max_distance, causal=self.causal)


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
