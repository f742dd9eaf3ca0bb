"""TISA on an image: a learned sum of Gaussians of the lag in two dimensions."""

from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from whence.checks import at_least, one_of
from whence.lag import DenseBias
from whence.method import Content, PositionMethod, longest_lag
from whence.methods.grid import grid_of, pairs_with_prefix, patch_lags


class Tisa2d(PositionMethod):
    """f_h(dy, dx) = sum_s a_s exp(-|b_s| ((dy - cy_s)^2 + (dx - cx_s)^2)), lags key - query.

    Position p is the patch (p // width, p % width), after `prefix` tokens ([CLS] and the like),
    whose pairs get 0. Without `width` the grid is the square of max_length. The number of rows is
    free: only the width has to be that of the image. Wennberg & Henter's TISA is one-dimensional;
    a and b start as there, the offsets at N(0, 2), because a grid is shorter than a text. With
    start="zero" all amplitudes begin at 0.
    """

    paper = "after Wennberg & Henter 2021, arXiv:2106.01950"
    formula = "4 * n_heads * kernels"
    logit_sized = True
    anchored = True

    def __init__(
        self,
        n_heads: int,
        max_length: int,
        *,
        kernels: int = 5,
        width: int | None = None,
        prefix: int = 0,
        start: Literal["released", "zero"] = "released",
    ) -> None:
        super().__init__()
        at_least(1, n_heads=n_heads, max_length=max_length, kernels=kernels)
        one_of("start", start, ("released", "zero"))
        _, self.width = grid_of(max_length, None, width, prefix)
        self.n_heads, self.kernels, self.prefix, self.start = n_heads, kernels, prefix, start
        self.amplitude = nn.Parameter(torch.empty(n_heads, kernels))
        self.sharpness = nn.Parameter(torch.empty(n_heads, kernels))
        self.offset_y = nn.Parameter(torch.empty(n_heads, kernels))
        self.offset_x = nn.Parameter(torch.empty(n_heads, kernels))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """a, b ~ N(0.1, 0.01), cy, cx ~ N(0, 2), as mean and deviation."""
        if self.start == "zero":
            nn.init.zeros_(self.amplitude)
        else:
            nn.init.normal_(self.amplitude, 0.1, 0.01)
        nn.init.normal_(self.sharpness, 0.1, 0.01)
        nn.init.normal_(self.offset_y, 0.0, 2.0)
        nn.init.normal_(self.offset_x, 0.0, 2.0)

    def surface(self, dy: Int[Tensor, " y"], dx: Int[Tensor, " x"]) -> Float[Tensor, "h y x"]:
        """f at each vertical and each horizontal lag; every Gaussian is a product of two."""
        dtype = torch.promote_types(self.amplitude.dtype, torch.float32)
        sharpness = self.sharpness.abs()[..., None].to(dtype)
        rows, columns = (
            torch.exp(-sharpness * (lag.to(dtype) - offset[..., None].to(dtype)).square())
            for lag, offset in ((dy, self.offset_y), (dx, self.offset_x))
        )
        return torch.einsum("hs,hsy,hsx->hyx", self.amplitude.to(dtype), rows, columns)

    def score_term(
        self,
        q: Float[Tensor, "b h q d"],
        q_pos: Int[Tensor, " q"],
        k_pos: Int[Tensor, " k"],
        *,
        content: Content | None = None,
    ) -> DenseBias:
        """f once for every lag there is, looked up for each pair."""
        tall = -(-longest_lag(q_pos, k_pos) // self.width)  # no |dy| is larger
        wide = self.width - 1
        device = self.amplitude.device
        dy = torch.arange(-tall, tall + 1, device=device)
        dx = torch.arange(-wide, wide + 1, device=device)
        table = self.surface(dy, dx)

        def matrix(q_pos: Tensor, k_pos: Tensor) -> Tensor:
            dy, dx = patch_lags(q_pos, k_pos, self.width, self.prefix)
            bias = table[:, dy + tall, dx + wide][None]
            if not self.prefix:
                return bias
            from_prefix, to_prefix = pairs_with_prefix(q_pos, k_pos, self.prefix)
            return bias.masked_fill(from_prefix | to_prefix, 0.0)

        return DenseBias(matrix, q_pos, k_pos, "a lag on a grid has two dimensions")
