"""FlexAttention as a peer: PyTorch's compiler writes the kernel from a function of one pair.

The bias is looked up by lag in that function. It is measured compiled, with the tiles that PyTorch
picks and with the best of a small set.
"""

import warnings
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from whence.bench.problem import Attention, Problem
from whence.checks import require
from whence.kernels.call import AttentionCall, Sight
from whence.lag import DeferredBias, LagBias

TILE_SIZES = (  # rows and keys of a tile: in forward, then in backward by keys and by rows
    (64, 64, 32, 64),
    (128, 64, 64, 64),
    (64, 32, 32, 32),
)


def default_flex() -> dict[str, Attention]:
    """FlexAttention with the tiles that PyTorch picks."""
    torch.compiler.reset()  # it compiles a function eight times at most, and this is a new size
    return {"": _compiled_flex(None)}


def best_flex() -> dict[str, Attention]:
    """FlexAttention with each of a small set of tiles, of which the fastest counts."""
    torch.compiler.reset()
    return {
        f"{rows}x{keys}, {short}x{long}": _compiled_flex(
            {
                "BLOCK_M": rows,
                "BLOCK_N": keys,
                "BLOCK_M1": short,
                "BLOCK_N1": long,
                "BLOCK_M2": long,
                "BLOCK_N2": short,
            }
        )
        for rows, keys, short, long in TILE_SIZES
    }


def _compiled_flex(tiles: dict[str, int] | None) -> Attention:
    from torch.nn.attention.flex_attention import flex_attention

    compiled = torch.compile(cast(Callable[..., Tensor], flex_attention), dynamic=False)
    masks: dict[int, Any] = {}  # one is made for each length, as a model would

    def run(problem: Problem) -> Tensor:
        call = problem.call()
        reason = refuse(call)
        require(reason is None, f"FlexAttention {reason}")
        if call.sight.n_k not in masks:
            masks[call.sight.n_k] = block_mask(call)
        return flex_attend(call, compiled, masks[call.sight.n_k], tiles)

    return run


def refuse(call: AttentionCall) -> str | None:
    """Why FlexAttention cannot compute the call, or None."""
    if call.values is not None:
        return "has no place for a value of each lag (Shaw's values)."
    if call.dense:
        return f"is measured without dense biases ({call.dense[0].why})."
    if call.lag is not None and call.lag.sloped and not _shared_by_queries(call.lag):
        return "is measured without slopes where something differs from query to query."
    if call.dropout:
        return "has no dropout."
    if call.q.dtype == torch.float64 and call.q.device.type == "cuda":
        return "has no float64 kernel on a GPU."
    if min(call.sight.n_q, call.sight.n_k) == 0:
        return "needs at least one query and one key."
    return None


def flex_attend(
    call: AttentionCall,
    attention: Callable[..., Tensor],
    mask: Any,
    tiles: dict[str, int] | None = None,
) -> Tensor:
    """A call by flex_attention, compiled or not, with its `block_mask` and kernel options."""
    with warnings.catch_warnings():  # on a CPU, tests run it without the compiler
        warnings.filterwarnings("ignore", "flex_attention called without torch.compile")
        return attention(
            call.q,
            call.k,
            call.v,
            score_mod=None if call.lag is None else _score_mod(call.lag, call.sight),
            block_mask=mask,
            scale=call.scale,
            enable_gqa=call.q.shape[1] != call.k.shape[1],
            kernel_options=tiles,
        )


def block_mask(call: AttentionCall) -> Any:
    """What a query may look at, as FlexAttention's block mask; None if that is everything."""
    from torch.nn.attention.flex_attention import create_block_mask

    sight, visible = call.sight, _mask_mod(call.sight)
    if visible is None:
        return None
    b, h = _mask_axes(sight)
    return create_block_mask(visible, b, h, sight.n_q, sight.n_k, device=str(call.q.device))


def _shared_by_queries(lag: LagBias) -> bool:
    # The tensors of a deferred bias are its parameters, which have no axis of queries.
    made = lag.evaluated() if isinstance(lag, DeferredBias) else lag
    return all(x.shape[2] == 1 for x in made.tensors())


def _score_mod(lag: LagBias, sight: Sight) -> Callable[..., Tensor]:
    """score + table[lag], one look-up for each pair: the compiler fails on much more.

    A table that queries share is evaluated at every lag of the call. One for each query would be
    n x n numbers, so it is the band with its constant tails as end columns, and lags are clipped.
    """
    if _shared_by_queries(lag):
        highest, clip = sight.n_k - 1 - sight.q_start, None
        lowest = -(sight.q_start + sight.n_q - 1)
        table = lag.at(torch.arange(lowest, highest + 1, device=lag.band.device))
    else:
        table = _with_end_columns(lag)
        clip = table.shape[-1] // 2
        lowest = -clip
    has_axis = [size > 1 for size in table.shape[:3]]
    table = table.reshape(*(size for size in table.shape[:3] if size > 1), -1).contiguous()
    shift = -sight.q_start - lowest

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        column = k - q + shift
        if clip is not None:
            column = column.clamp(0, 2 * clip)
        axes = [i for i, there in zip((b, h, q), has_axis, strict=True) if there]
        return score + table[(*axes, column)]

    return score_mod


def _with_end_columns(lag: LagBias) -> Tensor:
    """The band [b, h, q, lag] with a column more on each side, of the constant tails."""
    if lag.left is None or lag.right is None:
        return lag.band
    ends = [line.const for line in (lag.left, lag.right)]
    shape = torch.broadcast_shapes(  # type: ignore[no-untyped-call]
        lag.band.shape[:3], *(x.shape for x in ends if x is not None)
    )
    left, right = (lag.band.new_zeros(()) if x is None else x for x in ends)
    left, right = (x.expand(shape)[..., None] for x in (left, right))
    return torch.cat([left, lag.band.expand(*shape, -1), right], dim=-1)


def _mask_axes(sight: Sight) -> tuple[int | None, int | None]:
    """The sizes of the mask's batch and head axes, None where the axis is shared."""
    mask = sight.mask
    if mask is None:
        return None, None
    parts = [mask.keys, mask.pairs, *(mask.segments or ())]
    b = max(part.shape[0] for part in parts if part is not None)
    h = 1 if mask.pairs is None else mask.pairs.shape[1]
    return b if b > 1 else None, h if h > 1 else None


def _mask_mod(sight: Sight) -> Callable[..., Tensor] | None:
    """Whether a pair may attend, as a function of its indices; None if every pair may."""
    mask, (before, after) = sight.mask, sight.window
    after = 0 if sight.causal else after
    if mask is None and before is None and after is None:
        return None

    def visible(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        lag, rules = k - (q + sight.q_start), []
        if before is not None:
            rules.append(lag >= -before)
        if after is not None:
            rules.append(lag <= after)
        if mask is not None and mask.keys is not None:
            rules.append(mask.keys[_index(mask.keys, 0, b), k])
        if mask is not None and mask.segments is not None:
            of_q, of_k = mask.segments
            rules.append(of_q[_index(of_q, 0, b), q] == of_k[_index(of_k, 0, b), k])
        if mask is not None and mask.pairs is not None:
            row, head = _index(mask.pairs, 0, b), _index(mask.pairs, 1, h)
            rules.append(mask.pairs[row, head, q, k])
        seen = rules[0] if rules else lag == lag
        for rule in rules[1:]:
            seen = seen & rule
        return seen

    return visible


def _index(x: Tensor, axis: int, index: Tensor) -> Tensor:
    """The index into an axis, 0 where the axis has size 1 and is shared."""
    return index if x.shape[axis] > 1 else torch.zeros_like(index)
