"""Blocked attention as an operator, for compilers: whence::blocked_attention and its gradient.

How a call is cut into blocks depends on its length, so a compiler that looked into the blocks would
compile each length anew, and `torch.export` would fix it. Here the plan is made when the operator
runs. It never keeps weights for backward, because how many there are depends on the length too.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from whence.kernels.blocks.blocked import (
    N_GIVEN,
    N_MASK,
    Given,
    Kept,
    MaskTensors,
    attended,
    gradients,
)
from whence.kernels.blocks.plan import Plan, plan_of
from whence.kernels.call import Sight

_GIVEN = "Tensor q, Tensor k, Tensor v, Tensor band, " + ", ".join(
    f"Tensor? {name}" for name in Given._fields[4:]
)
_MASK = ", ".join(f"Tensor? mask_{name}" for name in MaskTensors._fields)
# -1 is no limit. The seed is a tensor, so that no graph holds its value.
_SETTINGS = (
    "Tensor? seed, SymInt q_start, bool causal, SymInt before, SymInt after, float scale, "
    "float dropout"
)
_FORWARD, _BACKWARD = "whence::blocked_attention", "whence::blocked_attention_backward"
torch.library.define(_FORWARD, f"({_GIVEN}, {_MASK}, {_SETTINGS}, bool recorded) -> Tensor[]")
torch.library.define(
    _BACKWARD, f"(Tensor d_out, Tensor[] kept, {_GIVEN}, {_MASK}, {_SETTINGS}) -> Tensor[]"
)
N_KEPT = 6  # the tensors of `Kept`
Room = tuple[tuple[int, ...], torch.dtype]


def blocked_attention(
    given: Given, masks: MaskTensors, sight: Sight, *, scale: float, dropout: float
) -> Tensor:
    """The attention of a call as one node of a graph, differentiable once."""
    seed = torch.randint(1 << 62, ()) if dropout else None
    before, after = (-1 if limit is None else limit for limit in sight.window)
    settings = (seed, sight.q_start, sight.causal, before, after, float(scale), float(dropout))
    recorded = torch.is_grad_enabled()
    out: Tensor = torch.ops.whence.blocked_attention(*given, *masks, *settings, recorded)[0]
    return out


@torch.library.impl(_FORWARD, "default")
def _forward(*arguments: Any) -> list[Tensor]:
    given, plan = _parsed(arguments[:-1])
    kept, _ = attended(plan, given)
    out = kept.out.to(given.q.dtype)
    wide = None if kept.out is out else kept.out  # no tensor may be given back twice
    whole = [out, wide, kept.lse, *kept.far_out, *kept.far_lse]
    # Where the plan has no far ranges, zeros stand for them: the graph did not know.
    return [
        _made(out.new_zeros, room) if x is None or room is None else x
        for x, room in zip(whole, _rooms(given, recorded=arguments[-1]), strict=True)
    ]


@torch.library.register_fake(_FORWARD)  # type: ignore[untyped-decorator]
def _forward_fake(*arguments: Any) -> list[Tensor]:
    given = Given(*arguments[:N_GIVEN])
    rooms = _rooms(given, recorded=arguments[-1])
    return [_made(given.q.new_empty, room) for room in rooms]


def _rooms(given: Given, *, recorded: bool) -> list[Room | None]:
    """Shape and dtype of each tensor that the operator gives back; None is an empty one."""
    q, wide = given.q, torch.promote_types(given.q.dtype, torch.float32)
    out, lse = (*q.shape[:3], given.v.shape[-1]), (*q.shape[:3], 1)
    found: list[Room | None] = [(out, q.dtype)]
    if not recorded:
        return [*found, *(None,) * N_KEPT]
    consts = (given.left_const, given.right_const)
    far_out = [None if x is None else (out, q.dtype) for x in consts]
    far_lse = [None if x is None and given.table is None else (lse, wide) for x in consts]
    return [*found, None if q.dtype == wide else (out, wide), (lse, wide), *far_out, *far_lse]


def _made(new: Callable[..., Tensor], room: Room | None) -> Tensor:
    return new(0) if room is None else new(room[0], dtype=room[1])


@torch.library.impl(_BACKWARD, "default")
def _backward(d_out: Tensor, kept: list[Tensor], *arguments: Any) -> list[Tensor]:
    given, plan = _parsed(arguments)
    out, wide, lse, *fars = (x if x.numel() else None for x in kept)
    whole = out if wide is None else wide
    if whole is None or lse is None:  # no query, or no width: there is nothing to add up
        return [torch.zeros_like(x) if x is not None else d_out.new_empty(0) for x in given]
    found = Kept(whole, lse, (fars[0], fars[1]), (fars[2], fars[3]))
    weights = [None for _ in plan.blocks()]
    return _without_none(gradients(plan, given, found, d_out, weights), d_out)


@torch.library.register_fake(_BACKWARD)  # type: ignore[untyped-decorator]
def _backward_fake(d_out: Tensor, kept: list[Tensor], *arguments: Any) -> list[Tensor]:
    given = Given(*arguments[:N_GIVEN])
    return _without_none([None if x is None else torch.empty_like(x) for x in given], d_out)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    tensors = inputs[: N_GIVEN + N_MASK + 1]  # the seed is the last of them
    ctx.there = [x is not None for x in tensors]
    ctx.settings = inputs[len(tensors) : -1]
    ctx.save_for_backward(*(x for x in tensors if x is not None), *output)


def _backward_of_operator(ctx: Any, d_outputs: list[Tensor]) -> tuple[Any, ...]:
    saved = iter(ctx.saved_tensors)
    tensors = [next(saved) if there else None for there in ctx.there]
    arguments = (*tensors, *ctx.settings)
    found = torch.ops.whence.blocked_attention_backward(d_outputs[0], list(saved), *arguments)
    needs = ctx.needs_input_grad[:N_GIVEN]
    kept = [x if need else None for x, need in zip(found, needs, strict=True)]
    return (*kept, *(None,) * (len(arguments) + 1 - N_GIVEN))


torch.library.register_autograd(_FORWARD, _backward_of_operator, setup_context=_setup_context)


def _parsed(arguments: Sequence[Any]) -> tuple[Given, Plan]:
    given, masks = Given(*arguments[:N_GIVEN]), MaskTensors(*arguments[N_GIVEN:][:N_MASK])
    seed, q_start, causal, before, after, scale, dropout = arguments[N_GIVEN + N_MASK :]
    q, bias, table = given.q, given.bias, given.table
    sight = Sight(
        q.shape[2],
        given.k.shape[2],
        q_start,
        masks.mask(),
        causal,
        (None if before < 0 else before, None if after < 0 else after),
        q.device,
    )
    plan = plan_of(
        q,
        sight,
        reach=max(bias.reach, 0 if table is None else table.shape[1] // 2),
        flat=not bias.sloped,
        scale=scale,
        dropout=dropout,
        seed=0 if seed is None else int(seed),
        keep_weights=False,
    )
    return given, plan


def _without_none(found: Sequence[Tensor | None], like: Tensor) -> list[Tensor]:
    """A list of tensors cannot hold None: an empty tensor stands for it."""
    return [like.new_empty(0) if x is None else x for x in found]
