"""xPos (Sun et al., 2022): rotary embeddings whose pairs fade with distance, fast ones first."""

import math
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from whence.checks import finite, require
from whence.method import span
from whence.methods.rope import Rope


class Xpos(Rope):
    """RoPE with pair i of q times zeta_i^(pos/scale_base), and of k times zeta_i^(-pos/scale_base).

    zeta_i = (i / (d/2) + gamma) / (1 + gamma) < 1, so a pair's part of q.k is multiplied by
    zeta_i^(-lag / scale_base): it fades with the distance of keys behind the query. Keys ahead of
    it would grow, hence causal only.

    The surprise: q and k each depend on the absolute position, exponentially, and only the product
    does not. Positions are counted from `centre`, which changes no logit; too far from it the
    factors leave the dtype. With the defaults float32 and bfloat16 reach 33,000 positions, float16
    1,700. Beyond is an error where positions can be read (on the CPU) or their number says so.

        >>> Xpos(8).reach(torch.float16), Xpos(8).reach(torch.float32)
        (1699, 33427)
    """

    paper = "Sun et al. 2022, arXiv:2212.10554"
    causal_only = True

    def __init__(
        self,
        d_head: int,
        *,
        base: float = 10000.0,
        layout: Literal["half", "interleaved"] = "interleaved",
        scale_base: float = 512.0,
        gamma: float = 0.4,
        centre: int = 0,
    ) -> None:
        finite(scale_base=scale_base, gamma=gamma)
        require(scale_base > 0, f"scale_base must be above 0, got {scale_base}.")
        require(
            gamma > 0, f"gamma must be above 0, or the first pair is multiplied by 0, got {gamma}."
        )
        super().__init__(d_head, base=base, layout=layout)
        self.scale_base, self.gamma, self.centre = scale_base, gamma, centre

    def query_heads(
        self, q: Float[Tensor, "b h q d"], q_pos: Int[Tensor, "*b q"]
    ) -> Float[Tensor, "b h q d"]:
        """The queries turned, and shrunk with their position."""
        return self.turn(q, q_pos, self.stretch(q_pos, q.dtype))

    def key_heads(
        self, k: Float[Tensor, "b h k d"], k_pos: Int[Tensor, "*b k"]
    ) -> Float[Tensor, "b h k d"]:
        """The keys turned, and grown with their position."""
        return self.turn(k, k_pos, self.stretch(k_pos, k.dtype, sign=-1))

    def stretch(
        self, pos: Int[Tensor, "*b n"], dtype: torch.dtype, *, sign: int = 1
    ) -> Float[Tensor, "*b n pairs"]:
        """zeta^(sign * (pos - centre) / scale_base)."""
        far, limit = max(abs(p - self.centre) for p in span(pos)), self.reach(dtype)
        require(
            far <= limit,
            lambda: (
                f"Xpos in {dtype} reaches {limit} positions from its centre {self.centre}, got "
                f"{far}: the factor of its first pair would overflow. Raise scale_base, move "
                "centre to the middle of the sequence, or use a wider dtype."
            ),
        )
        dtype = torch.promote_types(dtype, torch.float32)
        i = torch.arange(self.d // 2, device=pos.device, dtype=dtype)
        log_zeta = torch.log((i / (self.d // 2) + self.gamma) / (1 + self.gamma))
        power = (pos - self.centre).to(dtype) / self.scale_base
        return torch.exp(sign * power[..., None] * log_zeta)

    def reach(self, dtype: torch.dtype) -> int:
        """How far from the centre every factor stays 1,024 times below the largest number."""
        room = math.log(torch.finfo(dtype).max / 1024)
        return int(self.scale_base * room / math.log((1 + self.gamma) / self.gamma))
