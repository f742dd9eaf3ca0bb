"""Whether the fused kernels can run a call, and the call in the form that the kernels take.

The first half, down to `packed`, defines that form: groups of tensors and of numbers. A field for
a tensor also takes a `Slot` of a launch plan, since only shape, strides and dtype are read. The
second half has the interface of every backend (`refuse`, `note`, `run`), the calls that run again
unchecked (`signed_call`), and the way from an `AttentionCall` to that form (`given_and_call`).
"""

import importlib.util
import os
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter

from whence.checks import is_exported, is_symbolic, smaller, surely_equal
from whence.derivatives import once_differentiable, refused_transform
from whence.kernels.call import AttentionCall
from whence.kernels.fused.plain import HALF, fastest
from whence.kernels.fused.plan import PLANS, layout_of
from whence.lag import Bias, CurveBias, LagBias, LagValues, QueryBias


class CurveParts(NamedTuple):
    """Which parts of a bias a curve defines: its band, its tails, or both. The others are 0."""

    band: bool
    tails: bool


CURVE_PARTS = {  # the curves that the kernels evaluate themselves (device/band.py)
    "gaussians": CurveParts(band=True, tails=False),
    "buckets": CurveParts(band=True, tails=True),
    "line": CurveParts(band=False, tails=True),
}
FEW_ROWS = 16  # rows of the smallest tile of a tensor core; up to here queries count as few
MANY_KEYS = 256  # with few queries, from here on the keys are divided among programs


class Inputs(NamedTuple):
    """The tensors of a call besides q, k and v; None for those that the call does not have."""

    band: Any = None  # float32 [b|1, h|1, q|1, lag]
    extent: Any = None  # int32 [h]
    tails: Any = None  # float32 [4, b|1, h|1, q|1]
    table: Any = None  # float32 [h|1, lag, d_v]
    keys: Any = None  # uint8 [b|1, k]
    q_segment: Any = None  # integers [b|1, q]
    k_segment: Any = None  # integers [b|1, k]
    seed: Any = None  # int64 []


class Numbers(NamedTuple):
    """The scalars of a call.

    The window is -before <= lag <= after, where -1 stands for no limit. Keys at |lag| >= far are
    left to a plain kernel; far = 0 means that our kernels take all keys. `slopes` says whether a
    tail of the bias may slope.
    """

    scale: float
    q_start: int
    before: int
    after: int
    dropout: float
    slopes: bool
    far: int = 0

    @property
    def causal(self) -> bool:
        """Whether no query sees a key after it. That a call is causal is said by `after` alone."""
        return self.after == 0


class Product(NamedTuple):
    """A band that the forward kernel computes as scale * query @ factor^T.

    The first and the last column of the band go on beyond its reach as constant tails.
    """

    scale: float
    query: Any  # [b, h, q, d]; None if it is the q of the attention itself
    factor: Any  # float32 [h|1, lag, d], contiguous


class CurveBand(NamedTuple):
    """A band that is a curve of a few parameters, which the kernels evaluate.

    The parameters are contiguous and hold float32 or whole numbers. There are three places for
    them, and None fills those that the curve does not use.
    """

    name: str
    reach: int
    parameters: Sequence[Any]

    @property
    def tails(self) -> bool:
        """Whether the curve goes on beyond its reach."""
        return CURVE_PARTS[self.name].tails

    @property
    def constant(self) -> bool:
        """Whether it is one number for all lags: a band of lag 0 alone that goes on beyond it."""
        return self.reach == 0 and all(CURVE_PARTS[self.name])


class Far(NamedTuple):
    """Attention to the keys at |lag| >= start, which a plain kernel computed.

    `left` and `right` are outputs [b, h, n - start, d_v], in the memory layout of the call's
    output. Their log-sum-exps [b, h, n - start] are in base e. The rows of the right side are in
    reverse order. A causal call has no right side: its two fields are None.
    """

    start: int
    left: Any
    left_lse: Any
    right: Any = None
    right_lse: Any = None


class FarGradients(NamedTuple):
    """The far keys' contributions to the gradients of q, k and v, with rows ordered as in `Far`."""

    left: tuple[Any, Any, Any]
    right: tuple[Any, Any, Any] | None


class Kept(NamedTuple):
    """What forward saves for backward; None for what the call does not need."""

    out: Any
    lse: Any  # log-sum-exp in base 2; in base e two numbers of a row (row_lse in device/tile.py)
    out_residual: Any  # float16: the rounding error of out, scaled (device/tile.py)
    mass: Any  # probability mass of every lag of the value table
    band: Any  # laid out (device/band.py)
    extent: Any  # of a curve: the largest |lag| at which it is not 0
    tails: Any  # of a band that is a product or a curve


class Wanted(NamedTuple):
    """Which gradients are asked for, besides those of q, k, v and the value table.

    Where the band is a product or a curve, `band` and `tails` are still set: the gradients of the
    factors or parameters are computed from those of the band and its tails.
    """

    band: bool
    tails: bool
    query: bool = False  # of a product's query, which may be q itself
    factor: bool = False  # of a product's table


class Gradients(NamedTuple):
    """The gradients of a call; None for tensors that the call does not have, or that need none."""

    q: Any
    k: Any
    v: Any
    band: Any = None
    tails: Any = None
    table: Any = None
    query: Any = None  # of a product; None if its query is q, since d_q then includes it
    factor: Any = None
    parameters: Sequence[Any] = (None, None, None)  # of a curve


class Given(NamedTuple):
    """All tensors of a call, in the order in which plans and operators take them."""

    q: Any
    k: Any
    v: Any
    band: Any = None
    extent: Any = None
    tails: Any = None
    table: Any = None
    keys: Any = None
    q_segment: Any = None
    k_segment: Any = None
    seed: Any = None
    query: Any = None  # of a product
    factor: Any = None
    first: Any = None  # the parameters of a curve
    second: Any = None
    third: Any = None

    @classmethod
    def ordered(cls, found: Gradients) -> "Given":
        """Gradients in the order of the tensors that they belong to."""
        first, second, third = found.parameters
        return cls(
            found.q,
            found.k,
            found.v,
            band=found.band,
            tails=found.tails,
            table=found.table,
            query=found.query,
            factor=found.factor,
            first=first,
            second=second,
            third=third,
        )

    @property
    def inputs(self) -> Inputs:
        """The tensors that `Inputs` names."""
        return Inputs(*[getattr(self, name) for name in Inputs._fields])


class Task(NamedTuple):
    """A call in the form from which its launches are decided.

    A tensor may be a slot of a launch plan: only shape, strides and dtype are read.
    """

    q: Any
    k: Any
    v: Any
    inputs: Inputs
    numbers: Numbers
    product: Product | None = None  # what makes the band, if it is not among the inputs
    curve: CurveBand | None = None
    far: Far | None = None  # where a plain kernel attends to the far keys

    @property
    def band_shape(self) -> tuple[int, ...] | None:
        """The shape [b|1, h|1, q|1, lag] of the band, whatever makes it."""
        if self.product is not None:
            return (*self.q.shape[:3], self.product.factor.shape[1])
        if self.curve is not None:
            return (1, self.q.shape[1], 1, 2 * self.curve.reach + 1)
        return None if self.inputs.band is None else tuple(self.inputs.band.shape)

    @property
    def reach(self) -> int:
        """The largest |lag| of the band; 0 without one."""
        return 0 if self.band_shape is None else self.band_shape[-1] // 2

    @property
    def value_reach(self) -> int:
        """The largest |lag| of the value table; 0 without one."""
        return 0 if self.inputs.table is None else self.inputs.table.shape[1] // 2

    @property
    def per_row(self) -> bool:
        """Whether every query row has a band, or tails, of its own."""
        shape, tails = self.band_shape, self.inputs.tails
        if shape is None or self.product is not None:
            return self.product is not None
        return shape[2] > 1 or (tails is not None and tails.shape[3] > 1)

    @property
    def few_queries(self) -> bool:
        """Whether few queries attend to many keys (`decoded`), which programs then share.

        Never with a product, whose band only the forward kernel computes.
        """
        return self.product is None and decoded(self.q, self.k, self.numbers)


NOWHERE = "-"  # in place of a field's name, for a tensor that no kernel reads


class Call(NamedTuple):
    """Everything about a call but its tensors.

    Together with the shapes, strides and dtypes of the tensors it is the signature of the call,
    from which its launch plan follows.
    """

    numbers: Numbers
    product_scale: float = 1.0
    curve: str = ""  # the name of a curve with device code; "" where there is none
    reach: int = 0  # of the curve
    # The call is in a graph for any length. It saves the same tensors however it is run, of sizes
    # that are formulas of the lengths, and `numbers.far` holds from `split_from` tokens on (`at`).
    open_length: bool = False

    def flat(self) -> tuple[Any, ...]:
        """All fields in one flat tuple: an operator takes no nested ones."""
        return (*self.numbers, *self[1:])

    @classmethod
    def from_flat(cls, flat: Sequence[Any]) -> "Call":
        """The call from what `flat` gave."""
        count = len(Numbers._fields)
        return cls(Numbers(*flat[:count]), *flat[count:])

    def at(self, q: Any) -> "Call":
        """The call at the length of q: far is 0 if that is too short for a plain kernel."""
        far = self.numbers.far
        if not (self.open_length and far and q.shape[2] < split_from(q.shape[3], far)):
            return self
        return self._replace(numbers=self.numbers._replace(far=0))

    def task(self, given: Given) -> Task:
        """The call with these tensors, without the results for its far keys."""
        product = curve = None
        if given.factor is not None:
            product = Product(self.product_scale, given.query, given.factor)
        if self.curve:
            curve = CurveBand(self.curve, self.reach, (given.first, given.second, given.third))
        return Task(given.q, given.k, given.v, given.inputs, self.numbers, product, curve)


def decoded(q: Any, k: Any, numbers: Numbers) -> bool:
    """Whether few queries attend to many keys, as in decoding.

    Forward then divides the keys among programs, and reads the band without laying it out.
    """
    return bool(few_rows(q, k) and k.shape[2] >= MANY_KEYS) and not (numbers.far or numbers.dropout)


def few_rows(q: Any, k: Any) -> bool:
    """Whether the queries that share a head of keys fit into the smallest tile."""
    return bool(q.shape[2] * (q.shape[1] // k.shape[1]) <= FEW_ROWS)


def by_token(q: Any) -> bool:
    """Whether q [b, h, n, d] lies in memory as [b, n, h, d], which is how projections leave it."""
    return bool(q.shape[1] > 1 and q.shape[2] > 1 and q.stride(1) < q.stride(2))


def packed(x: Tensor, tokens: bool) -> Tensor:
    """x [b, h, n, d], copied unless it is contiguous; with `tokens`, in the order [b, n, h, d]."""
    ordered = x.transpose(1, 2) if tokens else x
    if ordered.is_contiguous():
        return x
    return ordered.contiguous().transpose(1, 2) if tokens else ordered.contiguous()


MOST_DROPOUT = 1 - 2.0**-24  # the largest float32 below 1: kernels divide by 1 - dropout
MOST_HEADS = 65_535  # batch * heads: CUDA's limit for the second axis of a grid
# Read once at import: torch.compile traces `refuse`, and can follow a constant but no look-up.
HAS_TRITON = importlib.util.find_spec("triton") is not None
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # Triton, too, reads it at import
DEVICES = ("cuda", "cpu") if INTERPRETED else ("cuda",)  # that have the kernels

# The far keys start at a multiple of FAR_STEP, so that no tile of the plain kernel is partly used.
# Where every row has its own band, near tiles cost more than that, so they start sooner.
FAR_STEP = 64
ROW_FAR_STEP = 32
# The split strategy is taken from this length on, by head size, and from FEWEST times the |lag| at
# which the far keys start; measured on an H200.
SHORTEST = {64: 4096, 128: 4096}
FEWEST = 8
NEVER = 1 << 62  # tokens


def split_from(d: int, start: int) -> int:
    """The length from which a plain kernel takes the keys at |lag| >= start, for this head size."""
    shortest = next((n for size, n in SHORTEST.items() if d <= size), NEVER)
    return max(shortest, FEWEST * start)


def refuse(call: AttentionCall) -> str | None:
    """Why this backend cannot run the call, or None."""
    if call.q.device.type not in DEVICES:
        return f"runs on an NVIDIA GPU, got {call.q.device.type}. Take backend='sdpa'."
    if not HAS_TRITON:
        return "needs Triton, which is not installed. Take backend='sdpa'."
    if call.q.dtype not in (torch.float32, *HALF):
        return f"has no kernels for {call.q.dtype}. Take backend='sdpa'."
    if INTERPRETED and call.q.dtype == torch.bfloat16:
        return (
            "gives wrong products of bfloat16 in Triton's interpreter, by the interpreter's own "
            "fault. Take float32 or float16 there, or backend='sdpa'."
        )
    width = max(call.q.shape[-1], call.v.shape[-1])
    if width > 256:
        return f"has kernels for heads of at most 256, got {width}. Take backend='sdpa'."
    if not call.sight.is_known:
        return "needs q_start as a whole number, got a tensor. Take backend='sdpa'."
    if call.dense:
        return f"takes no dense bias ({call.dense[0].why}). Take backend='sdpa'."
    if call.sight.mask is not None and call.sight.mask.pairs is not None:
        return "takes padding and packed masks, not a mask of every pair. Take backend='sdpa'."
    if call.lag is not None and call.lag.dtype == torch.float64:
        return "keeps a bias in float32, got float64. Take backend='sdpa'."
    if call.sight.n_q == 0 or call.sight.n_k == 0 or call.q.shape[0] == 0:
        return "needs at least one sequence, query and key. Take backend='sdpa'."
    heads = call.q.shape[0] * call.q.shape[1]
    reason = None if is_exported(heads) else too_many(heads)  # a graph for any batch asks when run
    return reason or refused_transform(call.tensors)


def too_many(heads: int) -> str | None:
    """Why a call with so many heads in all its sequences is refused, or None."""
    if heads <= MOST_HEADS:
        return None
    found = "" if is_symbolic(heads) else f", got {heads:,}"
    return f"takes at most {MOST_HEADS:,} heads in a batch{found}. Take backend='sdpa'."


def beats_plain(call: AttentionCall) -> bool:
    """Whether these kernels are faster than PyTorch's for a call without position.

    They are for short sequences in half precision, on an H200; with dropout it was not measured.
    False in a graph for any length, which must not ask whether it is short.
    """
    if is_symbolic(call.sight.n_q, call.sight.n_k):
        return False
    if call.q.dtype not in HALF or call.dropout or refuse(call) is not None:
        return False
    from whence.kernels.fused.launch import is_short  # which imports Triton

    after = 0 if call.sight.causal else -1
    numbers = Numbers(float(call.scale), 0, -1, after, dropout=0.0, slopes=False)
    return is_short(Task(call.q, call.k, call.v, Inputs(), numbers))


def note(call: AttentionCall) -> str:
    """What `explain` says of a call: the strategy, the reason for it, and the launch plan."""
    far = far_start(call)
    if isinstance(far, int):
        plain = fastest(call.q, call.v)
        assert plain is not None
        text = f"split: {plain.name} for |lag| >= {far}, our kernel for the rest; linear memory"
    else:
        text = f"one pass ({far}), linear memory, no atomics" + call.caveat()
    if type(call.q) is not Tensor:  # fake tensors have no memory, and so no launch plan
        return text
    from whence.kernels.fused.function import planned  # which imports Triton

    return "\n".join([text, *planned(*given_and_call(call))])


def run(call: AttentionCall) -> Float[Tensor, "b h q d_v"]:
    """The attention of a call for which `refuse` returned None."""
    from whence.kernels.fused.function import lag_attention  # which imports Triton

    return lag_attention(*given_and_call(call))


OPTIONS = {bool, int, float, str, tuple, type(None)}  # what can be compared by value
DESCRIBED = (CurveBias, QueryBias)  # biases that a few tensors describe
PLAIN = (Tensor, Parameter)


class SignedCall(NamedTuple):
    """The tensors of a call of `attend`, and its signature: all else that decides how it is run.

    The tensors are in the order of the fields of `Given`.
    """

    tensors: tuple[Tensor, ...]
    signature: Hashable


def signed_call(
    q: Tensor, k: Tensor, v: Tensor, bias: Bias | None, values: LagValues | None, *options: Any
) -> SignedCall | None:
    """The tensors and signature of a call of `attend` that can be remembered; None for others.

    It can be if there is no mask or dropout and a few tensors describe the bias. A second call with
    this signature passes the same checks, and its tensors fill the same fields of `Given`, so
    `run_remembered` skips both steps.
    """
    if torch.compiler.is_compiling() or not isinstance(bias, DESCRIBED):
        return None
    if torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0:
        return None
    # By their types, too: 1 and 1.0 are equal, but only one of them is a window.
    types = tuple(map(type, options))
    if tuple in types:
        types += tuple([type(x) for each in options if type(each) is tuple for x in each])
    if not OPTIONS.issuperset(types):
        return None
    parts = bias.tensors()
    tensors = (q, k, v, *(() if values is None else (values.table,)), *parts)
    for x in tensors:
        if type(x) not in PLAIN or x.is_nested or x.is_neg():
            return None
        if x.layout is not torch.strided:
            return None
    learned = tuple([x.requires_grad for x in tensors])
    kind = (type(bias), bias.kind(), parts[0] is q, values is None, torch.is_grad_enabled())
    return SignedCall(tensors, ("attend", kind, options, types, learned, *map(layout_of, tensors)))


def run_remembered(call: SignedCall) -> Float[Tensor, "b h q d_v"] | None:
    """The attention of a call whose signature `run_and_remember` has kept, or None."""
    ready = PLANS.get(call.signature)
    return None if ready is None else ready(call.tensors)


def run_and_remember(call: AttentionCall, as_given: SignedCall) -> Float[Tensor, "b h q d_v"]:
    """Run a call, and keep it for `run_remembered` if kernels can read its tensors uncopied."""
    from whence.kernels.fused.function import Ready, lag_attention  # which imports Triton

    given, settings = given_and_call(call)
    names = _names(given, as_given.tensors)
    if names is None or call.sight.n_q >= min(SHORTEST.values()):  # some of these are split
        return lag_attention(given, settings)
    ready = Ready(as_given.tensors, names, settings)
    PLANS.keep(as_given.signature, ready)
    return ready(as_given.tensors)


def _names(given: Given, tensors: Sequence[Tensor]) -> str | None:
    """For each tensor the name of its field of `given`; None if some field is not a given tensor.

    Both are in the same order and matched in one pass, so the names do not depend on whether a
    tensor is given twice, which the signature does not say. A tensor in no field gets NOWHERE.
    """
    names, left = [NOWHERE] * len(tensors), enumerate(tensors)
    for field, x in zip(Given._fields, given, strict=True):
        if x is not None:
            place = next((i for i, y in left if y is x), None)
            if place is None:
                return None
            names[place] = field
    return " ".join(names)


def far_start(call: AttentionCall) -> int | str:
    """The |lag| from which a plain kernel takes the keys, or why one pass takes them all."""
    sight, lag = call.sight, call.lag
    if lag is None:
        return "there is no bias"
    if call.scale <= 0:
        return "plain kernels need a positive scale"
    if not lag.endless:
        return "the bias has no tails, so every key is within its reach"
    if lag.sloped:
        return "the bias slopes beyond its reach"
    if sight.mask is not None or sight.window != (None, None) or call.dropout:
        return "plain kernels take no mask, window or dropout"
    if not surely_equal(sight.n_q, sight.n_k) or not surely_equal(sight.q_start, 0):
        return "queries and keys are not the same positions"
    values = 0 if call.values is None else call.values.reach
    row_lookup = lag.shape[2] > 1 or call.values is not None
    step = ROW_FAR_STEP if row_lookup else FAR_STEP
    if is_symbolic(lag.reach):
        return "the reach of the bias grows with the length"
    start = (max(lag.reach, values) // step + 1) * step
    least = split_from(call.q.shape[-1], start)
    if least >= NEVER or (not is_symbolic(sight.n_q) and sight.n_q < least):
        if torch.compiler.is_compiling():  # a length in a text would become a constant of the graph
            return "it is faster for so short a sequence"
        return f"it is faster at {sight.n_q} tokens with a reach of {lag.reach}"
    return no_plain(call.q, call.k, call.v) or start


def no_plain(q: Tensor, k: Tensor, v: Tensor) -> str | None:
    """Why no plain kernel can take the far keys of these heads, or None."""
    if q.device.type == "cuda" and torch.are_deterministic_algorithms_enabled():
        return "plain kernels are not deterministic"
    plain = fastest(q, v)
    if plain is None or not (plain.grouped or q.shape[1] == k.shape[1]):
        return f"no plain kernel takes heads of this size, grouping and dtype ({q.dtype})"
    return None


def given_and_call(call: AttentionCall) -> tuple[Given, Call]:
    """The tensors of a call as the kernels read them, and its numbers."""
    sight, mask, lag = call.sight, call.sight.mask, call.lag
    longest = sight.n_q + sight.n_k + abs(sight.q_start)  # a larger limit overflows int32
    before, after = (-1 if x is None else smaller(x, longest) for x in sight.window)
    far = far_start(call)
    numbers = Numbers(
        scale=float(call.scale),
        q_start=sight.q_start,
        before=before,
        after=0 if sight.causal else after,
        dropout=min(float(call.dropout), MOST_DROPOUT),
        slopes=lag is not None and lag.sloped,
        far=0 if isinstance(far, str) else far,
    )
    q, k, v = (as_rows(x) for x in (call.q, call.k, call.v))
    keys = q_segment = k_segment = seed = table = None
    if mask is not None:
        keys = None if mask.keys is None else mask.keys.to(torch.uint8).contiguous()
        if mask.segments is not None:
            q_segment, k_segment = (_readable(x) for x in mask.segments)
    if call.dropout:
        seed = torch.randint(1 << 31, (), device=q.device)  # on the device: no wait, and graph-safe
    if call.values is not None:
        table = _readable(call.values.table)
    given = Given(
        q, k, v, table=table, keys=keys, q_segment=q_segment, k_segment=k_segment, seed=seed
    )
    whole = Call(numbers, open_length=is_symbolic(sight.n_q, sight.n_k, sight.q_start))
    if isinstance(lag, QueryBias) and _is_product(lag, q, k, whole):
        query = None if lag.query is call.q else as_rows(lag.query)
        given = given._replace(query=query, factor=_readable(lag.table))
        return given, whole._replace(product_scale=float(lag.scale))
    if isinstance(lag, CurveBias) and lag.curve.name in CURVE_PARTS and lag.shape[1] == q.shape[1]:
        reach = lag.reach
        if min(numbers.before, numbers.after) >= 0 and not CURVE_PARTS[lag.curve.name].tails:
            seen = max(numbers.before, numbers.after)  # no query sees more of the curve
            reach = smaller(reach, seen)
        parameters: list[Any] = [_readable(x) for x in lag.parameters]
        parameters += [None] * (3 - len(parameters))
        given = given._replace(**dict(zip(("first", "second", "third"), parameters, strict=True)))
        return given, whole._replace(curve=lag.curve.name, reach=reach)
    band, extent, tails = _lag_parts(lag, q.shape[1], q.device)
    return given._replace(band=band, extent=extent, tails=tails), whole


def _is_product(lag: LagBias, q: Tensor, k: Tensor, call: Call) -> bool:
    """Whether every row of q has its own band, which the forward kernel is to compute.

    A single row is an exception, since its band is laid out like that of a head; and so are few
    queries (`decoded`), which read the band as the caller gave it.
    """
    if lag.shape[:3] != q.shape[:3] or q.shape[2] <= 1:
        return False
    if is_symbolic(q.shape[2]):
        return True
    if is_symbolic(k.shape[2]):  # a cache that grows: when it is run, `decoded` decides
        return not few_rows(q, k) or call.numbers.dropout > 0
    return not decoded(q, k, call.numbers)


def _lag_parts(
    lag: LagBias | None, n_heads: int, device: torch.device
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """band, extent and tails [4, b|1, h|1, q|1] of an evaluated bias."""
    if lag is None:
        return None, None, None
    if lag.ends and not torch.compiler.is_compiling():
        band, tails = ClippedBand.apply(lag.band)  # type: ignore[no-untyped-call]
        return as_rows(band), None, tails
    band = as_rows(lag.band.float())
    lines = [x for tail in (lag.left, lag.right) if tail for x in (tail.const, tail.slope)]
    if all(x is None for x in lines):
        extent = lag.extent
        if extent is not None:
            extent = _readable(extent.expand(n_heads).to(torch.int32))
        return band, extent, None
    zero = torch.zeros(1, 1, 1, device=device)
    shape = torch.broadcast_shapes(*(x.shape for x in lines if x is not None))  # type: ignore[no-untyped-call]
    tails = torch.stack([(zero if x is None else x.float()).expand(shape) for x in lines])
    # No extent if there are tails: the gradient of lags beyond it would go to a tail, not the band.
    return band, None, tails


FARTHEST = 1 << 24  # row strides are below this: offsets within a tile have 32 bits
ROWS = ("q", "k", "v", "band", "query")  # fields whose last two axes are rows with a stride


def as_rows(x: Tensor) -> Tensor:
    """x with a contiguous last axis, and without a pending negation: kernels read raw memory."""
    x = x.resolve_neg()
    near = is_exported(x.stride(-2)) or x.stride(-2) < FARTHEST
    return x if x.stride(-1) == 1 and near else x.contiguous()


def as_read(name: str, x: Tensor) -> Tensor:
    """The tensor of this field of `Given` in memory as the kernels read it."""
    if name == NOWHERE:
        return x
    return as_rows(x) if name in ROWS else _readable(x)


def without_gaps(x: Tensor) -> Tensor:
    """x, contiguous and aligned to 16 bytes, so that its parts can be read in any dtype."""
    x = x.contiguous()
    return x if x.data_ptr() & 15 == 0 else x.clone()


def _readable(x: Tensor) -> Tensor:
    """x without gaps, in float32 unless it holds whole numbers."""
    x = x.float() if x.is_floating_point() else x
    return x.resolve_neg().contiguous()


class ClippedBand(torch.autograd.Function):
    """band [b, h, q, lag] to float32, and tails [4, b, h, q] of its end columns, without slopes.

    With PyTorch's own operations, the gradient of each end column would first become a whole band
    that is zero elsewhere.
    """

    @staticmethod
    def forward(ctx: Any, band: Tensor) -> tuple[Tensor, Tensor]:
        """The band itself where it is float32 already."""
        ctx.dtype = band.dtype
        ctx.set_materialize_grads(False)
        tails = torch.zeros(4, *band.shape[:-1], dtype=torch.float32, device=band.device)
        tails[0], tails[2] = band[..., 0], band[..., -1]
        return band.view_as(band) if band.dtype == torch.float32 else band.float(), tails

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_band: Tensor | None, d_tails: Tensor | None) -> Tensor | None:
        """The gradient of the band, with the gradients of the tails added to its end columns."""
        if d_band is None or d_tails is None:  # attention gives both, or neither
            return None
        if d_band.shape[-1] == 1:  # one number for all keys does not change a softmax
            return torch.zeros_like(d_band, dtype=ctx.dtype)
        whole = d_band.to(ctx.dtype, copy=True)
        whole[..., 0] = d_band[..., 0] + d_tails[0]
        whole[..., -1] = d_band[..., -1] + d_tails[2]
        return whole
