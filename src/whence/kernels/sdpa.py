"""PyTorch's own attention where it fits, blocks of queries with linear memory where not."""

from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from whence.kernels import reference
from whence.kernels.blocked import BlockedAttention, Plan
from whence.kernels.call import AttentionCall
from whence.kernels.fused.plain import HALF
from whence.lag import LagBias, LagValues, Line

TILE = 1 << 20  # logits held at a time, all heads together: what a CPU's caches hold
TILE_OF_A_GPU = 1 << 26  # there a small tile is all launches
ROWS = 256  # query rows a block at the most
KEEP = 1 << 22  # logits of a whole call up to which its weights are kept for backward


def refuse(call: AttentionCall) -> str | None:
    """Why this backend cannot run the call, or None: it runs everything."""
    return None


def note(call: AttentionCall) -> str:
    """What `explain` says of it."""
    if is_plain(call):
        return "PyTorch's scaled_dot_product_attention as it is: linear memory"
    if call.dense:
        return "blocks of queries, the dense bias built a block at a time: linear memory"
    if _can_split(call):
        return "blocks of queries, far keys by the flash kernel: linear memory" + call.caveat()
    return "blocks of queries: linear memory" + call.caveat()


def run(call: AttentionCall) -> Float[Tensor, "b h q d_v"]:
    """Plain, in blocks, or in blocks computed again in backward for a dense bias."""
    d_v = call.v.shape[-1]
    if is_plain(call):
        call = _as_kernels_ask(call)
        out = scaled_dot_product_attention(
            call.q,
            call.k,
            call.v,
            dropout_p=call.dropout,
            is_causal=call.sight.causal,
            scale=call.scale,
            enable_gqa=call.q.shape[1] != call.k.shape[1],
        )
        return out[..., :d_v]
    call = call.with_kv_heads_expanded()
    return _dense(call) if call.dense else _blocked(call)[..., :d_v]


def is_plain(call: AttentionCall) -> bool:
    """Whether PyTorch's attention is all of the call."""
    sight = call.sight
    square = sight.n_q == sight.n_k and sight.q_start == 0
    return (
        call.lag is None
        and not call.dense
        and call.values is None
        and sight.mask is None
        and sight.window == (None, None)
        and (not sight.causal or square)
        and min(sight.n_q, sight.n_k) > 0
        and call.scale > 0  # a negative one with is_causal gives NaN on a CPU
    )


def _is_small(call: AttentionCall) -> bool:
    b, h, n_q, _ = call.q.shape
    return b * h * n_q * call.sight.n_k <= KEEP


def _can_split(call: AttentionCall) -> bool:
    """Whether far keys are plain attention that a flash kernel with a log-sum-exp can run here."""
    flat = call.lag is None or not call.lag.sloped
    return (
        flat
        and not _is_small(call)
        and call.q.device.type == "cpu"
        and not call.dropout
        and call.sight.mask is None
        and call.sight.window == (None, None)
    )


def _as_kernels_ask(call: AttentionCall) -> AttentionCall:
    """The same plain call in a form for which PyTorch need not build the matrix of logits.

    Its kernels want columns side by side; those of a GPU also whole eights of them, and a key head
    for every query head where a row is wide or in float32.
    """
    on_gpu = call.q.device.type != "cpu"
    call = _same_width(call, 8 if on_gpu else 1)
    if on_gpu and (call.q.dtype not in HALF or call.q.shape[-1] > 256):
        call = call.with_kv_heads_expanded()
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (call.q, call.k, call.v))
    return replace(call, q=q, k=k, v=v)


def _same_width(call: AttentionCall, multiple: int = 1) -> AttentionCall:
    """q, k and v of one width, which flash kernels ask for: columns of zeros change nothing."""
    width = -(-max(call.q.shape[-1], call.v.shape[-1]) // multiple) * multiple
    q, k, v = (_widened(x, width) for x in (call.q, call.k, call.v))
    values = None if call.values is None else LagValues(_widened(call.values.table, width))
    return replace(call, q=q, k=k, v=v, values=values)


def _widened(x: Tensor, width: int) -> Tensor:
    more = width - x.shape[-1]
    return pad(x, (0, more)) if more else x  # by nothing, it would still copy


def _blocked(call: AttentionCall) -> Tensor:
    split = _can_split(call)
    call = _same_width(call) if split else call
    lag = call.lag
    if lag is None:
        zero = torch.zeros(1, 1, 1, 1, dtype=call.q.dtype, device=call.q.device)
        lag = LagBias(zero, Line(), Line())
    elif lag.band.device.type == "cpu" and not torch.compiler.is_compiling():
        lag = lag.trimmed()
    sight, table = call.sight, None if call.values is None else call.values.table
    reach = max(lag.reach, 0 if call.values is None else call.values.reach)
    left, right = lag.left or Line(), lag.right or Line()
    # A view each: torch.compile refuses one tensor given twice, and ALiBi's tails are one line.
    tails = (left.const, left.slope, right.const, right.slope)
    plan = Plan(
        sight,
        call.scale,
        call.dropout,
        int(torch.randint(1 << 62, ())) if call.dropout else 0,
        _rows(call, reach if split else sight.n_k),
        split,
        _is_small(call) and torch.is_grad_enabled(),
        reach,
    )
    out: Tensor = BlockedAttention.apply(  # type: ignore[no-untyped-call]
        plan,
        call.q,
        call.k,
        call.v,
        lag.band,
        *(None if x is None else x.view_as(x) for x in tails),
        table,
    )
    return out


def _rows(call: AttentionCall, reach: int) -> int:
    """Query rows a block, so that a tile of logits stays small enough for the caches."""
    b, h, n_q, _ = call.q.shape
    width = min(2 * reach + ROWS, call.sight.n_k)
    if _is_small(call):
        return max(1, min(ROWS // 2, n_q))
    tile = TILE if call.q.device.type == "cpu" else TILE_OF_A_GPU
    return max(16, min(ROWS, n_q, tile // max(1, b * h * width)))


def _dense(call: AttentionCall) -> Tensor:
    n_q = call.sight.n_q
    step = _rows(call, call.sight.n_k)
    blocks = [slice(i, min(i + step, n_q)) for i in range(0, n_q, step)]
    if len(blocks) <= 1:
        return reference.attend_rows(call, slice(0, n_q))
    parts = [checkpoint(reference.attend_rows, call, rows, use_reentrant=False) for rows in blocks]
    return torch.cat(parts, dim=2)
