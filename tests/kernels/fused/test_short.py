"""The kernels for short sequences in Triton's interpreter, beside the definition of attention."""

import random
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from whence import LagBias, LagValues, Line, Mask, attend
from whence.kernels.fused.backend import Inputs, Numbers, Product, Task, Wanted
from whence.lag.deferred import QueryBias

short = pytest.importorskip("whence.kernels.fused.short", reason="Triton is a Linux package")
launch = pytest.importorskip("whence.kernels.fused.launch", reason="Triton is a Linux package")

pytestmark = [pytest.mark.triton, pytest.mark.usefixtures("_interpreter")]

NO_INPUTS = Inputs()


class Immediate:
    """A builder that does at once what a plan records. Unwritten places are NaN, to be seen."""

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype, tokens: bool = False) -> Tensor:
        if tokens:
            b, h, n, d = shape
            return torch.full((b, n, h, d), torch.nan, dtype=dtype).transpose(1, 2)
        return torch.full(shape, torch.nan, dtype=dtype)

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.zeros(shape, dtype=dtype)

    def summed(self, slot: Tensor, shape: tuple[int, ...]) -> Tensor:
        return slot.sum_to_size(shape)

    def launch(
        self,
        kernel: Any,
        grid: Any,
        *groups: Any,
        warps: int = 4,
        stages: int = 3,
        registers: int | None = None,
        **constants: Any,
    ) -> None:
        kernel[grid](*groups, num_warps=warps, num_stages=stages, **constants)


class Case(NamedTuple):
    """A call of `attend`, and the same call as the kernels take it."""

    q: Tensor
    k: Tensor
    v: Tensor
    call: Any  # short.ShortCall
    options: dict[str, Any]
    leaves: dict[str, Tensor]


def laid_out(bias: LagBias, before: int, after: int) -> Tensor:
    """The bias in base e, as logits are in float32, and -inf outside of the window."""
    edge = bias.reach + launch.MARGIN
    lag = torch.arange(-edge, edge + 1)
    out = bias.at(lag).detach()
    hidden = torch.zeros_like(lag, dtype=torch.bool)
    if before >= 0:
        hidden = hidden | (lag < -before)
    if after >= 0:
        hidden = hidden | (lag > after)
    return out.masked_fill(hidden, -torch.inf).contiguous()


def random_case(seed: int, *, triangle: bool = False, groups: Sequence[int] = (1, 1, 2)) -> Case:
    """At most 48 tokens; `triangle` gives a call that the kernel of three tiles covers."""
    torch.manual_seed(seed)
    pick = random.Random(seed).choice
    leaves: dict[str, Tensor] = {}

    def leaf(name: str, *shape: int) -> Tensor:
        leaves[name] = torch.randn(shape).requires_grad_()
        return leaves[name]

    b, kv_heads, group = pick([1, 2, 3]), pick([1, 2]), 1 if triangle else pick(groups)
    h, n_k = kv_heads * group, pick([1, 5, 16, 17, 33, 48])
    n_q, d = pick([1, n_k, n_k, max(1, n_k - 3), 7, 40]), pick([4, 16, 24])
    d_v, q_start = pick([d, 16]), 0 if triangle else pick([n_k - n_q, n_k - n_q, 0, 2])
    q, k, v = (
        leaf("q", b, h, n_q, d),
        leaf("k", b, kv_heads, n_k, d),
        leaf("v", b, kv_heads, n_k, d_v),
    )
    windows = [(-1, 0), (-1, 0), (3, 0), (-1, -1), (2, 4), (5, -1)]
    before, after = pick(windows[:3] if triangle else windows)
    scale = pick([0.3, 0.0, d**-0.5])
    keys = (torch.rand(b, n_k) > 0.3) if pick([True, False]) else None
    segments = None
    if pick([True, False, False]):
        segments = (torch.arange(n_q)[None] // 5, torch.arange(n_k)[None] // 5)
    inputs = NO_INPUTS
    if keys is not None:
        inputs = inputs._replace(keys=keys.to(torch.uint8))
    if segments is not None:
        q_segment, k_segment = (x.to(torch.int32) for x in segments)
        inputs = inputs._replace(q_segment=q_segment, k_segment=k_segment)
    bias: LagBias | None = None
    band, reach = None, pick([0, 1, 3, 9, 60])
    kind = pick(["none", "band", "tails", "tails"])
    if kind != "none":
        heads, batches = pick([1, h]), pick([1, 1, b])
        inputs = inputs._replace(band=leaf("band", batches, heads, 1, 2 * reach + 1))
        bias = LagBias(inputs.band, Line(), Line())
        if kind == "tails":
            inputs = inputs._replace(tails=leaf("tails", 4, batches, heads, 1))
            left, right = (Line(inputs.tails[i], inputs.tails[i + 1]) for i in (0, 2))
            bias = LagBias(inputs.band, left, right)
        band = laid_out(bias, before, after)
    options = {
        "bias": bias,
        "mask": Mask(keys=keys, segments=segments),
        "window": (None if before < 0 else before, None if after < 0 else after),
        "scale": scale,
        "q_start": q_start,
    }
    numbers = Numbers(scale, q_start, before, after, 0.0, kind == "tails")
    return Case(q, k, v, short.ShortCall(band, None, inputs, numbers), options, leaves)


def with_tables(case: Case, seed: int) -> Case:
    """The case with a product in place of its band, a value table, or both, some shared by heads.

    Their reaches differ, are 0, or are beyond all lags.
    """
    pick = random.Random(seed).choice
    (_, h, _, d), d_v, call = case.q.shape, case.v.shape[3], case.call
    leaves, options, inputs = dict(case.leaves), dict(case.options), call.inputs
    parts = pick(["product", "table", "both", "both", "both"])
    if parts != "table":
        factor = torch.randn(pick([1, h]), 2 * pick([0, 1, 2, 7, 31]) + 1, d).requires_grad_()
        options["bias"] = QueryBias(case.q, factor, scale=0.7)
        inputs = inputs._replace(band=None, tails=None)
        call = call._replace(band=None, product=Product(0.7, None, factor))
        leaves = {k: x for k, x in leaves.items() if k not in ("band", "tails")} | {
            "factor": factor
        }
    if parts != "product":
        table = torch.randn(pick([1, h]), 2 * pick([0, 1, 3, 16, 31]) + 1, d_v).requires_grad_()
        options["values"] = LagValues(table)
        inputs, leaves["table"] = inputs._replace(table=table), table
    return case._replace(call=call._replace(inputs=inputs), options=options, leaves=leaves)


EVERYTHING = Wanted(band=True, tails=True, query=True, factor=True)


def compare(case: Case, wanted: Tensor, *, tokens: bool, cut: Any = None) -> None:
    """The output and every gradient beside those of `wanted`."""
    with torch.no_grad():
        assert short.fits(case.q, case.k, case.v, case.call)
        found = short.forward(Immediate(), *case[:4], tokens=tokens)
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
        d_out = torch.randn_like(wanted)
        gradients = short.backward(
            Immediate(), d_out, *case[:4], EVERYTHING, tokens=tokens, cut=cut
        )._asdict()
    each = torch.autograd.grad(wanted, list(case.leaves.values()), d_out, allow_unused=True)
    for (name, leaf), gradient in zip(case.leaves.items(), each, strict=True):
        gradient = torch.zeros_like(leaf) if gradient is None else gradient
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("seed", range(60))
def test_output_and_every_gradient_equal_the_definition(seed: int) -> None:
    case = random_case(seed)
    wanted = attend(case.q, case.k, case.v, **case.options, backend="reference")
    compare(case, wanted, tokens=seed % 2 == 0)


@pytest.mark.parametrize("seed", range(60, 80))
def test_a_program_may_take_several_sequences(seed: int) -> None:
    case = random_case(seed)
    wanted = attend(case.q, case.k, case.v, **case.options, backend="reference")
    compare(case, wanted, tokens=False, cut=short.Cut(rows=64, warps=4, run=2))


@pytest.mark.parametrize("seed", range(200, 240))
def test_tables_of_keys_and_values_equal_the_definition(seed: int) -> None:
    case = with_tables(random_case(seed, groups=[1]), seed)
    wanted = attend(case.q, case.k, case.v, **case.options, backend="reference")
    cut = short.Cut(rows=64 if seed % 4 else 16, warps=4, run=1 + seed % 3)
    compare(case, wanted, tokens=False, cut=cut)


@pytest.mark.parametrize("seed", range(80, 110))
def test_a_causal_backward_in_three_tiles_equals_the_definition(seed: int) -> None:
    case = random_case(seed, triangle=True)
    wanted = attend(case.q, case.k, case.v, **case.options, backend="reference")
    run = 1 if seed % 3 else 6
    compare(case, wanted, tokens=seed % 2 == 0, cut=short.Cut(64, 4, run=run, triangle=True))


def test_a_causal_backward_skips_the_keys_that_no_query_sees_where_three_tiles_fit() -> None:
    q, k, v, call = plain_case(1, 2, 2, 100, 64, after=0)[:4]
    q, k, v = (x.to(torch.bfloat16) for x in (q, k, v))
    numbers = call.numbers

    def chosen(q: Tensor, k: Tensor, call: Any) -> bool:
        return bool(short.backward_cut(q, k, k, call).triangle)

    assert chosen(q, k, call)
    assert not chosen(q.float(), k.float(), call)
    assert not chosen(q[:, :, :64], k[:, :, :64], call)
    assert not chosen(q, k[:, :1], call)
    assert not chosen(q, k, call._replace(numbers=numbers._replace(after=-1)))
    assert not chosen(q, k, call._replace(numbers=numbers._replace(q_start=1)))
    assert not chosen(q, k, call._replace(numbers=numbers._replace(dropout=0.1)))


def plain_case(b: int, h: int, kv_heads: int, n: int, d: int, **numbers: Any) -> Case:
    """Random q, k, v without a bias."""
    q = torch.randn(b, h, n, d).requires_grad_()
    k, v = (torch.randn(b, kv_heads, n, d).requires_grad_() for _ in range(2))
    call = short.ShortCall(
        None, None, NO_INPUTS, Numbers(d**-0.5, 0, -1, -1, 0.0, False)._replace(**numbers)
    )
    return Case(q, k, v, call, {}, {"q": q, "k": k, "v": v})


def test_dropout_drops_the_same_weights_as_the_other_kernels_and_again_in_backward() -> None:
    from whence.kernels.fused.launch import forward
    from whence.kernels.fused.tiles import Tiles

    n, p = 24, 0.4
    case = plain_case(2, 2, 2, n, 16, dropout=p)
    call = case.call._replace(inputs=NO_INPUTS._replace(seed=torch.tensor(7)))
    case = case._replace(call=call)
    # With the identity as values, the output is the weights.
    eye = torch.eye(n).expand(2, 2, n, n).contiguous()
    with torch.no_grad():
        weights = torch.softmax(case.q @ case.k.mT * 0.25, -1)
        keep = short.forward(Immediate(), case.q, case.k, eye, call, tokens=False) / weights
        task = Task(case.q, case.k, eye, call.inputs, call.numbers)
        others = forward(Immediate(), task, Tiles(16, 16, 4, 1), recorded=False)
    torch.testing.assert_close(keep, others.out / weights, rtol=1e-4, atol=1e-5)
    assert 0.3 < (keep == 0).float().mean().item() < 0.5
    weights = torch.softmax(case.q @ case.k.mT * 0.25, -1) * keep
    compare(case, weights @ case.v, tokens=False)


def test_what_is_too_long_or_has_too_large_a_table_does_not_fit() -> None:
    q, k, v, call = plain_case(1, 1, 1, 128, 64)[:4]
    half = [x.to(torch.bfloat16) for x in (q, k, v)]
    assert short.fits(q, k, v, call)
    assert short.fits(*(torch.cat([x, x], -1) for x in half), call)
    assert not short.fits(*(torch.cat([x, x], -1) for x in (q, k, v)), call)
    assert not short.fits(*(torch.cat([x, x[:, :, :1]], 2) for x in half), call)
    table, large = torch.randn(1, 63, 64), torch.randn(1, 65, 64)
    with_product = call._replace(product=Product(1.0, None, table))
    assert short.fits(*half, with_product)
    assert short.fits(*half, call._replace(inputs=NO_INPUTS._replace(table=table)))
    assert not short.fits(*half, with_product._replace(product=Product(1.0, None, large)))
    assert not short.fits(*half, with_product._replace(product=Product(1.0, half[0], table)))
    assert not short.fits(*half, call._replace(inputs=NO_INPUTS._replace(table=large)))
    assert not short.fits(*(torch.cat([x, x], 1) for x in half[:1]), *half[1:], with_product)
    near = call._replace(inputs=NO_INPUTS._replace(band=torch.randn(1, 1, 1, 3)))
    assert not short.fits(*half, near._replace(band=torch.randn(1, 1, 1, 2 * 112 + 1)))
    assert short.fits(*half, near._replace(band=torch.randn(1, 1, 1, 2 * 128 + 1)))


@pytest.mark.parametrize("reach", [0, 2])
def test_a_value_table_s_gradient_has_the_digits_of_float32(reach: int) -> None:
    """Without q.k all weights of a row are 1 / 17: in half precision their sum would not be 1."""
    case = plain_case(1, 1, 1, 17, 16, scale=0.0)
    q, k, v = (x.detach().half() for x in (case.q, case.k, case.v))
    table = torch.zeros(1, 2 * reach + 1, 16).requires_grad_()
    call = case.call._replace(inputs=NO_INPUTS._replace(table=table))
    d_out = torch.ones_like(v)
    found = short.backward(Immediate(), d_out, q, k, v, call, EVERYTHING, tokens=False).table
    out = attend(*(x.double() for x in (q, k, v)), values=LagValues(table.double()), scale=0.0)
    (wanted,) = torch.autograd.grad(out, table, torch.ones_like(out))
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("seed", [200, 203, 206])
def test_columns_beyond_a_narrow_head_are_zero(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(short, "narrowest", lambda: 64)
    case = with_tables(random_case(seed, groups=[1]), seed)
    wanted = attend(case.q, case.k, case.v, **case.options, backend="reference")
    compare(case, wanted, tokens=False)


def test_tiles_of_a_head_are_as_wide_as_an_old_ptxas_needs_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import triton

    from whence.kernels.fused.tiles import narrowest

    def found(capability: int, version: str) -> int:
        tool = SimpleNamespace(version=version)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (capability, 0))
        monkeypatch.setattr(
            triton,
            "knobs",
            SimpleNamespace(
                runtime=SimpleNamespace(interpret=False), nvidia=SimpleNamespace(ptxas=tool)
            ),
        )
        return narrowest()

    assert found(9, "12.8") == 64
    assert found(9, "12.9") == found(9, "13.0") == found(8, "12.8") == 16
