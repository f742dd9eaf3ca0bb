"""The `reference` backend: the definition of attention with position, which tests the others."""

import torch
from jaxtyping import Float
from torch import Tensor

from whence.kernels.call import AttentionCall


def refuse(call: AttentionCall) -> str | None:
    """Why this backend cannot run the call, or None."""
    if call.q.dtype not in (torch.float32, torch.float64):
        return (
            f"computes in float32 or float64, got {call.q.dtype}. "
            "Cast q, k and v with .float(), or take backend='sdpa'."
        )
    return None


def note(call: AttentionCall) -> str:
    """How it would run the call, for `explain`."""
    return "holds the n x n logits: quadratic memory"


def run(call: AttentionCall) -> Float[Tensor, "b h q d_v"]:
    """Attention of all query rows at once."""
    return attend_rows(call.with_kv_heads_expanded(), slice(0, call.sight.n_q))


def attend_rows(
    call: AttentionCall, rows: slice, *, keep: Float[Tensor, "b h q k"] | None = None
) -> Float[Tensor, "b h q d_v"]:
    """softmax(scale q.k + bias) (v + values) for some of the query rows.

    The call has a key head for every query head (`with_kv_heads_expanded`). `keep`, if given, is
    the dropout to apply in place of a random one: 0 or 1 / (1 - dropout) for each weight.
    """
    return weighted(call, rows, weights_of(call, rows), keep)


def attend_with_weights(
    call: AttentionCall,
) -> tuple[Float[Tensor, "b h q d_v"], Float[Tensor, "b h q k"]]:
    """The output and the weights before dropout that it is made of, in the dtype of q.

    The output is computed from this very tensor of weights, so its gradient can be asked for.
    """
    call, rows = call.with_kv_heads_expanded(), slice(0, call.sight.n_q)
    weights = weights_of(call, rows).to(call.q.dtype)
    return weighted(call, rows, weights), weights


def weighted(
    call: AttentionCall, rows: slice, weights: Tensor, keep: Tensor | None = None
) -> Tensor:
    """The sum of v + values by these weights, after dropout."""
    if keep is not None:
        weights = weights * keep
    elif call.dropout:
        weights = torch.dropout(weights, call.dropout, train=True)
    out = weights.to(call.v.dtype) @ call.v
    if call.values is not None:
        wide = weights.to(torch.promote_types(weights.dtype, torch.float32))
        out = out + _lag_values(call, rows, wide).to(out.dtype)
    return out


def weights_of(call: AttentionCall, rows: slice) -> Float[Tensor, "b h q k"]:
    """The attention weights before dropout; those of a row that may look at no key are zero."""
    q, dtype = call.q[:, :, rows], torch.promote_types(call.q.dtype, torch.float32)
    (b, h, n, _), n_k = q.shape, call.sight.n_k
    logits = torch.zeros(b, h, n, n_k, dtype=dtype, device=q.device)
    if call.scale:
        logits = logits + (q @ call.k.transpose(-1, -2)).to(dtype) * call.scale
    if call.lag is not None:
        place = torch.arange(n_k, device=q.device)
        q_place = torch.arange(rows.start, rows.stop, device=q.device) + call.sight.start
        logits = logits + call.lag.rows(rows.start, rows.stop).to_dense(q_place, place)
    for term in call.dense:
        part = term.rows(rows.start, rows.stop)
        logits = logits + part.to_dense(part.q_pos, part.k_pos)
    allowed = call.sight.allowed(rows, slice(0, n_k))
    if allowed is None:
        return torch.softmax(logits, dim=-1)
    # Not -inf: the softmax of a row of -inf alone is NaN, and so are its gradients, even masked.
    logits = logits.masked_fill(~allowed, torch.finfo(dtype).min)
    return torch.softmax(logits, dim=-1).masked_fill(~allowed, 0.0)


def _lag_values(call: AttentionCall, rows: slice, weights: Tensor) -> Tensor:
    """sum_j weight_ij * table[lag_ij], with the weights summed by lag before the product.

    That takes the memory of one number for each row and lag, not of a vector for each pair.
    """
    assert call.values is not None
    table, reach = call.values.table, call.values.reach
    place = torch.arange(call.sight.n_k, device=weights.device)
    q_place = torch.arange(rows.start, rows.stop, device=weights.device) + call.sight.start
    column = (place - q_place[:, None]).clamp(-reach, reach) + reach
    mass = weights.new_zeros(*weights.shape[:3], 2 * reach + 1)
    mass = mass.scatter_add(-1, column.expand(weights.shape), weights)
    return mass @ table.to(weights.dtype)
