"""The fused attention as a differentiable function, for eager calls and for torch.compile.

Both run the same two plans, one for the output and one for the gradients. An eager call runs them
itself, because calling an operator costs the host more time (docs/LOG.md). Under torch.compile the
call is the operator whence::lag_attention, which the compiler does not look into; its graphs then
hold one operator that runs the first plan and one that runs the second.

A call is a list of tensors, a text that names the field of `Given` of each, and all else about it
as one flat tuple (`Call.flat`). The output comes with its residual, which lies in memory as the
output does, and with its *state*: all else that the gradients need, in one tensor of bytes.
"""

import hashlib
import itertools
from collections.abc import Collection, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from whence.checks import require
from whence.derivatives import once_differentiable
from whence.kernels.fused.backend import (
    CURVE_PARTS,
    FARTHEST,
    NOWHERE,
    ROWS,
    Call,
    Far,
    FarGradients,
    Given,
    Kept,
    Numbers,
    Task,
    Wanted,
    as_read,
    as_rows,
    by_token,
    no_plain,
    packed,
    split_from,
    too_many,
    without_gaps,
)
from whence.kernels.fused.launch import (
    backward,
    forward,
    kept_rooms,
    out_room,
)
from whence.kernels.fused.plan import (
    PLANS,
    Plan,
    Room,
    Slot,
    layout_of,
    parts_of,
    size_of,
    slots_of,
)
from whence.kernels.fused.split import far_attention, far_gradients, near_numbers
from whence.kernels.fused.tiles import TILES, TileSet

N_GIVEN = len(Given._fields)


def lag_attention(given: Given, call: Call) -> Tensor:
    """The attention of a call, differentiable once."""
    if torch.compiler.is_compiling():
        out: Tensor = lag_attention_op(*given, SOURCES, *call.flat())
        return out
    tensors, names = _named(given)
    learned = tuple([x.requires_grad for x in tensors])
    signature = ("call", call, names, torch.is_grad_enabled(), learned, *map(layout_of, tensors))
    return PLANS.find(signature, lambda: Ready(tensors, names, call))(tensors)


class Ready:
    """A prepared call. It runs on any tensors with the layouts of those that it was made with.

    It records gradients if they were recorded when it was made.
    """

    def __init__(self, tensors: Sequence[Tensor], names: str, call: Call) -> None:
        self.names, self.flat = names, call.flat()
        self.learned = _learned(tensors, names)
        self.recorded = bool(self.learned)
        self.back: dict[Hashable, Plan] = {}  # the gradients' plans by the layout of d_out
        self.plan: Plan | None = None  # a split call's also depends on a plain kernel's results
        if not call.numbers.far:
            slots, device = slots_of(tensors), tensors[0].device
            self.plan = forward_plan(slots, names, call, device, recorded=self.recorded)

    def __call__(self, tensors: Sequence[Tensor]) -> Tensor:
        """The output, differentiable if gradients are recorded."""
        out: Tensor
        if self.recorded or forward_ad._current_level >= 0:
            out = _recorded(self, *tensors)
        else:
            out = self.attended(tensors)[0]
        return out

    def attended(self, tensors: Sequence[Tensor]) -> Sequence[Any]:
        """The output, and what the gradients need."""
        if self.plan is None:
            return attended(tensors, self.names, self.flat, recorded=self.recorded)
        return self.plan.run(tensors)

    def places(self, saved: Sequence[Tensor]) -> Sequence[Hashable]:
        """Address and strides of the saved tensors, by which `gradients` sees if one changed."""
        return [(x.data_ptr(), x.stride(), x.is_neg()) for x in saved]

    def gradients(
        self, d_out: Tensor, saved: Sequence[Tensor], places: Sequence[Hashable]
    ) -> Sequence[Tensor | None]:
        """The gradient of each tensor of the call, from its tensors and what `attended` gave."""
        rest = (self.names, self.flat, self.learned)
        if self.places(saved) != places:  # a hook on saved tensors returned different ones
            return gradients(d_out, [x.resolve_neg() for x in saved], *rest)
        layout = (layout_of(d_out), d_out.is_neg())
        plan = self.back.get(layout)
        if plan is not None:
            return plan.run((d_out, *saved))
        found = gradients(d_out, saved, *rest)
        plan = PLANS.get(gradient_signature(d_out, saved, *rest))
        if plan is not None:  # there is none where tensors had to be copied
            self.back[layout] = plan
        return found


class LagAttention(torch.autograd.Function):
    """The autograd function of a call, which `run` (Ready or AsOperators) executes."""

    @staticmethod
    def forward(ctx: Any, run: Any, *tensors: Tensor) -> Tensor:
        """The output; what the gradients need is kept."""
        results = run.attended(tensors)
        saved = (*tensors, *results)
        ctx.run, ctx.places = run, run.places(saved)
        ctx.save_for_backward(*saved)
        out: Tensor = results[0]
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        """The gradient of every tensor."""
        return (None, *ctx.run.gradients(d_out, ctx.saved_tensors, ctx.places))


# LagAttention.apply without its support of torch.func's transforms, which `refuse` excludes.
_recorded: Any = super(torch.autograd.Function, LagAttention).apply


def attended(
    tensors: Sequence[Tensor], names: str, flat: tuple[Any, ...], *, recorded: bool
) -> Sequence[Any]:
    """The output of a call; if it is recorded, also residual, state and the far keys' results.

    Results that the call does not have are left out. A graph for any length gets every result that
    some length needs; those that this length does not need are empty memory, which nobody reads.
    """
    signature = ("output", names, flat, recorded, *map(layout_of, tensors))
    plan = PLANS.get(signature)
    if plan is not None:
        return plan.run(tensors)  # type: ignore[no-any-return]
    # An exported graph takes tensors of any layout, and makes some whose layout depends on sizes.
    tensors = [as_read(name, x) for name, x in zip(names.split(), tensors, strict=True)]
    signature = ("output", names, flat, recorded, *map(layout_of, tensors))
    call, given, far = Call.from_flat(flat), _fields(names, tensors), list[Tensor]()
    numbers = call.at(given.q).numbers
    _check(given, numbers)
    if numbers.far:
        far = _not_none(far_attention(given.q, given.k, given.v, numbers)[1:])
        signature = ("near output", *signature, *map(layout_of, far))
    every = [*tensors, *far]
    plan = PLANS.find(
        signature,
        lambda: forward_plan(slots_of(every), names, call, every[0].device, recorded=recorded),
    )
    return [*plan.run(every), *(far if recorded else ())]


def _check(given: Given, numbers: Numbers) -> None:
    """Refuse what an exported graph does not ask about: open sizes, and where it is run."""
    reason = too_many(given.q.shape[0] * given.q.shape[1])
    why = no_plain(given.q, given.k, given.v) if numbers.far else None
    if why is not None:
        reason = f"was exported to leave far keys to a plain kernel, but {why}. Export it here."
    for name, x in zip(Given._fields, given, strict=True):
        if name in ROWS and x is not None and x.shape[-2] > 1 and x.stride(-2) >= FARTHEST:
            reason = f"takes rows at most {FARTHEST - 1:,} numbers apart. Make {name} contiguous."
    require(reason is None, lambda: f"backend 'fused' cannot run this call: it {reason}")


def gradients(
    d_out: Tensor, saved: Sequence[Tensor], names: str, flat: tuple[Any, ...], learned: str
) -> Sequence[Tensor | None]:
    """The gradients of a call's tensors; None for those that are not among the `learned`.

    `saved` are the tensors of the call and what `attended` returned.
    """
    signature = gradient_signature(d_out, saved, names, flat, learned)
    plan = PLANS.get(signature)
    if plan is not None:
        return plan.run((d_out, *saved))  # type: ignore[no-any-return]
    call, fields = Call.from_flat(flat), names.split()
    # Hooks on saved tensors (as for offloading) may have returned the numbers laid out otherwise.
    tensors = [as_read(name, x) for name, x in zip(fields, saved, strict=False)]
    given, results = _fields(names, tensors), list(saved[len(fields) :])
    for place, x in enumerate(results):  # those with four axes lie as the output does
        results[place] = packed(x, by_token(given.q)) if x.ndim == 4 else without_gaps(x)
    rows = as_rows(d_out)
    every = [rows, *tensors, *results]
    at_length = call.at(given.q)
    if at_length.numbers.far:
        rooms = kept_rooms(at_length.task(given))
        state = results[1 if rooms.out_residual is None else 2]
        kept = Kept(*parts_of(state, in_state(rooms)))
        inputs = given.inputs
        inputs = inputs if kept.tails is None else inputs._replace(tails=kept.tails)
        parts = far_gradients(
            *(rows, given.q, given.k, given.v, results[0], kept.lse, inputs, at_length.numbers)
        )
        every += [*parts.left, *(parts.right or ())]
    if any(x is not y for x, y in itertools.zip_longest(every, (d_out, *saved))):
        signature = ("gradients elsewhere", names, flat, learned, *map(layout_of, every))
    plan = PLANS.find(
        signature, lambda: backward_plan(slots_of(every), names, call, rows.device, learned)
    )
    return plan.run(every)


def gradient_signature(
    d_out: Tensor, saved: Sequence[Tensor], names: str, flat: tuple[Any, ...], learned: str
) -> Hashable:
    """What decides the plan of the gradients, if the tensors lie as kernels read them."""
    return ("gradients", names, flat, learned, d_out.is_neg(), *map(layout_of, (d_out, *saved)))


def forward_plan(
    slots: Sequence[Slot | None], names: str, call: Call, device: torch.device, *, recorded: bool
) -> Plan:
    """The plan of the output, from the call's tensors and the results for the far keys."""
    count = len(names.split())
    given = _fields(names, slots[:count])
    at_length = call.at(given.q)
    task = _near(at_length.task(given), slots[count:])

    def make(tiles: TileSet) -> Plan:
        plan = Plan(device, len(slots))
        kept = forward(plan, task, tiles.forward, recorded=recorded)
        if not recorded:
            plan.returns(kept.out)
            return plan
        rooms, residual = saved_rooms(given, call), kept.out_residual
        if residual is None and rooms.out_residual is not None:
            residual = plan.reserved(rooms.out_residual)  # a graph for any length expects one
        n_bytes = 0 if rooms.state is None else rooms.state.shape[0]
        state = plan.together(in_state(kept), at_least=n_bytes)
        unused = [] if at_length.numbers.far else [plan.reserved(room) for room in rooms.far]
        plan.returns(*_not_none([kept.out, residual, state, *unused]))
        return plan

    return TILES.fit("forward", _width(given), given.q.dtype, device, make)


def backward_plan(
    slots: Sequence[Slot | None], names: str, call: Call, device: torch.device, learned: str
) -> Plan:
    """The plan of the gradients, from d_out, the call's tensors and what forward saved."""
    fields, learned_names = names.split(), learned.split()
    count = 1 + len(fields)
    d_out, given, rest = slots[0], _fields(names, slots[1:count]), list(slots[count:])
    saved, at_length = saved_rooms(given, call), call.at(given.q)
    rooms = kept_rooms(at_length.task(given))
    out = rest.pop(0)
    residual = None if saved.out_residual is None else rest.pop(0)
    state = None if saved.state is None else rest.pop(0)
    sides = len(saved.far) // 2 if at_length.numbers.far else 0
    task, elsewhere = _near(at_length.task(given), rest[: 2 * sides]), rest[2 * sides :]
    wanted = wanted_of(given, call, learned_names)
    far_parts = None
    if sides:
        right = elsewhere[3:] or None
        far_parts = FarGradients(elsewhere[:3], right)  # type: ignore[arg-type]

    def make(tiles: TileSet) -> Plan:
        plan = Plan(device, len(slots))
        kept = Kept(*plan.apart(state, in_state(rooms)))._replace(out=out, out_residual=residual)
        found = backward(plan, d_out, task, kept, tiles, wanted, far_parts)
        ordered = Given.ordered(found)
        plan.returns(
            *[getattr(ordered, name) if name in learned_names else None for name in fields]
        )
        return plan

    return TILES.fit("backward", _width(given), given.q.dtype, device, make)


def wanted_of(given: Given, call: Call, learned: Collection[str]) -> Wanted:
    """Which gradients are asked for, given the names of the tensors that need one."""
    if given.factor is not None:
        query = ("q" if given.query is None else "query") in learned
        # One lag is one number for all logits of a query, which does not change a softmax.
        some = given.factor.shape[1] > 1 and (query or "factor" in learned)
        return Wanted(band=some, tails=some, query=query, factor="factor" in learned)
    if call.curve:
        learns = not {"first", "second", "third"}.isdisjoint(learned)
        parts = CURVE_PARTS[call.curve]
        return Wanted(band=learns and parts.band, tails=learns and parts.tails)
    return Wanted(band="band" in learned, tails="tails" in learned)


def planned(given: Given, call: Call) -> list[str]:
    """The launch plans of a call, a line for each launch, as `explain` prints them."""
    if call.numbers.far:
        return ["its launches depend on where the plain kernel leaves its results"]
    tensors, names = _named(given)
    slots, learned, device = slots_of(tensors), _learned(tensors, names), given.q.device
    plan = forward_plan(slots, names, call, device, recorded=bool(learned))
    lines = [f"forward: {line}" for line in plan.lines()]
    if learned:
        saved = _not_none([plan.results[0], *slots, *plan.results])
        again = [replace(x, index=i) for i, x in enumerate(saved)]
        plan = backward_plan(again, names, call, device, learned)
        lines += [f"backward: {line}" for line in plan.lines()]
    return lines


@contextmanager
def trying(tiles: TileSet) -> Iterator[None]:
    """A context in which every plan uses these tiles or fails, as `whence tune` needs it."""
    PLANS.forget()
    try:
        with TILES.forced(tiles):
            yield
    finally:
        PLANS.forget()


class Saved(NamedTuple):
    """The memory of the tensors that a recorded call returns; None for those that it does not."""

    out: Room
    out_residual: Room | None
    state: Room | None
    far: list[Room]  # of each side, the far keys' output and log-sum-exp


def saved_rooms(given: Given, call: Call) -> Saved:
    """What a recorded call returns, also for symbolic lengths.

    A graph for any length returns every tensor that some length needs, and a state with room for
    the way to run the call that needs most. Where q is too short for a plain kernel, the results
    for the far keys are two rows that nobody reads.
    """
    far, is_open = call.numbers.far, call.open_length
    kept = kept_rooms(call.task(given), any_length=is_open)
    size = size_of(in_state(kept))
    if far and is_open:
        unsplit = call._replace(numbers=call.numbers._replace(far=0))
        least = size_of(in_state(kept_rooms(unsplit.task(given), any_length=True)))
        size = torch.sym_max(size, least)  # type: ignore[no-untyped-call]
    of_far = []
    if far:
        (b, h, n_q, d_v), d = kept.out.shape, given.q.shape[3]
        rows = n_q - far
        if is_open:  # a size that may be 0 or 1 would be a guard
            is_split = torch.sym_min(n_q // split_from(d, far), 1)  # type: ignore[no-untyped-call]
            rows = torch.sym_max(rows * is_split, 2)  # type: ignore[no-untyped-call]
        side = [kept.out._replace(shape=(b, h, rows, d_v)), Room((b, h, rows), torch.float32)]
        of_far = side * (1 if call.numbers.causal else 2)
    state = Room((size,), torch.uint8) if any(in_state(kept)) else None
    return Saved(kept.out, kept.out_residual, state, of_far)


def in_state(kept: Kept) -> Kept:
    """Those fields that are parts of the state."""
    return kept._replace(out=None, out_residual=None)


def _near(task: Task, far: Sequence[Slot | None]) -> Task:
    """The task of our kernels, which is to attend to the near keys, with the far keys' results."""
    if not task.numbers.far:
        return task
    return task._replace(numbers=near_numbers(task.numbers), far=Far(task.numbers.far, *far))


def _width(given: Given) -> int:
    return int(max(given.q.shape[-1], given.v.shape[-1]))


def hash_of(folder: Path) -> str:
    """A hash of the Python sources in a folder and below it."""
    found = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        found.update(path.read_bytes())
    return found.hexdigest()[:16]


# The operators for torch.compile. A graph first has the operator `lag_attention`. Autograd replaces
# it by the two others, which take a list of the tensors that are not None, and their names.

_TENSORS = "Tensor q, Tensor k, Tensor v, " + ", ".join(f"Tensor? {x}" for x in Given._fields[3:])
_NUMBERS = (
    "float scale, SymInt q_start, SymInt before, SymInt after, float dropout, bool slopes, "
    "SymInt far, float product_scale, str curve, SymInt reach, bool open_length"
)
_CALL, _FORWARD, _BACKWARD = (
    f"whence::lag_attention{what}" for what in ("", "_forward", "_backward")
)
# PyTorch keeps compiled graphs on disk and knows them by their text. The sizes of what an operator
# returns follow from the sources of this folder, so a hash of these is in the text.
SOURCES = hash_of(Path(__file__).parent)
_EXACT = (torch.Tag.needs_exact_strides,)  # or the compiler might pass copies of q, k and v
torch.library.define(_CALL, f"({_TENSORS}, str sources, {_NUMBERS}) -> Tensor", tags=_EXACT)
torch.library.define(
    _FORWARD,
    f"(Tensor[] tensors, str names, bool recorded, str sources, {_NUMBERS}) -> Tensor[]",
    tags=_EXACT,
)
torch.library.define(
    _BACKWARD,
    f"(Tensor d_out, Tensor[] saved, str names, str learned, str sources, {_NUMBERS}) -> Tensor[]",
    tags=_EXACT,
)


class AsOperators:
    """A call that a compiler traces, run by the operators of the output and of the gradients."""

    def __init__(self, names: str, flat: tuple[Any, ...], learned: str) -> None:
        self.names, self.flat, self.learned = names, flat, learned

    def attended(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """What the function `attended` returns."""
        found: list[Tensor] = lag_attention_forward_op(
            list(tensors), self.names, bool(self.learned), SOURCES, *self.flat
        )
        return found

    def places(self, saved: Sequence[Tensor]) -> None:
        """A compiler's tensors have no addresses."""

    def gradients(
        self, d_out: Tensor, saved: Sequence[Tensor], places: None
    ) -> list[Tensor | None]:
        """What the function `gradients` returns."""
        found = lag_attention_backward_op(
            d_out, list(saved), self.names, self.learned, SOURCES, *self.flat
        )
        each, learned = iter(found), self.learned.split()
        return [next(each) if name in learned else None for name in self.names.split()]


@torch.library.impl(_CALL, "Autograd")
def _call_recorded(*arguments: Any) -> Tensor:
    tensors, names = _named(arguments[:N_GIVEN])
    run = AsOperators(names, arguments[N_GIVEN + 1 :], _learned(tensors, names))
    out: Tensor = LagAttention.apply(run, *tensors)  # type: ignore[no-untyped-call]
    return out


@torch.library.impl(_CALL, ("cpu", "cuda"))
def _call(*arguments: Any) -> Tensor:
    tensors, names = _named(arguments[:N_GIVEN])
    out: Tensor = attended(tensors, names, arguments[N_GIVEN + 1 :], recorded=False)[0]
    return out


@torch.library.register_fake(_CALL)  # type: ignore[untyped-decorator]
def _call_fake(*arguments: Any) -> Tensor:
    given = Given(*arguments[:N_GIVEN])
    return _empty(out_room(given.q, given.v), given.q)


@torch.library.impl(_FORWARD, ("cpu", "cuda"))
def _forward(
    tensors: list[Tensor], names: str, recorded: bool, sources: str, *flat: Any
) -> Sequence[Any]:
    return attended(tensors, names, flat, recorded=recorded)


@torch.library.register_fake(_FORWARD)  # type: ignore[untyped-decorator]
def _forward_fake(
    tensors: list[Tensor], names: str, recorded: bool, sources: str, *flat: Any
) -> list[Tensor]:
    given = _fields(names, tensors)
    if not recorded:
        return [_empty(out_room(given.q, given.v), given.q)]
    out, residual, state, far = saved_rooms(given, Call.from_flat(flat))
    return [_empty(x, given.q) for x in _not_none([out, residual, state, *far])]


@torch.library.impl(_BACKWARD, ("cpu", "cuda"))
def _backward(
    d_out: Tensor, saved: list[Tensor], names: str, learned: str, sources: str, *flat: Any
) -> list[Tensor]:
    return _not_none(gradients(d_out, saved, names, flat, learned))


@torch.library.register_fake(_BACKWARD)  # type: ignore[untyped-decorator]
def _backward_fake(
    d_out: Tensor, saved: list[Tensor], names: str, learned: str, sources: str, *flat: Any
) -> list[Tensor]:
    fields = names.split()
    given = _fields(names, saved[: len(fields)])
    tokens = by_token(given.q)
    found = []
    for name in (name for name in fields if name in learned.split()):
        x = getattr(given, name)
        room = Room(tuple(x.shape), torch.float32)
        if name in ("q", "k", "v", "query"):
            room = Room(tuple(x.shape), x.dtype, by_token(x) if name == "query" else tokens)
        found.append(_empty(room, x))
    return found


lag_attention_op = torch.ops.whence.lag_attention.default
lag_attention_forward_op = torch.ops.whence.lag_attention_forward.default
lag_attention_backward_op = torch.ops.whence.lag_attention_backward.default


def _named(given: Sequence[Tensor | None]) -> tuple[list[Tensor], str]:
    """The tensors that are not None, and the names of their fields."""
    names = [name for name, x in zip(Given._fields, given, strict=True) if x is not None]
    return _not_none(given), " ".join(names)


def _fields(names: str, tensors: Sequence[Any]) -> Given:
    """Tensors or slots by their names."""
    pairs = zip(names.split(), tensors, strict=True)
    return Given(**{name: x for name, x in pairs if name != NOWHERE})


def _learned(tensors: Sequence[Tensor], names: str) -> str:
    """The names of the tensors whose gradients are recorded."""
    if not torch.is_grad_enabled():
        return ""
    pairs = zip(names.split(), tensors, strict=True)
    return " ".join([name for name, x in pairs if x.requires_grad and name != NOWHERE])


def _not_none(found: Sequence[Any]) -> list[Any]:
    return [x for x in found if x is not None]


def _empty(room: Room, like: Tensor) -> Tensor:
    return like.new_empty_strided(room.shape, room.strides, dtype=room.dtype)
