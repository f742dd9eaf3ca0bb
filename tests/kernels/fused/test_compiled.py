"""torch.compile and torch.export of attention on the fused backend: one graph, equal results."""

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounterWithBackend
from torch._functorch.aot_autograd import make_boxed_func

from shaking import gains, shake
from whence import build
from whence.nn import positioned_attention

pytestmark = [
    pytest.mark.triton,
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="set TRITON_INTERPRET=1"),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
]
H, D = 2, 16
SPECS = [
    "tisa",
    "t5:buckets=8,max_distance=16",
    "alibi",
    "shaw:clip=3",
    "kerple",
    "rope",
]
# Which kernels take a call, and so what the operator saves, changes at 32 tokens with tables and at
# 64 without (short.is_faster). A length that crosses one of these is a guard and one graph more.
AS_LONG = (36, 44, 60)


def quick(*few: str) -> list[Any]:
    """All of them, of which `make test` runs these few."""
    every = (*SPECS, "shaw:clip=3,per_head=true")
    return [spec if spec in few else pytest.param(spec, marks=pytest.mark.slow) for spec in every]


@pytest.fixture(autouse=True)
def _fresh_compiler() -> None:
    pytest.importorskip("triton", reason="Triton is a Linux package")
    torch.compiler.reset()


class Attention(nn.Module):
    """A method's attention of heads that are given."""

    def __init__(self, spec: str) -> None:
        super().__init__()
        self.method = build(spec, n_heads=H, d_head=D)
        shake(self.method, 0.1)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return positioned_attention(self.method, q, k, v, causal=True, backend="fused")


def heads(n: int) -> list[Tensor]:
    return [torch.randn(1, n, H, D).transpose(1, 2).requires_grad_() for _ in range(3)]


def results(run: Callable[..., Tensor], module: Attention, qkv: list[Tensor]) -> list[Tensor]:
    """The output and the gradients of q, k, v and every parameter, in the units of the formula."""
    out = run(*qkv)
    slope = torch.arange(out.numel()).cos().view(out.shape)
    found = torch.autograd.grad(out, [*qkv, *module.parameters()], slope)
    units = [1.0, 1.0, 1.0, *gains(module.method)]
    return [out, *(x / unit for x, unit in zip(found, units, strict=True))]


def assert_equal(module: Attention, compiled: Callable[..., Tensor], n: int) -> None:
    qkv = heads(n)
    found, wanted = results(compiled, module, qkv), results(module, module, qkv)
    assert len(found) == 4 + len(list(module.parameters()))
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("spec", SPECS)
def test_a_compiled_method_gives_the_output_and_gradients_of_the_called_one(spec: str) -> None:
    module = Attention(spec)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    assert_equal(module, compiled, 24)


@pytest.mark.parametrize("spec", quick("tisa"))
def test_other_lengths_are_compiled_at_most_once_more(spec: str) -> None:
    module = Attention(spec)
    graphs = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(module, fullgraph=True, backend=graphs)
    for n in AS_LONG:
        assert_equal(module, compiled, n)
    assert graphs.frame_count <= 2


@pytest.mark.parametrize("spec", quick("tisa"))
def test_all_sizes_may_be_symbolic(spec: str) -> None:
    module = Attention(spec)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager", dynamic=True)
    for n in AS_LONG[:2]:
        assert_equal(module, compiled, n)


@pytest.mark.parametrize("spec", SPECS)
def test_a_method_is_exported_with_a_length_that_varies(spec: str) -> None:
    module = Attention(spec)
    n = torch.export.Dim("n", min=AS_LONG[0], max=AS_LONG[-1])
    given = tuple(x.detach() for x in heads(AS_LONG[1]))
    with torch.no_grad():
        exported = torch.export.export(module, given, dynamic_shapes=({2: n}, {2: n}, {2: n}))
        called = [str(node.target) for node in exported.graph.nodes if node.op == "call_function"]
        assert sum("whence.lag_attention" in name for name in called) == 1
        for length in (AS_LONG[0], AS_LONG[-1]):
            given = tuple(x.detach() for x in heads(length))
            torch.testing.assert_close(exported.module()(*given), module(*given))


def test_an_exported_method_has_the_gradients_of_the_called_one() -> None:
    module, qkv = Attention("tisa"), heads(AS_LONG[0])
    exported = torch.export.export(module, tuple(qkv)).module()
    found, wanted = ([*qkv, *x.parameters()] for x in (exported, module))
    for a, b in zip(
        torch.autograd.grad(exported(*qkv).square().sum(), found),
        torch.autograd.grad(module(*qkv).square().sum(), wanted),
        strict=True,
    ):
        torch.testing.assert_close(a, b)


def test_a_compiled_layer_runs_two_operators_and_keeps_one_tensor_beside_the_output() -> None:
    module, qkv, called = Attention("tisa"), heads(AS_LONG[0]), []

    def noting(graph: Any, _: Any) -> Any:
        ours = [node for node in graph.graph.nodes if "whence" in str(node.target)]
        called.extend((str(node.target), len(node.users)) for node in ours)
        return make_boxed_func(graph)

    compiled = torch.compile(module, fullgraph=True, backend=aot_autograd(fw_compiler=noting))
    compiled(*qkv).sum().backward()
    n_gradients = 3 + len(list(module.parameters()))
    assert called == [
        ("whence.lag_attention_forward.default", 2),
        ("whence.lag_attention_backward.default", n_gradients),
    ]
