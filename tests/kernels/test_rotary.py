"""RoPE's kernel against its definition in torch: results, gradients, layouts in memory, and laws."""

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd import forward_ad
from torch.testing import assert_close

from whence import Sum, build
from whence.kernels.fused.plan import Plan
from whence.kernels.rotary import turned
from whence.methods.rope import Rope
from whence.nn import positioned_attention, positioned_attention_with_weights
from whence.rotation import Rotation

pytestmark = pytest.mark.triton
B, D = 2, 16
CLOSE = {"rtol": 1e-6, "atol": 2e-6}  # two sines of float32, each rounded in its own way
OPTIONS = [
    "rope",
    "rope:layout=interleaved",
    "rope:fraction=0.5",
    "rope:fraction=0.75",
    "rope:fraction=0.375,layout=interleaved",
    "rope:scaling=linear,factor=4",
    "rope:scaling=ntk,factor=4",
    "rope:scaling=dynamic,factor=2,original_length=8",
    "rope:scaling=yarn,factor=4,original_length=16",
    "rope:scaling=llama3,factor=8,original_length=64",
]


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The turns launched in a test, each the plan of one launch."""
    found: list[object] = []
    run = Plan.run

    def counting(plan: Plan, given: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
        found.extend(each for each in plan.launches if each.kernel == "turn_kernel")
        return run(plan, given)

    monkeypatch.setattr(Plan, "run", counting)
    return found


def rotation_of(spec: str, d_head: int = D) -> Rotation:
    rotation = build(spec, n_heads=1, d_head=d_head).rotation()
    assert rotation is not None
    return rotation


def heads(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Random heads [b, h, n, d] that lie in memory as [b, n, h, d], as projections leave them."""
    b, h, n, d = shape
    return torch.randn(b, n, h, d).to(dtype).transpose(1, 2).requires_grad_()


def by_definition(
    q: Tensor, q_pos: Tensor, k: Tensor, k_pos: Tensor, rotation: Rotation
) -> tuple[Tensor, Tensor]:
    return rotation.turned(q, q_pos), rotation.turned(k, k_pos)


def with_gradients(pair: tuple[Tensor, Tensor], leaves: list[Tensor]) -> list[Tensor]:
    torch.manual_seed(3)
    slopes = [torch.randn(x.shape).to(x.dtype) for x in pair]
    return [*pair, *torch.autograd.grad(pair, leaves, slopes)]


@pytest.mark.parametrize("spec", OPTIONS)
@pytest.mark.parametrize("start", [0, 37])
def test_the_kernel_equals_the_definition_for_grouped_heads_and_a_cache(
    spec: str, start: int, launches: list[object]
) -> None:
    rotation, q, k = rotation_of(spec), heads(B, 6, 5, D), heads(B, 2, 21, D)
    pos = torch.arange(start, start + 21)
    found = with_gradients(turned(q, start + 16, k, start, rotation), [q, k])
    assert len(launches) == 2  # one forward, one backward
    wanted = with_gradients(by_definition(q, pos[16:], k, pos, rotation), [q, k])
    for result, same in zip(found, wanted, strict=True):
        assert_close(result, same, **CLOSE)


@pytest.mark.parametrize("spec", OPTIONS)
def test_positions_may_be_a_tensor_with_a_row_for_each_sequence(spec: str) -> None:
    rotation, q, k = rotation_of(spec), heads(B, 3, 4, D), heads(B, 3, 9, D)
    k_pos = torch.stack([torch.arange(9), torch.arange(30, 39).flip(0)])
    for q_rows, k_rows in (
        (k_pos[:, 5:], k_pos),
        (k_pos[1, 5:], k_pos[:1]),
        (k_pos[0, ::2][:4], 7),
    ):
        filled = k_rows if isinstance(k_rows, Tensor) else torch.arange(k_rows, k_rows + 9)
        found = with_gradients(turned(q, q_rows, k, k_rows, rotation), [q, k])
        wanted = with_gradients(by_definition(q, q_rows, k, filled, rotation), [q, k])
        for result, same in zip(found, wanted, strict=True):
            assert_close(result, same, **CLOSE)


def test_positions_of_another_number_than_rows_are_refused(launches: list[object]) -> None:
    rotation, x = rotation_of("rope"), heads(B, 3, 4, D)
    with pytest.raises(RuntimeError, match="expanded size"):
        turned(x, torch.arange(3), x, 0, rotation)
    assert not launches


@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_half_precision_is_rounded_where_torch_rounds(layout: str) -> None:
    rotation = rotation_of(f"rope:layout={layout},scaling=yarn,factor=4,original_length=16")
    q, k = (heads(B, h, 40, D, dtype=torch.float16) for h in (3, 1))
    pos = torch.arange(500, 540)
    found = with_gradients(turned(q, 500, k, 500, rotation), [q, k])
    wanted = with_gradients(by_definition(q, pos, k, pos, rotation), [q, k])
    for result, same in zip(found, wanted, strict=True):
        # The interpreter's sines and torch's on a CPU may be rounded to float16 differently.
        assert (result != same).float().mean().item() < 0.01
        assert_close(result, same, rtol=2e-3, atol=2e-3)


def test_results_lie_in_memory_as_their_inputs_do_and_any_strides_are_read() -> None:
    rotation = rotation_of("rope:fraction=0.5")
    whole = torch.randn(B, 7, 3, 4, D)
    inputs = {
        "by token": whole[:, :, 0].contiguous().transpose(1, 2),
        "by head": whole[:, :, 0].transpose(1, 2).contiguous(),
        "part of one projection": whole[:, :, 1].transpose(1, 2),
        "every second row": torch.randn(B, 4, 14, D)[:, :, ::2],
        "every second column": torch.randn(B, 4, 7, 2 * D)[..., ::2],
        "one head for all": torch.randn(B, 1, 7, D).expand(-1, 4, -1, -1),
        "columns first": torch.randn(B, 4, D, 7).transpose(2, 3),
    }
    for name, x in inputs.items():
        found, other = turned(x, 3, inputs["by token"], 0, rotation)
        assert_close(found, rotation.turned(x, torch.arange(3, 10)), **CLOSE, msg=name)
        assert_close(other, rotation.turned(inputs["by token"], torch.arange(7)), **CLOSE)
        if name in ("by token", "by head"):
            assert found.stride() == x.stride()
        if name == "part of one projection":
            assert found.transpose(1, 2).is_contiguous()


@pytest.mark.parametrize("shape", [(1, 1, 1, 2), (3, 5, 1, 6), (1, 9, 70, 12), (2, 1, 33, 40)])
def test_odd_sizes(shape: tuple[int, int, int, int]) -> None:
    rotation, q, k = rotation_of("rope", shape[-1]), heads(*shape), heads(*shape)
    pos = torch.arange(11, 11 + shape[2])
    found = with_gradients(turned(q, 11, k, 11, rotation), [q, k])
    wanted = with_gradients(by_definition(q, pos, k, pos, rotation), [q, k])
    for result, same in zip(found, wanted, strict=True):
        assert_close(result, same, **CLOSE)


def test_one_gradient_alone_is_one_launch_and_none_for_frozen_heads(
    launches: list[object],
) -> None:
    rotation, q, k = rotation_of("rope"), heads(B, 4, 5, D), heads(B, 1, 9, D)
    turned_q, turned_k = turned(q, 4, k, 0, rotation)
    for out, leaf, pos in ((turned_q, q, torch.arange(4, 9)), (turned_k, k, torch.arange(9))):
        slope = torch.randn(out.shape)
        (found,) = torch.autograd.grad(out, leaf, slope, retain_graph=True)
        (wanted,) = torch.autograd.grad(rotation.turned(leaf, pos), leaf, slope)
        assert_close(found, wanted, **CLOSE)
    assert len(launches) == 3
    _, from_frozen = turned(q.detach(), 4, k, 0, rotation)
    from_frozen.sum().backward()
    assert k.grad is not None
    with torch.no_grad():
        assert_close(turned(q, 4, k, 0, rotation)[0], turned_q.detach(), rtol=0, atol=0)


def test_a_gradient_can_be_differentiated_again() -> None:
    rotation, q, k = rotation_of("rope"), heads(1, 2, 3, D), heads(1, 2, 3, D)
    pos = torch.arange(3)

    def twice(pair: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
        energy = (pair[0].mul(pair[1]).sum(-1) ** 2).sum()
        slopes = torch.autograd.grad(energy, [q, k], create_graph=True)
        return torch.autograd.grad(sum(x.square().sum() for x in slopes), [q, k])

    found = twice(turned(q, 0, k, 0, rotation))
    for result, same in zip(found, twice(by_definition(q, pos, k, pos, rotation)), strict=True):
        assert_close(result, same, rtol=1e-4, atol=1e-3)


def test_positions_changed_between_forward_and_backward_are_an_error() -> None:
    rotation, x, pos = rotation_of("rope"), heads(1, 2, 3, D), torch.arange(3)
    out, _ = turned(x, pos, x, pos, rotation)
    pos += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # torch's own, in jvp
def test_what_the_kernel_has_no_rule_for_is_left_to_torch(launches: list[object]) -> None:
    rotation, x = rotation_of("rope"), torch.randn(1, 2, 3, D)
    pos = torch.arange(5, 8)
    wanted = rotation.turned(x, pos)
    many = torch.vmap(lambda q: turned(q, 5, q, 5, rotation)[1])(x[None].expand(4, -1, -1, -1, -1))
    assert_close(many, wanted.expand(4, -1, -1, -1, -1), rtol=0, atol=0)
    _, slope = torch.func.jvp(lambda q: turned(q, 5, q, 5, rotation)[0], (x,), (x,))
    assert_close(slope, wanted, rtol=0, atol=0)
    with forward_ad.dual_level():
        out, _ = turned(forward_ad.make_dual(x, x), 5, x, 5, rotation)
        assert_close(forward_ad.unpack_dual(out).tangent, wanted, rtol=0, atol=0)
    wide, _ = turned(x.double(), 5, x.double(), 5, rotation)
    assert_close(wide, rotation.turned(x.double(), pos), rtol=0, atol=0)
    mixed, _ = turned(x, 5, x.half(), 5, rotation)
    assert_close(mixed, wanted, rtol=0, atol=0)
    learned = rotation._replace(frequency=rotation.frequency.clone().requires_grad_())
    turned(x, 5, x, 5, learned)[0].square().sum().backward()
    assert learned.frequency.grad is not None
    assert turned(x[:, :, :0], 8, x, 5, rotation)[0].shape == (1, 2, 0, D)
    assert not launches


@given(
    q_at=st.integers(0, 300),
    k_at=st.integers(0, 300),
    shift=st.integers(0, 2_000_000),
    spec=st.sampled_from([x for x in OPTIONS if "dynamic" not in x]),
)
def test_the_product_depends_on_the_lag_alone(q_at: int, k_at: int, shift: int, spec: str) -> None:
    rotation = rotation_of(spec)
    q, k = torch.randn(2, 1, 1, 1, D).unbind()

    def product(by: int) -> Tensor:
        turned_q, turned_k = turned(q, q_at + by, k, k_at + by, rotation)
        return (turned_q * turned_k).sum()

    assert_close(product(shift), product(0), rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize(
    "spec", ["rope", "rope:layout=interleaved+alibi", "tisa+rope:fraction=0.5"]
)
def test_attention_turns_queries_and_keys_by_one_launch(spec: str, launches: list[object]) -> None:
    method = build(spec, n_heads=4, d_head=D)
    q, k, v = heads(B, 4, 6, D), heads(B, 2, 11, D), heads(B, 2, 11, D)

    def run(method: torch.nn.Module) -> list[Tensor]:
        options = {"causal": True, "k_start": 5}
        out = positioned_attention(method, q, k, v, **options, backend="reference")
        _, weights = positioned_attention_with_weights(method, q, k, v, **options)
        return [out, weights, *torch.autograd.grad(out.square().sum(), [q, k, v])]

    found = run(method)
    assert len(launches) == 3  # two forward, one backward
    parts = list(method.parts) if isinstance(method, Sum) else [method]
    hooks = Sum(*(_ByHooks(part) if isinstance(part, Rope) else part for part in parts))
    launches.clear()
    for result, same in zip(found, run(hooks), strict=True):
        assert_close(result, same, rtol=1e-5, atol=1e-5)
    assert not launches


class _ByHooks(Rope):
    """RoPE that overrides a hook, and so has no rotation."""

    def __init__(self, like: Rope) -> None:
        super().__init__(like.d_head, layout=like.layout, fraction=like.fraction)  # type: ignore[arg-type]

    def query_heads(self, q: Tensor, q_pos: Tensor) -> Tensor:
        return super().query_heads(q, q_pos)
