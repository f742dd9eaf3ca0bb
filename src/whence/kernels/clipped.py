"""A band whose end columns are its tails: both as the kernels want them, and one gradient back."""

from typing import Any

import torch
from torch import Tensor


class ClippedBand(torch.autograd.Function):
    """band [b, h, q, lag] to float32, and tails [4, b, h, q] of its end columns, without slopes.

    By PyTorch's own operations the gradient of each end column would be a band of zeros but for it.
    """

    @staticmethod
    def forward(ctx: Any, band: Tensor) -> tuple[Tensor, Tensor]:
        """The band itself where it is float32 already."""
        ctx.dtype = band.dtype
        ctx.set_materialize_grads(False)
        tails = torch.zeros(4, *band.shape[:-1], dtype=torch.float32, device=band.device)
        tails[0], tails[2] = band[..., 0], band[..., -1]
        return band.view_as(band) if band.dtype == torch.float32 else band.float(), tails

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, d_band: Tensor | None, d_tails: Tensor | None) -> Tensor | None:
        """The tails' gradients to the end columns."""
        if d_band is None or d_tails is None:  # attention gives both, or neither
            return None
        if d_band.shape[-1] == 1:  # one number for all keys, which no softmax sees
            return torch.zeros_like(d_band, dtype=ctx.dtype)
        whole = d_band.to(ctx.dtype, copy=True)
        whole[..., 0] = d_band[..., 0] + d_tails[0]
        whole[..., -1] = d_band[..., -1] + d_tails[2]
        return whole
