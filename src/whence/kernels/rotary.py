"""Queries and keys turned by their positions: by one Triton kernel for both, or by torch.

The gradient of a turn is the turn by the opposite angle. So one kernel serves both directions, and
gradients of any order.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd import forward_ad

from whence.checks import surely_equal
from whence.kernels.fused.backend import DEVICES, HAS_TRITON, by_token
from whence.kernels.fused.plain import HALF
from whence.kernels.fused.plan import PLANS, Plan, layout_of, slots_of
from whence.rotation import Rotation

TILE = 1024  # pairs of one head in a program: eight for each of its 128 threads
MOST_HEADS = 4  # heads of a program, which share its sines


class Turn(NamedTuple):
    """A turn without its tensors: how pairs lie and turn, and where ranges of positions start."""

    interleaved: bool
    size: float
    opposite: bool  # by -angle
    q_start: int
    k_start: int


class Place(NamedTuple):
    """Where the rows of q or k stand.

    frequency is [pairs] or [b, pairs]; pos is [b, n], or None for a range that begins at `start`.
    """

    start: int
    frequency: Tensor
    pos: Tensor | None


def turned(
    q: Float[Tensor, "b h q d"],
    q_pos: Int[Tensor, "*b q"] | int,
    k: Float[Tensor, "b h_kv k d"],
    k_pos: Int[Tensor, "*b k"] | int,
    rotation: Rotation,
) -> tuple[Float[Tensor, "b h q d"], Float[Tensor, "b h_kv k d"]]:
    """q and k turned, as `rotation.turned` defines it.

    Positions are a tensor [n] or [b, n], or the first of consecutive ones. Where the kernel runs,
    a result lies in memory as its input does.
    """
    rotation.check(q)
    rotation.check(k)
    if not _suits_kernel(q, k, rotation.frequency):
        return _by_torch(q, q_pos, k, k_pos, rotation)
    q_place, k_place = _placed(q, q_pos, rotation), _placed(k, k_pos, rotation)
    size = float(rotation.size)  # for an int Triton would compile another kernel
    turn = Turn(rotation.interleaved, size, False, q_place.start, k_place.start)
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad):
        found = Turned.apply(turn, q, k, *q_place[1:], *k_place[1:])  # type: ignore[no-untyped-call]
    else:
        found = _launched(turn, (q, q_place), (k, k_place))
    turned_q, turned_k = found
    return turned_q, turned_k


def _suits_kernel(q: Tensor, k: Tensor, frequency: Tensor) -> bool:
    """Whether the kernel can run; what it has no gradient or no rule for is left to torch.

    A compiler fuses torch's operations by itself.
    """
    return (
        q.device.type in DEVICES
        and HAS_TRITON
        and not torch.compiler.is_compiling()
        and q.dtype in (torch.float32, *HALF)
        and k.dtype == q.dtype
        and k.device == q.device
        and frequency.device == q.device
        and not frequency.requires_grad
        and q.numel() > 0
        and k.numel() > 0
        and type(q) is Tensor
        and type(k) is Tensor
        and forward_ad._current_level < 0
        and not torch._C._are_functorch_transforms_active()
    )


def _by_torch(
    q: Tensor, q_pos: Tensor | int, k: Tensor, k_pos: Tensor | int, rotation: Rotation
) -> tuple[Tensor, Tensor]:
    """The definition, with one table where queries and keys stand at the same positions."""
    if isinstance(q_pos, Tensor) or isinstance(k_pos, Tensor):
        same = q_pos is k_pos
    else:
        same = surely_equal(q_pos, k_pos)
    waves = rotation.waves(_filled(q, q_pos), q.dtype)
    turned_q = rotation.rotated(q, *waves)
    if not same or not surely_equal(q.shape[2], k.shape[2]) or q.dtype != k.dtype:
        waves = rotation.waves(_filled(k, k_pos), k.dtype)
    return turned_q, rotation.rotated(k, *waves)


def _filled(x: Tensor, pos: Tensor | int) -> Tensor:
    if isinstance(pos, Tensor):
        return pos
    return torch.arange(pos, pos + x.shape[2], device=x.device)


def _placed(x: Tensor, pos: Tensor | int, rotation: Rotation) -> Place:
    if not isinstance(pos, Tensor):
        return Place(pos, rotation.frequencies(pos + x.shape[2] - 1), None)
    pos = pos.expand(x.shape[0], x.shape[2])
    last = pos.amax(dim=-1) if rotation.growth else 0
    return Place(0, rotation.frequencies(last), pos)


class Turned(torch.autograd.Function):
    """The kernel with its gradient. One of q and k is None where only one gradient is asked for."""

    @staticmethod
    def forward(
        ctx: Any,
        turn: Turn,
        q: Tensor | None,
        k: Tensor | None,
        q_frequency: Tensor,
        q_pos: Tensor | None,
        k_frequency: Tensor,
        k_pos: Tensor | None,
    ) -> tuple[Tensor | None, ...]:
        """Both turned."""
        ctx.turn = turn
        ctx.save_for_backward(q_frequency, q_pos, k_frequency, k_pos)
        ctx.set_materialize_grads(False)
        return _either(turn, q, k, q_frequency, q_pos, k_frequency, k_pos)

    @staticmethod
    def backward(ctx: Any, d_q: Tensor | None, d_k: Tensor | None) -> tuple[Tensor | None, ...]:
        """Both gradients turned back."""
        d_q = d_q if ctx.needs_input_grad[1] else None
        d_k = d_k if ctx.needs_input_grad[2] else None
        found: tuple[Tensor | None, ...] = (None, None)
        if d_q is not None or d_k is not None:
            back = ctx.turn._replace(opposite=not ctx.turn.opposite)
            # Autograd asks for a graph of the gradient only where it is differentiated again.
            turned_back: Any = Turned.apply if torch.is_grad_enabled() else _either
            found = turned_back(back, d_q, d_k, *ctx.saved_tensors)
        return (None, *found, None, None, None, None)


def _either(
    turn: Turn,
    q: Tensor | None,
    k: Tensor | None,
    q_frequency: Tensor,
    q_pos: Tensor | None,
    k_frequency: Tensor,
    k_pos: Tensor | None,
) -> tuple[Tensor | None, ...]:
    """Those of q and k that are there, turned."""
    q_place = Place(turn.q_start, q_frequency, q_pos)
    k_place = Place(turn.k_start, k_frequency, k_pos)
    if q is None:
        return (None, *_launched(turn, (k, k_place)))
    if k is None:
        return (*_launched(turn, (q, q_place)), None)
    return _launched(turn, (q, q_place), (k, k_place))


def _launched(turn: Turn, *sides: tuple[Any, Place]) -> tuple[Any, ...]:
    """The heads of one side or of two, turned by one launch."""
    tensors = []
    for x, (_, frequency, pos) in sides:
        tensors += [x if x.stride(3) == 1 else x.contiguous(), frequency, pos]
    plan = PLANS.find(
        ("turn", turn, tuple(place.start for _, place in sides), *[layout_of(x) for x in tensors]),
        lambda: _plan(turn, tensors, [place.start for _, place in sides]),
    )
    return plan.run(tensors)


def _plan(turn: Turn, tensors: Sequence[Tensor | None], starts: Sequence[int]) -> Plan:
    """One launch for the (heads, frequency, positions) of each side."""
    from whence.kernels.fused.device.rotary import Heads, Kind, Sizes, turn_kernel

    slots: list[Any] = list(slots_of(tensors))
    assert tensors[0] is not None
    plan = Plan(tensors[0].device, len(slots))
    sides = [slots[i : i + 3] for i in range(0, len(slots), 3)]
    d_head, pairs = sides[0][0].shape[3], sides[0][1].shape[-1]
    block = 1 << (pairs - 1).bit_length()
    rows, heads = max(1, TILE // block), min(MOST_HEADS, max(x.shape[1] for x, _, _ in sides))
    rest = 1 << (d_head - 2 * pairs).bit_length()
    kind = Kind(2 * pairs, d_head, turn.interleaved, turn.opposite, rows, heads, block, rest)
    results, groups, sizes, programs = [], [], [], 0
    for (x, frequency, pos), start in zip(sides, starts, strict=True):
        b, n_heads, n, _ = x.shape
        out = plan.empty(x.shape, x.dtype, tokens=by_token(x))
        results.append(out)
        groups.append(
            Heads._make(
                (
                    *(x, *x.stride()[:3], out, *out.stride()[:3]),
                    *(frequency, frequency.stride(0) if frequency.ndim == 2 else 0),
                    *((None, 0, 0) if pos is None else (pos, *pos.stride())),
                )
            )
        )
        mine = b * -(-n // rows) * -(-n_heads // heads)
        sizes.append(Sizes(n_heads, n, start, mine))
        programs += mine
    # The kernel takes two sides; of one alone no program reaches the second.
    # Without fused multiply-adds, rounding is that of torch's separate operations.
    plan.launch(
        turn_kernel,
        (programs,),
        *(groups[0], groups[-1], *sizes[0], *sizes[-1], turn.size),
        KIND=kind,
        fusion=False,
    )
    plan.returns(*results)
    return plan
