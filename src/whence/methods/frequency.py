"""Fixed frequencies, for sinusoids and rotations: exact in any precision a module is cast to."""

from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from whence.checks import require
from whence.method import PositionMethod


class Frequencies(PositionMethod):
    """A method with one fixed frequency for each pair of columns, in radians a position.

    A plain buffer would be rounded by `.bfloat16()`, keep float32's error after `.double()`, come
    out of `.to_empty()` unset: this one is written anew after each of them, in float32 or better.
    """

    frequency: Tensor

    def __init__(self, frequencies: Sequence[float]) -> None:
        super().__init__()
        self.exact = tuple(frequencies)
        self.register_buffer("frequency", torch.empty(len(self.exact)), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Write the frequencies, on the buffer's device and in its precision or float32."""
        dtype = torch.promote_types(self.frequency.dtype, torch.float32)
        self.frequency = torch.tensor(self.exact, dtype=dtype, device=self.frequency.device)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Frequencies":
        super()._apply(fn, recurse)
        self.reset_parameters()
        return self

    def angle(self, pos: Int[Tensor, "*b n"], dtype: torch.dtype) -> Float[Tensor, "*b n pairs"]:
        """pos * frequency, in this dtype or in float32, whichever is wider."""
        dtype = torch.promote_types(dtype, torch.float32)
        return pos.to(dtype)[..., None] * self.frequency.to(dtype)


def geometric(d: int, base: float) -> list[float]:
    """base^(-2i/d) for each pair of d columns, and for the odd one out."""
    require(base > 1, f"base must be above 1, got {base}: frequencies fall from 1 towards 1/base.")
    return [base ** (-i / d) for i in range(0, d, 2)]
