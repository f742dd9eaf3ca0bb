"""What only a GPU can show: the real kernels, the compiler, CUDA graphs, bitwise repetition."""

import pytest
import torch

from whence import LagBias, LagValues, Line, Mask, attend, build, explain

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    pytest.mark.filterwarnings("default"),
]


def qkv(n: int = 300, d: int = 64, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(2, 4, n, d, device="cuda").to(dtype).requires_grad_() for _ in range(3)]


@pytest.mark.parametrize("backend", ["sdpa", "flex", "fused"])
@pytest.mark.parametrize("name", ["tisa", "t5", "alibi", "kerple", "shaw"])
def test_every_backend_agrees_with_the_definition(backend: str, name: str) -> None:
    method = build(name, n_heads=4, d_head=64).cuda()
    q, k, v = qkv()
    pos = torch.arange(300, device="cuda")
    mask = Mask.padding(torch.tensor([300, 211], device="cuda"), 300)

    def run(backend: str) -> list[torch.Tensor]:
        values = method.value_term(pos, pos)
        if backend == "flex" or (values is not None and wanted_without_values):
            values = None
        out = attend(
            q,
            k,
            v,
            bias=method.score_term(q, pos, pos),
            values=values,
            mask=mask,
            causal=True,
            backend=backend,
        )
        targets = [q, k, v, *(p for p in method.parameters() if p is not method_value)]
        return [out, *torch.autograd.grad(out.square().sum(), targets, allow_unused=True)]

    wanted_without_values = backend == "flex"
    method_value = getattr(method, "value_table", None) if wanted_without_values else None
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


def test_autocast_and_activation_checkpointing_work() -> None:
    from torch.utils.checkpoint import checkpoint

    from whence.nn import MultiheadAttention

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
