"""TISA's lag curve and its extent in one small GPU kernel, and one more for their gradient."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from whence.lag.curve import Curve, Tensors
from whence.launcher import launch
from whence.methods.gaussians import underflow
from whence.units import GAIN

TWICE_UNDERFLOW = tl.constexpr(2 * underflow(torch.float32))
SCALE = tl.constexpr(GAIN)


@triton.jit
def _parts(h, amplitude_ptr, width_ptr, offset_ptr, kernels, KERNELS: tl.constexpr):
    """Amplitudes, widths in lags and offsets in widths of head h, from the parameters."""
    s = tl.arange(0, KERNELS)
    there = s < kernels
    a = tl.load(amplitude_ptr + h * kernels + s, mask=there, other=0.0) * SCALE
    w = tl.exp(tl.load(width_ptr + h * kernels + s, mask=there, other=0.0) * SCALE)
    u = tl.load(offset_ptr + h * kernels + s, mask=there, other=0.0) * SCALE
    return a, w, u, there


@triton.jit
def tisa_extent(h, reach, amplitude_ptr, width_ptr, offset_ptr, kernels, KERNELS: tl.constexpr):
    """The |lag| beyond which all Gaussians of head h are exactly 0, at most the reach."""
    a, w, u, there = _parts(h, amplitude_ptr, width_ptr, offset_ptr, kernels, KERNELS)
    edge = tl.where(there, w * (tl.abs(u) + tl.sqrt(tl.zeros_like(w) + TWICE_UNDERFLOW)), 0.0)
    # NaN fails every comparison: then, and without a width, nothing may be cut off.
    sound = (edge < reach) & (tl.abs(a) < float("inf"))
    far = tl.max(tl.where(sound, edge, reach * 1.0), 0)
    return tl.minimum(tl.ceil(far).to(tl.int32), reach)


@triton.jit
def tisa_at(h, lag, amplitude_ptr, width_ptr, offset_ptr, kernels, KERNELS: tl.constexpr):
    """f of head h at each of these lags."""
    a, w, u, there = _parts(h, amplitude_ptr, width_ptr, offset_ptr, kernels, KERNELS)
    distance = lag.to(tl.float32)[None, :] / w[:, None] - u[:, None]
    gaussian = tl.exp(-0.5 * distance * distance)
    return tl.sum(tl.where(there[:, None], a[:, None] * gaussian, 0.0), 0)


@triton.jit(do_not_specialize=["reach"])
def _curve_kernel(
    amplitude_ptr,
    width_ptr,
    offset_ptr,
    band_ptr,
    extent_ptr,
    reach,
    kernels,
    KERNELS: tl.constexpr,  # a power of two
    BLOCK: tl.constexpr,
):
    """f at one block of lags of one head; the first block writes the head's extent too."""
    h = tl.program_id(0)
    first = tl.program_id(1) * BLOCK - reach
    lag = first + tl.arange(0, BLOCK)
    extent = tisa_extent(h, reach, amplitude_ptr, width_ptr, offset_ptr, kernels, KERNELS)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    if (first <= extent) & (first + BLOCK > -extent):
        total = tisa_at(h, lag, amplitude_ptr, width_ptr, offset_ptr, kernels, KERNELS)
    tl.store(band_ptr + h * (2 * reach + 1) + lag + reach, total, mask=lag <= reach)
    if tl.program_id(1) == 0:
        tl.store(extent_ptr + h, extent)


@triton.jit(do_not_specialize=["reach"])
def _gradient_kernel(
    amplitude_ptr,
    width_ptr,
    offset_ptr,
    extent_ptr,
    d_band_ptr,
    d_amplitude_ptr,
    d_width_ptr,
    d_offset_ptr,
    reach,
    kernels,
    BLOCK: tl.constexpr,
):
    """The gradients of the three parameters of one Gaussian, over the lags within the extent."""
    h = tl.program_id(0)
    place = h * kernels + tl.program_id(1)
    a = tl.load(amplitude_ptr + place) * SCALE
    w = tl.exp(tl.load(width_ptr + place) * SCALE)
    u = tl.load(offset_ptr + place) * SCALE
    extent = tl.load(extent_ptr + h)
    d_a = tl.zeros([BLOCK], dtype=tl.float32)
    d_w = tl.zeros([BLOCK], dtype=tl.float32)
    d_u = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(-extent, extent + 1, BLOCK):
        lag = start + tl.arange(0, BLOCK)
        slope = tl.load(
            d_band_ptr + h * (2 * reach + 1) + lag + reach, mask=lag <= extent, other=0.0
        )
        scaled = lag.to(tl.float32) / w
        distance = scaled - u
        part = slope * tl.exp(-0.5 * distance * distance)
        d_a += part
        d_w += part * distance * scaled  # of the logarithm of the width
        d_u += part * distance
    tl.store(d_amplitude_ptr + place, tl.sum(d_a, 0) * SCALE)
    tl.store(d_width_ptr + place, tl.sum(d_w, 0) * a * SCALE)
    tl.store(d_offset_ptr + place, tl.sum(d_u, 0) * a * SCALE)


def _make(given: Tensors, reach: int) -> tuple[Tensor, Tensor]:
    """Band and extent."""
    amplitude, *_ = parts = tuple(x.float().contiguous() for x in given if x is not None)
    h, kernels = amplitude.shape
    band = torch.empty(1, h, 1, 2 * reach + 1, dtype=torch.float32, device=amplitude.device)
    extent = torch.empty(h, dtype=torch.int32, device=amplitude.device)
    launch(
        _curve_kernel,
        (h, -(-(2 * reach + 1) // 512)),
        (*parts, band, extent),
        (reach, kernels),
        KERNELS=1 << (kernels - 1).bit_length(),
        BLOCK=512,
    )
    return band, extent


def _gradient(given: Tensors, reach: int) -> Tensors:
    """Of the three parameters, in float32: autograd gives them their dtype."""
    d_band, extent, *parameters = given
    assert d_band is not None
    amplitude, *_ = parts = [x.float().contiguous() for x in parameters if x is not None]
    h, kernels = amplitude.shape
    found = tuple(torch.empty_like(amplitude) for _ in parts)
    tensors = (*parts, extent, d_band.contiguous(), *found)
    launch(_gradient_kernel, (h, kernels), tensors, (reach, kernels), BLOCK=128)
    return found


CURVE = Curve(_make, _gradient, tisa_at, tisa_extent)
