"""Describes an attention call with a method in words: its terms and its backends.

Nothing is allocated, so calls of any length and on any device can be described on any machine.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from whence.checks import at_least, require
from whence.kernels import Explanation, explain
from whence.lag import Bias, DeferredBias, DenseBias, LagBias, LagValues, Line, LowRankBias
from whence.method import Content, PositionMethod
from whence.methods import build


@dataclass(frozen=True)
class Described:
    """The answer of `describe`: what a method adds at each site, and which backends run the call.

    >>> describe("t5", length=1_000_000, device="cuda").terms
    ('score: a lag bias, reach 92, one band shared by all queries, tails constant',)
    """

    sites: tuple[str, ...]
    parameters: int
    terms: tuple[str, ...]
    explanation: Explanation
    caveats: tuple[str, ...] = ()  # in what the described call differs from the one asked about


def describe(
    spec: str,
    *,
    length: int = 8192,
    n_heads: int = 12,
    n_kv_heads: int | None = None,
    d_head: int = 64,
    batch: int = 1,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    causal: bool = False,
    window: int | None = None,
    dropout: float = 0.0,
    train: bool = True,
) -> Described:
    """Describe self-attention of this shape with the method that `spec` names, under fake tensors.

    Fake tensors have a shape, a dtype and a device but no memory, so any length and any device can
    be asked about on any machine. Dropout counts in training only. A method that must read numbers
    (FLOATER's solver does) is asked with real tensors at a short length, and `caveats` says so.

        >>> found = describe("shaw", length=4096, n_heads=8, d_head=64)
        >>> found.sites, found.explanation.chosen
        (('score', 'value'), 'sdpa')
    """
    n_kv_heads = n_heads if n_kv_heads is None else n_kv_heads
    at_least(1, length=length, heads=n_heads, kv_heads=n_kv_heads, d_head=d_head, batch=batch)
    require(
        n_heads % n_kv_heads == 0,
        f"heads must be a multiple of kv_heads, got {n_heads} and {n_kv_heads}.",
    )
    shape = CallShape(batch, n_heads, n_kv_heads, length, d_head, dtype, causal, train)
    fake, caveats = FakeTensorMode(), []
    try:
        with torch.device("meta"):
            method = shape.build(spec)
        with fake:
            _fake(method, dtype)
            said = _run_hooks(method, shape)
            words = said.words(method)  # here, because it may evaluate a bias of fake tensors
    except DataDependentOutputException:
        shape = dataclasses.replace(shape, batch=1, length=min(length, 8))
        caveats.append(f"it reads numbers, so it was asked at length {shape.length}, batch 1")
        method = shape.build(spec).to(dtype)
        said = _run_hooks(method, shape)
        words = said.words(method)
    if method.causal_only and not causal:
        caveats.append("it is for causal attention only, and the call is not causal")
    # Autograd asks a device for its streams, even for fake tensors, and aborts without the device.
    graph = train and (device == "cpu" or torch.cuda.is_available())
    if train and not graph:
        caveats.append(f"no {device} here, so it was judged without an autograd graph")
    with fake, torch.set_grad_enabled(graph):
        heads: tuple[Tensor, ...] = _moved_to(said.heads, device)
        if shape.length < length and said.bias is None and said.values is None:
            heads = tuple(x.new_empty(batch, x.shape[1], length, x.shape[3]) for x in heads)
        explanation = explain(
            *heads,
            bias=_moved_to(said.bias, device),
            values=_moved_to(said.values, device),
            causal=causal,
            window=window,
            scale=0.0 if said.replaces else d_head**-0.5,
            dropout=dropout if train else 0.0,
        )
    return Described(method.sites(), method.n_parameters(), words, explanation, tuple(caveats))


@dataclass(frozen=True)
class CallShape:
    """The shape of the described call."""

    batch: int
    n_heads: int
    n_kv_heads: int
    length: int
    d_head: int
    dtype: torch.dtype
    causal: bool
    train: bool

    def build(self, spec: str) -> PositionMethod:
        """The method for this call."""
        return build(
            spec,
            n_heads=self.n_heads,
            d_head=self.d_head,
            max_length=self.length,
            causal=self.causal,
        )


@dataclass(frozen=True, eq=False)
class HookResults:
    """The terms that the hooks of a method returned."""

    heads: tuple[Tensor, Tensor, Tensor]
    bias: Bias | None
    replaces: bool
    values: LagValues | None
    d_head: int

    def words(self, method: PositionMethod) -> tuple[str, ...]:
        """A phrase for each term."""
        said = []
        if "input" in method.sites():
            said.append("input: a vector a position, added to the embedding before attention")
        if "heads" in method.sites():
            width = self.heads[0].shape[-1]
            grown = "" if width == self.d_head else f", {self.d_head} columns become {width}"
            said.append(f"heads: changed before the dot product, linear memory{grown}")
        site = "replace" if self.replaces else "score"
        parts = [] if self.bias is None else self.bias.terms().parts()
        said += [f"{site}: {_kind(part)}" for part in parts]
        if self.values is not None:
            reach = self.values.reach
            said.append(f"value: a vector a lag, reach {reach}, the end rows go on beyond it")
        return tuple(said)


def _run_hooks(method: PositionMethod, shape: CallShape) -> HookResults:
    """Run every hook on CPU tensors: a fake tensor of a missing device cannot be indexed."""
    with torch.set_grad_enabled(shape.train):
        pos = torch.arange(shape.length)
        q, k, v = (
            torch.zeros(shape.batch, h, shape.length, shape.d_head, dtype=shape.dtype)
            for h in (shape.n_heads, shape.n_kv_heads, shape.n_kv_heads)
        )
        for x in (q, k, v):
            x.requires_grad_(shape.train)
        x = torch.zeros(shape.batch, shape.length, shape.n_heads * shape.d_head, dtype=shape.dtype)
        content = Content(x, x, k)
        bias = replaced = method.logits(q, pos, pos, content=content)
        if replaced is None:
            bias = method.score_term(q, pos, pos, content=content)
        heads = (method.query_heads(q, pos), method.key_heads(k, pos), method.value_heads(v, pos))
        return HookResults(
            heads, bias, replaced is not None, method.value_term(pos, pos), shape.d_head
        )


def _fake(method: PositionMethod, dtype: torch.dtype) -> None:
    """Replace every parameter and buffer by a fake one of this dtype."""

    def fake(x: Tensor) -> Tensor:
        return torch.empty(x.shape, dtype=dtype if x.is_floating_point() else x.dtype)

    for module in method.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(fake(parameter), parameter.requires_grad))
        for name, buffer in list(module.named_buffers(recurse=False)):
            setattr(module, name, fake(buffer))


T = TypeVar("T")


def _moved_to(part: T, device: str) -> T:
    """A tensor, a term or a tuple of them, with fake tensors of another device instead."""
    moved: Any = part
    if isinstance(part, Tensor):
        moved = torch.empty_strided(part.shape, part.stride(), dtype=part.dtype, device=device)
        moved = moved.requires_grad_(part.requires_grad)
    elif isinstance(part, tuple):
        moved = tuple(_moved_to(item, device) for item in part)
    elif isinstance(part, DeferredBias):  # its band is made of its tensors
        moved = part.made_of(*(_moved_to(x, device) for x in part.tensors()))
    elif dataclasses.is_dataclass(part) and not isinstance(part, type):
        names = [field.name for field in dataclasses.fields(part)]
        moved = dataclasses.replace(part, **{n: _moved_to(getattr(part, n), device) for n in names})
    return cast(T, moved)


def _kind(part: Bias) -> str:
    if isinstance(part, LagBias):
        shared = part.shape[2] == 1
        bands = "one band shared by all queries" if shared else "one band for each query"
        return f"a lag bias, reach {part.reach}, {bands}, {_tails(part)}"
    if isinstance(part, LowRankBias):
        return f"low rank, {part.query.shape[-1]} extra columns of the heads, linear memory"
    assert isinstance(part, DenseBias)
    return f"dense, one number for each query and key, because {part.why}"


def _tails(bias: LagBias) -> str:
    if bias.left is None or bias.right is None:
        return "no tails (nothing lies beyond the reach)"
    left, right = _line(bias.left), _line(bias.right)
    return f"tails {left}" if left == right else f"left tail {left}, right tail {right}"


def _line(line: Line) -> str:
    if line.slope is not None:
        return "sloped"
    return "zero" if line.const is None else "constant"
