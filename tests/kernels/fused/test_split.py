"""The split strategy: far keys by a plain kernel, near ones by ours, equal to the definition."""

import pytest
import torch
from torch import Tensor

from five_calls import Case, Sizes, errors_beyond, five_calls, nan_in_empty_memory
from shaking import gains
from whence import LagBias, LagValues, Line, attend, build, explain
from whence.kernels.fused import backend as fused
from whence.kernels.reference import attend_rows

__all__ = ["nan_in_empty_memory"]
pytestmark = pytest.mark.triton


@pytest.fixture(autouse=True)
def _short_calls_are_split(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="Triton is a Linux package")
    monkeypatch.setattr(fused, "FAR_STEP", 8)
    monkeypatch.setattr(fused, "SHORTEST", {256: 0})
    monkeypatch.setattr(fused, "FEWEST", 1)


def leaf(*shape: int) -> Tensor:
    return torch.randn(*shape, requires_grad=True)


CASES = {
    "zero tails": {"reach": 9},
    "constant tails": {"reach": 9, "tails": 1},
    "tails a row": {"reach": 5, "tails": 45, "rows": 45},
    "values": {"reach": 9, "values": 9},
    "values beyond the band": {"reach": 3, "values": 12, "tails": 1},
    "shaw": {"reach": 6, "values": 6, "tails": 45, "rows": 45, "b": 2},
    "a band for each head of each batch": {"reach": 4, "tails": 1, "batches": 2, "b": 2},
    "no reach at all": {"reach": 0, "tails": 1},
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("causal", [False, True])
def test_output_and_every_gradient_equal_the_definition(case: str, causal: bool) -> None:
    torch.manual_seed(0)
    config = CASES[case]
    b, h, n, d = config.get("b", 1), 2, 45, 16
    q, k, v = (leaf(b, n, h, d).transpose(1, 2) for _ in range(3))
    if case == "shaw":  # both layouts in memory
        q, k, v = (leaf(b, h, n, d) for _ in range(3))
    batches, rows = config.get("batches", 1), config.get("rows", 1)
    band = leaf(batches, h, rows, 2 * config["reach"] + 1)
    tails = [leaf(batches, h, rows) if config.get("tails") else None for _ in range(2)]
    table = leaf(1, 2 * config["values"] + 1, d) if "values" in config else None
    leaves = [q, k, v, *(x for x in (band, *tails, table) if x is not None)]

    def run(backend: str) -> list[Tensor]:
        bias = LagBias(band, Line(const=tails[0]), Line(const=tails[1]))
        values = None if table is None else LagValues(table)
        out = attend(q, k, v, bias=bias, values=values, causal=causal, backend=backend)
        torch.manual_seed(1)
        return [out, *torch.autograd.grad(out, leaves, torch.randn(out.shape))]

    bias = LagBias(band, Line(const=tails[0]), Line(const=tails[1]))
    assert "split" in str(explain(q, k, v, bias=bias, causal=causal))
    for found, wanted in zip(run("fused"), run("reference"), strict=True):
        torch.testing.assert_close(found, wanted, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize(
    "spec",
    [
        "tisa:reach=6",
        pytest.param("t5:max_distance=12,buckets=8", marks=pytest.mark.slow),  # a curve, as tisa
        "shaw:clip=4",
    ],
)
def test_methods_of_finite_reach_train_through_it(spec: str) -> None:
    torch.manual_seed(0)
    method = build(spec, n_heads=2, d_head=16)
    q, k, v = (leaf(1, 2, 40, 16) for _ in range(3))
    pos = torch.arange(40)

    def run(backend: str) -> list[Tensor]:
        bias, values = method.score_term(q, pos, pos), method.value_term(pos, pos)
        out = attend(q, k, v, bias=bias, values=values, backend=backend)
        return [out, *torch.autograd.grad(out.square().sum(), [q, k, v, *method.parameters()])]

    bias = method.score_term(q, pos, pos)
    assert not isinstance(fused.far_start(call_of(q, k, v, bias)), str)
    units = [1, 1, 1, 1, *gains(method)]
    for found, wanted, unit in zip(run("fused"), run("reference"), units, strict=True):
        torch.testing.assert_close(found / unit, wanted / unit, rtol=5e-4, atol=5e-5)


def call_of(q: Tensor, k: Tensor, v: Tensor, bias: LagBias, **more: object) -> object:
    from whence.kernels.call import as_call

    options = {"values": None, "mask": None, "causal": False, "window": None, "scale": None}
    options |= {"dropout": 0.0, "q_start": None, **more}
    return as_call(q, k, v, bias=bias, **options)


@pytest.mark.parametrize("causal", [False, True])
def test_what_cancels_in_a_row_cancels_in_the_gradient_of_its_band(causal: bool) -> None:
    """In steep heads the sum of a band's gradient, as for a wide Gaussian, is nearly 0.

    Delta has the rounding errors of the weights that forward multiplied with the values, which
    would not cancel.
    """
    h, n, d, reach = 2, 64, 16, 5
    lag = torch.arange(-reach, reach + 1)
    steep = (12 - 0.5 * lag.abs().float()).expand(1, h, 1, -1)

    def gradient(dtype: torch.dtype, *, seed: int, fused: bool = False) -> Tensor:
        torch.manual_seed(seed)
        q, k, v, d_out = (torch.randn(1, h, n, d).half().to(dtype) for _ in range(4))
        band = steep.to(torch.promote_types(dtype, torch.float32)).clone().requires_grad_()
        bias = LagBias(band, Line(), Line())
        if fused:
            assert "split" in str(explain(q, k, v, bias=bias, causal=causal))
            out = attend(q, k, v, bias=bias, causal=causal, backend="fused")
        else:
            out = attend_rows(call_of(q, k, v, bias, causal=causal), slice(0, n))
        return torch.autograd.grad(out, band, d_out)[0].double().sum(-1)

    errors = []
    for seed in range(2):
        truth = gradient(torch.float64, seed=seed)
        found = [gradient(torch.float16, seed=seed, fused=fused) for fused in (True, False)]
        errors.append(torch.stack([(x - truth).square().sum() for x in found]))
    ours, plain = torch.stack(errors).sum(0).sqrt().tolist()
    assert ours <= 2 * plain


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"window": 3}, "take no mask, window or dropout"),
        ({"dropout": 0.1}, "take no mask, window or dropout"),
        ({"mask": torch.ones(1, 40, dtype=torch.bool)}, "take no mask, window or dropout"),
        ({"q_start": 3}, "not the same positions"),
    ],
)
def test_one_pass_takes_what_a_plain_kernel_cannot(more: dict[str, object], why: str) -> None:
    q, k, v = (leaf(1, 2, 40, 16) for _ in range(3))
    bias = LagBias(leaf(1, 2, 1, 7), Line(), Line())
    assert fused.far_start(call_of(q, k, v, bias)) == 8
    assert why in str(fused.far_start(call_of(q, k, v, bias, **more)))


def test_sloped_biases_and_biases_without_tails_stay_in_one_pass() -> None:
    q, k, v = (leaf(1, 2, 40, 16) for _ in range(3))
    slope = Line(slope=torch.ones(1, 2, 1))
    sloped = LagBias(leaf(1, 2, 1, 7), slope, slope)
    assert "slopes" in str(fused.far_start(call_of(q, k, v, sloped)))
    assert "no tails" in str(fused.far_start(call_of(q, k, v, LagBias(leaf(1, 2, 1, 79)))))


@pytest.mark.slow
def test_the_compiler_sees_one_operator_here_too() -> None:
    band, table = leaf(1, 2, 1, 7), leaf(1, 5, 16)
    q, k, v = (leaf(1, 2, 40, 16) for _ in range(3))

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        bias = LagBias.clipped(band)
        return attend(q, k, v, bias=bias, values=LagValues(table), backend="fused")

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    for got, wanted in zip(
        torch.autograd.grad(compiled(q, k, v).square().sum(), [q, k, v, band, table]),
        torch.autograd.grad(run(q, k, v).square().sum(), [q, k, v, band, table]),
        strict=True,
    ):
        torch.testing.assert_close(got, wanted)


def test_a_scale_of_zero_stays_in_one_pass() -> None:
    q, k, v = (leaf(1, 2, 40, 16) for _ in range(3))
    bias = LagBias(leaf(1, 2, 1, 7), Line(), Line())
    assert "positive scale" in str(fused.far_start(call_of(q, k, v, bias, scale=0.0)))


@pytest.mark.parametrize(
    "spec",
    ["shaw:clip=3", pytest.param("t5:max_distance=6,buckets=8", marks=pytest.mark.slow)],
)
@pytest.mark.usefixtures("nan_in_empty_memory")
def test_the_first_and_the_fifth_call_are_as_exact_as_pytorch(spec: str) -> None:
    sizes = Sizes(20, batch=1, heads=2, d_head=16, dtype=torch.float32, device="cpu")
    assert errors_beyond(five_calls(Case(spec), sizes), sizes.dtype) == {}
