"""Sinusoidal embeddings (Vaswani et al., 2017): sines and cosines of the position, at the input."""

from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from whence.checks import at_least, finite, one_of, require
from whence.methods.frequency import Frequencies, geometric


class Sinusoidal(Frequencies):
    """p[2i] = sin(pos / base^(2i/d)), p[2i + 1] = cos(pos / base^(2i/d)), for any position.

    "halves" puts all sines before all cosines (Marian). With `endpoint` the slowest frequency is
    1/base itself, base^(-i / (d/2 - 1)): tensor2tensor and fairseq have that, with "halves", and
    not the paper's. An odd d leaves out the last cosine.

    All of it times `amplitude`. The paper's 1 goes with embeddings scaled by sqrt(d_model); beside
    embeddings that begin small and are not scaled, as GPT-2's and those of whence.models, it hides
    the words: there about their own size, 0.02, is right.

        >>> Sinusoidal(4).input_term(torch.arange(2))
        tensor([[0.0000, 1.0000, 0.0000, 1.0000],
                [0.8415, 0.5403, 0.0100, 0.9999]])
    """

    paper = "Vaswani et al. 2017, arXiv:1706.03762"
    lengths_only = True  # attention calls none of its hooks

    def __init__(
        self,
        d_model: int,
        *,
        base: float = 10000.0,
        layout: Literal["interleaved", "halves"] = "interleaved",
        endpoint: bool = False,
        amplitude: float = 1.0,
    ) -> None:
        at_least(1, d_model=d_model)
        finite(base=base, amplitude=amplitude)
        require(amplitude > 0, f"amplitude must be above 0, got {amplitude}.")
        one_of("layout", layout, ("interleaved", "halves"))
        frequencies = geometric(d_model, base)
        if endpoint:
            require(
                d_model >= 4 and d_model % 2 == 0,
                f"endpoint=True needs an even d_model of at least 4, got {d_model}. "
                "Leave endpoint off: the paper's frequencies are defined for any d_model.",
            )
            pairs = d_model // 2
            frequencies = [base ** (-i / (pairs - 1)) for i in range(pairs)]
        super().__init__(frequencies)
        self.d_model, self.base, self.layout, self.endpoint = d_model, base, layout, endpoint
        self.amplitude = amplitude
        # The frequencies stay in float32 or better: something else must follow the module's dtype.
        self.register_buffer("like", torch.empty(0), persistent=False)

    def input_term(self, pos: Int[Tensor, "*b n"]) -> Float[Tensor, "*b n {self.d_model}"]:
        """The table's rows at these positions, in the dtype of the module."""
        assert isinstance(self.like, Tensor)
        angle = self.angle(pos, self.like.dtype)
        sin, cos = angle.sin(), angle.cos()
        if self.layout == "interleaved":
            rows = torch.stack([sin, cos], dim=-1).flatten(-2)[..., : self.d_model]
        else:
            rows = torch.cat([sin, cos], dim=-1)[..., : self.d_model]
        return (self.amplitude * rows).to(self.like.dtype)
