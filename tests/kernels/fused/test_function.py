"""The differentiable function: plans are reused for tensors alike, and for no others."""

import ctypes
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from five_calls import nan_in_empty_memory
from layouts import LAYOUTS
from shaking import gains
from whence import LagBias, LagValues, Line, attend, build
from whence.kernels.call import as_call
from whence.kernels.fused.backend import given_and_call
from whence.lag import GAUSSIANS, LINE, CurveBias, QueryBias
from whence.methods.tisa import Tisa
from whence.nn import positioned_attention

__all__ = ["nan_in_empty_memory"]
pytestmark = [
    pytest.mark.triton,
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="set TRITON_INTERPRET=1"),
    # A cell out of sight may have any logit; whatever its exponential is, its weight is made 0.
    pytest.mark.filterwarnings("ignore:overflow encountered in exp"),
]


@pytest.fixture(autouse=True)
def _short_caches_are_shared_out(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="Triton is a Linux package")
    from whence.kernels.fused import backend

    monkeypatch.setattr(backend, "MANY_KEYS", 32)


@pytest.fixture
def plans() -> Any:
    from whence.kernels.fused.function import PLANS

    return PLANS


def leaf(*shape: int) -> Tensor:
    return torch.randn(*shape, requires_grad=True)


def banded(q: Tensor, k: Tensor, v: Tensor, band: Tensor, backend: str = "fused") -> Tensor:
    return attend(q, k, v, bias=LagBias(band, Line(), Line()), causal=True, backend=backend)


def assert_right(q: Tensor, k: Tensor, v: Tensor, band: Tensor) -> None:
    """The output and every gradient are those of the definition, in the dtype of q."""
    leaves, results = [q, k, v, band], []
    slope = torch.randn(v.shape)
    for backend in ("fused", "reference"):
        wide = [x.float() for x in (q, k, v)] if backend == "reference" else [q, k, v]
        out = banded(*wide, band, backend)
        results.append([out, *torch.autograd.grad(out, leaves, slope.to(out.dtype))])
    exact = q.dtype == torch.float32
    for a, b in zip(*results, strict=True):
        rtol, atol = (1e-4, 2e-5) if exact else (2e-2, 2e-2)
        torch.testing.assert_close(a.float(), b.float(), rtol=rtol, atol=atol)


@pytest.mark.parametrize(
    "spec",
    [
        "tisa",
        "shaw:clip=4",
        pytest.param("t5", marks=pytest.mark.slow),
        pytest.param("alibi", marks=pytest.mark.slow),
        pytest.param("kerple", marks=pytest.mark.slow),
        pytest.param("tisa + shaw", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("n_q", [1, 20])
@pytest.mark.usefixtures("nan_in_empty_memory")
def test_a_plan_is_made_once_and_each_call_gets_the_numbers_of_its_own_tensors(
    plans: Any, spec: str, n_q: int
) -> None:
    method = build(spec, n_heads=2, d_head=16)
    n_k = n_q if n_q > 1 else 40
    for _ in range(2):
        q = torch.randn(2, n_q, 2, 16).transpose(1, 2).requires_grad_()
        k, v = (leaf(2, 2, n_k, 16) for _ in range(2))
        d_out, keys = torch.randn(2, 2, n_q, 16), torch.rand(2, n_k) < 0.9
        leaves, results = [q, k, v, *method.parameters()], []
        for backend in ("fused", "reference"):
            out = positioned_attention(method, q, k, v, backend=backend, causal=True, mask=keys)
            found = torch.autograd.grad(out, leaves, d_out, allow_unused=True)
            results.append([out.detach(), *found])
        units = [1, 1, 1, 1, *gains(method)]
        for a, b, unit in zip(*results, units, strict=True):
            torch.testing.assert_close(a / unit, b / unit, rtol=1e-4, atol=2e-5)
        assert len(plans) == 2, "forward and backward"


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
        lambda x: x.half(),
        lambda x: x[:, :, :4].contiguous(),
        lambda x: torch.cat([torch.zeros(1), x.flatten()])[1:].view(x.shape),
    ],
    ids=["strides", "dtype", "shape", "alignment"],
)
def test_tensors_that_lie_otherwise_have_plans_of_their_own(
    plans: Any, change: Callable[[Tensor], Tensor]
) -> None:
    band = leaf(1, 2, 1, 7)
    for _ in range(2):
        assert_right(*(leaf(1, 2, 5, 16) for _ in range(3)), band)
    assert len(plans) == 2
    for _ in range(2):
        assert_right(*(change(torch.randn(1, 2, 5, 16)).requires_grad_() for _ in range(3)), band)
    assert len(plans) == 4


def test_a_tensor_on_another_device_is_refused_also_where_there_is_a_plan() -> None:
    q, k, v = torch.randn(3, 1, 2, 5, 16).unbind()
    banded(q, k, v, torch.randn(1, 2, 1, 7))
    with pytest.raises(ValueError, match="on one device, got cpu and meta"):
        banded(q, k, v, torch.randn(1, 2, 1, 7, device="meta"))


def test_a_tensor_given_twice_is_no_other_than_two_alike() -> None:
    band = leaf(1, 2, 1, 7)
    x = leaf(1, 2, 5, 16)
    found, wanted = (
        torch.autograd.grad(banded(x, x, x, band, backend).square().sum(), x)[0]
        for backend in ("fused", "reference")
    )
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=2e-5)
    assert_right(*(leaf(1, 2, 5, 16) for _ in range(3)), band)


@pytest.mark.parametrize(
    ("spec", "n", "dtype"),
    [
        ("tisa", 9, torch.float32),
        pytest.param("t5", 9, torch.float32, marks=pytest.mark.slow),  # a curve, as tisa
        ("shaw:clip=3", 9, torch.float32),
        ("shaw:clip=3", 33, torch.float16),  # which saves a residual in the layout of the output
    ],
)
def test_saved_tensors_that_hooks_moved_give_the_same_gradients(
    spec: str, n: int, dtype: torch.dtype
) -> None:
    method = build(spec, n_heads=2, d_head=16)
    q, k, v = (torch.randn(1, n, 2, 16).to(dtype).transpose(1, 2) for _ in range(3))
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    results = []

    def moved(x: Tensor) -> Tensor:
        """The same numbers, in another place and, where the axes allow it, in another order."""
        return x.clone(memory_format=torch.contiguous_format)

    def turned(x: Tensor) -> Tensor:
        """With rows that have gaps; bytes at an address that no float has."""
        if x.dtype == torch.uint8:
            return torch.cat([x.new_zeros(3), x])[3:]
        return LAYOUTS["transposed"](x.detach())

    def opposite(x: Tensor) -> Tensor:
        """In the same order, but with the other sign, which a view turns round."""
        return torch._neg_view(-x) if x.dtype.is_floating_point else x

    for pack in (lambda x: x, moved, turned, opposite):
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            out = positioned_attention(method, q, k, v, backend="fused")
        leaves = [q, k, v, *method.parameters()]
        results.append(torch.autograd.grad(out.square().sum(), leaves))
    for other in results[1:]:
        torch.testing.assert_close(results[0], other)


def test_there_are_never_more_plans_than_the_bound(
    plans: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plans, "most", 3)
    band = leaf(1, 2, 1, 7)
    for n in (4, 5, 6, 4):
        assert_right(*(leaf(1, 2, n, 16) for _ in range(3)), band)
        assert len(plans) <= 3


def test_results_are_memory_of_their_own() -> None:
    band = leaf(1, 2, 1, 7)
    leaves = [*(leaf(1, 2, 9, 16) for _ in range(3)), band]
    results = []
    for _ in range(2):
        out = banded(*leaves)
        results += [out.detach(), *torch.autograd.grad(out.sum(), leaves)]
    places = [x.untyped_storage().data_ptr() for x in (*results, *leaves)]
    assert len(set(places)) == len(places)
    for x in results:
        assert x.untyped_storage().nbytes() == x.numel() * x.element_size()


@pytest.mark.parametrize("spec", ["tisa", pytest.param("shaw:clip=4", marks=pytest.mark.slow)])
def test_a_call_like_an_earlier_one_is_checked_and_read_once(
    plans: Any, monkeypatch: pytest.MonkeyPatch, spec: str
) -> None:
    front: Any = sys.modules["whence.kernels.attend"]  # its name in the package is the function
    method = build(spec, n_heads=2, d_head=16)
    parameters = list(method.parameters())
    checked: list[bool] = []
    as_call_of = front.as_call

    def noting(*arguments: Any, **options: Any) -> Any:
        checked.append(True)
        return as_call_of(*arguments, **options)

    def found(backend: str, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> list[Tensor]:
        out = positioned_attention(method, q, k, v, backend=backend, **options)
        if not out.requires_grad:
            return [out]
        grads = torch.autograd.grad(out, [q, k, v, *parameters], torch.ones_like(out) / 7)
        return [out, *(g / unit for g, unit in zip(grads, [1, 1, 1, *gains(method)], strict=True))]

    def heads(n: int = 20) -> list[Tensor]:
        return [leaf(1, 2, n, 16) for _ in range(3)]

    same = heads()
    calls: list[tuple[list[Tensor], dict[str, Any], bool]] = [
        (heads(), {}, True),
        (heads(), {}, False),  # other numbers
        ([same[0]] * 3, {}, False),  # one tensor in three places
        (heads(), {"causal": True}, True),
        (heads(), {"scale": 0.5}, True),
        (heads(21), {}, True),
        ([x.detach().double() for x in heads()], {}, True),  # refused
        ([x.transpose(1, 2).contiguous().transpose(1, 2) for x in heads()], {}, True),
        (heads(), {"scale": 0.5}, False),
    ]
    monkeypatch.setattr(front, "as_call", noting)
    for tensors, options, first in calls:
        checked.clear()
        if tensors[0].dtype == torch.float64:
            with pytest.raises(ValueError, match=r"no kernels for torch\.float64"):
                found("fused", *tensors, **options)
            continue
        ours = found("fused", *tensors, **options)
        assert bool(checked) == first
        for a, b in zip(ours, found("reference", *tensors, **options), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=2e-5)
    with torch.no_grad():  # nothing is kept for gradients
        checked.clear()
        (out,) = found("fused", *same)
        assert checked
        assert not out.requires_grad


def test_a_call_that_failed_leaves_nothing_broken(
    plans: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from whence.kernels.fused.plan import Plan

    def fails(*_: Any, **__: Any) -> None:
        raise RuntimeError("out of memory")

    tensors = [leaf(1, 2, 5, 16) for _ in range(3)]
    band = leaf(1, 2, 1, 7)
    with monkeypatch.context() as patch:
        patch.setattr(Plan, "launch", fails)  # while the plan is made
        with pytest.raises(RuntimeError, match="out of memory"):
            banded(*tensors, band)
    assert len(plans) == 0
    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty_strided", fails)  # while it runs
        with pytest.raises(RuntimeError, match="out of memory"):
            banded(*tensors, band)
    assert_right(*tensors, band)


def test_a_curve_that_all_heads_share_is_that_of_the_reference() -> None:
    method = Tisa(1, kernels=2)
    q, k, v = (leaf(1, 3, 20, 16) for _ in range(3))
    d_out, results = torch.randn(1, 3, 20, 16), []
    for backend in ("fused", "reference"):
        bias = CurveBias(GAUSSIANS, 19, *method.parameters())
        out = attend(q, k, v, bias=bias, backend=backend)
        found = torch.autograd.grad(out, [q, k, v, *method.parameters()], d_out)
        results.append([out, *found])
    for a, b, unit in zip(*results, [1, 1, 1, 1, *gains(method)], strict=True):
        torch.testing.assert_close(a / unit, b / unit, rtol=1e-4, atol=2e-5)


def test_a_whole_number_as_scale_is_launched_as_a_float() -> None:
    q = torch.randn(1, 1, 2, 16)
    options = {"values": None, "mask": None, "causal": False, "window": None, "q_start": None}
    bias = QueryBias(q, torch.randn(1, 3, 16), scale=2)
    _, call = given_and_call(as_call(q, q, q, bias=bias, scale=1, dropout=0, **options))
    kinds = (type(call.product_scale), type(call.numbers.scale), type(call.numbers.dropout))
    assert kinds == (float, float, float)


class CompiledKernel:
    """Stands for what Triton compiles: started with addresses, it runs in the interpreter."""

    function = packed_metadata = None
    metadata = SimpleNamespace(global_scratch_size=0, profile_scratch_size=0, shared=0)
    asm = {"ptx": ""}  # noqa: RUF012

    def __init__(self, kernel: Any, groups: tuple[Any, ...], constants: dict[str, Any]) -> None:
        self.kernel, self.groups, self.constants = kernel, groups, constants
        self.run = Launcher(self.start)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *arguments, stream: self.run(*grid, stream, *(None,) * 5, *arguments)

    def start(self, grid: tuple[int, ...], arguments: tuple[Any, ...]) -> None:
        given = arguments[: len(self.groups)]
        names = self.kernel.arg_names[len(self.groups) :]
        assert list(arguments[len(self.groups) :]) == [self.constants[name] for name in names]
        groups = [self._filled(*pair) for pair in zip(self.groups, given, strict=True)]
        self.kernel[grid](*groups, **self.constants)

    def _filled(self, group: Any, given: Any) -> Any:
        """A group of arguments with tensors in place of addresses."""
        from whence.kernels.fused.plan import Slot

        if isinstance(group, tuple):
            parts = [self._filled(*pair) for pair in zip(group, given, strict=True)]
            return type(group)._make(parts)
        if not isinstance(group, Slot):
            assert given is group or given == group
            return given
        assert (given % 16 == 0) == group.aligned, "compiled for another alignment"
        one = (ctypes.c_char * group.dtype.itemsize).from_address(given)
        return torch.frombuffer(one, dtype=group.dtype)


class Launcher:
    """Stands for Triton's launcher, whose function `launch` is written in C."""

    as_one = False  # whether it takes the arguments as one, as in newer versions of Triton

    def __init__(self, start: Callable[..., None]) -> None:
        self.start = start

    def __call__(self, x: int, y: int, z: int, stream: int, *rest: Any) -> None:
        fixed, arguments = rest[:5], rest[5:]  # the function, its metadata and what is for hooks
        self.launch(x, y, z, stream, *fixed, *((arguments,) if self.as_one else arguments))

    def launch(self, x: int, y: int, z: int, stream: int, *rest: Any) -> None:
        self.start((x, y, z), rest[5] if self.as_one else rest[5:])


class Compiler:
    """Stands for a kernel of a GPU, which `warmup` compiles."""

    def __init__(self, kernel: Any) -> None:
        self.kernel, self.fn, self.arg_names = kernel, kernel.fn, kernel.arg_names

    def warmup(self, *groups: Any, grid: Any, **constants: Any) -> CompiledKernel:
        return CompiledKernel(self.kernel, groups, constants)


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Plans give kernels addresses, most of them in one workspace. Yields the plans."""
    from whence.kernels.fused import plan

    made: list[Any] = []
    init, launch = plan.Plan.__init__, plan.Plan.launch

    def started(self: Any, *arguments: Any) -> None:
        init(self, *arguments)
        self._on_gpu = True
        made.append(self)

    def launched(self: Any, kernel: Any, *rest: Any, **options: Any) -> None:
        launch(self, Compiler(kernel), *rest, **options)

    def run_in_order(self: Any, values: list[Any], tensors: list[Any]) -> None:
        for _, step in self._steps:
            step(values, tensors, 0)

    monkeypatch.setattr(plan.Plan, "__init__", started)
    monkeypatch.setattr(plan.Plan, "launch", launched)
    monkeypatch.setattr(plan.Plan, "_start", run_in_order)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: None, raising=False)  # the CPU's
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(
        torch._C._dynamo.guards,
        "_empty_strided_cuda",
        lambda shape, strides, dtype: torch.empty_strided(shape, strides, dtype=dtype),
    )
    return made


@pytest.mark.parametrize(
    "spec", ["tisa", "shaw:clip=4", pytest.param("t5", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("n_q", [1, 20])
@pytest.mark.usefixtures("nan_in_empty_memory")
def test_started_by_addresses_as_on_a_gpu_it_is_that_of_the_reference(
    as_on_a_gpu: list[Any], monkeypatch: pytest.MonkeyPatch, spec: str, n_q: int
) -> None:
    monkeypatch.setattr(Launcher, "as_one", n_q > 1)
    method = build(spec, n_heads=2, d_head=16)
    n_k = n_q if n_q > 1 else 40
    for _ in range(2):
        q = torch.randn(1, n_q, 2, 16).transpose(1, 2).requires_grad_()
        k, v = (leaf(1, 1, n_k, 16) for _ in range(2))
        d_out, leaves = torch.randn(1, 2, n_q, 16), [q, k, v, *method.parameters()]
        results = []
        for backend in ("fused", "reference"):
            out = positioned_attention(method, q, k, v, backend=backend, causal=True)
            results.append([out.detach(), *torch.autograd.grad(out, leaves, d_out)])
        units = [1, 1, 1, 1, *gains(method)]
        for a, b, unit in zip(*results, units, strict=True):
            torch.testing.assert_close(a / unit, b / unit, rtol=1e-4, atol=2e-5)
        for x in results[0]:
            assert x.untyped_storage().nbytes() == x.numel() * x.element_size()
    assert len(as_on_a_gpu) == 2
    assert any(plan.workspace for plan in as_on_a_gpu), "what only kernels see is taken at once"


def test_a_hook_on_launches_is_called_once_it_is_there(
    as_on_a_gpu: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    import triton

    public = list[str]()  # what is started by Triton's own way, which calls the hooks

    def noted(self: CompiledKernel, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *arguments, stream: public.append(self.kernel.fn.__name__)

    monkeypatch.setattr(CompiledKernel, "__getitem__", noted)
    method, hook = build("tisa", n_heads=2, d_head=16), triton.knobs.runtime.launch_enter_hook
    q = torch.randn(1, 2, 20, 16)
    positioned_attention(method, q, q, q, backend="fused")
    assert not public
    hook.add(print)
    try:
        positioned_attention(method, q, q, q, backend="fused")
    finally:
        hook.remove(print)
    assert public == [launch.kernel for launch in as_on_a_gpu[0].launches]


@pytest.mark.usefixtures("as_on_a_gpu")
def test_kernels_are_loaded_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    from whence.kernels.fused.plan import LOADING

    load, threads, held = CompiledKernel.__getitem__, set[int](), list[bool]()

    def noting(self: CompiledKernel, grid: tuple[int, ...]) -> Callable[..., None]:
        threads.add(threading.get_ident())
        held.append(LOADING.locked())
        time.sleep(0.01)
        return load(self, grid)

    monkeypatch.setattr(CompiledKernel, "__getitem__", noting)
    method, q = build("tisa", n_heads=2, d_head=16), leaf(1, 2, 20, 16)
    positioned_attention(method, q, q, q, backend="fused", causal=True).sum().backward()
    assert len(held) >= 4
    assert all(held), "of all threads of a process"
    assert len(threads) == 1


@pytest.mark.usefixtures("as_on_a_gpu")
def test_launchers_of_new_kernels_are_made_side_by_side_before_one_is_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import triton

    from whence.kernels.fused import plan

    class Future:
        """Stands for a kernel that Triton is compiling."""

        def __init__(self, kernel: CompiledKernel) -> None:
            self.kernel = kernel

        def result(self) -> CompiledKernel:
            return self.kernel

    compile_, load, order = Compiler.warmup, CompiledKernel.__getitem__, list[str]()
    together = threading.Barrier(2, timeout=30)  # the first plan has two kernels

    def made(kernel: CompiledKernel) -> None:
        assert plan.LOADING.locked()
        if len(order) < 2:
            order.append("made")
            together.wait()

    def loaded(self: CompiledKernel, grid: tuple[int, ...]) -> Callable[..., None]:
        order.append("loaded")
        return load(self, grid)

    monkeypatch.setattr(triton, "FutureKernel", Future)
    monkeypatch.setattr(Compiler, "warmup", lambda *a, **b: Future(compile_(*a, **b)))
    monkeypatch.setattr(plan, "_launcher_of", made)
    monkeypatch.setattr(CompiledKernel, "__getitem__", loaded)
    method, q = build("tisa", n_heads=2, d_head=16), torch.randn(1, 2, 70, 16)
    positioned_attention(method, q, q, q, backend="fused", causal=True)
    assert order == ["made", "made", "loaded", "loaded"]


@pytest.mark.usefixtures("as_on_a_gpu")
def test_a_call_allocates_its_results_one_state_and_one_workspace(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    method, guards = build("tisa", n_heads=2, d_head=16), torch._C._dynamo.guards
    made, make = list[Tensor](), guards._empty_strided_cuda

    def noting(*room: Any) -> Tensor:
        made.append(make(*room))
        return made[-1]

    monkeypatch.setattr(guards, "_empty_strided_cuda", noting)
    q, k, v = (leaf(1, 2, 20, 16) for _ in range(3))
    with torch.no_grad():
        positioned_attention(method, q, k, v, backend="fused")
    assert len(made) == 2, "the output, and a workspace"
    made.clear()
    out = positioned_attention(method, q, k, v, backend="fused")
    assert [x.dtype for x in made] == [torch.float32, torch.uint8], "the output, and its state"
    made.clear()
    leaves = [q, k, v, *method.parameters()]
    torch.autograd.grad(out.sum(), leaves)
    assert len(made) == len(leaves) + 1, "the gradients, and a workspace"


def test_a_learned_slope_takes_no_kernel_for_the_gradient_of_a_band() -> None:
    from whence.kernels.fused.function import planned

    q, slope = leaf(1, 2, 70, 16), leaf(2)
    options: Any = {"values": None, "mask": None, "causal": True, "window": None, "q_start": None}
    call = as_call(q, q, q, bias=CurveBias(LINE, 0, slope), scale=1, dropout=0, **options)
    lines = planned(*given_and_call(call))
    assert [line for line in lines if "line_gradient_kernel" in line], lines
    for kernel in ("band_kernel", "collect_kernel", "stripe_kernel"):
        assert not [line for line in lines if kernel in line], lines


@pytest.mark.parametrize("alike", [("table", "values"), ("q", "k"), ("k", "query"), ("v", "query")])
def test_a_call_with_a_tensor_twice_says_nothing_of_the_next_with_two_alike(
    alike: tuple[str, str],
) -> None:
    for twice in (True, False):
        given = {name: leaf(1, 2, 5, 16) for name in ("q", "k", "v", "query")}
        given |= {name: leaf(1, 5, 16) for name in ("table", "values")}
        if twice:
            given[alike[1]] = given[alike[0]]
        q, k, v, query, table, vectors = given.values()
        results = []
        for backend in ("fused", "reference"):
            bias, values = QueryBias(query, table), LagValues(vectors)
            out = attend(q, k, v, bias=bias, values=values, backend=backend)
            leaves = list(dict.fromkeys(given.values()))
            results.append([out, *torch.autograd.grad(out.square().sum(), leaves)])
        for a, b in zip(*results, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("right", "wrong"), [(1, 1.0), (1, True), ((1, 1), (1.0, 1)), (1, (1, 1, 1)), (1, ([1], 1))]
)
def test_a_wrong_window_is_refused_also_after_one_that_is_equal(right: Any, wrong: Any) -> None:
    q, k, v = torch.randn(3, 1, 2, 5, 16).unbind()
    bias = build("alibi", n_heads=2, d_head=16).score_term(q, torch.arange(5), torch.arange(5))
    attend(q, k, v, bias=bias, window=right, backend="fused")
    with pytest.raises((TypeError, ValueError), match=r"^window .*must be"):
        attend(q, k, v, bias=bias, window=wrong, backend="fused")


@pytest.mark.parametrize("dropout", [0.5, 1 - 1e-9, math.nextafter(1, 0)])
def test_dropout_is_below_one_also_in_the_float32_of_a_kernel(dropout: float) -> None:
    q = torch.randn(1, 2, 5, 16)
    none: dict[str, Any] = dict.fromkeys(("bias", "values", "mask", "window", "scale", "q_start"))
    call = as_call(q, q, q, causal=False, dropout=dropout, **none)
    rounded = torch.tensor(given_and_call(call)[1].numbers.dropout, dtype=torch.float32).item()
    assert rounded == pytest.approx(dropout, abs=1e-7)
    assert rounded < 1
