"""The masks of torch.nn.MultiheadAttention in the terms of `attend`: a Mask and a bias."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.functional import pad

from whence.checks import require
from whence.kernels import Mask
from whence.lag import Bias, DenseBias, LowRankBias


def from_torch(
    key_padding_mask: Tensor | None,
    attn_mask: Tensor | None,
    *,
    like: Float[Tensor, "b h q d"],
    n_k: int,
    front: int = 0,
) -> tuple[Mask | None, Bias | None]:
    """Boolean masks, where True forbids, become a Mask; of a float mask -inf does, the rest a bias.

    Shapes are torch's: [b, k] for the padding; [q, k] or [b * h, q, k] for the other. `like` are
    the queries. `front` keys that no mask knows come first: they may always be looked at. A float
    padding mask costs one more column of the heads, a float `attn_mask` is a dense bias.
    """
    b, h, n_q, _ = like.shape
    keys = pairs = None
    terms: list[Bias] = []
    if key_padding_mask is not None:
        _check("key_padding_mask", key_padding_mask, [(b, n_k)])
        keys, additive = _split(key_padding_mask, front, like.dtype)
        if additive is not None:
            one = torch.ones(1, 1, n_q, 1, dtype=like.dtype, device=like.device)
            terms.append(LowRankBias(one, additive[:, None, :, None]))
    if attn_mask is not None:
        _check("attn_mask", attn_mask, [(n_q, n_k), (b * h, n_q, n_k)])
        shape = (1, 1, n_q, n_k) if attn_mask.ndim == 2 else (b, h, n_q, n_k)
        pairs, additive = _split(attn_mask.reshape(shape), front, like.dtype)
        if additive is not None:
            terms.append(_given(additive))
    mask = None if keys is None and pairs is None else Mask(keys=keys, pairs=pairs)
    if len(terms) == 2:
        return mask, terms[0] + terms[1]
    return mask, terms[0] if terms else None


def _split(
    mask: Tensor, front: int, dtype: torch.dtype
) -> tuple[Bool[Tensor, "*b k"], Float[Tensor, "*b k"] | None]:
    """What may be looked at, and what is added there: -inf in a sum would make NaN of a row."""
    if mask.dtype == torch.bool:
        return pad(~mask, (front, 0), value=True), None
    mask = mask.to(dtype)  # first: in half precision, a huge negative number is -inf as well
    forbidden = mask == float("-inf")
    additive = mask.masked_fill(forbidden, 0.0)
    return pad(~forbidden, (front, 0), value=True), pad(additive, (front, 0))


def _given(matrix: Float[Tensor, "b h q k"]) -> DenseBias:
    def rows(q_pos: Tensor, k_pos: Tensor, rows: Tensor) -> Tensor:
        return rows

    n_q, n_k = matrix.shape[2:]
    q_pos, k_pos = (torch.arange(n, device=matrix.device) for n in (n_q, n_k))
    return DenseBias(rows, q_pos, k_pos, "attn_mask is a float matrix", (matrix,))


def _check(name: str, mask: Tensor, shapes: list[tuple[int, ...]]) -> None:
    require(
        mask.dtype == torch.bool or mask.is_floating_point(),
        f"{name} must be boolean (True forbids) or floating point (added), got {mask.dtype}.",
    )
    require(
        tuple(mask.shape) in shapes,
        lambda: f"{name} must have shape {' or '.join(map(str, shapes))}, got {tuple(mask.shape)}.",
    )
