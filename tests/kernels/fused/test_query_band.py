"""The kernels that make a query's band and its gradients, and Shaw's attention through them."""

import pytest
import torch
from torch import Tensor

from whence import LagBias, Line, Mask, attend, build
from whence.lag import QueryBias, deferred
from whence.nn import positioned_attention

pytestmark = [pytest.mark.triton, pytest.mark.usefixtures("_interpreter")]
LOG2E = 1.4426950408889634
SHAPES = {  # batch, heads, rows, head size, width of the table, one for each head
    "one lag": (2, 1, 70, 16, 1, False),
    "few rows": (1, 3, 5, 24, 3, True),
    "as Shaw et al.": (1, 2, 130, 64, 33, False),
    "more lags and columns than a tile": (1, 2, 66, 80, 65, True),
}
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture
def poisoned():
    """Memory that nobody wrote holds NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def tiled(_interpreter: None, monkeypatch: pytest.MonkeyPatch):
    """Small calls take the kernels of long ones, which make a query's band in memory."""
    from whence.kernels.fused import short
    from whence.kernels.fused.plan import PLANS

    PLANS.forget()  # a plan of the same signature may hold the other kernels
    monkeypatch.setattr(short, "is_faster", lambda q, k, v, call: False)
    yield
    PLANS.forget()


@pytest.fixture
def unmade(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Tensor) -> Tensor:
        raise AssertionError("somebody made the band")

    monkeypatch.setattr(deferred, "_product", refuse)


def factors(shape: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    b, h, n, d, width, per_head = SHAPES[shape]
    q = torch.randn(b, n, h, d + 3)[..., :d].to(dtype).transpose(1, 2)
    if shape == "few rows":  # another layout in memory, with gaps
        q = torch.randn(b, h, n, 2 * d).to(dtype)[..., :d]
    return q, torch.randn(h if per_head else 1, width, d)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.usefixtures("poisoned", "tiled")
def test_the_band_is_the_product_between_its_margins(shape: str, dtype: torch.dtype) -> None:
    from whence.kernels.fused.backend import Call, Given, Kept, Numbers
    from whence.kernels.fused.function import attended, in_state
    from whence.kernels.fused.launch import MARGIN, kept_rooms
    from whence.kernels.fused.plan import parts_of
    from whence.kernels.fused.tiles import power_of_two

    q, table = factors(shape, dtype)
    call = Call(Numbers(1.0, 0, -1, -1, 0.0, False), product_scale=0.3)
    *_, state = attended([q, q, q, table], "q k v factor", call.flat(), recorded=True)
    rooms = kept_rooms(call.task(Given(q, q, q, factor=table)))
    kept = Kept(*parts_of(state, in_state(rooms)))
    laid, tails = kept.band, kept.tails
    band = 0.3 * q.double() @ table.double().transpose(-1, -2)
    left, right = band[..., :1], band[..., -1:]
    margin = power_of_two(table.shape[1] // 2 + MARGIN)
    assert laid.numel() - band.numel() >= 2 * margin
    inside = laid.flatten()[margin : margin + band.numel()].view(band.shape)[..., 1:-1]
    unit = 1.0 if dtype == torch.float32 else LOG2E  # the base of the logits
    torch.testing.assert_close(inside.double(), band[..., 1:-1] * unit, rtol=1e-6, atol=1e-5)
    ends = torch.cat([left, right], dim=-1).movedim(-1, 0)
    torch.testing.assert_close(tails[::2].double(), ends, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.usefixtures("poisoned")
def test_its_gradients_are_two_products(
    shape: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    from whence.kernels.fused import tables
    from whence.kernels.fused.backend import Product, Wanted
    from whence.kernels.fused.plan import Plan, slots_of

    q, table = factors(shape, dtype)
    monkeypatch.setattr(tables, "PRODUCT_PROGRAMS", 4)  # a run has several steps
    d_band = torch.randn(*q.shape[:3], table.shape[1])
    whole = d_band.double()
    d_q = 0.3 * whole @ table.double()
    d_table = _summed(whole, q, table) * 0.3
    # To bfloat16 the interpreter cuts, and does not round.
    rounding = {torch.float32: 1e-6, torch.bfloat16: 2**-7, torch.float16: 2**-11}[dtype]

    def gradients(d_q: Tensor | None, **wanted: bool) -> tuple[Tensor | None, ...]:
        """Of a query of its own, or, with d_q, of the attention's q, whose gradient that is."""
        given = [d_band, q, table, d_q]
        d_band_slot, query, factor, into = slots_of(given)
        product = Product(0.3, query if d_q is None else None, factor)
        plan = Plan(q.device, len(given))
        found = tables.product_gradients(
            *(plan, product, query, into, d_band_slot),
            *(Wanted(True, True, **wanted), None),
        )
        plan.returns(*found)
        return plan.run(given)

    found_q, found_table = gradients(None, query=True, factor=True)
    assert found_q.dtype == dtype
    torch.testing.assert_close(found_q.double(), d_q, rtol=rounding, atol=1e-5)
    torch.testing.assert_close(found_table.double(), d_table, rtol=1e-6, atol=1e-4)

    there = torch.randn(q.transpose(1, 2).shape).to(dtype).transpose(1, 2)
    wanted = there.double() + d_q
    assert gradients(there, query=True, factor=False) == (None, None)
    torch.testing.assert_close(there.double(), wanted, rtol=rounding, atol=1e-5)

    nothing, found_table = gradients(None, query=False, factor=True)
    assert nothing is None
    torch.testing.assert_close(found_table.double(), d_table, rtol=1e-6, atol=1e-4)

    given = [d_band, q, table]
    plan = Plan(q.device, len(given))
    plan.returns(tables.table_gradient(plan, *slots_of(given)))
    (found_table,) = plan.run(given)
    wanted = _summed(d_band.double(), q, table)
    torch.testing.assert_close(found_table.double(), wanted, rtol=1e-6, atol=1e-4)


def _summed(rows: Tensor, q: Tensor, table: Tensor) -> Tensor:
    product = (rows.transpose(-1, -2) @ q.double()).sum(0)
    return product if len(table) > 1 else product.sum(0, keepdim=True)


CALLS: dict[str, tuple[str, dict[str, object]]] = {
    "both tables": ("shaw:clip=3", {}),
    "causal": ("shaw:clip=3", {"causal": True}),
    "keys only": ("shaw:clip=16,values=false", {"causal": True}),
    "values only": ("shaw:clip=3,keys=false", {}),
    "asymmetric": ("shaw:left=5,right=2", {}),
    "one vector": ("shaw:clip=0", {}),
    "a table a head": ("shaw:clip=4,per_head=true", {}),
    "heads in groups": ("shaw:clip=4,per_head=true", {"groups": 2, "causal": True}),
    "rows that see nothing": ("shaw:clip=3", {"causal": True, "q_start": -7}),
    "padding": ("shaw:clip=3", {"mask": torch.arange(21)[None] < 15}),
    "a window": ("shaw:clip=3", {"window": (9, 4)}),
    "a window narrower than the table": ("shaw:clip=19", {"window": 1, "n": 40}),
    "a bias that slopes besides": ("shaw:clip=3+alibi", {}),
    "queries of its own": ("rope+shaw:clip=3", {"causal": True}),
}


@pytest.mark.parametrize("case", CALLS)
@pytest.mark.usefixtures("poisoned")
def test_attention_and_every_gradient_equal_the_definition(case: str) -> None:
    spec, options = CALLS[case]
    options = dict(options)
    torch.manual_seed(0)
    groups, n = options.pop("groups", 1), options.pop("n", 21)
    method = build(spec, n_heads=2, d_head=16)
    q, k, v = (
        torch.randn(1, n, h, 16).transpose(1, 2).requires_grad_()
        for h in (2, 2 // groups, 2 // groups)
    )
    leaves = [q, k, v, *method.parameters()]

    def run(backend: str) -> list[Tensor]:
        out = positioned_attention(method, q, k, v, backend=backend, **options)
        torch.manual_seed(1)
        return [out, *torch.autograd.grad(out, leaves, torch.randn(out.shape))]

    for found, wanted in zip(run("fused"), run("reference"), strict=True):
        torch.testing.assert_close(found, wanted, rtol=2e-4, atol=2e-5)


def shaws_call(**needs: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, 20, 16).unbind()
    table = torch.randn(1, 7, 16)
    for name, x in {"q": q, "k": k, "v": v, "table": table}.items():
        x.requires_grad_(needs.get(name, True))
    return q, k, v, table


@pytest.mark.usefixtures("unmade")
def test_the_band_is_never_made_for_the_kernels() -> None:
    q, k, v, table = shaws_call()
    out = attend(q, k, v, bias=QueryBias(q, table), causal=True, backend="fused")
    out.sum().backward()
    with torch.no_grad():
        again = attend(q, k, v, bias=QueryBias(q, table), causal=True, backend="fused")
    torch.testing.assert_close(again, out, rtol=0, atol=0)
    with pytest.raises(AssertionError, match="made the band"):
        attend(q, k, v, bias=QueryBias(q, table), causal=True, backend="reference")


@pytest.mark.usefixtures("unmade")
@pytest.mark.parametrize("alone", ["q", "query", "v", "table"])
def test_a_gradient_is_given_to_those_alone_who_want_one(alone: str) -> None:
    q, k, v, table = shaws_call(**{name: name == alone for name in ("q", "k", "v", "table")})
    query = q
    if alone == "query":
        query = q.clone().requires_grad_()
    elif alone == "table":
        query = q.double().float()  # another tensor, of no gradient
    bias = QueryBias(query, table, scale=0.25)
    found = attend(q, k, v, bias=bias, backend="fused")
    dense = 0.25 * query @ table.transpose(-1, -2)
    wanted = attend(q, k, v, bias=LagBias.clipped(dense), backend="reference")
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    leaf = {"q": q, "query": query, "v": v, "table": table}[alone]
    weight = torch.randn_like(wanted)
    torch.testing.assert_close(
        torch.autograd.grad(found, leaf, weight),
        torch.autograd.grad(wanted, leaf, weight),
        rtol=1e-3,
        atol=1e-4,
    )


def test_one_query_alone_and_a_second_derivative_are_as_before() -> None:
    q, k, v, table = shaws_call()
    one = q[:, :, -1:]
    out = attend(one, k, v, bias=QueryBias(one, table), backend="fused")
    wanted = attend(one, k, v, bias=QueryBias(one, table), backend="reference")
    torch.testing.assert_close(out, wanted, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(
        torch.autograd.grad(out.sum(), table)[0],
        torch.autograd.grad(wanted.sum(), table)[0],
        rtol=1e-3,
        atol=1e-5,
    )
    out = attend(q, k, v, bias=QueryBias(q, table), backend="fused")
    (d_q,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiated once"):
        d_q.sum().backward()


def test_packed_sequences_are_those_apart() -> None:
    q, k, v, table = shaws_call()
    segment = (torch.arange(20) >= 8).long()[None]
    mask = Mask(segments=(segment, segment))
    whole = attend(q, k, v, bias=QueryBias(q, table), mask=mask, backend="fused")
    for part in (slice(0, 8), slice(8, 20)):
        mine, keys, values = (x[:, :, part] for x in (q, k, v))
        apart = attend(mine, keys, values, bias=QueryBias(mine, table), backend="fused")
        torch.testing.assert_close(whole[:, :, part], apart, rtol=1e-4, atol=1e-5)


def test_one_vector_for_all_lags_has_no_gradient() -> None:
    """It adds one number to all logits of a query, which no softmax sees."""
    torch.manual_seed(0)
    position = build("shaw:clip=0", n_heads=2, d_head=16)
    q, k, v = (torch.randn(1, 2, 21, 16) for _ in range(3))
    band = torch.randn(1, 2, 21, 1, requires_grad=True)
    attend(q, k, v, bias=LagBias.clipped(band), backend="fused").square().sum().backward()
    positioned_attention(position, q, k, v, backend="fused").square().sum().backward()
    apart, table = (torch.randn(1, 2, n, 16, requires_grad=True) for n in (21, 1))
    attend(q, k, v, bias=QueryBias(apart, table[0]), backend="fused").square().sum().backward()
    assert not any(x.grad.any() for x in (band, apart, table))
    assert not position.raw_key_table.grad.any()
    assert position.raw_value_table.grad.any()


@pytest.mark.parametrize("layout", ["all heads from one", "a slice of q, k and v"])
def test_tensors_that_hooks_saved_elsewhere_give_the_same_gradients(layout: str) -> None:
    torch.manual_seed(0)
    b, h, n, d = 1, 2, 20, 16
    if layout == "all heads from one":
        q = torch.randn(b, 1, n, d).expand(b, h, n, d).requires_grad_()
    else:
        q = torch.randn(b, n, 3, h, d)[:, :, 0].transpose(1, 2).requires_grad_()
    k, v = (torch.randn(b, h, n, d, requires_grad=True) for _ in range(2))
    table = torch.randn(1, 7, d, requires_grad=True)
    leaves, results = [q, k, v, table], []
    for moved in (lambda x: x, lambda x: x if x._base is not None else x.contiguous().clone()):
        with torch.autograd.graph.saved_tensors_hooks(moved, lambda x: x):
            out = attend(q, k, v, bias=QueryBias(q, table), backend="fused")
        results.append(torch.autograd.grad(out.square().sum(), leaves))
    torch.testing.assert_close(*results)


def test_an_extent_below_zero_is_none() -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 1, 40, 16) for _ in range(3))
    bias = LagBias(torch.zeros(1, 1, 1, 9), Line(), Line(), torch.tensor([-20]))
    results = [attend(q, k, v, bias=bias, causal=True, backend=x) for x in ("fused", "reference")]
    torch.testing.assert_close(*results)
