"""TISA (Wennberg & Henter, 2021): a learned sum of Gaussians of the lag, added to the logits."""

from typing import Literal

from jaxtyping import Float, Int
from torch import Tensor, nn

from whence.checks import at_least, one_of
from whence.lag import GAUSSIANS, CurveBias, LagBias
from whence.method import Content, longest_lag
from whence.methods.gaussians import STARTS, Gaussians, InWidths


class Tisa(Gaussians):
    """f_h(lag) = sum_s a_s exp(-|b_s| (lag - c_s)^2), lag = key - query, added after the scaling.

    a, b, c are `amplitude`, `sharpness` and `offset`, each [n_heads, kernels]: read them, or assign
    to them. What is trained are these in other units, which suit the learning rate of the other
    weights (`Gaussians`).

    start="local" prefers near keys at many scales, up to `max_length`: head h falls about as
    |lag|^-p_h, from steep heads to nearly flat ones. "released" is the authors' way, from which a
    model trained from nothing learns less (docs/training.md). With "zero" all amplitudes begin at
    0 and widths as with "local", so that a model to which it is added gives what it gave before.

    With `reach` the function is zero beyond |lag| = reach by definition, so that a kernel may leave
    the far part to plain attention. The authors' code evaluates f at query - key - 1:
    `from_released` converts its weights.

        >>> import torch
        >>> method = Tisa(12, kernels=5)
        >>> method.amplitude = torch.zeros(12, 5)
        >>> method.curve(torch.tensor([3])).abs().max().item()
        0.0
    """

    paper = "Wennberg & Henter 2021, arXiv:2106.01950"
    formula = "3 * n_heads * kernels"
    lengths_only = True
    offsets = ("offset",)
    raw_offset: nn.Parameter
    former_names = {  # noqa: RUF012
        "amplitude": "raw_amplitude",
        "sharpness": "raw_deviation",
        "offset": "raw_offset",
    }

    offset = InWidths()

    def __init__(
        self,
        n_heads: int,
        *,
        kernels: int = 5,
        reach: int | None = None,
        start: Literal["local", "released", "zero"] = "local",
        max_length: int = 512,
    ) -> None:
        at_least(1, n_heads=n_heads, kernels=kernels, max_length=max_length)
        one_of("start", start, STARTS)
        if reach is not None:
            at_least(0, reach=reach)
        super().__init__(n_heads, kernels)
        self.n_heads, self.kernels, self.reach, self.start = n_heads, kernels, reach, start
        self.max_length = max_length
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """As `start` says."""
        self.begin_at(self.start, self.max_length, spread=5.0)

    @classmethod
    def from_released(
        cls,
        amplitude: Float[Tensor, "h s"],
        sharpness: Float[Tensor, "h s"],
        offset: Float[Tensor, "h s"],
    ) -> "Tisa":
        """A layer with the weights of the authors' module, whose f is read at query - key - 1."""
        method = cls(amplitude.shape[0], kernels=amplitude.shape[1])
        method.amplitude, method.sharpness, method.offset = amplitude, sharpness, -(offset + 1)
        return method

    def curve(self, lag: Int[Tensor, " lag"]) -> Float[Tensor, "h lag"]:
        """f at each lag, in float32 at least."""
        return GAUSSIANS.at(self._trained(), lag)

    def extent(self, longest: int) -> Int[Tensor, " h"]:
        """The |lag| beyond which f of a head is exactly 0, at most `longest`."""
        return GAUSSIANS.extent(self._trained(), longest)

    def score_term(
        self,
        q: Float[Tensor, "b h q d"],
        q_pos: Int[Tensor, " q"],
        k_pos: Int[Tensor, " k"],
        *,
        content: Content | None = None,
    ) -> LagBias:
        """One band for all queries, zero beyond it."""
        reach = longest_lag(q_pos, k_pos, at_most=self.reach)
        return CurveBias(GAUSSIANS, reach, *self._trained())

    def _trained(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.raw_amplitude, self.raw_deviation, self.raw_offset
