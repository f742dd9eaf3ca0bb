"""torch.compile(fullgraph=True) sees through the layers: no graph breaks, equal results."""

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.testing import assert_close

from whence.kernels.fused.plain import _has_cudnn
from whence.nn import MultiheadAttention, TransformerEncoder

pytestmark = [
    pytest.mark.compiled,
    # torch's own, from its inductor and from its tracing of an autograd function
    pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
]

B, N, H, D = 2, 9, 3, 12


def run(module: nn.Module, call: object, x: Tensor) -> tuple[object, list[Tensor]]:
    module.zero_grad()
    out = call(x)
    (out[0] if isinstance(out, tuple) else out).square().sum().backward()
    return out, [p.grad for p in module.parameters() if p.grad is not None]


def assert_compiles(module: nn.Module, call: object, x: Tensor, backend: str) -> None:
    """Compiled equals eager: outputs and the gradient of every parameter."""
    torch.compiler.reset()
    expected = run(module, call, x)
    got = run(module, torch.compile(call, fullgraph=True, backend=backend), x)
    assert_close(got, expected)
    assert len(expected[1]) == len(list(module.parameters()))


@pytest.mark.parametrize(
    "position", ["tisa", "alibi", "t5", "shaw", "rope", "learned+tisa", "fire"]
)
def test_attention_compiles_to_one_graph(position: str) -> None:
    layer = MultiheadAttention(
        D, H, dtype=torch.float64, position=position, max_length=16, backend="reference"
    )
    x = torch.randn(N, B, D, dtype=torch.float64)
    assert_compiles(layer, lambda x: layer(x, x, x, need_weights=False), x, "aot_eager")


@pytest.mark.parametrize("position", ["tisa", "t5", "shaw", "alibi"])
def test_a_layer_that_never_ran_compiles_to_one_graph(position: str) -> None:
    layer = MultiheadAttention(D, H, position=position, backend="reference")
    x = torch.randn(N, B, D)
    torch.compiler.reset()
    compiled = torch.compile(
        lambda x: layer(x, x, x, need_weights=False)[0], fullgraph=True, backend="eager"
    )
    assert_close(compiled(x), layer(x, x, x, need_weights=False)[0])


def test_masks_weights_and_extra_keys_compile_to_one_graph() -> None:
    layer = MultiheadAttention(
        D, H, dtype=torch.float64, add_bias_kv=True, add_zero_attn=True, backend="reference"
    )
    x = torch.randn(N, B, D, dtype=torch.float64)
    padding = torch.zeros(B, N, dtype=torch.bool)
    padding[1, 5:] = True
    added = torch.randn(N, N, dtype=torch.float64)
    assert_compiles(layer, lambda x: layer(x, x, x, padding, attn_mask=added), x, "aot_eager")


@pytest.mark.parametrize(
    ("layers", "backend"),
    [pytest.param(1, "inductor", marks=pytest.mark.slow), (2, "aot_eager")],
)
def test_an_encoder_compiles(layers: int, backend: str) -> None:
    """By inductor a single layer: each of its kernels is a call of the C++ compiler."""
    options = {"dtype": torch.float64, "causal": True, "backend": "reference"}
    stack = TransformerEncoder(D, H, layers, 16, 0.0, position="tisa", **options)
    x = torch.randn(N, B, D, dtype=torch.float64)
    assert_compiles(stack, lambda x: stack(x), x, backend)


@pytest.mark.parametrize(
    ("position", "dynamic"),
    [
        ("tisa", None),
        pytest.param("learned+shaw", None, marks=pytest.mark.slow),
        pytest.param("alibi", True, marks=pytest.mark.slow),
    ],
)
def test_a_compiled_layer_takes_any_length_with_two_graphs(
    position: str, dynamic: bool | None
) -> None:
    layer = MultiheadAttention(D, H, position=position, dtype=torch.float64, backend="reference")
    torch.compiler.reset()
    graphs = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, fullgraph=True, backend=graphs, dynamic=dynamic)
    for n in (5, 8, 13, 21):
        x = torch.randn(n, B, D, dtype=torch.float64)
        padding = torch.arange(n).expand(B, n) >= n - 2
        assert_close(compiled(x, x, x, padding, False), layer(x, x, x, padding, False))
    assert graphs.frame_count <= 2  # one for the first length, one for all others


def test_an_exported_encoder_takes_any_length() -> None:
    encoder = TransformerEncoder(D, H, 1, 16, batch_first=True, position="tisa").eval()

    class Padded(nn.Module):
        def forward(self, x: Tensor, padding: Tensor) -> Tensor:
            return encoder(x, src_key_padding_mask=padding)

    def given(n: int) -> tuple[Tensor, Tensor]:
        return torch.randn(B, n, D), torch.arange(n).expand(B, n) >= n - 2

    n = torch.export.Dim("n", min=4, max=40)
    exported = torch.export.export(Padded(), given(9), dynamic_shapes=({1: n}, {1: n}))
    for length in (5, 31):
        x, padding = given(length)
        assert_close(exported.module()(x, padding), Padded()(x, padding))


@pytest.mark.parametrize("position", ["alibi:learned=true", "fire"])
def test_attention_compiles_on_the_backend_that_auto_takes(position: str) -> None:
    layer = MultiheadAttention(D, H, position=position, dtype=torch.float64)
    x = torch.randn(N, B, D, dtype=torch.float64)
    assert_compiles(layer, lambda x: layer(x, x, x, need_weights=False), x, "aot_eager")


def test_whether_cudnn_is_there_is_marked_as_pytorch_marks_a_constant() -> None:
    @torch.compiler.assume_constant_result
    def marked() -> bool:
        return True

    assert vars(_has_cudnn) == vars(marked)
