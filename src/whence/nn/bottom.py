"""What the outermost owner of a method does in a pass: begin, and the input term, once."""

import torch
from jaxtyping import Float
from torch import Tensor

from whence.checks import not_nested, require
from whence.method import PositionMethod

PAD = (
    "Pad it, torch.nested.to_padded_tensor(x, 0.0), with a key_padding_mask; or pack its sequences "
    "into one row for whence.attend, with Mask.packed."
)


def begin(position: PositionMethod, *sequences: Tensor, batch_first: bool) -> None:
    """A pass over positions of the longest of these [n, d], [b, n, d] or [n, b, d]."""
    for x in sequences:
        not_nested(PAD, input=x)
    position.begin(max(x.shape[_axis(x, batch_first)] for x in sequences))


def with_input_term(
    position: PositionMethod, x: Float[Tensor, "*n d"], *, batch_first: bool, start: int = 0
) -> Float[Tensor, "*n d"]:
    """x + the method's term at positions start, start + 1, ...; x itself if it has no input site.

    x is [n, d] for one sequence, else [b, n, d] or, not batch_first, [n, b, d].
    """
    axis = _axis(x, batch_first)
    term = position.input_term(torch.arange(start, start + x.shape[axis], device=x.device))
    if term is None:
        return x
    require(
        term.shape[-1] == x.shape[-1],
        f"the position adds {term.shape[-1]} numbers to each token of the input, got tokens of "
        f"{x.shape[-1]}. Build it with d_model = {x.shape[-1]}.",
    )
    return x + (term if axis == x.ndim - 2 else term[:, None]).to(x.dtype)


def begun(
    position: PositionMethod, x: Float[Tensor, "*n d"], *, batch_first: bool
) -> Float[Tensor, "*n d"]:
    """Both: the input of a pass that begins."""
    begin(position, x, batch_first=batch_first)
    return with_input_term(position, x, batch_first=batch_first)


def _axis(x: Tensor, batch_first: bool) -> int:
    return 1 if batch_first and x.ndim == 3 else 0
