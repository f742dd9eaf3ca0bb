"""What only a GPU can show: the real kernels, the compiler, CUDA graphs, bitwise repetition."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from five_calls import (
    CASES,
    DECODING,
    Case,
    Found,
    Gradients,
    Sizes,
    errors_beyond,
    fill_free_gpu_memory_with_nan,
    five_calls,
    five_steps,
    gradients_of,
    nan_in_empty_memory,
)
from shaking import shake
from whence import LagBias, LagValues, Line, Mask, attend, build, explain
from whence.kernels.rotary import turned
from whence.nn import MultiheadAttention

__all__ = ["nan_in_empty_memory"]
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    pytest.mark.filterwarnings("default"),
]


def qkv(n: int = 300, d: int = 64, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(2, 4, n, d, device="cuda").to(dtype).requires_grad_() for _ in range(3)]


@pytest.mark.parametrize("backend", ["sdpa", "fused"])
@pytest.mark.parametrize("name", ["tisa", "t5", "alibi", "kerple", "shaw"])
def test_every_backend_agrees_with_the_definition(backend: str, name: str) -> None:
    method = build(name, n_heads=4, d_head=64).cuda()
    q, k, v = qkv()
    pos = torch.arange(300, device="cuda")
    mask = Mask.padding(torch.tensor([300, 211], device="cuda"), 300)

    def run(backend: str) -> list[torch.Tensor]:
        out = attend(
            q,
            k,
            v,
            bias=method.score_term(q, pos, pos),
            values=method.value_term(pos, pos),
            mask=mask,
            causal=True,
            backend=backend,
        )
        targets = [q, k, v, *method.parameters()]
        return [out, *torch.autograd.grad(out.square().sum(), targets, allow_unused=True)]

    for found, wanted in zip(run(backend), run("reference"), strict=True):
        if wanted is not None:
            torch.testing.assert_close(found, wanted, rtol=2e-3, atol=2e-3)


def test_auto_takes_the_fused_kernels_on_a_gpu() -> None:
    q, k, v = qkv(dtype=torch.bfloat16)
    method = build("tisa+shaw", n_heads=4, d_head=64).cuda()
    pos = torch.arange(300, device="cuda")
    found = explain(
        q, k, v, bias=method.score_term(q, pos, pos), values=method.value_term(pos, pos)
    )
    assert found.chosen == "fused"


def test_all_gradients_are_bitwise_equal_on_every_run() -> None:
    results = []
    for _ in range(3):
        q, k, v = qkv(1000, dtype=torch.bfloat16)
        torch.manual_seed(1)
        method = build("tisa+t5", n_heads=4, d_head=64).cuda()
        pos = torch.arange(1000, device="cuda")
        out = attend(q, k, v, bias=method.score_term(q, pos, pos), backend="fused")
        results.append(
            torch.autograd.grad(out.float().square().sum(), [q, k, v, *method.parameters()])
        )
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            assert torch.equal(a, b)


def test_the_compiler_sees_one_operator() -> None:
    band = torch.randn(1, 4, 1, 65, device="cuda", requires_grad=True)
    table = torch.randn(1, 33, 64, device="cuda", requires_grad=True)

    def layer(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        bias = LagBias(band, Line(), Line())
        return attend(q, k, v, bias=bias, values=LagValues(table), backend="fused") * 2

    q, k, v = qkv(dtype=torch.bfloat16)
    targets = [q, k, v, band, table]
    results = []
    for function in (layer, torch.compile(layer, fullgraph=True)):
        out = function(q, k, v)
        results.append([out, *torch.autograd.grad(out.float().square().sum(), targets)])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)


def test_a_training_step_can_be_captured_in_a_cuda_graph() -> None:
    method = build("tisa", n_heads=4, d_head=64).cuda()
    q, k, v = qkv(512, dtype=torch.bfloat16)
    pos = torch.arange(512, device="cuda")

    def step() -> list[torch.Tensor]:
        out = attend(q, k, v, bias=method.score_term(q, pos, pos), dropout=0.1, backend="fused")
        return [out, *torch.autograd.grad(out.float().sum(), [q, *method.parameters()])]

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    graph.replay()
    torch.cuda.synchronize()
    first = results[0].clone()
    graph.replay()
    torch.cuda.synchronize()
    assert all(torch.isfinite(x).all() for x in results)
    assert not torch.equal(first, results[0])  # a new dropout mask each time


@pytest.mark.parametrize("spec", ["t5", "shaw:clip=16"])
def test_the_split_on_its_two_streams_gives_the_same_in_a_graph_and_on_another_stream(
    spec: str,
) -> None:
    torch.manual_seed(0)
    method = build(spec, n_heads=2, d_head=64).cuda()
    q, k, v = (torch.randn(1, 2, 4096, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    leaves = [q.requires_grad_(), *method.parameters()]
    pos = torch.arange(4096, device="cuda")

    def step() -> list[torch.Tensor]:
        bias, values = method.score_term(q, pos, pos), method.value_term(pos, pos)
        assert "split" in str(explain(q, k, v, bias=bias, values=values))
        out = attend(q, k, v, bias=bias, values=values, backend="fused")
        found = [out, *torch.autograd.grad(out, leaves, torch.ones_like(out) / 7)]
        return [x.detach() for x in found]  # a graph that lives on would tie its stream to ours

    wanted = step()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(4):  # memory is freed and taken again between the streams
            found = step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = step()
    graph.replay()
    torch.cuda.synchronize()
    for results in (found, replayed):
        for result, same in zip(results, wanted, strict=True):
            torch.testing.assert_close(result, same, rtol=1e-2, atol=1e-3)  # q's: cuDNN's order


def test_a_tensor_on_the_cpu_is_refused_also_by_a_kernel_that_ran_before() -> None:
    q, k, v = qkv(64)
    band = torch.randn(1, 4, 1, 9, device="cuda")
    for _ in range(2):
        attend(q, k, v, bias=LagBias(band, Line(), Line()), backend="fused")
    with pytest.raises(ValueError, match="on one device, got cuda:0 and cpu"):
        attend(q, k, v, bias=LagBias(band.cpu(), Line(), Line()), backend="fused")


def test_hooks_of_tritons_launches_are_called_for_each_kernel_of_a_plan() -> None:
    import triton

    from whence.kernels.fused.function import PLANS

    PLANS.forget()
    q, k, v = (x.detach() for x in qkv(64))
    bias = LagBias(torch.randn(1, 4, 1, 9, device="cuda"), Line(), Line())
    attend(q, k, v, bias=bias, backend="fused")  # the plan is made without a hook
    (ready,) = PLANS._kept.values()
    names: list[str] = []

    def hook(metadata: object) -> None:
        names.append(metadata.get()["name"])  # type: ignore[attr-defined]

    runtime = triton.knobs.runtime
    runtime.launch_enter_hook.add(hook)
    try:
        attend(q, k, v, bias=bias, backend="fused")
    finally:
        runtime.launch_enter_hook.remove(hook)
    attend(q, k, v, bias=bias, backend="fused")
    assert names == [each.kernel for each in ready.plan.launches]


def test_autocast_and_activation_checkpointing_work() -> None:
    from torch.utils.checkpoint import checkpoint

    layer = MultiheadAttention(256, 4, batch_first=True, position="tisa").cuda()
    x = torch.randn(2, 100, 256, device="cuda", requires_grad=True)
    grads = []
    for wrapped in (False, True):
        with torch.autocast("cuda", torch.bfloat16):
            run = lambda x: layer(x, x, x, need_weights=False)[0]  # noqa: E731
            out = checkpoint(run, x, use_reentrant=False) if wrapped else run(x)
        grads.append(torch.autograd.grad(out.float().square().sum(), [x, *layer.parameters()]))
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b)


def test_a_finite_reach_takes_the_split_and_deterministic_mode_one_pass() -> None:
    q, k, v = (torch.randn(1, 2, 4096, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    bias = build("t5", n_heads=2, d_head=64).cuda().score_term(q, *[torch.arange(4096).cuda()] * 2)
    assert "split: cuDNN" in str(explain(q, k, v, bias=bias))
    torch.use_deterministic_algorithms(True)
    try:
        assert "one pass" in str(explain(q, k, v, bias=bias))
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("spec", ["tisa:reach=100", "t5", "shaw:clip=16"])
@pytest.mark.parametrize("deterministic", [False, True])
def test_position_gradients_are_bitwise_equal_also_when_split(
    spec: str, deterministic: bool
) -> None:
    torch.manual_seed(0)
    method = build(spec, n_heads=2, d_head=64).cuda()
    q, k, v = (torch.randn(1, 2, 4096, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    pos = torch.arange(4096, device="cuda")
    results = []
    torch.use_deterministic_algorithms(deterministic)
    try:
        for _ in range(3):
            bias, values = method.score_term(q, pos, pos), method.value_term(pos, pos)
            out = attend(q, k, v, bias=bias, values=values, backend="fused")
            slope = torch.ones_like(out) / 7
            wanted = [*method.parameters(), *(leaves if deterministic else ())]
            results.append([out, *torch.autograd.grad(out, wanted, slope)])
    finally:
        torch.use_deterministic_algorithms(False)
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            assert torch.equal(a, b)


def test_addresses_beyond_two_to_the_31_are_right() -> None:
    b, h, n, d = 40, 16, 56_000, 64
    if torch.cuda.mem_get_info()[0] < 60 << 30:
        pytest.skip("needs 60 GB of GPU memory")
    assert b * h * n * d > 2**31
    torch.manual_seed(0)
    make = {"device": "cuda", "dtype": torch.bfloat16}
    q, k, v = (torch.randn(b, h, n, d, **make).requires_grad_() for _ in range(3))
    band = torch.randn(1, h, 1, 65, device="cuda", requires_grad=True)

    def run(*heads: torch.Tensor) -> list[torch.Tensor]:
        bias = LagBias(band[:, -1:] if heads[0].shape[1] == 1 else band, Line(), Line())
        out = attend(*heads, bias=bias, window=64, backend="fused")
        return [out, *torch.autograd.grad(out, heads, torch.ones_like(out))]

    whole = [x[-1:, -1:] for x in run(q, k, v)]
    alone = run(*(x.detach()[-1:, -1:].clone().requires_grad_() for x in (q, k, v)))
    for a, b_ in zip(whole, alone, strict=True):
        assert torch.equal(a, b_)


@pytest.mark.parametrize("n_q", [1, 3])
@pytest.mark.parametrize("spec", ["tisa", "t5", "alibi", "shaw:clip=16"])
def test_decoding_steps_equal_the_definition(spec: str, n_q: int) -> None:
    torch.manual_seed(0)
    method = build(spec, n_heads=4, d_head=64, causal=True).cuda()
    q = torch.randn(2, 4, n_q, 64, device="cuda")
    k, v = (torch.randn(2, 2, 3000, 64, device="cuda") for _ in range(2))
    k_pos = torch.arange(3000, device="cuda")
    q_pos = k_pos[-n_q:]
    bias, values = method.score_term(q, q_pos, k_pos), method.value_term(q_pos, k_pos)
    found, wanted = (
        attend(
            *(x.to(dtype) for x in (q, k, v)), bias=bias, values=values, causal=True, backend=name
        )
        for dtype, name in ((torch.bfloat16, "fused"), (torch.float32, "reference"))
    )
    torch.testing.assert_close(found.float(), wanted, rtol=2e-2, atol=1e-2)


@pytest.mark.parametrize("spec", ["rope", "rope:layout=interleaved,fraction=0.5"])
@pytest.mark.parametrize("start", [0, 1_000_000])
def test_ropes_kernel_rounds_as_torch_does_at_the_first_and_the_fifth_call(
    spec: str, start: int
) -> None:
    torch.manual_seed(0)
    method = build(spec, n_heads=12, d_head=64).cuda()
    rotation = method.rotation()
    assert rotation is not None
    exact = rotation._replace(frequency=rotation.frequency.double())
    make = {"device": "cuda", "dtype": torch.bfloat16}
    q = torch.randn(2, 300, 12, 64, **make).transpose(1, 2).requires_grad_()
    k = torch.randn(2, 4, 1000, 64, **make).requires_grad_()
    q_pos, k_pos = (torch.arange(start + a, start + 1000, device="cuda") for a in (700, 0))
    slopes = [torch.randn_like(q), torch.randn_like(k)]

    def results(pair: tuple[torch.Tensor, ...], leaves: list[torch.Tensor]) -> list[torch.Tensor]:
        grads = torch.autograd.grad(pair, leaves, [s.to(pair[0].dtype) for s in slopes])
        return [*pair, *grads]

    in_torch = results((method.query_heads(q, q_pos), method.key_heads(k, k_pos)), [q, k])
    wide = [x.detach().double().requires_grad_() for x in (q, k)]
    in_float64 = results((exact.turned(wide[0], q_pos), exact.turned(wide[1], k_pos)), wide)
    for call in range(5):
        found = results(turned(q, start + 700, k, start, rotation), [q, k])
        assert found[0].stride() == q.stride()
        if call not in (0, 4):
            continue
        for result, same, wanted in zip(found, in_torch, in_float64, strict=True):
            assert torch.equal(result, same)
            torch.testing.assert_close(result.double(), wanted, rtol=2e-2, atol=2e-2)


def test_ropes_kernel_is_captured_in_a_cuda_graph_and_two_launches_a_step() -> None:
    method = build("rope", n_heads=4, d_head=64).cuda()
    rotation = method.rotation()
    assert rotation is not None
    q, k, _ = qkv(128, dtype=torch.bfloat16)

    def step() -> list[torch.Tensor]:
        pair = turned(q, 0, k, 0, rotation)
        return [x.detach() for x in (*pair, *torch.autograd.grad(pair, [q, k], pair))]

    wanted = step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step()
    kernels = [e.name for e in profile.events() if e.device_type.name == "CUDA"]
    assert [name for name in kernels if "turn_kernel" in name] == kernels
    assert len(kernels) == 2
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    graph.replay()
    torch.cuda.synchronize()
    for result, same in zip(found, wanted, strict=True):
        assert torch.equal(result, same)


LENGTHS = (16, 64, 128, 200, 512, 2048)


@pytest.mark.parametrize("n", LENGTHS)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.usefixtures("nan_in_empty_memory")
def test_the_first_and_the_fifth_call_are_as_exact_as_pytorch(case: str, n: int) -> None:
    if CASES[case].dropout and n > 256:
        pytest.skip("no kernels for values of more than 256 numbers, which show what dropout keeps")
    sizes = Sizes(n)
    outcomes = five_calls(CASES[case], sizes, between=fill_free_gpu_memory_with_nan)
    assert errors_beyond(outcomes, sizes.dtype) == {}


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("case", ["tisa", "shaw causal", "alibi causal in groups", "t5 packed"])
@pytest.mark.usefixtures("nan_in_empty_memory")
def test_so_they_are_in_other_dtypes(case: str, dtype: torch.dtype) -> None:
    sizes = Sizes(200, dtype=dtype)
    outcomes = five_calls(CASES[case], sizes, between=fill_free_gpu_memory_with_nan)
    assert errors_beyond(outcomes, dtype) == {}


@pytest.mark.parametrize("n", LENGTHS)
@pytest.mark.parametrize("case", DECODING)
@pytest.mark.usefixtures("nan_in_empty_memory")
def test_so_they_are_for_the_last_queries_of_a_cache(case: str, n: int) -> None:
    sizes = Sizes(n)
    outcomes = five_calls(DECODING[case], sizes, between=fill_free_gpu_memory_with_nan)
    assert errors_beyond(outcomes, sizes.dtype) == {}


@pytest.mark.parametrize("n", [2304, 2350])  # in whole tiles, and not
@pytest.mark.parametrize(
    "case",
    [
        Case("tisa", window=(300, 200)),
        Case("tisa", window=1, groups=2),
        Case("tisa", window=(500, None), causal=True, groups=4),
        Case("t5", window=(200, 90)),
        Case("tisa", window=900),  # too wide: by block-diagonals
    ],
    ids=str,
)
@pytest.mark.usefixtures("nan_in_empty_memory")
def test_so_they_are_in_a_window_of_a_long_sequence(case: Case, n: int) -> None:
    sizes = Sizes(n, batch=1)
    outcomes = five_calls(case, sizes, between=fill_free_gpu_memory_with_nan)
    assert errors_beyond(outcomes, sizes.dtype) == {}


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("spec", ["tisa:reach=100", "t5", "shaw:clip=16"])
@pytest.mark.usefixtures("nan_in_empty_memory")
def test_so_they_are_where_a_plain_kernel_takes_the_far_keys(spec: str, causal: bool) -> None:
    sizes = Sizes(4096, batch=1, heads=2)
    q = torch.zeros(1, 2, 4096, 64, device="cuda", dtype=sizes.dtype)
    pos = torch.arange(4096, device="cuda")
    method = build(spec, n_heads=2, d_head=64, causal=causal).cuda()
    bias, values = method.score_term(q, pos, pos), method.value_term(pos, pos)
    assert "split" in str(explain(q, q, q, bias=bias, values=values, causal=causal))
    outcomes = five_calls(Case(spec, causal=causal), sizes, between=fill_free_gpu_memory_with_nan)
    assert errors_beyond(outcomes, sizes.dtype) == {}


@pytest.mark.parametrize("how", ["default", "reduce-overhead", "a CUDA graph"])
@pytest.mark.parametrize("spec", ["tisa", "t5", "alibi", "shaw", "kerple"])
def test_compiled_gradients_of_the_fifth_step_are_as_exact_as_the_called_ones(
    spec: str, how: str
) -> None:
    torch.compiler.reset()
    layer = MultiheadAttention(256, 4, batch_first=True, position=spec, backend="fused").cuda()
    shake(layer, 0.02)

    def forward(x: Tensor) -> Tensor:
        return layer(x, x, x, need_weights=False)[0]

    def in_half(forward: Callable[[Tensor], Tensor]) -> Gradients:
        def step(x: Tensor) -> Found:
            # Without a cache: what a graph has captured must cast the weights again.
            with torch.autocast("cuda", torch.bfloat16, cache_enabled=False):
                return gradients_of(layer, forward, x)

        return step

    def draw() -> Tensor:
        fill_free_gpu_memory_with_nan()
        return torch.randn(2, 200, 256, device="cuda")

    if how == "a CUDA graph":
        ours = captured(in_half(forward), draw())
    else:
        compiled = in_half(torch.compile(forward, mode=how))

        def ours(x: Tensor) -> Found:
            torch.compiler.cudagraph_mark_step_begin()
            return {name: g.clone() for name, g in compiled(x).items()}

    outcomes = five_steps(
        ours=ours,
        plain=in_half(forward),
        truth=lambda x: gradients_of(layer, forward, x),
        draw=draw,
    )
    assert errors_beyond(outcomes, torch.bfloat16) == {}


def captured(step: Gradients, x: Tensor) -> Gradients:
    """The step as a CUDA graph, which reads its input from one place and is played again."""
    place = x.clone()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step(place)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step(place)

    def played(x: Tensor) -> Found:
        place.copy_(x)
        graph.replay()
        return {name: g.clone() for name, g in found.items()}

    return played
