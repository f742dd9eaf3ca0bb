"""The `sdpa` backend: PyTorch's own attention where it fits, else blocks of query rows.

It runs every call on every device, and it is what "auto" takes on a CPU. There are three ways: a
call without position goes to `scaled_dot_product_attention`, one with a lag bias to
`BlockedAttention`, and one with a dense bias to the definition, a block of query rows at a time.
"""

from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from whence.checks import is_symbolic, surely_equal
from whence.derivatives import refused_tangent, refused_transform
from whence.kernels import reference
from whence.kernels.blocks.blocked import BlockedAttention, Given, MaskTensors
from whence.kernels.blocks.operator import blocked_attention
from whence.kernels.blocks.plan import is_small, may_split, plan_of, rows_in_a_block
from whence.kernels.call import AttentionCall
from whence.kernels.mask import Mask
from whence.lag import LagBias, LagValues, Line


def refuse(call: AttentionCall) -> str | None:
    """Why this backend cannot run the call, or None: it runs all but some that are transformed."""
    if is_plain(call):
        return refused_tangent(call.tensors)
    return refused_transform(call.tensors)


def note(call: AttentionCall) -> str:
    """How it would run the call, for `explain`."""
    if is_plain(call):
        return "PyTorch's scaled_dot_product_attention as it is: linear memory"
    if not call.sight.is_known:
        return "holds the logits of all queries and keys, because q_start is a tensor"
    if call.dense:
        return "blocks of queries, the dense bias built a block at a time: linear memory"
    if _can_split(call):
        return "blocks of queries, far keys by the flash kernel: linear memory" + call.caveat()
    return "blocks of queries: linear memory" + call.caveat()


def run(call: AttentionCall) -> Float[Tensor, "b h q d_v"]:
    """Attention by whichever of the three ways fits the call."""
    if is_plain(call):
        return _plain(call)
    call = call.with_kv_heads_expanded()
    if not call.sight.is_known:  # which keys are near depends on q_start, a tensor here
        return reference.attend_rows(call, slice(0, call.sight.n_q))
    return _dense(call) if call.dense else _blocked(call)


def is_plain(call: AttentionCall) -> bool:
    """Whether `scaled_dot_product_attention` computes all of the call without a mask tensor."""
    sight = call.sight
    square = (
        sight.is_known and surely_equal(sight.n_q, sight.n_k) and surely_equal(sight.q_start, 0)
    )
    return (
        call.lag is None
        and len(call.dense) == 0  # torch.compile cannot trace `not` of a tuple
        and call.values is None
        and sight.mask is None
        and sight.window == (None, None)
        and (not sight.causal or square)
        and min(sight.n_q, sight.n_k) > 0
        and call.scale > 0  # with is_causal, PyTorch's CPU kernel gives NaN for a negative scale
    )


def _plain(call: AttentionCall) -> Tensor:
    """PyTorch's attention, its inputs in a form for which it need not build the n x n logits.

    Its kernels want a last axis of stride 1; those of a GPU also a width that is a multiple of 8,
    and no grouped heads where q is wider than 256 or not in half precision.
    """
    d_v, on_gpu = call.v.shape[-1], call.q.device.type != "cpu"
    call = _with_one_width(call, multiple_of=8 if on_gpu else 1)
    if on_gpu and (call.q.dtype.itemsize > 2 or call.q.shape[-1] > 256):
        call = call.with_kv_heads_expanded()
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (call.q, call.k, call.v))
    # A comparison of heads that a compiler holds open is no bool: it must be asked for.
    grouped: dict[str, Any] = {"enable_gqa": True} if q.shape[1] != k.shape[1] else {}
    out = scaled_dot_product_attention(
        q,
        k,
        v,
        dropout_p=call.dropout,
        is_causal=call.sight.causal,
        scale=call.scale,
        **grouped,
    )
    return out[..., :d_v]


def _blocked(call: AttentionCall) -> Tensor:
    """Blocks of query rows, with a band of zeros where there is none, and tails of zero likewise.

    A compiler sees one operator: it need not know the length, on which the blocks depend.
    """
    compiling, d_v = torch.compiler.is_compiling(), call.v.shape[-1]
    if _may_split(call) if compiling else _can_split(call):
        call = _with_one_width(call)
    lag, sight = call.lag, call.sight
    if lag is None:
        zero = torch.zeros(1, 1, 1, 1, dtype=call.q.dtype, device=call.q.device)
        lag = LagBias(zero, Line(), Line())
    elif lag.band.device.type == "cpu" and not compiling:
        lag = lag.trimmed()
    left, right = lag.left or Line(), lag.right or Line()
    table = None if call.values is None else call.values.table
    tails = (left.const, left.slope, right.const, right.slope)
    given = Given(call.q, call.k, call.v, lag.band, *map(_view, tails), table)  # type: ignore[call-arg]
    masks = MaskTensors(*(_view(x) for x in _mask_tensors(sight.mask)))
    out: Tensor
    if compiling:
        out = blocked_attention(given, masks, sight, scale=call.scale, dropout=call.dropout)
        return out[..., :d_v]
    plan = plan_of(
        call.q,
        sight,
        reach=max(lag.reach, 0 if call.values is None else call.values.reach),
        flat=not lag.sloped,
        scale=call.scale,
        dropout=call.dropout,
        seed=int(torch.randint(1 << 62, ())) if call.dropout else 0,
        keep_weights=torch.is_grad_enabled(),
    )
    out = BlockedAttention.apply(plan.with_mask(None), *given, *masks)  # type: ignore[no-untyped-call]
    return out[..., :d_v]


def _dense(call: AttentionCall) -> Tensor:
    """The definition for each block of query rows, computed again in backward.

    A graph for any length has one block, so that there it takes n x n memory.
    """
    n_q, n_k = call.sight.n_q, call.sight.n_k
    if is_symbolic(n_q, n_k):  # a graph cannot loop over a number of blocks that it does not know
        return reference.attend_rows(call, slice(0, n_q))
    step = rows_in_a_block(call.q, call.sight, call.sight.n_k)
    blocks = [slice(i, min(i + step, n_q)) for i in range(0, n_q, step)]
    if len(blocks) <= 1:
        return reference.attend_rows(call, slice(0, n_q))
    parts = [checkpoint(reference.attend_rows, call, rows, use_reentrant=False) for rows in blocks]
    out: Tensor = _RaiseIfChanged.apply(  # type: ignore[no-untyped-call]
        torch.cat(parts, dim=2), *_tensors(call)
    )
    return out


class _RaiseIfChanged(torch.autograd.Function):
    """The identity of its first argument; backward raises if another was changed in place.

    A checkpoint reads what it is given again in backward and does not notice a change.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, *watched: Tensor) -> Tensor:
        ctx.save_for_backward(*watched)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, d_x: Tensor) -> tuple[Tensor | None, ...]:
        return d_x, *(None for _ in ctx.saved_tensors)


def _may_split(call: AttentionCall) -> bool:
    """Whether the flash kernel can take far keys, whatever the length."""
    flat = call.lag is None or not call.lag.sloped
    return may_split(call.q, call.sight, flat=flat, dropout=call.dropout)


def _can_split(call: AttentionCall) -> bool:
    """Whether the flash kernel takes the far keys of this call."""
    return _may_split(call) and not is_small(call.q, call.sight)


def _with_one_width(call: AttentionCall, *, multiple_of: int = 1) -> AttentionCall:
    """q, k and v padded with zeros to the one width that flash kernels ask for."""
    width = -(-max(call.q.shape[-1], call.v.shape[-1]) // multiple_of) * multiple_of
    q, k, v = (_padded(x, width) for x in (call.q, call.k, call.v))
    values = None if call.values is None else LagValues(_padded(call.values.table, width))
    return replace(call, q=q, k=k, v=v, values=values)


def _padded(x: Tensor, width: int) -> Tensor:
    more = width - x.shape[-1]
    return pad(x, (0, more)) if more else x  # padding by nothing would still copy


def _mask_tensors(mask: Mask | None) -> tuple[Tensor | None, ...]:
    """keys, segments of the queries, segments of the keys, pairs."""
    if mask is None:
        return None, None, None, None
    return mask.keys, *(mask.segments or (None, None)), mask.pairs


def _tensors(call: AttentionCall) -> list[Tensor]:
    """Every tensor that a call with a dense bias reads."""
    return [*call.tensors(), *(x for x in _mask_tensors(call.sight.mask) if x is not None)]


def _view(x: Tensor | None) -> Tensor | None:
    """A tensor of its own: torch.compile and autograd refuse one that is given as two arguments.

    ALiBi's two tails are one line, and the segments of `Mask.packed` one tensor.
    """
    return None if x is None else x.view_as(x)
