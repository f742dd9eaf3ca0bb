"""FlexAttention: PyTorch's compiler writes the kernel from the bias as a function of one pair."""

import warnings
from collections.abc import Callable
from typing import cast

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from whence.kernels.call import AttentionCall
from whence.kernels.mask import Sight
from whence.lag import LagBias


def refuse(call: AttentionCall) -> str | None:
    """Why this backend cannot run the call, or None."""
    if call.values is not None:
        return "has no place for a value of each lag (Shaw's values). Take backend='sdpa'."
    if call.dense:
        return f"takes no dense bias ({call.dense[0].why}). Take backend='sdpa'."
    if _sloped_rows(call.lag):
        return "takes no slope where something differs from query to query. Take backend='sdpa'."
    if call.dropout:
        return "has no dropout. Take backend='sdpa', or dropout=0.0."
    if call.q.device.type == "cpu" and _needs_gradients(call):
        return "has no backward on a CPU. Take backend='sdpa', or torch.no_grad()."
    if call.q.dtype == torch.float64 and call.q.device.type == "cuda":
        return "has no float64 kernel on a GPU. Take backend='sdpa'."
    if min(call.sight.n_q, call.sight.n_k) == 0:
        return "needs at least one query and one key. Take backend='sdpa'."
    return None


def note(call: AttentionCall) -> str:
    """What `explain` says of it."""
    if call.q.device.type == "cuda":
        return "compiled for each new shape; gradients of a bias by atomic adds, so not repeatable"
    return "not compiled on a CPU: holds the n x n logits, quadratic memory"


def run(call: AttentionCall) -> Float[Tensor, "b h q d_v"]:
    """flex_attention with the lag bias as score_mod and everything else as a block mask."""
    sight, on_gpu = call.sight, call.q.device.type == "cuda"
    longest = max(sight.q_start + sight.n_q - 1, sight.n_k - 1 - sight.q_start, 0)
    score_mod = None
    if call.lag is not None:
        score_mod = _score_mod(_looked_up(call.lag, longest), sight.q_start)
    visible = _mask_mod(sight)
    block_mask = None
    if visible is not None:
        b, h = _mask_axes(sight)
        block_mask = create_block_mask(
            visible, b, h, sight.n_q, sight.n_k, device=str(call.q.device), _compile=on_gpu
        )
    attention = cast(Callable[..., Tensor], flex_attention)
    q, k, v = call.q, call.k, call.v
    if on_gpu:
        attention = torch.compile(attention, dynamic=False)  # a reach as a symbol does not compile
    else:
        q, k, v = q.detach(), k.detach(), v.detach()
    with warnings.catch_warnings():  # that it is not compiled on a CPU is what `note` says
        warnings.filterwarnings("ignore", "flex_attention called without torch.compile")
        return attention(
            q,
            k,
            v,
            score_mod=score_mod,
            block_mask=block_mask,
            scale=call.scale,
            enable_gqa=call.q.shape[1] != call.k.shape[1],
        )


def _needs_gradients(call: AttentionCall) -> bool:
    tensors = [call.q, call.k, call.v]
    if call.lag is not None:
        tensors += call.lag.tensors()
    return torch.is_grad_enabled() and any(x.requires_grad for x in tensors)


def _sloped_rows(lag: LagBias | None) -> bool:
    return lag is not None and lag.sloped and any(x.shape[2] > 1 for x in lag.tensors())


def _looked_up(lag: LagBias, longest: int) -> Float[Tensor, "b h q lag"]:
    """A band in which every lag is one look-up, clipped to its ends: compilers fail on more.

    That of a head is widened to the longest lag. That of a query gets its constant tails as ends.
    """
    if lag.left is None or lag.right is None or lag.reach >= longest:
        return lag.band
    lines = [x for line in (lag.left, lag.right) for x in (line.const, line.slope)]
    if all(x is None or x.shape[2] == 1 for x in (lag.band, *lines)):
        return lag.widen(longest).band
    shape = torch.broadcast_shapes(  # type: ignore[no-untyped-call]
        lag.band.shape[:3], *(x.shape for x in lines if x is not None)
    )
    zero = lag.band.new_zeros(1, 1, 1)
    ends = (zero if line.const is None else line.const for line in (lag.left, lag.right))
    left, right = (end.expand(shape)[..., None] for end in ends)
    return torch.cat([left, lag.band.expand(*shape, -1), right], dim=-1)


def _score_mod(band: Float[Tensor, "b h q lag"], q_start: int) -> Callable[..., Tensor]:
    reach = band.shape[-1] // 2

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        lag = k - (q + q_start)
        axes = zip((b, h, q), band.shape[:3], strict=True)
        place = [i if size > 1 else torch.zeros_like(i) for i, size in axes]
        return score + band[(*place, lag.clamp(-reach, reach) + reach)]

    return score_mod


def _mask_axes(sight: Sight) -> tuple[int | None, int | None]:
    """The batch and head axes that the mask really has; None shares one mask among them."""
    mask = sight.mask
    if mask is None:
        return None, None
    parts = [mask.keys, mask.pairs, *(mask.segments or ())]
    b = max(part.shape[0] for part in parts if part is not None)
    h = 1 if mask.pairs is None else mask.pairs.shape[1]
    return b if b > 1 else None, h if h > 1 else None


def _mask_mod(sight: Sight) -> Callable[..., Tensor] | None:
    mask, (before, after) = sight.mask, sight.window
    after = 0 if sight.causal else after
    if mask is None and before is None and after is None:
        return None

    def visible(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        lag = k - (q + sight.q_start)
        seen = lag == lag
        if before is not None:
            seen = seen & (lag >= -before)
        if after is not None:
            seen = seen & (lag <= after)
        if mask is not None:
            if mask.keys is not None:
                seen = seen & mask.keys[b if mask.keys.shape[0] > 1 else torch.zeros_like(b), k]
            if mask.segments is not None:
                of_q, of_k = mask.segments
                row = b if of_q.shape[0] > 1 else torch.zeros_like(b)
                seen = seen & (of_q[row, q] == of_k[row, k])
            if mask.pairs is not None:
                row = b if mask.pairs.shape[0] > 1 else torch.zeros_like(b)
                head = h if mask.pairs.shape[1] > 1 else torch.zeros_like(h)
                seen = seen & mask.pairs[row, head, q, k]
        return seen

    return visible
