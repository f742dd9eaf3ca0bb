"""The fused attention and its gradient as functions: near and far keys, whatever tiles fit."""

from typing import NamedTuple

from torch import Tensor

from whence.kernels.split import far_attention, far_gradients, near_numbers
from whence.kernels.tiles_table import fitting
from whence.kernels.triton_inputs import NO_PRODUCT, Far, Inputs, Numbers, Product, tokens_of
from whence.kernels.triton_launch import backward, forward
from whence.kernels.triton_query_band import value_table_gradient
from whence.kernels.triton_rows import packed
from whence.lag import Curve


class Kept(NamedTuple):
    """What forward leaves for backward; None for what the call does not need."""

    out: Tensor
    lse: Tensor  # in base 2
    rest: Tensor | None  # what rounding took from out
    mass: Tensor | None  # a lag of the value table
    far_left: Tensor | None
    far_left_lse: Tensor | None
    far_right: Tensor | None
    far_right_lse: Tensor | None
    band: Tensor | None  # as the kernels read it


def attended(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    inputs: Inputs,
    numbers: Numbers,
    *,
    tails_too: bool,
    band: Tensor | None = None,
    product: Product = NO_PRODUCT,
    curve: tuple[Curve, tuple[Tensor, ...]] | None = None,
    recorded: bool = True,
) -> Kept:
    """The output and what its gradient needs; see `forward` for the last four."""
    far, near = None, numbers
    if numbers.far:
        far, near = far_attention(q, k, v, numbers), near_numbers(numbers)
    out, rest, lse, mass, band = fitting(
        "forward",
        q,
        v,
        lambda tiles: forward(
            *(q, k, v, inputs, near, tiles, far, band, product, curve), recorded=recorded
        ),
    )
    # Only the gradient of a tail asks again what the far keys gave.
    parts = far[1:] if far is not None and tails_too else (None,) * 4
    return Kept(out, lse, rest, mass, *parts, band)


def gradients(
    d_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kept: Kept,
    inputs: Inputs,
    numbers: Numbers,
    *,
    band_too: bool = True,
    tails_too: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of q, k, v, band, tails and table; None for what is not there."""
    d_out = d_out if d_out.stride(-1) == 1 else d_out.contiguous()
    d_table = None
    if inputs.table is not None:
        assert kept.mass is not None
        d_table = value_table_gradient(kept.mass, d_out, inputs.table)
    far, elsewhere, near = None, None, numbers
    if numbers.far:
        near = near_numbers(numbers)
        elsewhere = far_gradients(d_out, q, k, v, kept.out, kept.lse, inputs, numbers)
        tokens = tokens_of(q, k, numbers)
        left, right = (None if x is None else packed(x, tokens) for x in (kept[4], kept[6]))
        far = Far(numbers.far, left, kept.far_left_lse, right, kept.far_right_lse)
    found = fitting(
        "backward",
        q,
        v,
        lambda rows, keys, block: backward(
            d_out,
            q,
            k,
            v,
            kept.out,
            kept.rest,
            kept.lse,
            kept.band,
            inputs,
            near,
            rows,
            keys,
            block,
            band_too=band_too,
            tails_too=tails_too,
            far=far,
            far_gradients=elsewhere,
        ),
    )
    d_band, d_tails = found.band, found.tails
    if inputs.band is not None and d_band is not None:
        d_band = d_band.sum_to_size(inputs.band.shape)
    if inputs.tails is not None and d_tails is not None:
        d_tails = d_tails.sum_to_size(inputs.tails.shape)
    return found.q, found.k, found.v, d_band, d_tails, d_table
