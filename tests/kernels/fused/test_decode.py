"""Few queries against many keys: shares of the keys, merged, equal the definition."""

import random

import pytest
import torch
from torch import Tensor

from five_calls import DECODING, Sizes, errors_beyond, five_calls, nan_in_empty_memory
from whence import LagBias, LagValues, Line, Mask, attend, build

__all__ = ["nan_in_empty_memory"]
pytestmark = [
    pytest.mark.triton,
    # A cell out of sight may have any logit; whatever its exponential is, its weight is made 0.
    pytest.mark.filterwarnings("ignore:overflow encountered in exp"),
]


@pytest.fixture(autouse=True)
def _short_caches_are_shared_out(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="Triton is a Linux package")
    from whence.kernels.fused import backend

    monkeypatch.setattr(backend, "MANY_KEYS", 32)


def planned(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict[str, object]]]:
    """The kernels of the plans that are made from here on, and their constants."""
    from whence.kernels.fused.plan import Plan

    found: list[tuple[str, dict[str, object]]] = []
    launch = Plan.launch

    def noting(self: Plan, kernel: object, *rest: object, **options: object) -> None:
        found.append((kernel.fn.__name__, options))
        launch(self, kernel, *rest, **options)

    monkeypatch.setattr(Plan, "launch", noting)
    return found


@pytest.mark.parametrize("seed", range(16))
def test_output_and_every_gradient_equal_the_definition(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    launches = planned(monkeypatch)
    choose = random.Random(seed)
    torch.manual_seed(seed)
    b, h_kv, groups = choose.choice([1, 2]), choose.choice([1, 2]), choose.choice([1, 3])
    h, n_q, n_k = h_kv * groups, choose.choice([1, 2, 5]), choose.choice([33, 64, 131])
    d, reach = choose.choice([16, 24]), choose.choice([0, 4, 40])

    def leaf(*shape: int) -> Tensor:
        return torch.randn(*shape, requires_grad=True)

    q, k, v = leaf(b, h, n_q, d), leaf(b, h_kv, n_k, d), leaf(b, h_kv, n_k, d)
    axes = (choose.choice([1, b]), h, choose.choice([1, n_q]))
    band = leaf(*axes, 2 * reach + 1)
    lines = [leaf(*axes) if choose.random() < 0.5 else None for _ in range(4)]
    table = leaf(choose.choice([1, h]), 2 * choose.choice([0, 6]) + 1, d)
    values = choose.random() < 0.5
    mask = choose.choice([None, torch.rand(b, n_k) > 0.3])
    options = {
        "mask": mask,
        "causal": choose.random() < 0.7,
        "window": choose.choice([None, None, 20, (7, None)]),
        "q_start": choose.choice([None, None, 3]),
    }
    leaves = [x for x in (q, k, v, band, *lines, *([table] if values else [])) if x is not None]

    def run(backend: str) -> list[Tensor]:
        bias = LagBias(band, Line(lines[0], lines[1]), Line(lines[2], lines[3]))
        out = attend(
            *(q, k, v),
            bias=bias,
            values=LagValues(table) if values else None,
            backend=backend,
            **options,
        )
        torch.manual_seed(1)
        found = torch.autograd.grad(out, leaves, torch.randn_like(out), allow_unused=True)
        return [out, *(torch.zeros(()) if x is None else x for x in found)]

    for found, wanted in zip(run("fused"), run("reference"), strict=True):
        torch.testing.assert_close(found, wanted.expand_as(found), rtol=2e-4, atol=3e-5)
    assert [name for name, _ in launches].count("share_kernel") == 1


def test_packed_segments_and_low_rank_terms_decode_too(monkeypatch: pytest.MonkeyPatch) -> None:
    launches = planned(monkeypatch)
    torch.manual_seed(0)
    q, k, v = torch.randn(1, 2, 3, 16), torch.randn(1, 2, 50, 16), torch.randn(1, 2, 50, 16)
    segments = Mask(segments=(torch.tensor([[0, 1, 1]]), torch.arange(50)[None] // 25))
    wanted = attend(q, k, v, mask=segments, backend="reference")
    torch.testing.assert_close(attend(q, k, v, mask=segments, backend="fused"), wanted)
    assert [name for name, _ in launches].count("share_kernel") == 1


@pytest.mark.parametrize("spec", ["tisa", "t5", "alibi", "shaw:clip=3", "kerple+rope"])
def test_a_step_of_a_method_equals_the_last_row_of_the_whole(spec: str) -> None:
    from whence.nn import positioned_attention

    torch.manual_seed(0)
    method = build(spec, n_heads=2, d_head=16, causal=True)
    q, k, v = (torch.randn(1, 2, 60, 16) for _ in range(3))
    whole = positioned_attention(method, q, k, v, causal=True, backend="reference")
    last = positioned_attention(method, q[:, :, -1:], k, v, causal=True, backend="fused")
    torch.testing.assert_close(last, whole[:, :, -1:], rtol=1e-4, atol=1e-5)


def test_shares_cover_all_keys_and_none_twice() -> None:
    from whence.kernels.fused.tiles import shares

    for n_k in (1, 127, 128, 1000, 32768, 100_001):
        for heads in (1, 12, 500):
            count, share = shares(n_k, heads, 132, 128)
            assert share % 128 == 0
            assert (count - 1) * share < n_k <= count * share
            assert count <= 64


def test_tiles_of_a_decoder_shrink_with_those_that_fit() -> None:
    from whence.kernels.fused.tiles import NARROW, PLAIN, WIDE, share_tiles

    assert share_tiles(64, torch.bfloat16, 128, 3) == NARROW
    assert share_tiles(128, torch.bfloat16, 128, 3) == WIDE
    assert share_tiles(64, torch.float32, 128, 3) == share_tiles(256, torch.half, 128, 3) == PLAIN
    assert share_tiles(128, torch.bfloat16, 32, 1)[:2] == (32, 1)


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("n_q", [1, 3])
@pytest.mark.parametrize("reach", [5, 150])
def test_a_share_makes_its_own_part_of_a_curve(
    groups: int, n_q: int, reach: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from whence.lag import GAUSSIANS, CurveBias

    launches = planned(monkeypatch)
    torch.manual_seed(0)
    method = build("tisa", n_heads=2 * groups, d_head=16)
    for causal in (False, True):
        q = torch.randn(2, 2 * groups, n_q, 16)
        k, v = (torch.randn(2, 2, 139, 16) for _ in range(2))
        for recorded in (False, True):
            with torch.set_grad_enabled(recorded):
                bias = CurveBias(GAUSSIANS, reach, *method.parameters())
                found, wanted = (
                    attend(q, k, v, bias=bias, causal=causal, backend=backend)
                    for backend in ("fused", "reference")
                )
            torch.testing.assert_close(found, wanted)
    assert [name for name, _ in launches] == ["share_kernel", "merge_kernel"] * 4
    assert all(constants["CURVE_AT"] is not None for _, constants in launches[::2])


QUICK = ("shaw:clip=3 for 1 of a cache",)  # the rest have simpler bands, or more rows of them


@pytest.mark.parametrize(
    "case",
    [case if case in QUICK else pytest.param(case, marks=pytest.mark.slow) for case in DECODING],
)
@pytest.mark.usefixtures("nan_in_empty_memory")
def test_the_first_and_the_fifth_call_are_as_exact_as_pytorch(case: str) -> None:
    sizes = Sizes(40, batch=1, heads=2, d_head=16, dtype=torch.float32, device="cpu")
    assert errors_beyond(five_calls(DECODING[case], sizes), sizes.dtype) == {}


@pytest.mark.parametrize("n_q", [1, 3])
def test_the_gradient_of_a_bias_sums_to_zero_over_the_keys_in_half_precision(n_q: int) -> None:
    """The weights of a row sum to 1 whatever is added to all of its logits.

    Forward rounds the weights before it multiplies them with the values, which is an error of
    delta in backward; summed over all keys it was 40 times that of PyTorch.
    """
    torch.manual_seed(0)
    n_k, d = 50, 64
    q, k, v = (torch.randn(1, 2, n, d).half().requires_grad_() for n in (n_q, n_k, n_k))
    band = torch.randn(1, 2, 1, 2 * n_k - 1, requires_grad=True)
    out = attend(q, k, v, bias=LagBias(band), backend="fused")
    out.backward(torch.randn(1, 2, n_q, d).half())
    assert band.grad is not None
    torch.testing.assert_close(band.grad.sum(-1), torch.zeros(1, 2, 1), rtol=0, atol=3e-5)
