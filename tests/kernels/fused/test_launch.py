"""The fused backend's kernels and the order of their launches, against the definition.

A plan that launches at once stands in for the one that records; Triton's interpreter runs the kernels.
"""

import inspect
import random
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from whence import LagBias, LagValues, Line, Mask, attend
from whence.lag import QueryBias
from whence.lag.deferred import BUCKETS
from whence.methods.tisa import Tisa
from whence.units import GAIN

pytestmark = [
    pytest.mark.usefixtures("_interpreter"),
    pytest.mark.triton,
    # A cell out of sight may have any logit; whatever its exponential is, its weight is made 0.
    pytest.mark.filterwarnings("ignore:overflow encountered in exp"),
]


@pytest.fixture(autouse=True)
def _poisoned():
    """Memory that nobody wrote holds NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True)
def _tiled(_interpreter: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small calls take the kernels of long ones, which cut a head into tiles."""
    from whence.kernels.fused import short

    monkeypatch.setattr(short, "is_faster", lambda q, k, v, call: False)


class Immediate:
    """A plan that does everything at once, with tensors for slots, or decides everything only."""

    device = torch.device("cpu")

    def __init__(self, *, runs: bool = True) -> None:
        self.runs = runs
        self.launched: list[str] = []
        self.constants: dict[str, dict[str, Any]] = {}  # of each kernel
        self.grids: dict[str, tuple[int, ...]] = {}
        self.groups: dict[str, tuple[object, ...]] = {}
        self.specialised: list[object] = []  # what kernels are compiled anew for

    def reserved(self, room: Any) -> Tensor:
        return self.empty(room.shape, room.dtype, room.tokens)

    def empty(self, shape: Sequence[int], dtype: torch.dtype, tokens: bool = False) -> Tensor:
        if tokens:
            b, h, n, d = shape
            return torch.empty(b, n, h, d, dtype=dtype).transpose(1, 2)
        return torch.empty(*shape, dtype=dtype)

    def zeros(self, shape: Sequence[int], dtype: torch.dtype, *, tokens: bool = False) -> Tensor:
        return self.empty(shape, dtype, tokens).zero_()

    def summed(self, slot: Tensor, shape: Sequence[int]) -> Tensor:
        return slot.sum_to_size(*shape)

    def launch(
        self,
        kernel: Any,
        grid: tuple[int, ...],
        *groups: object,
        warps: int = 4,
        stages: int = 3,
        registers: int | None = None,
        chained: bool = False,
        side: bool = False,
        **constants: object,
    ) -> None:
        self.launched.append(kernel.fn.__name__)
        self.constants[kernel.fn.__name__] = constants
        self.grids[kernel.fn.__name__] = grid
        self.groups[kernel.fn.__name__] = groups
        names = inspect.signature(kernel.fn).parameters
        free = kernel.kwargs["do_not_specialize"] or ()
        for name, group in zip(names, groups, strict=False):  # the constants follow
            if name not in free or isinstance(group, tuple):  # it does not reach into tuples
                self.specialised += _specialised(group)
        if self.runs:
            kernel[grid](*groups, num_warps=warps, num_stages=stages, **constants)


def _specialised(argument: object) -> list[object]:
    """Whether each whole number is 1 and whether it is a multiple of 16, as Triton asks.

    Of a number that is a constant of the kernel, all of it.
    """
    if isinstance(argument, tuple):
        return [x for part in argument for x in _specialised(part)]
    if type(argument).__name__ == "constexpr":  # Triton's, which is a Linux package
        return [argument.value]  # type: ignore[attr-defined]
    return [(argument == 1, argument % 16 == 0)] if isinstance(argument, int) else []


def launched(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    weight: Tensor,
    inputs: dict[str, Tensor | None],
    *,
    product: Any = None,
    curve: Any = None,
    far: Any = None,
    far_gradients: Any = None,
    wanted: tuple[bool, ...] = (True, True, True, True),
    by_rows: tuple[int, int] = (16, 16),
    by_keys: tuple[int, int] = (16, 16),
    runs: bool = True,
    **numbers: Any,
) -> tuple[Tensor, Any, Immediate]:
    """The output, the gradients of (out * weight).sum(), and the plan."""
    from whence.kernels.fused.backend import Inputs, Numbers, Task, Wanted
    from whence.kernels.fused.launch import backward, forward
    from whence.kernels.fused.tiles import Tiles, TileSet

    plan, tiles = Immediate(runs=runs), Tiles(16, 16, 1, 1)
    defaults = {"q_start": 0, "before": -1, "after": -1, "dropout": 0.0, "slopes": False}
    defaults |= {"scale": q.shape[-1] ** -0.5, "far": 0 if far is None else far.start}
    both = {**defaults, **numbers}
    parts = {name: None if x is None else x.detach() for name, x in inputs.items()}
    heads = (q.detach(), k.detach(), v.detach())
    task = Task(*heads, Inputs(**parts), Numbers(**both), product, curve, far)
    kept = forward(plan, task, tiles)
    of_gradients = TileSet(tiles, Tiles(*by_rows, 1, 1), Tiles(*by_keys, 1, 1), 16)
    grads = backward(plan, weight, task, kept, of_gradients, Wanted(*wanted), far_gradients)
    return kept.out, grads, plan


def assert_equal(found: Sequence[Tensor | None], wanted: Sequence[Tensor | None]) -> None:
    for a, b in zip(found, wanted, strict=True):
        assert a is not None
        b = torch.zeros_like(a) if b is None else b
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


def defined(
    q: Tensor, k: Tensor, v: Tensor, leaves: list[Tensor], **options: Any
) -> tuple[Tensor, Tensor, Sequence[Tensor | None]]:
    """The definition's output, a weight of its cells, and gradients of the weighted sum."""
    out = attend(q, k, v, **options, backend="reference")
    weight = torch.randn_like(out)
    return out, weight, torch.autograd.grad((out * weight).sum(), leaves, allow_unused=True)


def leaf(*shape: int) -> Tensor:
    return torch.randn(shape).requires_grad_()


@pytest.mark.parametrize("seed", range(24))
def test_output_and_every_gradient_equal_the_definition(seed: int) -> None:
    torch.manual_seed(seed)
    pick = random.Random(seed).choice
    b, kv_heads, groups = pick([1, 2]), pick([1, 2]), pick([1, 2])
    h, n_k, d = kv_heads * groups, pick([17, 33, 48]), pick([4, 16, 24])
    n_q, d_v, start = pick([1, n_k, 7]), pick([d, 16]), pick([0, 0, 2])
    q = leaf(b, n_q, h, d).transpose(1, 2) if pick([True, False]) else leaf(b, h, n_q, d)
    k, v = leaf(b, kv_heads, n_k, d), leaf(b, kv_heads, n_k, d_v)
    axes, reach = (pick([1, b]), pick([1, h]), pick([1, n_q])), pick([0, 3, 9, 20])
    inputs: dict[str, Tensor | None] = {}
    bias, slopes = None, pick([True, False])
    kind = ["band", "extent", "tails", "none"][seed % 4]
    if kind == "extent":  # nothing beyond lag 4
        near = (torch.arange(-reach, reach + 1).abs() <= 4).float()
        inputs["band"] = (leaf(1, h, 1, 2 * reach + 1) * near).detach().requires_grad_()
        inputs["extent"] = torch.full((h,), min(4, reach), dtype=torch.int32)
        bias = LagBias(inputs["band"], Line(), Line(), inputs["extent"])
    elif kind != "none":
        inputs["band"] = leaf(*axes, 2 * reach + 1)
        bias = LagBias(inputs["band"], Line(), Line())
    if kind == "tails":
        inputs["tails"] = tails = leaf(4, *axes)
        with torch.no_grad():
            tails[1::2] *= slopes
        lines = [Line(tails[i], tails[i + 1] if slopes else None) for i in (0, 2)]
        bias = LagBias(inputs["band"], *lines)
    values = None
    if pick([True, False]):
        inputs["table"] = leaf(pick([1, h]), 2 * pick([0, 2, 5]) + 1, d_v)
        values = LagValues(inputs["table"])
    mask, choice = None, pick(["none", "keys", "segments"])
    if choice == "keys":
        mask = torch.rand(b, n_k) > 0.3
        inputs["keys"] = mask.to(torch.uint8)
    elif choice == "segments":
        segments = (torch.arange(n_q)[None] // 5, torch.arange(n_k)[None] // 5)
        mask = Mask(segments=segments)
        inputs["q_segment"], inputs["k_segment"] = (x.to(torch.int32) for x in segments)
    causal, before = pick([True, False]), pick([-1, -1, 3])
    options = {
        "bias": bias,
        "values": values,
        "mask": mask,
        "causal": causal,
        "window": None if before < 0 else (before, None),
        "q_start": start,
    }
    names = [name for name in ("band", "tails", "table") if name in inputs]
    leaves = [q, k, v, *[inputs[name] for name in names]]
    out, weight, wanted = defined(q, k, v, leaves, **options)
    numbers = {"q_start": start, "before": before, "after": 0 if causal else -1}
    found, grads, _ = launched(
        q, k, v, weight, inputs, slopes=kind == "tails" and slopes, **numbers
    )
    torch.testing.assert_close(found, out, rtol=1e-4, atol=1e-5)
    given = [grads.q, grads.k, grads.v, *[getattr(grads, name) for name in names]]
    if kind == "tails" and not slopes:  # the definition has no slope to take a gradient of
        place = 3 + names.index("tails")
        given[place] = torch.stack([given[place][i] * (i % 2 == 0) for i in range(4)])
    if kind == "extent":  # the definition knows the cells beyond the extent too
        wanted = [x if i != 3 or x is None else x * near for i, x in enumerate(wanted)]
        given[3] = given[3] * near
    assert_equal(given, wanted)


class Banded(NamedTuple):
    """A call with a band that all rows share."""

    n_q: int
    n_k: int
    reach: int
    start: int = 0
    before: int = -1
    after: int = -1
    b: int = 1
    heads: int = 2
    kv_heads: int = 2
    band: tuple[int, int] = (1, 2)  # its batches and heads
    extents: tuple[int, ...] | None = None  # of the heads
    slopes: bool = False  # tails with slopes beyond the reach
    by_row: bool = False  # these tails are of each row
    table: int | None = None  # the reach of a value table
    segments: bool = False
    tile: tuple[int, int] = (32, 64)  # rows and keys, of the key kernel
    long: bool = False  # whether to compare with a call of more tokens


BANDED = {
    "a band over everything": Banded(100, 100, 99, after=0, long=True),
    "whole tiles": Banded(64, 64, 63, after=0, tile=(16, 16)),
    "tails, grouped heads": Banded(70, 70, 20, heads=4, band=(1, 4), slopes=True),
    "a window": Banded(83, 83, 30, before=19, after=3, long=True),
    "a window narrower than a tile": Banded(45, 45, 9, before=2, after=0, tile=(16, 16)),
    "a window, later queries": Banded(60, 110, 25, start=50, before=21, after=4, tile=(16, 16)),
    "a window wider than the reach": Banded(90, 90, 7, before=30, after=40, tile=(16, 32)),
    "extents": Banded(90, 90, 89, after=0, heads=4, band=(1, 4), extents=(0, 5, 17, 60)),
    "extents, both sides": Banded(67, 67, 80, extents=(3, 33), tile=(16, 32), long=True),
    "a band for each sequence": Banded(41, 41, 40, b=2, band=(2, 2), tile=(16, 16)),
    "a band for each sequence, grouped heads": Banded(
        40, 40, 39, after=0, b=3, heads=4, band=(3, 4)
    ),
    "one band for all heads": Banded(71, 71, 12, b=3, band=(1, 1), segments=True),
    "later queries": Banded(40, 73, 72, start=33, after=0),
    "queries beyond the keys": Banded(73, 40, 45, start=7, tile=(16, 16)),
    "a reach beyond the keys": Banded(65, 65, 150),
    "a value table that reaches farther": Banded(75, 75, 4, table=21),
    "extents and a value table": Banded(75, 75, 40, extents=(2, 30), table=9, after=0),
    "a reach of 0": Banded(70, 70, 0, slopes=True),
    "tails of each row": Banded(70, 70, 11, slopes=True, by_row=True),
    "more sequences than a step": Banded(
        40, 300, 3, b=9, heads=1, kv_heads=1, band=(1, 1), after=5
    ),
}


@pytest.mark.parametrize("name", BANDED)
def test_up_to_2048_tokens_the_key_kernel_sums_the_gradient_of_a_shared_band(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from whence.kernels.fused import launch

    torch.manual_seed(0)
    call = BANDED[name]
    q = leaf(call.b, call.heads, call.n_q, 16)
    k, v = (leaf(call.b, call.kv_heads, call.n_k, 16) for _ in range(2))
    lags = torch.arange(-call.reach, call.reach + 1).abs()
    near = torch.ones(1, 1, 1, lags.numel())
    inputs: dict[str, Tensor | None] = {}
    lines, extent, values, mask = [Line(), Line()], None, None, None
    if call.extents is not None:
        inputs["extent"] = extent = torch.tensor(call.extents, dtype=torch.int32)
        near = (lags <= extent[:, None]).float()[None, :, None]
    inputs["band"] = band = (leaf(*call.band, 1, lags.numel()) * near).detach().requires_grad_()
    if call.slopes:
        inputs["tails"] = tails = leaf(4, *call.band, call.n_q if call.by_row else 1)
        lines = [Line(tails[0], tails[1]), Line(tails[2], tails[3])]
    if call.table is not None:
        inputs["table"] = leaf(1, 2 * call.table + 1, 16)
        values = LagValues(inputs["table"])
    if call.segments:
        segments = (torch.arange(call.n_q)[None] // 9, torch.arange(call.n_k)[None] // 9)
        mask = Mask(segments=segments)
        inputs["q_segment"], inputs["k_segment"] = (x.to(torch.int32) for x in segments)
    window = tuple(None if x < 0 else x for x in (call.before, call.after))
    out, weight, wanted = defined(
        *(q, k, v, [q, k, v, band]),
        bias=LagBias(band, *lines, extent),
        values=values,
        mask=mask,
        window=window,
        q_start=call.start,
    )
    numbers = {"q_start": call.start, "before": call.before, "after": call.after}
    found, grads, plan = launched(
        q, k, v, weight, inputs, slopes=call.slopes, by_keys=call.tile, **numbers
    )
    assert plan.launched[-2:] == ["key_kernel", "stripe_kernel"]
    torch.testing.assert_close(found, out, rtol=1e-4, atol=1e-5)
    # The definition knows the cells beyond the extent too.
    wanted = [*wanted[:3], wanted[3] * near]
    assert_equal([*grads[:3], grads.band * near], wanted)

    if call.long:
        monkeypatch.setattr(launch, "STRIPED", call.n_q - 1)
        monkeypatch.setattr(launch, "STRIPED_WINDOW", 0)
        _, long, plan = launched(q, k, v, weight, inputs, slopes=call.slopes, **numbers)
        assert "band_kernel" in plan.launched
        assert "stripe_kernel" not in plan.launched
        assert_equal([long.band * near], wanted[3:])


def test_in_a_window_the_sums_of_a_band_take_memory_linear_in_the_tokens() -> None:
    from whence.kernels.fused.device.arguments import KeyGradients

    def workspace(n: int) -> int:
        q = torch.empty(1, 1, n, 16)
        inputs = {"band": torch.empty(1, 1, 1, 201)}
        numbers = {"before": 100, "after": 100}
        _, _, plan = launched(q, q, q, q, inputs, by_keys=(32, 64), runs=False, **numbers)
        assert plan.launched[-2:] == ["key_kernel", "stripe_kernel"]
        written = [x for x in plan.groups["key_kernel"] if isinstance(x, KeyGradients)]
        return written[0].stripes.numel()

    assert workspace(8192) == 2 * workspace(4096)


class Turns(NamedTuple):
    """A call, the heads that the cache has room for, and how many of them take turns."""

    room: int
    in_turn: int | None  # None where they do not
    heads: int = 4
    kv_heads: int = 4
    causal: bool = True
    before: int = -1
    runs: bool = True


@pytest.mark.parametrize(
    "call",
    [
        Turns(room=100, in_turn=12),
        Turns(room=5, in_turn=4),
        Turns(room=0, in_turn=1, runs=False),
        Turns(room=7, in_turn=6, kv_heads=2),
        Turns(room=100, in_turn=None, before=30, runs=False),
        Turns(room=100, in_turn=None, causal=False, runs=False),
    ],
    ids=str,
)
def test_heads_of_a_causal_call_take_turns(call: Turns, monkeypatch: pytest.MonkeyPatch) -> None:
    from whence.kernels.fused import launch

    torch.manual_seed(0)
    n, b = 34, 3
    bytes_of_head = n * (16 + 16) * 4
    monkeypatch.setattr(launch, "cache_bytes", lambda device: 4 * call.room * bytes_of_head)
    q, band = leaf(b, call.heads, n, 16), leaf(1, call.heads, 1, 21)
    k, v = (leaf(b, call.kv_heads, n, 16) for _ in range(2))
    window = None if call.before < 0 else (call.before, None)
    options = {"causal": call.causal, "window": window}
    bias = LagBias(band, Line(), Line())
    out, weight, wanted = defined(q, k, v, [q, k, v, band], bias=bias, **options)
    numbers = {"before": call.before, "after": 0 if call.causal else -1}
    found, grads, plan = launched(q, k, v, weight, {"band": band}, runs=call.runs, **numbers)
    if call.runs:
        torch.testing.assert_close(found, out, rtol=1e-4, atol=1e-5)
        assert_equal([*grads[:3], grads.band], wanted)
    for kernel, heads in (
        ("forward_kernel", b * call.heads),
        ("query_kernel", b * call.heads),
        ("key_kernel", b * call.kv_heads),
    ):
        grid, blocks = plan.grids[kernel], 3
        if call.in_turn is None:
            assert grid == (blocks, heads)
        else:
            in_turn = min(call.in_turn, heads)
            assert grid == (in_turn, blocks, heads // in_turn)
        assert (call.in_turn is not None) == plan.constants[kernel]["TILE"].TURNS


def test_a_grid_has_no_more_blocks_than_cuda_allows() -> None:
    from whence.kernels.fused import launch

    kind = SimpleNamespace(CAUSAL=True, BEFORE=False, FAR=False, D=64, D_V=64)
    sizes, q = SimpleNamespace(n_q=64, n_k=64), SimpleNamespace(ptr=torch.empty(0))
    call: Any = SimpleNamespace(kind=kind, sizes=sizes, q=q)
    plan: Any = Immediate()
    assert launch.grid_of(plan, call, 65_535, 6) == (6, 65_535, 1)
    assert launch.grid_of(plan, call, 65_536, 6) == (65_536, 6)


def test_in_half_precision_a_shared_band_has_its_gradient() -> None:
    torch.manual_seed(0)
    q, k, v, band = leaf(1, 2, 40, 16), leaf(1, 2, 40, 16), leaf(1, 2, 40, 16), leaf(1, 2, 1, 79)
    half = [x.detach().half() for x in (q, k, v)]
    out, weight, wanted = defined(q, k, v, [q, k, v, band], bias=LagBias(band, Line(), Line()))
    found, grads, plan = launched(*half, weight.half(), {"band": band})
    assert "stripe_kernel" in plan.launched
    torch.testing.assert_close(found.float(), out, rtol=1e-2, atol=1e-2)
    for a, b in zip([*grads[:3], grads.band], wanted, strict=True):
        torch.testing.assert_close(a.float(), b, rtol=1e-2, atol=1e-2)


def test_short_sequences_take_one_kernel_each_way(monkeypatch: pytest.MonkeyPatch) -> None:
    from whence.kernels.fused import short

    monkeypatch.undo()
    q, k, v, band = *(leaf(1, 2, 33, 16) for _ in range(3)), leaf(1, 2, 1, 65)
    out, weight, wanted = defined(q, k, v, [q, k, v, band], bias=LagBias(band, Line(), Line()))
    found, grads, plan = launched(q, k, v, weight, {"band": band})
    assert short.FASTER >= 33
    kernels = ["short_forward_kernel", "short_backward_kernel", "short_band_kernel"]
    assert plan.launched == ["head_layout_kernel", *kernels]
    torch.testing.assert_close(found, out, rtol=1e-4, atol=1e-5)
    assert_equal([*grads[:3], grads.band], wanted)


def test_gradients_that_are_not_wanted_take_no_launch() -> None:
    q, k, v = (leaf(1, 2, 33, 16) for _ in range(3))
    slope = torch.tensor([-0.5, -0.25])
    out, weight, wanted = defined(q, k, v, [q, k, v], bias=LagBias.line(slope), causal=True)
    tails = torch.zeros(4, 1, 2, 1)
    tails[1, 0, :, 0] = tails[3, 0, :, 0] = slope
    inputs = {"band": torch.zeros(1, 1, 1, 1), "tails": tails}
    found, grads, plan = launched(
        *(q, k, v, weight, inputs), slopes=True, after=0, wanted=(False, False)
    )
    torch.testing.assert_close(found, out, rtol=1e-4, atol=1e-5)
    assert_equal(grads[:3], wanted)
    assert plan.launched == ["head_layout_kernel", "forward_kernel", "query_kernel", "key_kernel"]


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize("width", [1, 5, 65])
def test_a_product_s_factors_have_gradients(own: bool, per_head: bool, width: int) -> None:
    from whence.kernels.fused.backend import Product

    q, k, v = (leaf(2, 2, 19, 16) for _ in range(3))
    query = leaf(2, 2, 19, 24) if own else q
    table = leaf(2 if per_head else 1, width, query.shape[-1])
    values = leaf(1, 5, 16)
    leaves = [q, k, v, table, values, *([query] if own else [])]
    bias = QueryBias(query, table, scale=0.3)
    out, weight, wanted = defined(q, k, v, leaves, bias=bias, values=LagValues(values))
    product = Product(0.3, query.detach() if own else None, table.detach())
    some = width > 1
    found, grads, _ = launched(
        *(q, k, v, weight, {"table": values}), product=product, wanted=(some, some, True, True)
    )
    torch.testing.assert_close(found, out, rtol=1e-4, atol=1e-5)
    given = (*grads[:3], grads.factor, grads.table, *([grads.query] if own else []))
    assert_equal(given, wanted)


@pytest.mark.parametrize("n_q", [1, 3, 40])
def test_a_curve_s_parameters_have_gradients(n_q: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from whence.kernels.fused import backend as inputs

    monkeypatch.setattr(inputs, "MANY_KEYS", 32)
    method = Tisa(4, kernels=3, start="released")
    q, k, v = leaf(1, 4, n_q, 16), leaf(1, 2, 40, 16), leaf(1, 2, 40, 16)
    parameters = list(method.parameters())
    reach = 39
    band = method.curve(torch.arange(-reach, reach + 1))[None, :, None]
    bias = LagBias(band, Line(), Line())
    out, weight, wanted = defined(
        *(q, k, v, [q, k, v, *parameters]), bias=bias, causal=True, q_start=40 - n_q
    )
    made = inputs.CurveBand("gaussians", reach, [x.detach() for x in parameters])
    found, grads, plan = launched(*(q, k, v, weight, {}), curve=made, after=0, q_start=40 - n_q)
    assert ("share_kernel" in plan.launched) == (n_q < 40)
    torch.testing.assert_close(found, out, rtol=1e-4, atol=1e-5)
    assert_equal([*grads[:3], *grads.parameters], wanted)


class Bucketed(NamedTuple):
    """A call of a curve with constant tails, and tiles [rows, keys] of the backward kernels."""

    n_q: int
    n_k: int
    reach: int
    by_rows: tuple[int, int]
    by_keys: tuple[int, int]
    start: int = 0
    before: int = -1
    after: int = 0


@pytest.mark.parametrize(
    "call",
    [
        Bucketed(70, 70, 5, (32, 16), (16, 32)),
        Bucketed(35, 66, 2, (16, 32), (32, 16), start=3, after=-1),
        Bucketed(72, 36, 6, (16, 32), (16, 16), start=5, before=50, after=30),
        Bucketed(40, 13, 3, (16, 32), (16, 16), start=34, before=37, after=-1),
    ],
)
def test_every_cell_of_a_tail_counts_once_in_a_curve_s_gradient(call: Bucketed) -> None:
    """The query kernel sums its far tiles, the key kernel's diagonals hold what is near."""
    from whence.kernels.fused.backend import CurveBand

    torch.manual_seed(0)
    q, k, v = leaf(2, 2, call.n_q, 16), leaf(2, 1, call.n_k, 16), leaf(2, 1, call.n_k, 16)
    bucket = torch.arange(2 * call.reach + 1)  # each lag has its own, so that none hides another's
    table = (torch.randn(len(bucket), 2) / GAIN).requires_grad_()
    window = tuple(None if x < 0 else x for x in (call.before, call.after))
    bias = BUCKETS.evaluate((table, bucket), call.reach)
    out, weight, wanted = defined(
        *(q, k, v, [q, k, v, table]), bias=bias, window=window, q_start=call.start
    )
    found, grads, plan = launched(
        *(q, k, v, weight, {}),
        curve=CurveBand("buckets", call.reach, [table.detach(), bucket, None]),
        by_rows=call.by_rows,
        by_keys=call.by_keys,
        **{"q_start": call.start, "before": call.before, "after": call.after},
    )
    torch.testing.assert_close(found, out, rtol=1e-4, atol=1e-5)
    assert plan.launched[-2:] == ["stripe_kernel", "buckets_gradient_kernel"]
    assert_equal([*grads[:3], grads.parameters[0] / GAIN], [*wanted[:3], wanted[3] / GAIN])


@pytest.mark.parametrize("by_token", [False, True])
@pytest.mark.parametrize("kind", ["shared", "per row"])
@pytest.mark.parametrize("n_q", [1, 3])
def test_few_queries_share_out_the_keys(
    n_q: int, kind: str, by_token: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from whence.kernels.fused import backend as few

    monkeypatch.setattr(few, "MANY_KEYS", 32)
    q = leaf(1, n_q, 4, 16).transpose(1, 2) if by_token else leaf(1, 4, n_q, 16)
    k, v = leaf(1, 2, 67, 16), leaf(1, 2, 67, 24)
    axes = (1, 4, n_q) if kind == "per row" else (1, 4, 1)
    band, tails, table = leaf(*axes, 9), leaf(4, *axes), leaf(1, 5, 24)
    bias = LagBias(band, Line(tails[0], tails[1]), Line(tails[2], tails[3]))
    start, keys = 67 - n_q, torch.rand(1, 67) > 0.3
    options = {"bias": bias, "values": LagValues(table), "mask": keys, "causal": True}
    leaves = [q, k, v, band, tails, table]
    out, weight, wanted = defined(q, k, v, leaves, **options, q_start=start)
    inputs = {"band": band, "tails": tails, "table": table, "keys": keys.to(torch.uint8)}
    found, grads, plan = launched(q, k, v, weight, inputs, slopes=True, after=0, q_start=start)
    assert plan.launched[:2] == ["share_kernel", "merge_kernel"]
    assert (found.transpose(1, 2) if by_token else found).is_contiguous()
    torch.testing.assert_close(found, out, rtol=1e-4, atol=1e-5)
    assert_equal([*grads[:3], grads.band, grads.tails, grads.table], wanted)


def test_dropout_is_the_same_in_backward_and_for_the_table() -> None:
    n, p = 24, 0.4
    q, k = leaf(1, 2, n, 16), leaf(1, 2, n, 16)
    eye = torch.eye(n).expand(1, 2, n, n).contiguous()
    table, weight = leaf(2, 5, n), torch.randn(1, 2, n, n)
    seed = {"seed": torch.tensor(3)}
    plain = attend(q, k, eye, backend="reference")
    dropped, _, _ = launched(q, k, eye, weight, seed, dropout=p)
    keep = (dropped / plain).detach()
    assert abs((keep == 0).float().mean().item() - p) < 0.05
    found, grads, _ = launched(q, k, eye, weight, {"table": table, **seed}, dropout=p)
    lag = torch.arange(n)[None] - torch.arange(n)[:, None]
    weights = plain * keep
    of_table = torch.einsum("bhqk,hqkd->bhqd", weights, table[:, lag.clamp(-2, 2) + 2])
    out = weights + of_table
    torch.testing.assert_close(found, out, rtol=1e-4, atol=1e-5)
    wanted = torch.autograd.grad((out * weight).sum(), [q, k, table])
    assert_equal([grads.q, grads.k, grads.table], wanted)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("by_row", [False, True])
def test_far_keys_may_be_attended_to_elsewhere(causal: bool, by_row: bool) -> None:
    from whence.kernels.fused.backend import Far, FarGradients

    b, h, n, d, start = 1, 2, 40, 16, 5
    q, k, v = (leaf(b, h, n, d) for _ in range(3))
    band = leaf(1, h, n if by_row else 1, 2 * start - 1)
    tails = leaf(4, 1, h, n if by_row else 1)
    bias = LagBias(band, Line(tails[0]), Line(tails[2]))
    leaves = [q, k, v, band, tails]
    out, weight, wanted = defined(q, k, v, leaves, bias=bias, causal=causal)
    lag = torch.arange(n)[None] - torch.arange(n)[:, None]
    scale, m = d**-0.5, n - start
    plain = q @ k.transpose(-1, -2) * scale
    logits = plain + bias.to_dense(torch.arange(n), torch.arange(n))
    logits = logits.masked_fill(lag > 0, -torch.inf) if causal else logits
    weights = logits.softmax(-1)
    delta = (out * weight).sum(-1, keepdim=True)
    d_logits = weights * (weight @ v.transpose(-1, -2) - delta)

    def side(there: Tensor) -> tuple[Tensor, ...]:
        part = plain.masked_fill(~there, -torch.inf)
        lse = part.logsumexp(-1)
        far_out = (part - lse.nan_to_num(neginf=0.0)[..., None]).exp() @ v
        d_far, w_far = d_logits * there, weights * there
        d_q, d_k = d_far @ k * scale, d_far.transpose(-1, -2) @ q * scale
        return tuple(x.detach() for x in (far_out, lse, d_q, d_k, w_far.transpose(-1, -2) @ weight))

    far_out, lse, d_q, d_k, d_v = side(lag <= -start)
    left = far_out[:, :, start:], lse[:, :, start:], d_q[:, :, start:], d_k[:, :, :m], d_v[:, :, :m]
    left = tuple(x.contiguous() for x in left)
    right: tuple[Any, ...] = (None,) * 5
    if not causal:
        far_out, lse, d_q, d_k, d_v = side(lag >= start)
        right = (
            far_out[:, :, :m],
            lse[:, :, :m],
            d_q[:, :, :m],
            d_k[:, :, start:],
            d_v[:, :, start:],
        )
        right = tuple(x.flip(2).contiguous() for x in right)
    found, grads, _ = launched(
        *(q, k, v, weight, {"band": band, "tails": tails}),
        before=start - 1,
        after=0 if causal else start - 1,
        far=Far(start, *left[:2], *right[:2]),
        far_gradients=FarGradients(left[2:], None if causal else right[2:]),
    )
    torch.testing.assert_close(found, out, rtol=1e-4, atol=1e-5)
    given = torch.stack([grads.tails[i] * (i % 2 == 0) for i in range(4)])
    assert_equal([*grads[:3], grads.band, given], wanted)


def test_the_stride_from_row_to_row_is_a_constant_unless_the_batch_lies_within_the_rows() -> None:
    from whence.kernels.fused.device.arguments import rows_of

    def stride(x: Tensor) -> Any:
        return rows_of(x).stride_n

    by_head = torch.empty(3, 2, 7, 16)
    by_token = torch.empty(3, 7, 2, 16).transpose(1, 2)
    batch_inside = torch.empty(7, 3, 2, 16).permute(1, 2, 0, 3)
    assert (stride(by_head).value, stride(by_token).value) == (16, 32)
    assert stride(batch_inside) == 96  # with another batch it would be another number
    one_sequence = torch.empty(7, 1, 2, 16).permute(1, 2, 0, 3)
    assert stride(one_sequence).value == 32


@pytest.mark.parametrize(
    ("dtype", "scale", "started", "table"),
    [
        (torch.float16, 0.25, True, False),
        (torch.float16, 0.25, True, True),
        (torch.float16, 3e-4, True, False),
        (torch.float16, 1e-5, False, False),  # a bias divided by it could be infinite
        (torch.float16, -0.25, False, False),  # the largest logit would be the smallest product
        (torch.float32, 0.25, False, False),
    ],
)
def test_products_start_from_a_head_s_band_in_half_precision(
    dtype: torch.dtype, scale: float, started: bool, table: bool
) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 1, 66, 16).to(dtype) for _ in range(3))
    band, tails = torch.randn(1, 1, 1, 41), torch.randn(4, 1, 1, 1)
    tails[1::2] = 0.0
    bias = LagBias(band, *[Line(tails[i]) for i in (0, 2)])
    inputs: dict[str, Tensor | None] = {"band": band, "tails": tails}
    values = None
    if table:
        inputs["table"] = torch.randn(1, 5, 16)
        values = LagValues(inputs["table"])
    leaves = [x.float().requires_grad_() for x in (q, k, v)]
    leaves.append(band.requires_grad_())
    out, weight, wanted = defined(*leaves[:3], leaves, bias=bias, values=values, scale=scale)
    found, grads, plan = launched(q, k, v, weight.to(dtype), inputs, scale=scale)
    assert started == plan.constants["forward_kernel"]["KIND"].STARTED
    close = {"rtol": 2e-2, "atol": 2e-2}
    torch.testing.assert_close(found.float(), out, **close)
    for a, b in zip([*grads[:3], grads.band], wanted, strict=True):
        wanted_here = torch.zeros(a.shape) if b is None else b
        torch.testing.assert_close(a.float(), wanted_here, **close)


def test_a_new_length_compiles_nothing() -> None:
    found = []
    for n, q_start in ((17, 0), (32, 5), (41, 16)):
        q, k, v = (torch.randn(1, 2, n, 16) for _ in range(3))
        inputs = {"band": torch.randn(1, 2, 1, 9), "tails": torch.randn(4, 1, 2, 1)}
        inputs["table"] = torch.randn(1, 5, 16)
        _, _, plan = launched(q, k, v, torch.randn_like(v), inputs, q_start=q_start, runs=False)
        found.append((plan.launched, plan.specialised))
    assert found[0] == found[1] == found[2]


def test_a_new_length_compiles_nothing_where_rows_have_bands_as_long() -> None:
    found = []
    for n in (70, 97, 110):
        q, k, v = (torch.randn(1, 2, n, 16) for _ in range(3))
        inputs = {"band": torch.randn(1, 2, n, 2 * n - 1)}
        _, _, plan = launched(q, k, v, torch.randn_like(v), inputs, runs=False)
        found.append((plan.launched, plan.specialised))
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("by_keys", [False, True])
def test_far_tiles_are_left_out_only_where_no_block_has_any(by_keys: bool) -> None:
    """Against key_range and row_range of the kernels, block by block."""
    from whence.kernels.fused.launch import _all_near

    pick, left_out = random.Random(3), 0
    for _ in range(400):
        n, n_other = pick.choice([1, 16, 30, 64, 128]), pick.choice([1, 16, 33, 64, 128])
        block, tile = pick.choice([16, 32, 64]), pick.choice([16, 32, 64])
        start, reach = pick.choice([0, 0, 5, -9, 100]), pick.choice([0, 3, 16, 64])
        before, after = pick.choice([-1, -1, 0, 7, 40]), pick.choice([-1, 0, 0, 20])
        window = (after, before) if by_keys else (before, after)
        sizes = SimpleNamespace(
            q_start=-start if by_keys else start,
            reach=reach,
            value_reach=0,
            before=window[0],
            after=window[1],
        )
        call: Any = SimpleNamespace(sizes=sizes, kind=SimpleNamespace(EXTENT=False))
        spare = pick.choice([0, 1])
        if _all_near(call, n, n_other, block, tile, by_keys=by_keys, spare=spare):
            left_out += 1
            for first in range(0, n, block):
                low, near_low, near_high, high = _ranges(
                    first + start,
                    min(first + block, n) - 1 + start,
                    n_other,
                    tile,
                    reach,
                    before,
                    after,
                )
                assert near_low - low <= spare * tile
                assert high - near_high <= spare * tile
    assert 50 < left_out < 350


def _ranges(
    first: int, last: int, n: int, tile: int, reach: int, before: int, after: int
) -> tuple[int, int, int, int]:
    low = 0 if before < 0 else max(first - before, 0)
    high = n if after < 0 else min(max(last + after + 1, 0), n)
    low, high = min(low, n) // tile * tile, -(-high // tile) * tile
    high = max(low, high)
    near_low = min(max(max(first - reach, 0) // tile * tile, low), high)
    near_high = -(-max(last + reach + 1, 0) // tile) * tile
    return low, near_low, min(max(near_high, near_low), high), high
