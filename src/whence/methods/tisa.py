"""TISA (Wennberg & Henter, 2021): a learned sum of Gaussians of the lag, added to the logits."""

import functools
import importlib.util
import math
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from whence.checks import at_least, one_of
from whence.lag import CurveBias, LagBias, Line
from whence.method import Content, PositionMethod, longest_lag


class Tisa(PositionMethod):
    """f_h(lag) = sum_s a_s exp(-|b_s| (lag - c_s)^2), lag = key - query, added after the scaling.

    a, b, c are `amplitude`, `sharpness` and `offset`, each [n_heads, kernels]. With `reach` the
    function is zero beyond |lag| = reach by definition, so that a kernel may leave the far part to
    plain attention. With start="zero" all amplitudes begin at 0, so that a model to which it is
    added gives what it gave before; "released" is the authors' way. Their code evaluates f at
    query - key - 1: `from_released` converts its weights.
    """

    paper = "Wennberg & Henter 2021, arXiv:2106.01950"
    formula = "3 * n_heads * kernels"
    logit_sized = True
    lengths_only = True

    def __init__(
        self,
        n_heads: int,
        *,
        kernels: int = 5,
        reach: int | None = None,
        start: Literal["released", "zero"] = "released",
    ) -> None:
        super().__init__()
        at_least(1, n_heads=n_heads, kernels=kernels)
        one_of("start", start, ("released", "zero"))
        if reach is not None:
            at_least(0, reach=reach)
        self.n_heads, self.kernels, self.reach, self.start = n_heads, kernels, reach, start
        self.amplitude = nn.Parameter(torch.empty(n_heads, kernels))
        self.sharpness = nn.Parameter(torch.empty(n_heads, kernels))
        self.offset = nn.Parameter(torch.empty(n_heads, kernels))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """The released initialisation: a, b ~ N(0.1, 0.01), c ~ N(0, 5), as mean and deviation."""
        if self.start == "zero":
            nn.init.zeros_(self.amplitude)
        else:
            nn.init.normal_(self.amplitude, 0.1, 0.01)
        nn.init.normal_(self.sharpness, 0.1, 0.01)
        nn.init.normal_(self.offset, 0.0, 5.0)

    @classmethod
    def from_released(
        cls,
        amplitude: Float[Tensor, "h s"],
        sharpness: Float[Tensor, "h s"],
        offset: Float[Tensor, "h s"],
    ) -> "Tisa":
        """A layer with the weights of the authors' module, whose f is read at query - key - 1."""
        method = cls(amplitude.shape[0], kernels=amplitude.shape[1])
        with torch.no_grad():
            method.amplitude.copy_(amplitude)
            method.sharpness.copy_(sharpness)
            method.offset.copy_(-(offset + 1))
        return method

    def curve(self, lag: Int[Tensor, " lag"]) -> Float[Tensor, "h lag"]:
        """f at each lag, in float32 at least: half precision cannot tell lag 257 from 256."""
        amplitude, sharpness, offset = self._exact()
        distance = lag.to(offset.dtype) - offset[..., None]
        gaussian = torch.exp(-sharpness.abs()[..., None] * distance.square())
        return (amplitude[..., None] * gaussian).sum(dim=1)

    def _exact(self) -> tuple[Tensor, Tensor, Tensor]:
        dtype = torch.promote_types(self.offset.dtype, torch.float32)
        return self.amplitude.to(dtype), self.sharpness.to(dtype), self.offset.to(dtype)

    def extent(self, longest: int) -> Int[Tensor, " h"]:
        """Beyond this |lag| every Gaussian of the head underflows to exactly 0 in its dtype.

        A parameter that is NaN, or a kernel of endless width, gives `longest`: nothing is cut off.
        """
        _, sharpness, offset = self._exact()
        with torch.no_grad():
            half_width = (underflow(offset.dtype) / sharpness.abs()).sqrt()
            far = self.offset.abs() + half_width + 0 * self.amplitude  # NaN if that is not finite
            far = far.masked_fill(far.isnan(), float("inf"))
            return far.amax(dim=1).ceil().clamp(0, longest).long()

    def score_term(
        self,
        q: Float[Tensor, "b h q d"],
        q_pos: Int[Tensor, " q"],
        k_pos: Int[Tensor, " k"],
        *,
        content: Content | None = None,
    ) -> LagBias:
        """One band for all queries, zero beyond it."""
        longest = longest_lag(q_pos, k_pos)
        reach = longest if self.reach is None else min(self.reach, longest)
        in_float32 = self.offset.is_cuda and self.offset.dtype != torch.float64
        if in_float32 and not torch.compiler.is_compiling() and _has_triton():
            from whence.methods.tisa_kernel import CURVE

            return CurveBias(CURVE, reach, self.amplitude, self.sharpness, self.offset)
        return LagBias.from_function(
            self.curve,
            reach,
            left=Line(),
            right=Line(),
            extent=self.extent(reach),
            device=self.offset.device,
        )


def underflow(dtype: torch.dtype) -> float:
    """The x from which exp(-x) is exactly 0."""
    finfo = torch.finfo(dtype)
    return 2 - math.log(finfo.smallest_normal * finfo.eps)


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None
