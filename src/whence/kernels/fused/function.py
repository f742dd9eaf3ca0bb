"""The fused attention as a differentiable function: called as it is, or compiled as one operator.

Both run the same two plans, one for the output and one for the gradients. An eager call takes the
autograd function, because calling an operator costs the host more time (docs/LOG.md). Under
torch.compile the call is the operator whence::lag_attention, which the compiler does not trace.
"""

import functools
import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from whence.derivatives import once_differentiable
from whence.kernels.fused.backend import (
    CURVES,
    Call,
    Far,
    FarGradients,
    Given,
    Kept,
    Numbers,
    Wanted,
    by_token,
    decoded,
    packed,
)
from whence.kernels.fused.launch import backward, forward, is_short, laid_out_shape
from whence.kernels.fused.plan import PLANS, Plan, Slot, lies, slots_of
from whence.kernels.fused.split import far_attention, far_gradients, near_numbers
from whence.kernels.fused.tiles import TILES, TileSet

N_GIVEN, N_KEPT, N_FAR = len(Given._fields), len(Kept._fields), 4
NOTHING_FAR, NOTHING_ELSEWHERE = (None,) * N_FAR, (None,) * 6


def lag_attention(given: Given, call: Call) -> Tensor:
    """The attention of a call, differentiable once."""
    if torch.compiler.is_compiling():
        out: Tensor = lag_attention_op(*given, *call.flat(), torch.is_grad_enabled())[0]
        return out
    tensors = _there(given)
    there = tuple([x is not None for x in given])
    learned = tuple([x.requires_grad for x in tensors])
    signature = ("call", call, there, torch.is_grad_enabled(), learned, *map(lies, tensors))

    def ready() -> Ready:
        places = itertools.accumulate(there)  # the i-th that is there has place i
        found = [place if x else 0 for place, x in zip(places, there, strict=True)]
        return Ready(given, call, found, len(tensors))

    return PLANS.find(signature, ready)(tensors)


class Ready:
    """A call that was prepared: it is run on any tensors that are like those it was made with.

    The tensors are the arguments of a call in an order of their own; `places` has the place of each
    field of `given` in (None, *tensors). Gradients are recorded if they are when this is made.
    """

    def __init__(self, given: Given, call: Call, places: Sequence[int], count: int) -> None:
        self.call, self._places = call, places
        self._given = itemgetter(*places)
        recording = torch.is_grad_enabled()
        needs = Given(*[recording and x is not None and x.requires_grad for x in given])
        self.recorded = any(needs)
        self.wanted = wanted_of(given, call, needs)
        # The field of each tensor among (*gradients, None): a tensor may be in no field.
        fields = [places.index(i) if i in places else N_GIVEN for i in range(1, 1 + count)]
        self._gradients = itemgetter(*fields)
        self.plan: Plan | None = None  # where a plain kernel takes the far keys, there are more
        if not call.numbers.far:
            slots = slots_of((*given, *NOTHING_FAR))
            self.plan = forward_plan(slots, call, given.q.device, recorded=self.recorded)
        self._saved: Any = None  # itemgetter of all fields that the gradients need

    def __call__(self, tensors: Sequence[Tensor]) -> Tensor:
        """The output, differentiable if gradients are recorded."""
        out: Tensor
        if self.recorded or forward_ad._current_level >= 0:
            out = LagAttention.apply(self, *tensors)  # type: ignore[no-untyped-call]
        else:
            out = self.attended(tensors)[0]
        return out

    def attended(self, tensors: Sequence[Tensor]) -> tuple[Any, ...]:
        """The results of `attended` for these tensors."""
        given = self._given((None, *tensors))
        if self.plan is None:
            return attended(Given(*given), self.call, recorded=self.recorded)
        return (*self.plan.run(given + NOTHING_FAR), *NOTHING_FAR)

    def saved(self, tensors: Sequence[Tensor], results: Sequence[Any]) -> list[Tensor]:
        """What autograd is to keep: the tensors of the call, and the results that are there."""
        kept = [*tensors, *_there(results)]
        if self._saved is None:
            places = itertools.count(1 + len(tensors))
            of_results = [0 if x is None else next(places) for x in results]
            self._saved = itemgetter(*self._places, *of_results)
        return kept

    def gradients(self, d_out: Tensor, saved: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
        """The gradient of each tensor of the call, from what `saved` returned."""
        fields = self._saved((None, *saved))
        signature = ("gradients", self, d_out.is_neg(), lies(d_out), *map(lies, saved))
        plan = PLANS.get(signature)
        if plan is not None:
            found = plan.run((d_out, *fields, *NOTHING_ELSEWHERE))
        else:
            found, plan = gradients(d_out, fields, self.call, self.wanted)
            if plan is not None:
                PLANS.keep(signature, plan)
        of_tensors: tuple[Tensor | None, ...] = self._gradients((*found, None))
        return of_tensors


class LagAttention(torch.autograd.Function):
    """The autograd function of eager calls; compiled ones take the operator below."""

    @staticmethod
    def forward(ctx: Any, ready: Ready, *tensors: Tensor) -> Tensor:
        """Run the plan of the output, and keep what the gradients need."""
        results = ready.attended(tensors)
        ctx.ready = ready
        ctx.save_for_backward(*ready.saved(tensors, results))
        out: Tensor = results[0]
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        """Run the plan of the gradients."""
        return (None, *ctx.ready.gradients(d_out, ctx.saved_tensors))


def attended(given: Given, call: Call, *, recorded: bool) -> tuple[Any, ...]:
    """The fields of `Kept`, the output first, and then the four results for the far keys, or None.

    `recorded` says whether autograd records the call, so that backward may follow.
    """
    far: Sequence[Tensor | None] = (None,) * N_FAR
    if call.numbers.far:
        far = far_attention(given.q, given.k, given.v, call.numbers)[1:]
    tensors = (*given, *far)
    plan = PLANS.find(
        ("forward", call, recorded, *map(lies, tensors)),
        lambda: forward_plan(slots_of(tensors), call, given.q.device, recorded=recorded),
    )
    return (*plan.run(tensors), *far)


def gradients(
    d_out: Tensor, fields: Sequence[Any], call: Call, wanted: Wanted
) -> tuple[Sequence[Tensor | None], Plan | None]:
    """The gradients of a call's tensors, in the order of `Given`; None for a tensor without one.

    The fields are those of `Given` and what `attended` returned. With the gradients comes their
    plan, unless it needs other tensors than these.
    """
    given, kept, far = Given(*fields[:N_GIVEN]), Kept(*fields[N_GIVEN:-N_FAR]), fields[-N_FAR:]
    tokens, residual = by_token(given.q), kept.out_residual
    # Hooks on saved tensors (as for offloading) may have returned copies with other strides.
    out = packed(kept.out, tokens)
    residual = residual if residual is None else packed(residual, tokens)
    rows = d_out.resolve_neg()  # kernels read raw memory
    rows = rows if rows.stride(-1) == 1 else rows.contiguous()
    as_they_are = out is kept.out and residual is kept.out_residual and rows is d_out
    kept = kept._replace(out=out, out_residual=residual)
    elsewhere: Sequence[Tensor | None] = NOTHING_ELSEWHERE
    if call.numbers.far:
        inputs = given.inputs
        inputs = inputs if kept.tails is None else inputs._replace(tails=kept.tails)
        parts = far_gradients(rows, given.q, given.k, given.v, out, kept.lse, inputs, call.numbers)
        elsewhere = (*parts.left, *(parts.right or (None,) * 3))
    tensors = (rows, *given, *kept, *far, *elsewhere)
    make = functools.partial(backward_plan, slots_of(tensors), call, given.q.device, wanted)
    if as_they_are and not call.numbers.far:
        plan = make()
        return plan.run(tensors), plan
    plan = PLANS.find(("backward", call, wanted, *map(lies, tensors)), make)
    return plan.run(tensors), None


def forward_plan(
    slots: Sequence[Slot | None], call: Call, device: torch.device, *, recorded: bool
) -> Plan:
    """The plan of the output, from the call's tensors and the results for the far keys."""
    given, far = Given(*slots[:N_GIVEN]), slots[N_GIVEN:]

    def make(tiles: TileSet) -> Plan:
        plan = Plan(device, len(slots))
        kept = forward(
            plan,
            *given[:3],
            given.inputs,
            *_near(call.numbers, far),
            tiles.forward,
            call.product(given),
            call.curve_band(given),
            recorded=recorded,
        )
        plan.returns(*kept)
        return plan

    return TILES.fit("forward", _width(given), given.q.dtype, device, make)


def backward_plan(
    slots: Sequence[Slot | None], call: Call, device: torch.device, wanted: Wanted
) -> Plan:
    """The plan of the gradients, from d_out, the call's tensors and what forward saved."""
    d_out, given = slots[0], Given(*slots[1 : 1 + N_GIVEN])
    kept, rest = Kept(*slots[1 + N_GIVEN :][:N_KEPT]), slots[1 + N_GIVEN + N_KEPT :]
    far, elsewhere = rest[:N_FAR], rest[N_FAR:]
    far_parts = None
    if call.numbers.far:
        right = None if elsewhere[3] is None else elsewhere[3:]
        far_parts = FarGradients(elsewhere[:3], right)  # type: ignore[arg-type]

    def make(tiles: TileSet) -> Plan:
        plan = Plan(device, len(slots))
        found = backward(
            plan,
            d_out,
            *given[:3],
            kept,
            given.inputs,
            *_near(call.numbers, far),
            tiles,
            wanted,
            far_parts,
            call.product(given),
            call.curve_band(given),
        )
        plan.returns(*Given.ordered(found))
        return plan

    return TILES.fit("backward", _width(given), given.q.dtype, device, make)


def wanted_of(given: Given, call: Call, needs: Given) -> Wanted:
    """Which gradients are asked for, given which of the tensors need one."""
    if given.factor is not None:
        query = bool(needs.q if given.query is None else needs.query)
        # One lag is one number for all logits of a query, which does not change a softmax.
        some = given.factor.shape[1] > 1 and (query or bool(needs.factor))
        return Wanted(band=some, tails=some, query=query, factor=bool(needs.factor))
    if call.curve:
        learned, parts = any((needs.first, needs.second, needs.third)), CURVES[call.curve]
        return Wanted(band=learned and parts.band, tails=learned and parts.tails)
    return Wanted(band=bool(needs.band), tails=bool(needs.tails))


def planned(given: Given, call: Call) -> list[str]:
    """The launch plans of a call, a line for each launch, as `explain` prints them."""
    if call.numbers.far:
        return ["its launches depend on where the plain kernel leaves its results"]
    needs = Given(*[x is not None and x.requires_grad for x in given])
    recorded, device = torch.is_grad_enabled() and any(needs), given.q.device
    slots = slots_of((*given, *NOTHING_FAR))
    plan = forward_plan(slots, call, device, recorded=recorded)
    lines = [f"forward: {line}" for line in plan.lines()]
    if recorded:
        saved = (plan.results[0], *slots[:N_GIVEN], *plan.results, *(None,) * (N_FAR + 6))
        again = [x if x is None else replace(x, index=i) for i, x in enumerate(saved)]
        plan = backward_plan(again, call, device, wanted_of(given, call, needs))
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


def _near(numbers: Numbers, far: Sequence[Slot | None]) -> tuple[Numbers, Far | None]:
    """The numbers of the near keys, to which our kernels attend, and the far keys' results."""
    if not numbers.far:
        return numbers, None
    return near_numbers(numbers), Far(numbers.far, *far)


def _width(given: Given) -> int:
    return int(max(given.q.shape[-1], given.v.shape[-1]))


# The operator, for torch.compile. An operator's list of tensors cannot hold None, so these lists
# hold what is there. `kept_like` and `gradients_like` say what that is.

_TENSORS = "Tensor q, Tensor k, Tensor v, " + ", ".join(f"Tensor? {x}" for x in Given._fields[3:])
_NUMBERS = (
    "float scale, SymInt q_start, SymInt before, SymInt after, float dropout, bool slopes, "
    "SymInt far, float product_scale, str curve, SymInt reach"
)
_FORWARD, _BACKWARD = "whence::lag_attention", "whence::lag_attention_backward"
_EXACT = (torch.Tag.needs_exact_strides,)  # or the compiler might pass copies of q, k and v
torch.library.define(_FORWARD, f"({_TENSORS}, {_NUMBERS}, bool recorded) -> Tensor[]", tags=_EXACT)
torch.library.define(
    _BACKWARD,
    f"(Tensor d_out, Tensor[] saved, {_TENSORS}, {_NUMBERS}, bool[] needs) -> Tensor[]",
    tags=_EXACT,
)


@torch.library.impl(_FORWARD, ("cpu", "cuda"))
def _forward_op(*arguments: Any) -> list[Tensor]:
    tensors = arguments[:N_GIVEN]
    signature = ("operator", arguments[N_GIVEN:], *map(lies, tensors))
    plan = PLANS.get(signature)
    if plan is None:
        given, call, recorded = _parsed(arguments)
        if call.numbers.far:
            return _there(attended(given, call, recorded=recorded))
        slots = slots_of((*given, *NOTHING_FAR))
        plan = forward_plan(slots, call, given.q.device, recorded=recorded)
        PLANS.keep(signature, plan)
    return _there(plan.run(tensors + NOTHING_FAR))


@torch.library.impl(_BACKWARD, ("cpu", "cuda"))
def _backward_op(d_out: Tensor, saved: list[Tensor], *arguments: Any) -> list[Tensor]:
    given, numbers, needs = arguments[:N_GIVEN], arguments[N_GIVEN:-1], tuple(arguments[-1])
    every = (d_out, *given, *saved)
    signature = ("operator's gradients", numbers, needs, d_out.is_neg(), *map(lies, every))
    known = PLANS.get(signature)
    if known is not None:
        plan, fields = known
        return _there(plan.run((d_out, *fields((None, *every)), *NOTHING_ELSEWHERE)))
    call = Call.from_flat(numbers)
    places = itertools.count(2 + N_GIVEN)
    of_results = [
        0 if x is None else next(places) for x in kept_like(Given(*given), call, recorded=True)
    ]
    fields = itemgetter(*range(2, 2 + N_GIVEN), *of_results)  # of (None, *every)
    wanted = wanted_of(Given(*given), call, Given(*needs))
    found, plan = gradients(d_out, fields((None, *every)), call, wanted)
    if plan is not None:
        PLANS.keep(signature, (plan, fields))
    return _there(found)


@torch.library.register_fake(_FORWARD)  # type: ignore[untyped-decorator]
def _forward_fake(*arguments: Any) -> list[Tensor]:
    given, call, recorded = _parsed(arguments)
    return _there(kept_like(given, call, recorded=recorded))


def kept_like(given: Given, call: Call, *, recorded: bool) -> tuple[Tensor | None, ...]:
    """Empty tensors like those that `attended` returns, also for symbolic lengths."""
    q, k, v, numbers = given.q, given.k, given.v, call.numbers
    (b, h, n_q, _), tokens = q.shape, by_token(q)
    product, curve = call.product(given), call.curve_band(given)
    biased = given.band is not None or given.table is not None or product or curve
    brief = is_short(q, k, v, given.inputs, numbers, product, curve)
    out = _room((b, h, n_q, v.shape[-1]), q, q.dtype, tokens)
    residual = None
    if recorded and biased and not brief and q.dtype != torch.float32:
        residual = _room(out.shape, q, torch.float16, tokens)
    mass = None if given.table is None else (b, h, n_q, given.table.shape[1])
    laid_out = extent = tails = None
    if not decoded(q, k, numbers):
        laid_out = laid_out_shape(q, given.inputs, numbers, product, curve)
        extent = (h,) if curve and not curve.tails else None
        tails = (4, b, h, n_q) if product else (4, 1, h, 1) if curve and curve.tails else None
    wide = [None if x is None else q.new_empty(x, dtype=torch.float32) for x in (mass, laid_out)]
    kept = Kept(
        out=out,
        lse=None if brief else q.new_empty((b, h, n_q), dtype=torch.float32),
        out_residual=residual,
        mass=wide[0],
        band=wide[1],
        extent=None if extent is None else q.new_empty(extent, dtype=torch.int32),
        tails=None if tails is None else q.new_empty(tails, dtype=torch.float32),
    )
    far: list[Tensor | None] = [None] * N_FAR
    if numbers.far:
        m = n_q - numbers.far
        for side in range(1 if numbers.after == 0 else 2):
            far[2 * side] = _room((b, h, m, v.shape[-1]), q, q.dtype, tokens)
            far[2 * side + 1] = q.new_empty((b, h, m), dtype=torch.float32)
    return (*kept, *far)


@torch.library.register_fake(_BACKWARD)  # type: ignore[untyped-decorator]
def _backward_fake(d_out: Tensor, saved: list[Tensor], *arguments: Any) -> list[Tensor]:
    given, call, needs = _parsed(arguments)
    return _there(gradients_like(given, call, needs))


def gradients_like(given: Given, call: Call, needs: Sequence[bool]) -> Given:
    """Empty tensors like those that `gradients` returns."""
    wanted, tokens = wanted_of(given, call, Given(*needs)), by_token(given.q)
    made = given.factor is not None or bool(call.curve)  # the band is not an input of the call
    found: dict[str, Any] = {
        name: _room(x.shape, x, x.dtype, tokens)
        for name, x in (("q", given.q), ("k", given.k), ("v", given.v))
    }
    if given.query is not None and wanted.query:
        query = given.query
        found["query"] = _room(query.shape, query, query.dtype, by_token(query))
    others = {
        "band": wanted.band and not made,
        "tails": wanted.tails and not made,
        "table": given.table is not None,
        "factor": wanted.factor,
        "first": call.curve and any(wanted),
        "second": call.curve and any(wanted),
        "third": call.curve and any(wanted),
    }
    for name, there in others.items():
        x = getattr(given, name)
        if there and x is not None and x.is_floating_point():
            found[name] = x.new_empty(x.shape, dtype=torch.float32)
    return Given(*(None,) * 3)._replace(**found)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    given, ctx.numbers = inputs[:N_GIVEN], inputs[N_GIVEN:-1]
    ctx.there = [x is not None for x in given]
    ctx.save_for_backward(*_there(given), *output)


def _backward_of_op(ctx: Any, d_saved: list[Tensor]) -> tuple[Any, ...]:
    saved = iter(ctx.saved_tensors)
    given = [next(saved) if there else None for there in ctx.there]
    needs = [bool(x) for x in ctx.needs_input_grad[:N_GIVEN]]
    found = iter(lag_attention_backward_op(d_saved[0], list(saved), *given, *ctx.numbers, needs))
    there = gradients_like(Given(*given), Call.from_flat(ctx.numbers), needs)
    every = [None if x is None else next(found) for x in there]
    kept = [x if need else None for x, need in zip(every, needs, strict=True)]
    return (*kept, *(None,) * (len(ctx.numbers) + 1))


torch.library.register_autograd(_FORWARD, _backward_of_op, setup_context=_setup_context)
lag_attention_op = torch.ops.whence.lag_attention.default
lag_attention_backward_op = torch.ops.whence.lag_attention_backward.default


def _parsed(arguments: tuple[Any, ...]) -> tuple[Given, Call, Any]:
    return Given(*arguments[:N_GIVEN]), Call.from_flat(arguments[N_GIVEN:-1]), arguments[-1]


def _there(found: Sequence[Any]) -> list[Tensor]:
    return [x for x in found if x is not None]


def _room(shape: Sequence[int], like: Tensor, dtype: torch.dtype, tokens: bool) -> Tensor:
    """An empty tensor [b, h, n, d] with the strides that `Plan.empty` gives it."""
    b, h, n, d = shape
    if not tokens:
        return like.new_empty((b, h, n, d), dtype=dtype)
    return like.new_empty((b, n, h, d), dtype=dtype).transpose(1, 2)
