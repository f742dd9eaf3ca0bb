"""Sums of Gaussians of the lag, TISA's curve (Wennberg & Henter, 2021), and their gradient.

f(lag) = sum_s a_s exp(-((lag - u_s w_s) / w_s)^2 / 2). The parameters [h, count] are a, log w and
u, each divided by GAIN (whence.units).
"""

import math

import torch
import triton
import triton.language as tl

from whence.units import GAIN

_FLOAT = torch.finfo(torch.float32)
# Twice the x from which exp(-x) is exactly 0 in float32.
TWICE_UNDERFLOW = tl.constexpr(2 * (2 - math.log(_FLOAT.smallest_normal * _FLOAT.eps)))
SCALE = tl.constexpr(GAIN)


@triton.jit
def gaussians_of(h, amplitude, width, offset, count, COUNT: tl.constexpr):
    """Amplitudes, widths in lags and offsets in widths of head h, and which of them exist."""
    s = tl.arange(0, COUNT)
    there = s < count
    a = tl.load(amplitude + h * count + s, mask=there, other=0.0) * SCALE
    w = tl.exp(tl.load(width + h * count + s, mask=there, other=0.0) * SCALE)
    u = tl.load(offset + h * count + s, mask=there, other=0.0) * SCALE
    return a, w, u, there


@triton.jit
def gaussians_extent(h, reach, amplitude, width, offset, count, COUNT: tl.constexpr):
    """The |lag| beyond which all Gaussians of head h are exactly 0, at most the reach."""
    a, w, u, there = gaussians_of(h, amplitude, width, offset, count, COUNT)
    edge = tl.where(there, w * (tl.abs(u) + tl.sqrt(tl.zeros_like(w) + TWICE_UNDERFLOW)), 0.0)
    # A NaN fails every comparison: then, and with an infinite width, nothing may be cut off.
    sound = (edge < reach) & (tl.abs(a) < float("inf"))
    far = tl.max(tl.where(sound, edge, reach * 1.0), 0)
    return tl.minimum(tl.ceil(far).to(tl.int32), reach)


@triton.jit
def gaussians_at(h, lag, amplitude, width, offset, count, COUNT: tl.constexpr):
    """f of head h at each of these lags."""
    a, w, u, there = gaussians_of(h, amplitude, width, offset, count, COUNT)
    distance = lag.to(tl.float32)[None, :] / w[:, None] - u[:, None]
    gaussian = tl.exp(-0.5 * distance * distance)
    return tl.sum(tl.where(there[:, None], a[:, None] * gaussian, 0.0), 0)


@triton.jit(do_not_specialize=["reach"])
def gaussians_gradient_kernel(
    parameters,
    extent,
    d_band,  # float32 [h, 2 * reach + 1]
    gradients,
    reach,
    BLOCK: tl.constexpr,
):
    """One Gaussian (program 1) of one head (program 0), over the lags within the head's extent."""
    h = tl.program_id(0)
    count = parameters.count
    place = h * count + tl.program_id(1)
    a = tl.load(parameters.first + place) * SCALE
    w = tl.exp(tl.load(parameters.second + place) * SCALE)
    u = tl.load(parameters.third + place) * SCALE
    edge = tl.load(extent + h)
    d_a = tl.zeros([BLOCK], dtype=tl.float32)
    d_w = tl.zeros([BLOCK], dtype=tl.float32)
    d_u = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(-edge, edge + 1, BLOCK):
        lag = start + tl.arange(0, BLOCK)
        cells = d_band + h * (2 * reach + 1) + lag + reach
        d_f = tl.load(cells, mask=lag <= edge, other=0.0)
        scaled = lag.to(tl.float32) / w
        distance = scaled - u
        part = d_f * tl.exp(-0.5 * distance * distance)
        d_a += part
        d_w += part * distance * scaled  # of the logarithm of the width
        d_u += part * distance
    tl.store(gradients.first + place, tl.sum(d_a, 0) * SCALE)
    tl.store(gradients.second + place, tl.sum(d_w, 0) * a * SCALE)
    tl.store(gradients.third + place, tl.sum(d_u, 0) * a * SCALE)
