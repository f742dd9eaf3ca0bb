"""torch.compile and torch.export of attention on the fused backend: one graph, equal results."""

import os
from collections.abc import Callable
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounterWithBackend
from torch._functorch.aot_autograd import make_boxed_func

from shaking import gains, shake
from whence import LagBias, Mask, attend, build
from whence.kernels.fused import backend as fused
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
# The kernels for short sequences take calls of up to 64 tokens, causal ones in half precision without
# tables of up to 128, and save less for backward (short.is_faster).
LENGTHS = (36, 60, 20, 70)


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

    def __init__(self, spec: str, *, causal: bool = True) -> None:
        super().__init__()
        self.method, self.causal = build(spec, n_heads=H, d_head=D), causal
        shake(self.method, 0.1)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return positioned_attention(self.method, q, k, v, causal=self.causal, backend="fused")


class SelfAttention(Attention):
    """The same of one tensor, so that a compiler knows that there are as many queries as keys."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(*x.chunk(3, -1))


def heads(n: int) -> list[Tensor]:
    return [torch.randn(1, n, H, D).transpose(1, 2).requires_grad_() for _ in range(3)]


def results(run: Callable[..., Tensor], module: Attention, given: list[Tensor]) -> list[Tensor]:
    """The output and the gradients of what is given and of every parameter, the latter in the units
    of the formula.
    """
    out = run(*given)
    slope = torch.arange(out.numel()).cos().view(out.shape)
    found = torch.autograd.grad(out, [*given, *module.parameters()], slope)
    units = [*(1.0 for _ in given), *gains(module.method)]
    return [out, *(x / unit for x, unit in zip(found, units, strict=True))]


def assert_equal(module: Attention, compiled: Callable[..., Tensor], *given: Tensor) -> None:
    found, wanted = (results(run, module, [*given]) for run in (compiled, module))
    assert len(found) == 1 + len(given) + len(list(module.parameters()))
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("spec", SPECS)
def test_a_compiled_method_gives_the_output_and_gradients_of_the_called_one(spec: str) -> None:
    module = Attention(spec)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    assert_equal(module, compiled, *heads(24))


@pytest.mark.parametrize("spec", quick("tisa", "shaw:clip=3"))
def test_other_lengths_are_compiled_at_most_once_more(spec: str) -> None:
    module = Attention(spec)
    graphs = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(module, fullgraph=True, backend=graphs)
    for n in LENGTHS:
        assert_equal(module, compiled, *heads(n))
    assert graphs.frame_count <= 2


@pytest.mark.parametrize("spec", ["tisa", "shaw:clip=3"])
def test_other_lengths_are_compiled_at_most_once_more_in_half_precision(spec: str) -> None:
    module = Attention(spec)
    graphs = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(module, fullgraph=True, backend=graphs)
    for n in (100, 140, 60):
        assert_equal(module, compiled, *(x.detach().half().requires_grad_() for x in heads(n)))
    assert graphs.frame_count <= 2


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("spec", ["tisa:reach=6", "shaw:clip=4"])
def test_lengths_are_compiled_at_most_once_more_where_a_plain_kernel_takes_the_far_keys(
    spec: str, causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fused, "FAR_STEP", 8)
    monkeypatch.setattr(fused, "ROW_FAR_STEP", 8)
    monkeypatch.setattr(fused, "SHORTEST", {256: 48})
    monkeypatch.setattr(fused, "FEWEST", 1)
    from whence.kernels.fused import function  # which imports Triton

    split = MagicMock(wraps=function.far_attention)
    monkeypatch.setattr(function, "far_attention", split)
    module = SelfAttention(spec, causal=causal)
    graphs = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(module, fullgraph=True, backend=graphs)
    for n in (40, 70, 24, 48, 47):
        split.reset_mock()
        x = torch.randn(1, n, H, 3 * D).transpose(1, 2).requires_grad_()
        assert_equal(module, compiled, x)
        assert split.call_count == (2 if n >= 48 else 0)  # compiled and called
    assert graphs.frame_count <= 2


@pytest.mark.parametrize("spec", ["tisa", "shaw:clip=3"])
def test_other_lengths_are_compiled_at_most_once_more_with_few_queries(
    spec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fused, "MANY_KEYS", 32)
    module = Attention(spec)
    graphs = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(module, fullgraph=True, backend=graphs)
    for n_q, n_k in ((20, 60), (5, 70), (2, 90), (17, 33)):
        assert_equal(module, compiled, heads(n_q)[0], *heads(n_k)[1:])
    assert graphs.frame_count <= 2


class Masked(Attention):
    """Attention with padding, documents in a row and a window."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        place = torch.arange(k.shape[2])[None]
        mask = Mask(keys=place > 1, segments=(place // 15, place // 15))
        options = {"causal": self.causal, "window": (25, 9), "mask": mask, "backend": "fused"}
        return positioned_attention(self.method, q, k, v, **options)


@pytest.mark.parametrize("spec", ["tisa", "tisa+shaw:clip=40"])
def test_other_lengths_are_compiled_at_most_once_more_with_a_mask_and_a_window(spec: str) -> None:
    module = Masked(spec, causal=False)
    graphs = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(module, fullgraph=True, backend=graphs)
    for n in LENGTHS:
        assert_equal(module, compiled, *heads(n))
    assert graphs.frame_count <= 2


def test_a_compiled_model_has_two_graphs_for_all_lengths() -> None:
    from whence.models import WhenceConfig, WhenceForCausalLM

    sizes = {"hidden_size": H * D, "num_attention_heads": H, "intermediate_size": 16}
    model = WhenceForCausalLM(
        WhenceConfig(vocab_size=30, num_hidden_layers=1, position="tisa+rope", **sizes)
    )
    graphs = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, fullgraph=True, backend=graphs)
    for n in LENGTHS:
        ids = torch.randint(30, (2, n))
        given = {"attention_mask": (torch.arange(n) > 2).expand(2, -1), "use_cache": False}
        found, wanted = (x(ids, labels=ids, **given).loss for x in (compiled, model))
        torch.testing.assert_close(found, wanted)
        parameters = list(model.parameters())
        of_compiled, of_called = (torch.autograd.grad(x, parameters) for x in (found, wanted))
        torch.testing.assert_close(of_compiled, of_called, rtol=1e-4, atol=1e-5)
    assert graphs.frame_count <= 2


@pytest.mark.parametrize("spec", ["tisa", "shaw:clip=3"])
def test_a_graph_for_a_growing_cache_runs_the_kernels_of_few_queries(spec: str) -> None:
    from whence.kernels.fused.plan import PLANS

    module = Attention(spec)
    graphs = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(module, fullgraph=True, backend=graphs)
    with torch.no_grad():
        for n_k in (300, 310, 320):
            q, (_, *kv) = heads(4)[0], heads(n_k)
            PLANS.forget()
            torch.testing.assert_close(compiled(q, *kv), module(q, *kv))
            plans = [getattr(x, "plan", x) for x in PLANS._kept.values()]
            assert {x.launches[-1].kernel for x in plans} == {"merge_kernel"}
    assert graphs.frame_count <= 2


@pytest.mark.parametrize("spec", ["alibi", "shaw:clip=3"])
def test_another_first_position_is_compiled_at_most_once_more(spec: str) -> None:
    method, (q, k, v) = build(spec, n_heads=H, d_head=D), heads(40)

    def attention(q_start: int) -> Tensor:
        pos = torch.arange(40)
        bias = method.score_term(q, pos + q_start, pos)
        return attend(q, k, v, bias=bias, q_start=q_start, backend="fused")

    graphs = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(attention, fullgraph=True, backend=graphs)
    for q_start in (31, 5, 10, 200):
        torch.testing.assert_close(compiled(q_start), attention(q_start), rtol=1e-4, atol=1e-5)
    assert graphs.frame_count <= 2


def test_a_graph_asks_whether_there_are_too_many_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "MOST_HEADS", 4 * H)
    method, sizes = build("tisa", n_heads=H, d_head=D), (2, 3, 5)
    given = [[torch.randn(b, H, 9, D) for _ in range(3)] for b in sizes]

    class Auto(nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return positioned_attention(method, q, k, v)

    compiled = torch.compile(Auto(), fullgraph=True, backend="aot_eager")
    for qkv in given:  # the last one on another backend, as a call does
        torch.testing.assert_close(compiled(*qkv), Auto()(*qkv))
    b = torch.export.Dim("b", min=2, max=100)
    with torch.no_grad():
        exported = torch.export.export(Auto(), tuple(given[0]), dynamic_shapes=({0: b},) * 3)
        torch.testing.assert_close(exported.module()(*given[1]), Auto()(*given[1]))
        with pytest.raises(ValueError, match="cannot run this call: it takes at most 8 heads"):
            exported.module()(*given[2])


@pytest.mark.parametrize("spec", ["kerple", "tisa+shaw:clip=3"])
def test_a_band_that_grows_with_the_length_is_exported_without_a_limit(spec: str) -> None:
    module, n = Attention(spec), torch.export.Dim("n")
    given = tuple(x.detach() for x in heads(20))
    with torch.no_grad():
        exported = torch.export.export(module, given, dynamic_shapes=({2: n},) * 3)
        given = tuple(x.detach() for x in heads(50))
        torch.testing.assert_close(exported.module()(*given), module(*given))


@pytest.mark.parametrize("spec", quick("tisa"))
def test_all_sizes_may_be_symbolic(spec: str) -> None:
    module = Attention(spec)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager", dynamic=True)
    for n in LENGTHS:
        assert_equal(module, compiled, *heads(n))


@pytest.mark.parametrize("spec", SPECS)
def test_a_method_is_exported_with_a_length_that_varies(spec: str) -> None:
    module = Attention(spec)
    n = torch.export.Dim("n", min=min(LENGTHS), max=max(LENGTHS))
    given = tuple(x.detach() for x in heads(LENGTHS[0]))
    with torch.no_grad():
        exported = torch.export.export(module, given, dynamic_shapes=({2: n}, {2: n}, {2: n}))
        called = [str(node.target) for node in exported.graph.nodes if node.op == "call_function"]
        assert sum("whence.lag_attention" in name for name in called) == 1
        for length in (min(LENGTHS), max(LENGTHS)):
            given = tuple(x.detach() for x in heads(length))
            torch.testing.assert_close(exported.module()(*given), module(*given))


def test_an_exported_graph_takes_heads_in_any_layout() -> None:
    module, n = Attention("tisa"), torch.export.Dim("n", min=2)
    with torch.no_grad():
        graph = torch.export.export(module, tuple(heads(20)), dynamic_shapes=({2: n},) * 3).module()
        q, k, v = heads(33)
        for i in range(3):
            given = [q, k, v]
            given[i] = given[i].transpose(-1, -2).contiguous().transpose(-1, -2)
            torch.testing.assert_close(graph(*given), module(q, k, v))


def test_an_exported_graph_reads_what_it_made_for_one_query() -> None:
    # With one query PyTorch lays out the sum of the two bands otherwise than with many.
    module = Attention("t5:buckets=8,max_distance=16+shaw:clip=3", causal=False)
    n, m = torch.export.Dim("n"), torch.export.Dim("m")

    class FromTheStart(nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            options = {"q_start": 0, "backend": "fused"}
            return positioned_attention(module.method, q, k, v, **options)

    whole = FromTheStart()
    with torch.no_grad():
        given = (heads(37)[0], *heads(53)[1:])
        graph = torch.export.export(whole, given, dynamic_shapes=({2: n}, {2: m}, {2: m})).module()
        for n_q, n_k in ((1, 40), (1, 280), (2, 40)):
            given = (heads(n_q)[0], *heads(n_k)[1:])
            torch.testing.assert_close(graph(*given), whole(*given))


def test_an_exported_graph_is_refused_where_its_plain_kernel_is_not_to_be_had(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fused, "FAR_STEP", 8)
    monkeypatch.setattr(fused, "SHORTEST", {256: 48})
    monkeypatch.setattr(fused, "FEWEST", 1)
    module, given = Attention("tisa:reach=6"), tuple(heads(48))
    with torch.no_grad():
        graph = torch.export.export(module, given).module()
        torch.testing.assert_close(graph(*given), module(*given))
        monkeypatch.setattr(fused, "fastest", lambda q, v: None)  # as on another GPU
        with pytest.raises(ValueError, match="was exported to leave far keys to a plain kernel"):
            graph(*given)
        module(*given)  # in one pass


def test_a_compiled_call_of_one_query_may_have_rows_any_distance_apart() -> None:
    q = torch.randn(4 * D).as_strided((2, H, 1, D), (H * D, D, 1 << 24, 1))
    _, k, v = (x[:2] for x in heads(40))

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q, k, v, bias=LagBias.line(torch.tensor([-1.0, -0.5])), backend="fused")

    compiled = torch.compile(attention, fullgraph=True, backend="aot_eager")
    k, v = (x.detach().expand(2, -1, -1, -1) for x in (k, v))
    torch.testing.assert_close(compiled(q, k, v), attention(q, k, v))


def test_an_exported_method_has_the_gradients_of_the_called_one() -> None:
    module, qkv = Attention("tisa"), heads(LENGTHS[0])
    exported = torch.export.export(module, tuple(qkv)).module()
    found, wanted = ([*qkv, *x.parameters()] for x in (exported, module))
    for a, b in zip(
        torch.autograd.grad(exported(*qkv).square().sum(), found),
        torch.autograd.grad(module(*qkv).square().sum(), wanted),
        strict=True,
    ):
        torch.testing.assert_close(a, b)


def test_a_compiled_layer_runs_two_operators_and_keeps_one_tensor_beside_the_output() -> None:
    module, qkv, called = Attention("tisa"), heads(LENGTHS[0]), []

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
