"""Probes: a question about a method, answered by running it, at whatever site position enters."""

import copy
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from whence.method import Content, PositionMethod
from whence.methods import build
from whence.methods.registry import named
from whence.nn import positioned_attention
from whence.units import GAIN

HEADS, D_HEAD, LENGTH = 4, 16, 32
FAR = 1009  # a shift beyond any length that a method has for a threshold; prime, so no whole period
HELD = ("raw_", "held_")  # names of numbers that are held as a GAIN-th of themselves
STRETCH = 8  # how many times the length a method was built for
OPERATIONS_AT = (64, 256)
TIMED_AT = 256


class FirstLayer:
    """Attention as the first layer sees it: x plus the input term, through fixed projections."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        d_model = HEADS * D_HEAD
        self.projections = torch.randn(3, d_model, d_model, dtype=dtype) * d_model**-0.5

    def heads(
        self, method: PositionMethod, x: Float[Tensor, "b n d_model"], start: int
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The layer's input with its input term, and q, k, v [b, h, n, d] made from it."""
        term = method.input_term(torch.arange(start, start + x.shape[1]))
        x = x if term is None else x + term
        q, k, v = ((x @ w).unflatten(-1, (HEADS, D_HEAD)).transpose(1, 2) for w in self.projections)
        return x, q, k, v

    def logits(
        self, method: PositionMethod, x: Float[Tensor, "b n d_model"], start: int = 0
    ) -> Float[Tensor, "b h n n"]:
        """scale q.k + bias, or what the method puts in its place: nothing is masked."""
        pos = torch.arange(start, start + x.shape[1])
        x, q, k, _ = self.heads(method, x, start)
        content = Content(x, x, k)
        replaced = method.logits(q, pos, pos, content=content)
        if replaced is not None:
            return replaced.to_dense(pos, pos).expand(*q.shape[:2], -1, -1)
        query, key = method.query_heads(q, pos), method.key_heads(k, pos)
        product: Tensor = query @ key.transpose(-1, -2) * D_HEAD**-0.5
        bias = method.score_term(q, pos, pos, content=content)
        return product if bias is None else product + bias.to_dense(pos, pos)

    def values(
        self, method: PositionMethod, x: Float[Tensor, "b n d_model"]
    ) -> Float[Tensor, "b h n n d"]:
        """What each query would get from each key if it looked at no other."""
        pos = torch.arange(x.shape[1])
        *_, v = self.heads(method, x, 0)
        pairs = method.value_heads(v, pos)[:, :, None].expand(-1, -1, len(pos), -1, -1)
        term = method.value_term(pos, pos)
        if term is None:
            return pairs
        lag = (pos - pos[:, None]).clamp(-term.reach, term.reach)
        return pairs + term.table[:, lag + term.reach]

    def output(
        self,
        method: PositionMethod,
        x: Float[Tensor, "b n d_model"],
        *,
        causal: bool = False,
        backend: str = "reference",
    ) -> Float[Tensor, "b h n d"]:
        """The whole of attention, the values' site included."""
        method.begin(x.shape[1])
        x, q, k, v = self.heads(method, x, 0)
        return positioned_attention(method, q, k, v, x_q=x, x_k=x, causal=causal, backend=backend)


def made(
    spec: str, max_length: int, dtype: torch.dtype = torch.float64
) -> tuple[PositionMethod, bool]:
    """The method with its parameters moved off their start, and whether it is for causal use.

    Many parameters start at or near zero, where a method would look as if it did nothing. A matrix
    moves by weights that keep the size of what it multiplies, anything else by a little. A number
    that is held as a part of itself (`whence.units`) moves by that part.
    """
    causal = any(part.cls.causal_only for part in named(spec))
    method = build(spec, n_heads=HEADS, d_head=D_HEAD, max_length=max_length, causal=causal)
    method = method.to(dtype)
    with torch.no_grad():
        for part in method.modules():
            for name, parameter in part.named_parameters(recurse=False):
                size = parameter.shape[-1] ** -0.5 if parameter.ndim > 1 else 0.3
                if getattr(part, "logit_sized", False) and name.startswith(HELD):
                    size /= GAIN
                parameter.add_(torch.randn_like(parameter), alpha=size)
    return method, causal


def longest_run(spec: str) -> tuple[int, str]:
    """How many times the length it was built for it runs and stays finite, at most STRETCH.

    With a parameter more than before it would be another method; then, or on an error, the second
    part says why it stops.
    """
    with _alone(), torch.no_grad():
        method, causal = made(spec, LENGTH)
        layer, before, factor = FirstLayer(), method.n_parameters(), 1
        while factor < STRETCH:
            x = torch.randn(1, 2 * factor * LENGTH, HEADS * D_HEAD, dtype=torch.float64)
            try:
                out = layer.output(method, x, causal=causal)
            except (ValueError, IndexError, RuntimeError) as error:
                return factor, str(error)
            if not bool(out.isfinite().all()):
                return factor, "the output is not finite"
            if method.n_parameters() != before:
                return factor, "it made new parameters"
            factor *= 2
    return factor, ""


def learning_parameters(spec: str) -> tuple[int, int]:
    """Parameters through which position can learn at this length, and all parameters.

    The same tokens are put in several orders. Without position the logit of a pair of tokens, and
    the value that one gets from the other, would stay as they were; the gradient of the variance
    that is there reaches the parameters that make position. (The output would not do: what weighs
    content against position has a gradient there, and need not be of position.)
    """
    with _alone(), torch.enable_grad():
        method, _ = made(spec, LENGTH)
        parameters = list(method.parameters())
        total = sum(parameter.numel() for parameter in parameters)
        method.begin(LENGTH)
        order = _orders(8)
        tokens = torch.randn(LENGTH, HEADS * D_HEAD, dtype=torch.float64)
        layer, x, place = FirstLayer(), tokens[order], order.argsort(dim=-1)
        found = (layer.logits(method, x)[..., None], layer.values(method, x))
        varied = sum(_by_tokens(part, place).var(dim=0).mean() for part in found)
        assert isinstance(varied, Tensor)
        if not varied.requires_grad:
            return 0, total
        gradients = torch.autograd.grad(varied, parameters, allow_unused=True)
        # A parameter of the content alone has a gradient of rounding errors, some 1e-17.
        reached = sum(int((g.abs() > 1e-12).sum()) for g in gradients if g is not None)
    return reached, total


def _by_tokens(x: Float[Tensor, "b h n n c"], place: Tensor) -> Float[Tensor, "b h n n c"]:
    """Rows and columns from the order of places to that of the tokens."""
    batch = torch.arange(len(place))[:, None, None]
    found: Tensor = x.movedim(1, -1)[batch, place[:, :, None], place[:, None, :]].movedim(-1, 1)
    return found


def largest_change(spec: str) -> float:
    """Of any logit when all positions shift, by one and far, over the logits' largest deviation."""
    with _alone(), torch.no_grad():
        method, causal = made(spec, FAR + LENGTH)
        method.begin(FAR + LENGTH)
        x = torch.randn(4, LENGTH, HEADS * D_HEAD, dtype=torch.float64)
        layer, seen = FirstLayer(), _seen(causal)
        here = layer.logits(method, x)[..., seen]
        there = [layer.logits(method, x, start)[..., seen] for start in (1, FAR)]
        change = max(float((shifted - here).abs().max()) for shifted in there)
        return change / max(float(logits.std()) for logits in (here, *there))


def operations(spec: str) -> tuple[int, int]:
    """Operations that one pass dispatches at each of the two lengths OPERATIONS_AT.

    An operation is counted whatever its size, so this is the length of the chain that a device must
    walk one by one. A loop inside an operation is not seen.
    """
    counts = []
    for length in OPERATIONS_AT:
        with _alone(), torch.no_grad():
            method, causal = made(spec, length, torch.float32)
            x = torch.randn(1, length, HEADS * D_HEAD)
            layer = FirstLayer(torch.float32)
            count = _Count()  # type: ignore[no-untyped-call]
            with count:
                layer.output(method, x, causal=causal)
        counts.append(count.operations)
    return counts[0], counts[1]


def lag_share(spec: str) -> float | None:
    """The share of position's part of the logits that head and lag explain; None if it has none.

    The same tokens are put in random orders at random places. What then changes in the logit of a
    pair of tokens is position's part. A sum of an effect a pair and an effect a (head, lag) is
    fitted by least squares: with the pairs' means taken out of both sides, only the lags are left.
    """
    with _alone(), torch.no_grad():
        method, causal = made(spec, FAR + LENGTH)
        method.begin(FAR + LENGTH)
        layer, seen = FirstLayer(), _seen(causal)
        tokens = torch.randn(LENGTH, HEADS * D_HEAD, dtype=torch.float64)
        lags = (torch.arange(LENGTH) - torch.arange(LENGTH)[:, None] + LENGTH - 1)[seen]
        logits, pairs = [], []
        for start in torch.linspace(0, FAR, 8).long().tolist():
            order = _orders(8)
            logits.append(layer.logits(method, tokens[order], start)[..., seen].transpose(1, 2))
            pairs.append((order[:, :, None] * LENGTH + order[:, None, :])[..., seen])
        y, pair = torch.cat(logits).flatten(0, 1), torch.cat(pairs).flatten()
        lag = lags.expand(len(y) // len(lags), -1).flatten()
        effects = torch.nn.functional.one_hot(lag, 2 * LENGTH - 1).to(y.dtype)
        whole = (y - y.mean(dim=0)).square().sum()
        y, effects = _less_mean_of_group(y, pair), _less_mean_of_group(effects, pair)
        position = y.square().sum()
        if position <= 1e-20 * whole:
            return None
        normal = torch.linalg.pinv(effects.T @ effects, hermitian=True)
        left = y - effects @ (normal @ (effects.T @ y))
        return float(1 - left.square().sum() / position)


def relative_time(spec: str) -> float:
    """Forward at TIMED_AT tokens on one thread here, as a multiple of the same without position.

    The fastest of several passes counts, and the two take turns: others may use the machine too.
    """
    with _alone(), torch.no_grad():
        method, causal = made(spec, TIMED_AT, torch.float32)
        x = torch.randn(1, TIMED_AT, HEADS * D_HEAD)
        layer, pair = FirstLayer(torch.float32), (method, PositionMethod())
        begun = time.perf_counter()
        taken: list[tuple[float, ...]] = []
        while len(taken) < 2 or (len(taken) < 30 and time.perf_counter() - begun < 0.15):
            taken.append(tuple(_seconds(layer, which, x, causal) for which in pair))
    return min(ours for ours, _ in taken) / min(plain for _, plain in taken)


def _seconds(layer: FirstLayer, method: PositionMethod, x: Tensor, causal: bool) -> float:
    fresh = copy.deepcopy(method)  # what a pass leaves behind for the next one does not count
    start = time.perf_counter()
    layer.output(fresh, x, causal=causal, backend="auto")
    return time.perf_counter() - start


def _orders(count: int) -> Tensor:
    return torch.stack([torch.randperm(LENGTH) for _ in range(count)])


def _seen(causal: bool) -> Tensor:
    """Pairs (query, key) that a model looks at, [n, n]."""
    seen = torch.ones(LENGTH, LENGTH, dtype=torch.bool)
    return seen.tril() if causal else seen


def _less_mean_of_group(x: Float[Tensor, "n c"], group: Tensor) -> Float[Tensor, "n c"]:
    sums = x.new_zeros(int(group.max()) + 1, x.shape[1]).index_add_(0, group, x)
    sizes = group.bincount(minlength=len(sums)).clamp(min=1)
    return x - (sums / sizes[:, None])[group]


@contextmanager
def _alone() -> Iterator[None]:
    """The same random numbers in every probe, on one thread; the caller's stay as they were.

    The tensors are small: more threads would only wait for each other.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            yield
    finally:
        torch.set_num_threads(threads)


class _Count(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts what torch dispatches."""

    operations = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.operations += 1
        return func(*args, **(kwargs or {}))
