"""Attention called five times with the same shapes and other numbers, each call against float64.

The fused backend plans its launches at an early call and repeats the plan later. Its fifth call
must see nothing of the earlier ones: its tensors are new, and memory that nobody wrote is NaN. The
error of the output and of every gradient is at most twice that of the definition run by PyTorch in
the same dtype, both as root mean squares. PyTorch's is pooled over the five calls, because the
error of a few numbers in one call is luck. As in benchmarks/gpu_exactness.py, an error below 1e-5
counts as none, in the units of the method's formula; and so does one below the share of a tensor's
size that whence.bench.exactness.FLOOR gives.
"""

import copy
import ctypes
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from shaking import gain, shake
from whence import LagBias, Mask, build
from whence.bench.exactness import ALLOWED, FEW, FLOOR
from whence.kernels.attend import execute
from whence.kernels.call import AttentionCall
from whence.kernels.reference import attend_rows
from whence.method import PositionMethod
from whence.nn.positioned import positioned_call

CALLS = 5
LEAST = 1e-5
HEADS = ("out", "out alone", "q", "k", "v")
Found = dict[str, Tensor]
Execute = Callable[[AttentionCall], Tensor]
Gradients = Callable[[Tensor], Found]  # of the input of a layer


class QueryBands(PositionMethod):
    """A band of its own for every query of every head, its ends repeated beyond."""

    paper, formula = "none: for tests", "band"

    def __init__(self, *shape: int, reach: int = 5) -> None:
        super().__init__()
        self.band = nn.Parameter(torch.zeros(*shape, 2 * reach + 1))

    def score_term(
        self, q: Tensor, q_pos: Tensor, k_pos: Tensor, *, content: Any = None
    ) -> LagBias:
        return LagBias.clipped(self.band)


@dataclass(frozen=True)
class Case:
    """A path through the fused backend: a method, and what else the call has."""

    spec: str
    n_q: int | None = None  # as many as there are keys, or the last few of a cache
    groups: int = 1  # query heads that share a key head
    mask: str = "none"  # or "padded" or "packed"
    causal: bool = False
    window: int | tuple[int | None, int | None] | None = None
    dropout: float = 0.0


CASES = {
    "tisa": Case("tisa"),
    "t5": Case("t5"),
    "alibi": Case("alibi"),
    "shaw": Case("shaw:clip=16"),
    "kerple": Case("kerple"),
    "a band a query": Case("query bands"),
    "tisa causal": Case("tisa", causal=True),
    "shaw causal": Case("shaw:clip=3", causal=True),
    "alibi causal in groups": Case("alibi", causal=True, groups=2),
    "t5 in a window": Case("t5", window=(9, 4)),
    "shaw in a window": Case("shaw:clip=3", window=(7, None)),
    "tisa padded in groups": Case("tisa", mask="padded", groups=2),
    "shaw padded": Case("shaw:clip=3", mask="padded"),
    "t5 packed": Case("t5", mask="packed"),
    "a band a query packed": Case("query bands", mask="packed", causal=True),
    "tisa with dropout": Case("tisa", dropout=0.25),
    "shaw with dropout": Case("shaw:clip=3", dropout=0.25),
}
DECODING = {
    f"{spec} for {n_q} of a cache": Case(spec, n_q=n_q, causal=True, groups=2)
    for spec in ("tisa", "t5", "alibi", "shaw:clip=3", "kerple")
    for n_q in (1, 3)
}


@dataclass(frozen=True)
class Sizes:
    """The shapes of q, k and v, and the dtype and device that they have."""

    n: int
    batch: int = 2
    heads: int = 4
    d_head: int = 64
    dtype: torch.dtype = torch.bfloat16
    device: str = "cuda"


class Outcome(NamedTuple):
    """The output and the gradients of one call: ours, PyTorch's in the same dtype, and the truth."""

    ours: Found
    plain: Found
    truth: Found


def five_calls(
    case: Case,
    sizes: Sizes,
    *,
    between: Callable[[], None] = lambda: None,
    run: Execute = lambda call: execute(call, backend="fused"),
) -> list[Outcome]:
    """The outcomes of five calls; `between` is called before each, when old inputs are freed."""
    outcomes = []
    for time in range(CALLS):
        between()
        outcomes.append(_outcome(case, sizes, time, run))
    return outcomes


def five_steps(
    ours: Gradients, plain: Gradients, truth: Gradients, draw: Callable[[], Tensor]
) -> list[Outcome]:
    """The outcomes of five training steps, each on an input of its own."""
    outcomes = []
    for _ in range(CALLS):
        x = draw()
        outcomes.append(
            Outcome(*({n: g.double() for n, g in f(x).items()} for f in (ours, plain, truth)))
        )
    return outcomes


def gradients_of(
    layer: nn.Module, forward: Callable[[Tensor], Tensor], x: Tensor
) -> dict[str, Tensor]:
    """The output's gradients, in the units of each method's formula, of x and of every parameter.

    The output's own gradient is fixed: a cosine, of which no two numbers are alike.
    """
    x = x.detach().requires_grad_()
    out = forward(x)
    slope = torch.arange(out.numel(), device=out.device).double().cos().view(out.shape)
    named = dict(layer.named_parameters())
    found = torch.autograd.grad(out, [x, *named.values()], slope.to(out.dtype))
    pairs = zip(["x", *named], found, strict=True)
    return {"out": out.detach(), **{name: g / gain(name) for name, g in pairs}}


def errors_beyond(outcomes: list[Outcome], dtype: torch.dtype) -> dict[str, float]:
    """What of the first and the fifth call is off by more than twice PyTorch's error, and how far."""
    beyond = {}
    for name in outcomes[0].truth:
        plain = _root_mean_square([each.plain[name] - each.truth[name] for each in outcomes])
        floor = FLOOR[dtype] * (1 if name in HEADS else FEW)
        for time in (0, CALLS - 1):
            ours, _, truth = outcomes[time]
            error = _root_mean_square([ours[name] - truth[name]])
            allowed = max(plain, floor * _root_mean_square([truth[name]]), LEAST)
            if not error <= ALLOWED * allowed:  # NaN is beyond, too
                beyond[f"{name} at call {time + 1}"] = error / allowed
    return beyond


def fill_free_gpu_memory_with_nan() -> None:
    """Let most allocations that follow on this stream, also those inside PyTorch, find NaN.

    PyTorch's allocator cuts small tensors out of blocks of 2 MB and larger ones out of 20 MB. Gaps
    between tensors that are still alive are filled by the smallest of these.
    """
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    mega = 1 << 20
    pools = {128 * mega: 2, 5 * mega: 32, mega: 32, 1 << 16: 32, 1 << 12: 64, 1 << 9: 64}
    held = [
        torch.full((size // 4,), torch.nan, device="cuda")
        for size, count in pools.items()
        for _ in range(count)
    ]
    del held


@pytest.fixture
def nan_in_empty_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that Python takes and does not write holds NaN, and -1 where it holds integers.

    Of a call that is being recorded, an operation of PyTorch would become a part: so memory of the
    CPU is written past PyTorch, and that of a GPU only while nobody records.
    """

    def poisoned(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def made(*args: Any, **options: Any) -> Tensor:
            x = make(*args, **options)
            if type(x) is not Tensor:
                return x
            if x.device.type == "cpu":
                ctypes.memset(x.data_ptr(), 0xFF, x.untyped_storage().nbytes())
            elif x.is_cuda and torch._C._len_torch_dispatch_stack() == 0:
                x.untyped_storage().fill_(0xFF)
            return x

        return made

    for name in ("empty", "empty_strided", "empty_like"):
        monkeypatch.setattr(torch, name, poisoned(getattr(torch, name)))
    for name in ("new_empty", "new_empty_strided"):
        monkeypatch.setattr(Tensor, name, poisoned(getattr(Tensor, name)))
    guards = torch._C._dynamo.guards  # from which compiled code and launch plans allocate
    make = poisoned(guards._empty_strided_cuda)
    monkeypatch.setattr(guards, "_empty_strided_cuda", make)


def _outcome(case: Case, sizes: Sizes, time: int, run: Execute) -> Outcome:
    torch.manual_seed(1000 + time)
    n_q, device = case.n_q or sizes.n, sizes.device
    kv_heads = sizes.heads // case.groups
    shape = (sizes.batch, sizes.heads, n_q)
    if case.spec == "query bands":
        method: PositionMethod = QueryBands(*shape)
    else:
        method = build(case.spec, n_heads=sizes.heads, d_head=sizes.d_head, causal=case.causal)
    shake(method, 0.3)
    method = method.to(device)
    heads = [
        torch.randn(sizes.batch, n, h, sizes.d_head, device=device).to(sizes.dtype).transpose(1, 2)
        for n, h in ((n_q, sizes.heads), (sizes.n, kv_heads), (sizes.n, kv_heads))
    ]
    slope = torch.randn(*shape, sizes.d_head, device=device).to(sizes.dtype)
    mask = _mask(case.mask, sizes)
    keep = _kept(case, sizes, time, run) if case.dropout else None

    def definition(call: AttentionCall) -> Tensor:
        whole = replace(call, dropout=0.0).with_kv_heads_expanded()
        return attend_rows(whole, slice(0, n_q), keep=keep)

    def found(dtype: torch.dtype, execute_call: Execute) -> Found:
        """In float64 the method is, too; else it stays in float32."""
        wide = dtype == torch.float64
        own = copy.deepcopy(method).to(torch.float64 if wide else torch.float32)
        q, k, v = leaves = [x.detach().to(dtype).requires_grad_() for x in heads]

        def called() -> Tensor:
            torch.manual_seed(time)  # of dropout
            options = {"causal": case.causal, "window": case.window, "dropout": case.dropout}
            return execute_call(positioned_call(own, q, k, v, mask=mask, **options))

        out = called()
        with torch.no_grad():  # the backend may take another way where no gradient is wanted
            alone = called()
        names = ["q", "k", "v", *(name for name, _ in own.named_parameters())]
        targets = [*leaves, *own.parameters()]
        gradients = torch.autograd.grad(out, targets, slope.to(out.dtype), allow_unused=True)
        results = {"out": out.detach(), "out alone": alone}
        for name, target, x in zip(names, targets, gradients, strict=True):
            results[name] = torch.zeros_like(target) if x is None else x / gain(name)
        return {name: x.double() for name, x in results.items()}

    return Outcome(
        ours=found(sizes.dtype, run),
        plain=found(sizes.dtype, definition),
        truth=found(torch.float64, definition),
    )


def _mask(kind: str, sizes: Sizes) -> Mask | None:
    if kind == "padded":
        return Mask.padding(torch.randint(1, sizes.n + 1, (sizes.batch,)).to(sizes.device), sizes.n)
    if kind == "packed":
        cuts = torch.randint(1, sizes.n, (2,)).sort().values
        ends = torch.tensor([0, *cuts.tolist(), sizes.n], device=sizes.device)
        return Mask.packed(ends, sizes.n)
    return None


def _kept(case: Case, sizes: Sizes, time: int, run: Execute) -> Tensor:
    """What dropout multiplies each weight by, read off from equal weights of one-hot values."""
    n, b, h = sizes.n, sizes.batch, sizes.heads
    q, k = (torch.zeros(b, h, n, 16, device=sizes.device) for _ in range(2))
    eye = torch.eye(n, device=sizes.device).expand(b, h, n, n)
    nowhere = build("nope", n_heads=h, d_head=16)
    call = positioned_call(nowhere, q, k, eye, dropout=case.dropout)
    torch.manual_seed(time)
    with torch.no_grad():
        kept = (execute(call, backend="fused") != 0).double()
    share = 1 - kept.mean().item()
    spread = (case.dropout * (1 - case.dropout) / kept.numel()) ** 0.5
    assert abs(share - case.dropout) < 5 * spread
    return kept / (1 - case.dropout)


def _root_mean_square(each: list[Tensor]) -> float:
    return torch.stack([x.square().mean() for x in each]).mean().sqrt().item()
