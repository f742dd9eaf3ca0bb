"""torch.compile and torch.export of attention on the fused backend: one graph, equal results."""

import os
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

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


@pytest.mark.parametrize("spec", SPECS)
def test_other_lengths_are_compiled_at_most_once_more(spec: str) -> None:
    module = Attention(spec)
    graphs = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(module, fullgraph=True, backend=graphs)
    for n in (24, 32, 40, 48):
        assert_equal(module, compiled, n)
    assert graphs.frame_count <= 2


FIXED = pytest.mark.xfail(
    raises=torch._dynamo.exc.UserError,
    strict=True,
    reason="longest_lag takes len() of the positions, which torch.export makes a constant",
)


@pytest.mark.parametrize(
    "spec", [pytest.param(x, marks=FIXED) if x in ("tisa", "kerple") else x for x in SPECS]
)
def test_a_method_is_exported_with_a_length_that_varies(spec: str) -> None:
    module = Attention(spec)
    n = torch.export.Dim("n", min=17, max=64)  # up to 16 queries may take another way (`decoded`)
    given = tuple(x.detach() for x in heads(24))
    with torch.no_grad():
        exported = torch.export.export(module, given, dynamic_shapes=({2: n}, {2: n}, {2: n}))
        called = [str(node.target) for node in exported.graph.nodes if node.op == "call_function"]
        assert sum("whence.lag_attention" in name for name in called) == 1
        for length in (17, 40):
            given = tuple(x.detach() for x in heads(length))
            torch.testing.assert_close(exported.module()(*given), module(*given))
