"""TISA on an image: a learned sum of Gaussians of the lag in two dimensions."""

from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from whence.checks import at_least, one_of
from whence.lag import DenseBias
from whence.lag.deferred import gaussians
from whence.method import Content, longest_lag
from whence.methods.gaussians import STARTS, Gaussians, InWidths
from whence.methods.grid import grid_of, pairs_with_prefix, patch_lags
from whence.units import GAIN, in_float32


class Tisa2d(Gaussians):
    """f_h(dy, dx) = sum_s a_s exp(-|b_s| ((dy - cy_s)^2 + (dx - cx_s)^2)), lags key - query.

    Position p is the patch (p // width, p % width), after `prefix` tokens ([CLS] and the like),
    whose pairs get 0. Without `width` the grid is the square of max_length. The number of rows is
    free: only the width has to be that of the image. Wennberg & Henter's TISA is one-dimensional.
    The starts are those of `tisa`, on a scale up to the side of the image; with "released" the
    offsets are N(0, 2), because a grid is shorter than a text.

        >>> method = Tisa2d(2, 9, kernels=3)  # a grid of 3 x 3
        >>> method.surface(torch.arange(-2, 3), torch.arange(-2, 3)).shape
        torch.Size([2, 5, 5])
    """

    paper = "after Wennberg & Henter 2021, arXiv:2106.01950"
    formula = "4 * n_heads * kernels"
    image_sizes = ("width",)
    anchored = True
    offsets = ("offset_y", "offset_x")
    former_names = {  # noqa: RUF012
        "amplitude": "raw_amplitude",
        "sharpness": "raw_deviation",
        "offset_y": "raw_offset_y",
        "offset_x": "raw_offset_x",
    }

    raw_offset_y: nn.Parameter
    raw_offset_x: nn.Parameter

    offset_y, offset_x = InWidths(), InWidths()

    def __init__(
        self,
        n_heads: int,
        max_length: int,
        *,
        kernels: int = 5,
        width: int | None = None,
        prefix: int = 0,
        start: Literal["local", "released", "zero"] = "local",
    ) -> None:
        at_least(1, n_heads=n_heads, max_length=max_length, kernels=kernels)
        one_of("start", start, STARTS)
        super().__init__(n_heads, kernels)
        self.height, self.width = grid_of(max_length, None, width, prefix)
        self.n_heads, self.kernels, self.prefix, self.start = n_heads, kernels, prefix, start
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """As `start` says."""
        self.begin_at(self.start, max(self.height, self.width), spread=2.0)

    def surface(self, dy: Int[Tensor, " y"], dx: Int[Tensor, " x"]) -> Float[Tensor, "h y x"]:
        """f at each vertical and each horizontal lag; every Gaussian is a product of two."""
        log_width, y, x = (
            GAIN * in_float32(raw)
            for raw in (self.raw_deviation, self.raw_offset_y, self.raw_offset_x)
        )
        rows, columns = gaussians(dy, log_width, y), gaussians(dx, log_width, x)
        return torch.einsum("hs,hsy,hsx->hyx", self.amplitude, rows, columns)

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
        device = self.raw_deviation.device
        dy = torch.arange(-tall, tall + 1, device=device)
        dx = torch.arange(-wide, wide + 1, device=device)
        # One row more on each side is NaN: for queries outside of the keys, on a device, the number
        # of positions bounds no lag.
        table = F.pad(self.surface(dy, dx), (0, 0, 1, 1), value=torch.nan)

        def matrix(q_pos: Tensor, k_pos: Tensor) -> Tensor:
            dy, dx = patch_lags(q_pos, k_pos, self.width, self.prefix)
            bias = table[:, dy.clamp(-tall - 1, tall + 1) + tall + 1, dx + wide][None]
            if not self.prefix:
                return bias
            from_prefix, to_prefix = pairs_with_prefix(q_pos, k_pos, self.prefix)
            return bias.masked_fill(from_prefix | to_prefix, 0.0)

        return DenseBias(matrix, q_pos, k_pos, "a lag on a grid has two dimensions")
