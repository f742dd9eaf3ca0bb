"""torch.export and torch.compile of attention on a CPU with a length that is not known."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.export import Dim, export

from shaking import gains, shake
from whence import LagBias, Mask, attend, build
from whence.nn import positioned_attention

pytestmark = [
    pytest.mark.compiled,
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
]
H, D = 2, 8
SPECS = ["tisa", "shaw:clip=3", "rope", "fire"]
SLOW = [
    "alibi",
    "content_band:width=9",
    "cope",
    "deberta:position_buckets=4,max_distance=9",
    "forget",
    "kerple",
    "learned",
    "sandwich",
    "synthesizer",
    "t5:buckets=8,max_distance=16",
    "tisa2",
    "tisa:reach=9+rope",
    "tisa+shaw:clip=7",
    "transformer_xl",
    "transformer_xl:clamp=9",
    "tupe",
    "xpos",
]
SPECS += [pytest.param(spec, marks=pytest.mark.slow) for spec in SLOW]


@pytest.fixture(autouse=True)
def _fresh_compiler() -> None:
    torch.compiler.reset()


class Attention(nn.Module):
    """A method's causal attention of heads that are given."""

    def __init__(self, spec: str) -> None:
        super().__init__()
        sizes = {"n_heads": H, "d_head": D, "d_model": H * D, "max_length": 64}
        self.method = build(spec, **sizes, causal=True)
        shake(self.method, 0.1)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        content = {"x_q": q.transpose(1, 2).flatten(2), "x_k": k.transpose(1, 2).flatten(2)}
        return positioned_attention(self.method, q, k, v, **content, causal=True)


def heads(n_q: int, n_k: int) -> list[Tensor]:
    return [torch.randn(1, n, H, D).transpose(1, 2).requires_grad_() for n in (n_q, n_k, n_k)]


def results(run: Callable[..., Tensor], module: Attention, qkv: list[Tensor]) -> list[Tensor]:
    """The output and the gradients of q, k, v and every parameter, in the units of the formula."""
    out = run(*qkv)
    slope = torch.arange(out.numel()).cos().view(out.shape)
    found = torch.autograd.grad(
        out, [*qkv, *module.parameters()], slope, allow_unused=True, materialize_grads=True
    )
    units = [1.0, 1.0, 1.0, *gains(module.method)]
    return [out, *(x / unit for x, unit in zip(found, units, strict=True))]


@pytest.mark.parametrize("spec", SPECS)
def test_an_exported_method_takes_any_number_of_queries_and_keys(spec: str) -> None:
    module = Attention(spec)
    n_q, n_k = Dim("n_q", min=4, max=60), Dim("n_k", min=4, max=60)
    exported = export(module, tuple(heads(16, 21)), dynamic_shapes=({2: n_q}, {2: n_k}, {2: n_k}))
    for lengths in ((5, 7), (16, 16), (20, 55)):
        given = heads(*lengths)
        torch.testing.assert_close(exported.module()(*given), module(*given))


@pytest.mark.parametrize(
    "spec", [pytest.param(s, marks=pytest.mark.slow) if s == "fire" else s for s in SPECS]
)
def test_a_method_compiled_for_any_length_is_compiled_at_most_twice(spec: str) -> None:
    module = Attention(spec)
    graphs = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(module, fullgraph=True, backend=graphs, dynamic=True)
    for n in (5, 16, 40):
        qkv = heads(n, n)
        wanted = results(module, module, qkv)
        for a, b in zip(results(compiled, module, qkv), wanted, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    assert graphs.frame_count <= 2


class Masked(nn.Module):
    """`attend` with every part of a mask and a window, and with dropout if asked for."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.dropout = dropout

    def forward(self, q: Tensor, k: Tensor, v: Tensor, keys: Tensor, segment: Tensor) -> Tensor:
        bias = LagBias.clipped(q @ torch.ones(D, 7) / 7)
        pairs = keys[:, None, None] | keys[:, None, :, None]
        mask = Mask(keys=keys, segments=(segment, segment), pairs=pairs)
        return attend(q, k, v, bias=bias, mask=mask, window=(9, None), dropout=self.dropout)


def masked(n: int) -> tuple[Tensor, ...]:
    q, k, v = (x.detach() for x in heads(n, n))
    return q, k, v, torch.arange(n)[None] > 1, torch.arange(n)[None] // 6


def test_masks_are_exported_with_a_length_that_varies() -> None:
    n = Dim("n", min=4, max=600)
    exported = export(Masked(), masked(16), dynamic_shapes=({2: n}, {2: n}, {2: n}, {1: n}, {1: n}))
    for length in (5, 16, 300):
        given = masked(length)
        torch.testing.assert_close(exported.module()(*given), Masked()(*given))


def test_a_graph_draws_dropout_anew_in_every_call_and_again_in_backward() -> None:
    compiled = torch.compile(Masked(0.5), fullgraph=True, backend="aot_eager", dynamic=True)
    q, k, v, keys, segment = masked(24)
    v = torch.eye(24)[None, None].expand(1, H, 24, 24).clone().requires_grad_()
    first, second = (compiled(q, k, v, keys, segment) for _ in range(2))
    assert (first.detach() - second.detach()).abs().max() > 0
    # The output is the weights, as v is the identity: its sum over rows is the gradient of v.
    (d_v,) = torch.autograd.grad(first.sum(), v)
    torch.testing.assert_close(d_v[..., 0], first.detach().sum(2))


def test_the_operator_is_what_its_fake_and_its_gradient_say() -> None:
    torch.manual_seed(0)
    q, k, v, keys, segment = masked(12)
    band, const = torch.randn(1, H, 12, 5), torch.randn(1, H, 12)
    given = [x.clone().requires_grad_() for x in (q, k, v, band, const, const, const, const)]
    table = torch.randn(H, 3, D, requires_grad=True)
    masks = (keys, segment, segment.clone(), None)
    for dtype in (torch.float32, torch.bfloat16):
        typed = [x.detach().to(dtype).requires_grad_() for x in (*given, table)]
        torch.library.opcheck(
            torch.ops.whence.blocked_attention.default,
            (*typed, *masks, None, 0, True, -1, -1, 0.5, 0.0, True),
        )
