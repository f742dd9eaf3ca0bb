"""Where learned biases begin: a preference for near keys at many scales.

A bias that begins near zero learns late: until it has the size of a logit, the other weights learn
to do without. So head h begins with about -p_h log |lag|, from heads that see little more than
their neighbours to heads that see all alike. docs/LOG.md has the runs by which these numbers were
chosen, docs/training.md what they are worth.
"""

import math

import torch
from jaxtyping import Float
from torch import Tensor

STEEPEST, FLATTEST = 4.0, 0.125  # p_h of the first and of the last head
NARROWEST, WIDEST = 0.5, 128.0  # widths of Gaussians, in lags


def powers(n_heads: int) -> Float[Tensor, " h"]:
    """p_h, in even ratios over the heads; of one head, their geometric mean."""
    if n_heads == 1:
        return torch.tensor([math.sqrt(STEEPEST * FLATTEST)])
    return torch.logspace(math.log2(STEEPEST), math.log2(FLATTEST), n_heads, base=2.0)


def widest(max_length: int) -> float:
    """A quarter of the sequence, so that the widest Gaussian still tells its halves apart."""
    return min(WIDEST, max(max_length / 4, NARROWEST))


def widths(kernels: int, max_length: int) -> Float[Tensor, " s"]:
    """Widths in even ratios from NARROWEST to the widest; of one kernel, their geometric mean."""
    low, high = math.log2(NARROWEST), math.log2(widest(max_length))
    if kernels == 1:
        low = high = (low + high) / 2
    return torch.logspace(low, high, kernels, base=2.0)


def heights(n_heads: int, kernels: int, max_length: int) -> Float[Tensor, "h s"]:
    """Amplitudes of Gaussians of those widths, whose sum falls about as -p_h log |lag|.

    From one width to the next the logarithm of the lag grows by log(ratio), and one Gaussian of the
    sum ends: so each is p_h log(ratio) high.
    """
    step = math.log(widest(max_length) / NARROWEST) / max(kernels - 1, 1)
    return (powers(n_heads) * step)[:, None].expand(n_heads, kernels)


def falling(distance: Float[Tensor, "*lags"], n_heads: int) -> Float[Tensor, "*lags h"]:
    """-p_h log(1 + distance), for methods that hold a number for each lag."""
    return -torch.log1p(distance)[..., None] * powers(n_heads)
