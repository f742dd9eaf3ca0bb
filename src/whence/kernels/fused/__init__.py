"""The fused backend: Triton kernels, linear memory, position gradients in a fixed order."""

import importlib.util
import os

import torch
from jaxtyping import Float
from torch import Tensor

from whence.kernels.call import AttentionCall
from whence.kernels.clipped import ClippedBand
from whence.kernels.plain import HALF, fastest
from whence.kernels.strategy import far_start
from whence.lag import CurveBias, LagBias, QueryBias

MOST_HEADS = 65_535  # of a grid's second axis
# Read once: a compiler that traces `refuse` can follow a constant, not a look at the system.
HAS_TRITON = importlib.util.find_spec("triton") is not None
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # Triton, too, reads it at import


def refuse(call: AttentionCall) -> str | None:
    """Why this backend cannot run the call, or None."""
    if call.q.device.type != "cuda" and not INTERPRETED:
        return f"runs on an NVIDIA GPU, got {call.q.device.type}. Take backend='sdpa'."
    if not HAS_TRITON:
        return "needs Triton, which is not installed. Take backend='sdpa'."
    if call.q.dtype not in (torch.float32, *HALF):
        return f"has no kernels for {call.q.dtype}. Take backend='sdpa'."
    if max(call.q.shape[-1], call.v.shape[-1]) > 256:
        return f"has kernels for heads of at most 256, got {call.q.shape[-1]}. Take backend='sdpa'."
    if call.dense:
        return f"takes no dense bias ({call.dense[0].why}). Take backend='sdpa'."
    if call.sight.mask is not None and call.sight.mask.pairs is not None:
        return "takes padding and packed masks, not a mask of every pair. Take backend='sdpa'."
    if call.lag is not None and call.lag.dtype == torch.float64:
        return "keeps a bias in float32, got float64. Take backend='sdpa'."
    if min(call.sight.n_q, call.sight.n_k, call.q.shape[0]) == 0:
        return "needs at least one sequence, query and key. Take backend='sdpa'."
    if call.q.shape[0] * call.q.shape[1] > MOST_HEADS:
        heads = call.q.shape[0] * call.q.shape[1]
        return f"takes at most {MOST_HEADS:,} heads in a batch, got {heads:,}. Take backend='sdpa'."
    return None


def note(call: AttentionCall) -> str:
    """What `explain` says of it."""
    far = far_start(call)
    if isinstance(far, int):
        plain = fastest(call.q, call.v)
        assert plain is not None
        return f"split: {plain.name} for |lag| >= {far}, our kernel for the rest; linear memory"
    shared = call.lag is not None and call.lag.shape[2] == 1
    bands = "; the band's gradient by block-diagonals" if shared else ""
    return f"one pass ({far}), linear memory, no atomics{bands}" + call.caveat()


def run(call: AttentionCall) -> Float[Tensor, "b h q d_v"]:
    """The operator, with the call's parts as it wants them."""
    from whence.kernels.fused_op import lag_attention
    from whence.kernels.triton_inputs import NO_PRODUCT, Inputs, Numbers, Product, shared_out

    sight, mask = call.sight, call.sight.mask
    longest = sight.n_q + sight.n_k + abs(sight.q_start)  # more would not fit the kernels' integers
    before, after = (-1 if limit is None else min(limit, longest) for limit in sight.window)
    after = 0 if sight.causal else after
    keys, q_segment, k_segment = None, None, None
    if mask is not None:
        keys = None if mask.keys is None else mask.keys.to(torch.uint8).contiguous()
        if mask.segments is not None:
            q_segment, k_segment = (x.to(torch.int32).contiguous() for x in mask.segments)
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (call.q, call.k, call.v))
    far = far_start(call)
    far = 0 if isinstance(far, str) else far
    slopes, dropout = call.lag is not None and call.lag.sloped, float(call.dropout)
    numbers = Numbers(float(call.scale), sight.q_start, before, after, dropout, slopes, far)
    lag, product, curve = call.lag, NO_PRODUCT, None
    if isinstance(lag, QueryBias) and _by_row(lag, q) and not shared_out(q, k, numbers):
        query = None
        if lag.query is not call.q:
            query = lag.query if lag.query.stride(-1) == 1 else lag.query.contiguous()
        # 2 and 2.0 are one key to whoever keeps launches, but not one type to Triton.
        product = Product(float(lag.scale), query, lag.table.float().contiguous())
        lag = None
    elif isinstance(lag, CurveBias) and _by_head(lag, q):
        curve, lag = lag, None
    band, extent, tails = _lag_parts(lag, q.shape[1], q.device)
    seed = None
    if call.dropout:
        seed = torch.randint(1 << 31, (), device=q.device)  # on the device: no wait, and graph-safe
    table = None if call.values is None else call.values.table.float()
    inputs = Inputs(band, extent, tails, table, keys, q_segment, k_segment, seed)
    return lag_attention(q, k, v, inputs, numbers, product, curve)


def _by_row(lag: LagBias, q: Tensor) -> bool:
    """Whether every row of q has a band of its own; one row's would be laid out as a head's."""
    return not torch.compiler.is_compiling() and lag.shape[:3] == q.shape[:3] and q.shape[2] > 1


def _by_head(lag: LagBias, q: Tensor) -> bool:
    """Whether every head of q has a band of its own; of one for all, the extent is one number."""
    return not torch.compiler.is_compiling() and lag.shape[1] == q.shape[1]


def _lag_parts(
    lag: LagBias | None, n_heads: int, device: torch.device
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """band, extent and tails [4, b|1, h|1, q|1]."""
    if lag is None:
        return None, None, None
    if lag.ends and not torch.compiler.is_compiling():
        band, tails = ClippedBand.apply(lag.band)  # type: ignore[no-untyped-call]
        return band if band.stride(-1) == 1 else band.contiguous(), None, tails
    band = lag.band.float()
    band = band if band.stride(-1) == 1 else band.contiguous()
    lines = [x for tail in (lag.left, lag.right) if tail for x in (tail.const, tail.slope)]
    if all(x is None for x in lines):
        extent = lag.extent
        if extent is not None and (extent.dtype != torch.int32 or len(extent) != n_heads):
            extent = extent.expand(n_heads).to(torch.int32)
        extent = None if extent is None else extent.contiguous()
        return band, extent, None
    zero = torch.zeros(1, 1, 1, device=device)
    shape = torch.broadcast_shapes(*(x.shape for x in lines if x is not None))  # type: ignore[no-untyped-call]
    tails = torch.stack([(zero if x is None else x.float()).expand(shape) for x in lines])
    # With tails the extent would send part of the band's gradient to them: look all of it up.
    return band, None, tails
