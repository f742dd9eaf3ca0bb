"""A rotation of queries and keys by their positions: its description, and its definition in torch.

A method describes a rotation (`PositionMethod.rotation`), `whence.kernels.rotary` executes it.
"""

import math
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from whence.checks import require

TAU = 2 * math.pi


class Growth(NamedTuple):
    """Frequencies that fall with the length of a sequence, once it is beyond `original_length`.

    Pair i of d columns is multiplied by growth^(-2i / (d - 2)), where
    growth = factor * length / original_length - (factor - 1).
    """

    factor: float
    original_length: int


class Rotation(NamedTuple):
    """Pair i of a head's first d = 2 * pairs columns turns by pos * frequency[i]; the rest stays.

    A pair is columns i and i + d/2, or 2i and 2i + 1 if `interleaved`. The turned columns are
    multiplied by `size`. Queries and keys turn alike, and so do all heads. Neither the frequencies
    nor the positions get a gradient from a kernel.
    """

    frequency: Float[Tensor, " pairs"]
    d_head: int
    interleaved: bool
    size: float = 1.0
    growth: Growth | None = None

    def check(self, x: Float[Tensor, "b h n d_head"]) -> None:
        """Raise unless the heads have the width that the rotation was made for."""
        require(
            x.shape[-1] == self.d_head,
            lambda: (
                f"The rotation was built for heads of {self.d_head}, got {x.shape[-1]}. "
                "In a Sum put it before a method that makes heads wider."
            ),
        )

    def frequencies(self, last: Int[Tensor, "*b"] | int) -> Float[Tensor, "*b pairs"]:
        """The frequencies in sequences that end at the position `last`."""
        if self.growth is None:
            return self.frequency
        factor, original = self.growth
        wide, pairs = _wide(self.frequency), len(self.frequency)
        power = torch.arange(pairs, device=self.frequency.device, dtype=wide) / (1 - pairs)
        if isinstance(last, int):
            if last < original:
                return self.frequency
            grown = (factor * (last + 1) / original - (factor - 1)) ** power
        else:
            length = (last + 1).clamp(min=original).to(wide)
            grown = (factor * length / original - (factor - 1))[..., None] ** power
        return self.frequency.to(wide) * grown

    def angle(self, pos: Int[Tensor, "*b n"], dtype: torch.dtype) -> Float[Tensor, "*b n pairs"]:
        """pos * frequency from -pi to pi, in this dtype or in float32, whichever is wider.

        A product in float32 is off by 0.03 at position 1e6. So the number of turns is computed in
        float64, and whole turns are dropped before it is rounded.
        """
        # Without positions there is no last one, and any frequency will do.
        last: Tensor | int = pos.amax(dim=-1) if self.growth and pos.shape[-1] else 0
        wide = _wide(self.frequency)
        turns_each = self.frequencies(last).to(wide) * (1 / TAU)
        turns = pos.to(wide)[..., None] * turns_each.unsqueeze(-2)
        angle = (turns - torch.floor(turns + 0.5)) * TAU
        return angle.to(torch.promote_types(dtype, torch.float32))

    def waves(
        self,
        pos: Int[Tensor, "*b n"],
        dtype: torch.dtype,
        stretch: Float[Tensor, "*b n pairs"] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The cosine and the sine of each angle times `size` and `stretch`, in this dtype.

        Their axes are [n, pairs] or, where each sequence has its own positions, [b, 1, n, pairs].
        """
        angle = self.angle(pos, dtype)
        size = self.size if stretch is None else self.size * stretch
        cos, sin = (angle.cos() * size).to(dtype), (angle.sin() * size).to(dtype)
        return (cos, sin) if pos.ndim == 1 else (cos.unsqueeze(-3), sin.unsqueeze(-3))

    def rotated(
        self, x: Float[Tensor, "b h n d_head"], cos: Tensor, sin: Tensor
    ) -> Float[Tensor, "b h n d_head"]:
        """Heads with each pair (a, b) in place of (a cos - b sin, b cos + a sin)."""
        d = 2 * len(self.frequency)
        if self.interleaved:
            a, b = x[..., :d:2], x[..., 1:d:2]
        else:
            a, b = x[..., : d // 2], x[..., d // 2 : d]
        pair = (a * cos - b * sin, b * cos + a * sin)
        turned = torch.stack(pair, dim=-1).flatten(-2) if self.interleaved else torch.cat(pair, -1)
        return turned if d == self.d_head else torch.cat([turned, x[..., d:]], dim=-1)

    def turned(
        self,
        x: Float[Tensor, "b h n d_head"],
        pos: Int[Tensor, "*b n"],
        stretch: Float[Tensor, "*b n pairs"] | None = None,
    ) -> Float[Tensor, "b h n d_head"]:
        """The definition: heads turned by their positions, each pair times its `stretch`."""
        self.check(x)
        return self.rotated(x, *self.waves(pos, x.dtype, stretch))


def _wide(x: Tensor) -> torch.dtype:
    """The widest dtype of a device: Apple's GPUs have no float64."""
    return torch.float32 if x.device.type == "mps" else torch.float64
