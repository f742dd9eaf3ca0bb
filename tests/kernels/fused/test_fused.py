"""The GPU kernels in Triton's interpreter: the same code, on a machine without a GPU."""

import math
import random
from typing import Any

import pytest
import torch
from torch import Tensor

from whence import METHODS, LagBias, LagValues, Line, LowRankBias, Mask, attend, build, explain

pytestmark = [pytest.mark.triton, pytest.mark.usefixtures("_interpreter")]


def random_call(seed: int) -> tuple[list[Tensor], dict[str, object], list[Tensor]]:
    """(q, k, v), the options of attend, and every tensor that has a gradient; at most 48 tokens."""
    torch.manual_seed(seed)
    pick = random.Random(seed).choice
    leaves: list[Tensor] = []

    def leaf(*shape: int) -> Tensor:
        leaves.append(torch.randn(shape).requires_grad_())
        return leaves[-1]

    b, kv_heads, groups = pick([1, 2]), pick([1, 2]), pick([1, 2])
    h, n_k = kv_heads * groups, pick([1, 5, 17, 33, 48])
    n_q, d = pick([1, n_k, max(1, n_k - 3), 7]), pick([4, 16, 24])
    d_v = pick([d, 16])
    q = leaf(b, n_q, h, d).transpose(1, 2) if pick([True, False]) else leaf(b, h, n_q, d)
    k, v = leaf(b, kv_heads, n_k, d), leaf(b, kv_heads, n_k, d_v)
    axes = (pick([1, b]), pick([1, h]), pick([1, 1, n_q]))

    def line() -> Line:
        return Line(
            leaf(*axes) if pick([True, False]) else None,
            leaf(*axes) if pick([True, False, False, False]) else None,
        )

    bias: LagBias | None = None
    kind, reach = pick(["none", "band", "tails", "extent"]), pick([0, 1, 3, 9, 20])
    if kind == "band":
        bias = LagBias(leaf(*axes, 2 * reach + 1), Line(), Line())
    elif kind == "tails":
        bias = LagBias(leaf(*axes, 2 * reach + 1), line(), line())
    elif kind == "extent":  # nothing beyond lag 4
        near = (torch.arange(-reach, reach + 1).abs() <= 4).float()
        band = leaf(1, h, 1, 2 * reach + 1) * near
        bias = LagBias(band, Line(), Line(), torch.full((h,), min(4, reach)))
    values = None
    if pick([True, False, False]):
        values = LagValues(leaf(pick([1, h]), 2 * pick([0, 2, 5]) + 1, d_v))
    masks = {
        "none": None,
        "keys": torch.rand(b, n_k) > 0.3,
        "packed": Mask(segments=(torch.arange(n_q)[None] // 5, torch.arange(n_k)[None] // 5)),
    }
    options = {
        "bias": bias,
        "values": values,
        "mask": masks[pick(["none", *masks])],
        "causal": pick([True, False]),
        "window": pick([None, None, 2, (3, None), (0, 4)]),
        "q_start": pick([None, None, 0, 2]),
        "scale": pick([None, 0.3, 0.0]),
    }
    return [q, k, v], options, leaves


@pytest.mark.parametrize("seed", range(60))
def test_output_and_every_gradient_equal_the_definition(seed: int) -> None:
    qkv, options, leaves = random_call(seed)
    found = attend(*qkv, **options, backend="fused")
    wanted = attend(*qkv, **options, backend="reference")
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    weight = torch.randn_like(wanted)
    for place, (a, b) in enumerate(
        zip(
            torch.autograd.grad(
                (found * weight).sum(), leaves, allow_unused=True, retain_graph=True
            ),
            torch.autograd.grad((wanted * weight).sum(), leaves, allow_unused=True),
            strict=True,
        )
    ):
        a, b = (torch.zeros_like(leaves[place]) if x is None else x for x in (a, b))
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


def test_a_negative_scale_turns_the_order_of_the_keys_round() -> None:
    torch.manual_seed(0)
    q, k, v = (6 * torch.randn(1, 2, 160, 16) for _ in range(3))
    band, tail = torch.randn(1, 2, 1, 5), torch.randn(1, 2, 1)
    options = {"bias": LagBias(band, Line(tail), Line(tail)), "causal": True, "scale": -0.5}
    found, wanted = (attend(q, k, v, **options, backend=x) for x in ("fused", "reference"))
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("n", [20, 70])  # by the short kernels and by the others
def test_dropout_does_not_round_the_weight_of_the_key_that_a_row_looks_at(n: int) -> None:
    torch.manual_seed(0)
    q, k, v = torch.ones(1, 1, 5, 16), torch.zeros(1, 1, n, 16), torch.randn(1, 1, n, 16)
    k[:, :, 3] = 100.0  # the softmax is 1 here, and 0 elsewhere
    out = attend(q.half(), k.half(), v.half(), dropout=0.25, q_start=0, backend="fused")
    kept = out.any(dim=-1)
    assert kept.any()
    wanted = (v[:, :, 3:4].half().double() / 0.75).half().expand_as(out)
    torch.testing.assert_close(out[kept], wanted[kept], rtol=0, atol=0)


def test_dropout_repeats_its_mask_in_backward_and_for_the_table() -> None:
    n, p = 24, 0.4
    q, k = torch.randn(2, 1, 2, n, 16).unbind()
    q.requires_grad_()
    eye = torch.eye(n).expand(1, 2, n, n).contiguous()
    table = LagValues(torch.randn(2, 5, n))
    plain = attend(q, k, eye, backend="fused")
    torch.manual_seed(3)
    keep = (attend(q, k, eye, dropout=p, backend="fused") / plain).detach()
    share = (keep == 0).float().mean().item()
    assert math.isclose(share, p, abs_tol=0.05)
    torch.manual_seed(3)
    found = attend(q, k, eye, values=table, dropout=p, backend="fused")
    lag = torch.arange(n)[None] - torch.arange(n)[:, None]
    weights = plain * keep
    wanted = weights + torch.einsum(
        "bhqk,hqkd->bhqd", weights, table.table[:, lag.clamp(-2, 2) + 2]
    )
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    weight = torch.randn_like(wanted)
    (a,) = torch.autograd.grad((found * weight).sum(), [q])
    (b,) = torch.autograd.grad((wanted * weight).sum(), [q])
    torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", sorted(METHODS))
def test_every_method_runs_or_is_refused_with_the_way_out(name: str) -> None:
    from battery import Layer, inputs, small

    layer, x = Layer(small(name, torch.float32)), inputs(13, dtype=torch.float32)
    x.requires_grad_()
    wanted = layer(x, 11, backend="reference")
    try:
        found = layer(x, 11, backend="fused")
    except ValueError as refusal:
        assert "takes no dense bias" in str(refusal)
        assert "Take backend='sdpa'" in str(refusal)
        return
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    targets = [x, *layer.parameters()]
    pairs = zip(
        torch.autograd.grad(found.square().sum(), targets, allow_unused=True),
        torch.autograd.grad(wanted.square().sum(), targets, allow_unused=True),
        strict=True,
    )
    for place, (a, b) in enumerate(pairs):
        a, b = (torch.zeros_like(targets[place]) if g is None else g for g in (a, b))
        torch.testing.assert_close(a, b, rtol=2e-3, atol=1e-3)


def test_a_low_rank_bias_is_a_wider_head() -> None:
    q = torch.randn(1, 2, 9, 8)
    bias = LowRankBias(torch.randn(1, 2, 9, 3), torch.randn(1, 2, 9, 3))
    torch.testing.assert_close(
        attend(q, q, q, bias=bias, backend="fused"),
        attend(q, q, q, bias=bias, backend="reference"),
    )


def test_what_it_cannot_run_is_refused_before_launch() -> None:
    q = torch.randn(1, 1, 4, 8)
    with pytest.raises(ValueError, match=r"no kernels for torch\.float64"):
        attend(q.double(), q.double(), q.double(), backend="fused")
    with pytest.raises(ValueError, match="heads of at most 256, got 300"):
        attend(*torch.randn(3, 1, 1, 4, 300), backend="fused")
    with pytest.raises(ValueError, match="not a mask of every pair"):
        attend(q, q, q, mask=torch.ones(1, 1, 4, 4, dtype=torch.bool), backend="fused")
    text = str(explain(q, q, q, bias=LagBias.clipped(torch.zeros(1, 1, 1, 3))))
    assert "-> fused" in text
    assert "linear memory, no atomics" in text
    assert "short_forward_kernel in 1 x 1 programs of 16 rows x 16 keys" in text


def test_output_and_gradients_lie_in_memory_as_the_queries_do() -> None:
    band = torch.randn(1, 2, 1, 9, requires_grad=True)
    for by_token in (False, True):
        q, k, v = laid(by_token)
        out = attend(q, k, v, bias=LagBias(band, Line(), Line()), backend="fused")
        for x in (out, *torch.autograd.grad(out.sum(), [q, k, v])):
            assert (x.transpose(1, 2) if by_token else x).is_contiguous()


def laid(by_token: bool) -> list[Tensor]:
    """q, k and v, one head's rows after the other's or those of all heads beside each other."""
    shape = (1, 20, 2, 16) if by_token else (1, 2, 20, 16)
    tensors = [torch.randn(shape) for _ in range(3)]
    return [(x.transpose(1, 2) if by_token else x).requires_grad_() for x in tensors]


def test_the_compiler_sees_one_operator() -> None:
    band = torch.randn(1, 2, 1, 9, requires_grad=True)
    table = torch.randn(1, 5, 16, requires_grad=True)

    def layer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        bias = LagBias(band, Line(), Line())
        return attend(q, k, v, bias=bias, values=LagValues(table), backend="fused") * 2

    for by_token in (False, True):
        q, k, v = laid(by_token)
        results = []
        for function in (layer, torch.compile(layer, fullgraph=True, backend="aot_eager")):
            out = function(q, k, v)
            results.append([out, *torch.autograd.grad(out.square().sum(), [q, k, v, band, table])])
        for a, b in zip(*results, strict=True):
            torch.testing.assert_close(a, b, check_stride=True)


def test_tiles_shrink_until_they_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    import triton

    from whence.kernels.fused import tiles

    tried = []
    monkeypatch.setattr(tiles, "lookup", lambda *_: tiles.TABLE[9, 0].sizes[64])

    def make(those: object) -> str:
        tried.append(those)
        if len(tried) < 4:
            raise triton.runtime.errors.OutOfResources(300_000, 100_000, "shared memory")
        return "made"

    fitting = tiles.FittingTiles()
    kind = ("forward", 48, torch.float32, torch.device("cpu"))
    assert fitting.fit(*kind, make) == "made"
    assert fitting.fit(*kind, make) == "made"
    assert tried[-1] == tried[-2] != tried[0]  # what fitted is remembered
    fitting.fit("backward", *kind[1:], make)
    assert tried[-1] == tried[0]  # by purpose
    small = tiles.Tiles(128, 64, 8, 3)
    sizes = []
    for _ in range(8):
        small = tiles._smaller(small)
        sizes.append(small.rows * small.keys * small.stages)
    assert sizes == sorted(sizes, reverse=True)
    assert min(small.rows, small.keys) >= tiles.SMALLEST


def test_a_curve_is_evaluated_as_far_as_a_window_shows_it() -> None:
    from whence.kernels.call import as_call
    from whence.kernels.fused.backend import given_and_call

    others = {"values": None, "mask": None, "scale": None, "dropout": 0.0, "q_start": None}
    q, pos = torch.randn(1, 3, 40, 16), torch.arange(40)
    bias = build("tisa", n_heads=3, d_head=16).score_term(q, pos, pos)
    for window, causal, reach in (
        (None, True, 39),
        ((5, 2), False, 5),
        ((5, None), False, 39),
        ((5, None), True, 5),
        (100, False, 39),
    ):
        call = as_call(q, q, q, bias=bias, window=window, causal=causal, **others)
        assert given_and_call(call)[1].reach == reach


@pytest.mark.filterwarnings("ignore:overflow encountered")  # NumPy's, in the interpreter
def test_the_tisa_kernel_gives_the_curve_its_extent_and_its_gradients() -> None:
    from whence.kernels.fused import launch
    from whence.kernels.fused.backend import CurveBand, Inputs, Numbers, Task
    from whence.kernels.fused.plan import Plan, slots_of
    from whence.methods.tisa import Tisa

    method = Tisa(3, kernels=4, start="released")
    parameters = list(method.parameters())
    numbers = Numbers(1.0, 0, -1, -1, 0.0, False)

    def evaluated(reach: int, d_band: Tensor) -> list[Tensor]:
        """The band of the lags -reach..reach, the extent and the parameters' gradients."""
        given = [*(x.detach() for x in parameters), torch.randn(1, 3, 5, 16), d_band[None, :, None]]
        *curve, q, slope = slots_of(given)
        made = CurveBand("gaussians", reach, curve)
        plan = Plan(torch.device("cpu"), len(given))
        in_base_2 = math.log2(math.e)
        task = Task(q, q, q, Inputs(), numbers, curve=made)
        band, extent, _ = launch._laid_out(plan, task, in_base_2)
        found = launch._curve_gradient(plan, made, extent, slope, None)
        plan.returns(band, extent, *found)
        band, extent, *found = plan.run(given)
        band, middle = band[0, :, 0] / in_base_2, band.shape[-1] // 2
        assert not band[:, : middle - reach].any()
        assert not band[:, middle + reach + 1 :].any()
        return [band[:, middle - reach : middle + reach + 1], extent, *found]

    for reach in (0, 5, 300):
        wanted = method.curve(torch.arange(-reach, reach + 1))
        weight = torch.randn_like(wanted)
        band, extent, *found = evaluated(reach, weight)
        torch.testing.assert_close(band, wanted)
        assert torch.equal(extent.long(), method.extent(reach))
        for a, b in zip(
            found, torch.autograd.grad((wanted * weight).sum(), parameters), strict=True
        ):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    with torch.no_grad():  # widths that float32 cannot hold, in a head with a wide Gaussian
        method.raw_deviation[0, :3] = torch.tensor([-1e3, -88.5, 1e3]) / 32
    lags, weight = torch.arange(-40, 41), torch.randn(3, 81)
    band, extent, *found = evaluated(40, weight)
    torch.testing.assert_close(band, method.curve(lags))
    assert torch.equal(extent.long(), method.extent(40))
    wanted = torch.autograd.grad((method.curve(lags) * weight).sum(), parameters)
    torch.testing.assert_close(found, list(wanted), rtol=1e-4, atol=1e-5)
    with torch.no_grad():
        method.raw_amplitude[2, 1] = torch.nan
    assert evaluated(300, torch.zeros(3, 601))[1][2] == 300


@pytest.mark.parametrize("n_k", [16, 17, 23])
@pytest.mark.parametrize("q_start", [40, -30])
def test_queries_far_beyond_the_keys_see_only_keys(n_k: int, q_start: int) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, n, 16, requires_grad=True) for n in (20, n_k, n_k))
    band = torch.randn(1, 2, 1, 7, requires_grad=True)

    def run(backend: str) -> list[torch.Tensor]:
        out = attend(q, k, v, bias=LagBias.clipped(band), q_start=q_start, backend=backend)
        return [out, *torch.autograd.grad(out.square().sum(), [q, k, v, band])]

    for found, wanted in zip(run("fused"), run("reference"), strict=True):
        torch.testing.assert_close(found, wanted, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("q_start", [10**12, -(10**12)])
def test_a_line_is_the_reference_s_at_any_distance_from_the_keys(q_start: int) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, n, 16, requires_grad=True) for n in (5, 9, 9))
    slope = torch.tensor([0.5, -0.25], requires_grad=True)

    def run(backend: str) -> list[torch.Tensor]:
        options = {"bias": LagBias.line(slope), "q_start": q_start, "window": 10**12 + 2}
        out = attend(q, k, v, **options, backend=backend)  # type: ignore[arg-type]
        return [out, *torch.autograd.grad(out.square().sum(), [q, k, v, slope])]

    for found, wanted in zip(run("fused"), run("reference"), strict=True):
        torch.testing.assert_close(found, wanted, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("backend", ["fused", "sdpa", "reference"])
def test_a_start_that_is_no_whole_number_is_refused_by_every_backend(backend: str) -> None:
    q, k, v = torch.randn(3, 1, 2, 5, 16)
    several = torch.tensor([1, 2])
    refused: list[Any] = [1.0, True, "1", torch.tensor(1.0), several]
    for q_start in refused:
        with pytest.raises(TypeError, match=r"^q_start must be a whole number"):
            attend(q, k, v, q_start=q_start, backend=backend)


def test_one_head_s_extent_serves_all_heads() -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 3, 40, 16) for _ in range(3))
    band = torch.zeros(1, 1, 1, 79)
    band[..., 37:42] = torch.randn(5)
    bias = LagBias(band, Line(), Line(), extent=torch.tensor([2]))
    found, wanted = (attend(q, k, v, bias=bias, backend=name) for name in ("fused", "reference"))
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("window", [(None, 2**31 - 1), (2**31 - 1, 0), 10**12])
def test_a_window_beyond_all_keys_is_no_window(window: object) -> None:
    q, k, v = (torch.randn(1, 1, 20, 16) for _ in range(3))
    found, wanted = (attend(q, k, v, window=window, backend=name) for name in ("fused", "sdpa"))
    torch.testing.assert_close(found, wanted)


def test_more_heads_than_a_grid_has_are_refused() -> None:
    q = torch.zeros(1, 1, 1, 16).expand(70_000, 1, 1, 16)
    with pytest.raises(ValueError, match="at most 65,535 heads in a batch, got 70,000"):
        attend(q, q, q, backend="fused")


def test_the_operator_sums_no_gradient_that_nobody_wants(monkeypatch: pytest.MonkeyPatch) -> None:
    from whence.kernels.fused import function
    from whence.kernels.fused.backend import Wanted

    asked, wanted_of = [], function.wanted_of

    def asking(*args: Any) -> Wanted:
        asked.append(wanted_of(*args))
        return asked[-1]

    monkeypatch.setattr(function, "wanted_of", asking)
    q, k, v = (torch.randn(1, 2, 20, 16, requires_grad=True) for _ in range(3))
    bias = LagBias.line(torch.tensor([-0.5, -0.25]))

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return attend(q, k, v, bias=bias, backend="fused")

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    found = torch.autograd.grad(compiled(q, k, v).square().sum(), [q, k, v])
    wanted = torch.autograd.grad(run(q, k, v).square().sum(), [q, k, v])
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b)
    assert asked == [Wanted(band=False, tails=False)], "one plan, compiled and called"


def test_a_window_of_one_key_leaves_a_curve_without_a_gradient() -> None:
    """Each weight is 1, whatever the bias: rounding errors of delta must not be summed over rows."""
    method = build("tisa:kernels=2", n_heads=1, d_head=16, max_length=140)
    torch.manual_seed(1)
    q, k, v, d_out = torch.randn(4, 1, 1, 140, 16)
    pos = torch.arange(140)
    q.requires_grad_()
    bias = method.score_term(q, pos, pos)
    attend(q, k, v, bias=bias, window=0, backend="fused").backward(d_out)
    assert all(p.grad is not None and not p.grad.any() for p in method.parameters())


def test_a_constant_added_to_all_lags_has_no_gradient() -> None:
    """A softmax does not see it: what is left of the sum is rounding, at most twice PyTorch's."""

    def left_over(seed: int, backend: str) -> float:
        torch.manual_seed(seed)
        q, k, v, d_out = torch.randn(4, 1, 1, 70, 24, dtype=torch.float64).float()
        band = torch.zeros(1, 1, 1, 139, requires_grad=True)
        out = attend(q, k, v + 3, bias=LagBias(band), scale=1.0, backend=backend)
        out.backward(d_out)
        assert band.grad is not None
        return band.grad.double().sum().item()

    ours, same = (math.hypot(*(left_over(seed, x) for seed in range(4))) for x in ("fused", "sdpa"))
    assert ours <= 2 * same
