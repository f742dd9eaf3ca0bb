"""Every backend against the definition, over random combinations of everything `attend` takes."""

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from whence import DenseBias, LagBias, LagValues, Line, LowRankBias, Mask, attend, explain
from whence.bench import flex_peer
from whence.kernels.blocks import far, plan, sdpa
from whence.kernels.blocks.skew import fold, skew, spread, unskew
from whence.kernels.call import AttentionCall, as_call

F64 = torch.float64


@given(rows=st.integers(1, 5), keys=st.integers(1, 6), shared=st.booleans())
def test_skew_and_unskew_are_adjoint(rows: int, keys: int, shared: bool) -> None:
    curve = torch.randn(2, 1 if shared else rows, rows + keys - 1, dtype=F64)
    tile = torch.randn(2, rows, keys, dtype=F64)
    there = (skew(curve, keys) * tile).sum()
    back = (curve * unskew(tile)).sum()
    torch.testing.assert_close(there, back)


@given(reach=st.integers(0, 4), first=st.integers(-9, 9), n=st.integers(1, 9))
def test_spread_and_fold_are_adjoint(reach: int, first: int, n: int) -> None:
    table, curve = torch.randn(2, 2 * reach + 1, dtype=F64), torch.randn(2, n, dtype=F64)
    there = (spread(table, first, n) * curve).sum()
    torch.testing.assert_close(there, (table * fold(curve, first, reach)).sum())


def test_a_skewed_curve_is_the_toeplitz_matrix_of_its_lags() -> None:
    bias = LagBias.from_function(lambda lag: lag[None].to(F64), 6)
    first_lag, rows, keys = -3, 3, 4  # queries at 0, 1, 2 and keys at -1, 0, 1, 2
    tile = skew(bias.at(torch.arange(first_lag, first_lag + rows + keys - 1)), keys).flip(-2)
    wanted = bias.to_dense(torch.arange(3), torch.arange(-1, 3))
    torch.testing.assert_close(tile, wanted)


def random_call(seed: int) -> tuple[list[Tensor], dict[str, object], list[Tensor]]:
    """(q, k, v), the options of attend, and every tensor that has a gradient."""
    torch.manual_seed(seed)
    pick = random.Random(seed).choice
    b, kv_heads, groups = pick([1, 2, 3]), pick([1, 2]), pick([1, 2])
    h, n_k = kv_heads * groups, pick([1, 2, 7, 17, 40])
    n_q = pick([1, n_k, max(1, n_k - 3), 6])
    d, d_v = pick([(4, 4), (6, 4), (3, 5)])

    def leaf(*shape: int) -> Tensor:
        x = torch.randn(shape, dtype=F64).requires_grad_()
        gradients.append(x)
        return x

    gradients: list[Tensor] = []
    q = leaf(b, n_q, h, d).transpose(1, 2)  # heads side by side, as projections leave them
    k, v = leaf(b, kv_heads, n_k, d), leaf(b, kv_heads, n_k, d_v)

    def axes() -> tuple[int, int, int]:
        return pick([1, b]), pick([1, h]), pick([1, n_q])

    def line() -> Line:
        const, slope = pick([False, True]), pick([False, False, True])
        return Line(leaf(*axes()) if const else None, leaf(*axes()) if slope else None)

    bias = None
    if pick([False, True]):
        reach = pick([0, 1, 3, 9])
        bias = LagBias(leaf(*axes(), 2 * reach + 1), line(), line())
    if pick([False, False, True]):
        low_rank = LowRankBias(leaf(1, h, n_q, 2), leaf(b, 1, n_k, 2))
        bias = low_rank if bias is None else bias + low_rank
    values = None
    if pick([False, True]):
        reach = pick([0, 2, 5])
        values = LagValues(leaf(pick([1, h]), 2 * reach + 1, d_v))
    masks = {
        "none": None,
        "keys": torch.rand(b, n_k) > 0.3,
        "pairs": torch.rand(b, 1, n_q, n_k) > 0.5,
        "packed": Mask(
            segments=(torch.arange(n_q)[None] // 5, torch.arange(n_k)[None] // 5),
        ),
    }
    options = {
        "bias": bias,
        "values": values,
        "mask": masks[pick(["none", "none", *masks])],
        "causal": pick([False, True]),
        "window": pick([None, None, 2, (3, None), (0, 4)]),
        "q_start": pick([None, None, 0, 2]),
        "scale": pick([None, 0.3, 0.0]),
    }
    return [q, k, v], options, gradients


@settings(max_examples=150)
@given(
    seed=st.integers(0, 10**6),
    rows=st.sampled_from([1, 4, 16, 64]),
    far=st.sampled_from([1, 3, 1000]),
    keep=st.sampled_from([0, 0, plan.MOST_KEPT_WEIGHTS]),
)
def test_blocks_equal_the_definition_in_output_and_every_gradient(
    seed: int, rows: int, far: int, keep: int
) -> None:
    qkv, options, gradients = random_call(seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan, "MOST_ROWS", rows)
        patch.setattr(plan, "FEWEST_FAR_KEYS", far)
        patch.setattr(
            plan, "MOST_KEPT_WEIGHTS", keep
        )  # with 0, weights are computed again in backward
        found = attend(*qkv, **options, backend="sdpa")
    wanted = attend(*qkv, **options, backend="reference")
    torch.testing.assert_close(found, wanted)
    weight = torch.randn_like(wanted)
    pairs = zip(
        torch.autograd.grad((found * weight).sum(), gradients, allow_unused=True),
        torch.autograd.grad((wanted * weight).sum(), gradients, allow_unused=True),
        strict=True,
    )
    for place, (a, b) in enumerate(pairs):
        a, b = (torch.zeros_like(gradients[place]) if x is None else x for x in (a, b))
        torch.testing.assert_close(a, b)


@pytest.mark.compiled
@pytest.mark.parametrize("calls", [16, pytest.param(40, marks=pytest.mark.slow)])
def test_the_flex_peer_equals_the_definition_where_it_runs(calls: int) -> None:
    settings(max_examples=calls)(given(seed=st.integers(0, 10**6))(flex_peer_equals))()


def flex_peer_equals(seed: int) -> None:
    from torch.nn.attention.flex_attention import flex_attention

    qkv, options, _ = random_call(seed)
    with torch.no_grad():
        if options["values"] is not None:
            assert "no place for a value of each lag" in str(flex_peer.refuse(call(qkv, options)))
            options["values"] = None
        asked = call(qkv, options)
        reason = flex_peer.refuse(asked)
        if reason is not None:
            assert "without slopes where something differs from query to query" in reason
            assert asked.lag is not None
            assert max(x.shape[2] for x in asked.lag.tensors()) > 1
            return
        found = flex_peer.flex_attend(asked, flex_attention, flex_peer.block_mask(asked))
        torch.testing.assert_close(found, attend(*qkv, **options, backend="reference"))


def call(qkv: list[Tensor], options: dict[str, object]) -> AttentionCall:
    """The call that `attend` would run, without gradients, which FlexAttention lacks on a CPU."""
    made = as_call(*qkv, **options, dropout=0.0)
    return replace(made, q=made.q.detach(), k=made.k.detach(), v=made.v.detach())


def test_the_far_parts_really_are_left_to_the_flash_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    plain = far.FarRange.forward
    monkeypatch.setattr(far.FarRange, "forward", lambda part: seen.append(part) or plain(part))
    monkeypatch.setattr(plan, "MOST_KEPT_WEIGHTS", 0)
    q = torch.randn(1, 2, 1024, 8)
    band = LagBias(torch.randn(1, 2, 1, 9), Line(), Line())
    attend(q, q, q, bias=band, backend="sdpa")
    assert seen
    seen.clear()
    attend(q, q, q, bias=LagBias.line(torch.tensor([0.1, 0.2])), backend="sdpa")
    assert not seen  # a sloped tail is no constant


def test_dropout_keeps_the_right_share_scales_it_and_repeats_it_in_backward() -> None:
    b, h, n, p = 2, 3, 50, 0.3
    q, k = torch.randn(2, b, h, n, 4, dtype=F64)
    q.requires_grad_()
    eye = torch.eye(n, dtype=F64).expand(b, h, n, n)
    bias = LagBias.clipped(torch.randn(1, h, 1, 7, dtype=F64))
    table = LagValues(torch.randn(h, 5, n, dtype=F64))
    plain = attend(q, k, eye, bias=bias, backend="sdpa")
    torch.manual_seed(5)
    dropped = attend(q, k, eye, bias=bias, dropout=p, backend="sdpa")
    keep = (dropped / plain).detach()
    share = (keep == 0).double().mean().item()
    assert abs(share - p) < 0.02
    torch.testing.assert_close(keep[keep != 0], torch.full_like(keep[keep != 0], 1 / (1 - p)))
    # The same seed gives the same mask again: compare output and gradient with it written out.
    torch.manual_seed(5)
    found = attend(q, k, eye, bias=bias, values=table, dropout=p, backend="sdpa")
    lag = torch.arange(n)[None] - torch.arange(n)[:, None]
    weights = plain * keep
    wanted = weights + torch.einsum(
        "bhqk,hqkd->bhqd", weights, table.table[:, lag.clamp(-2, 2) + 2]
    )
    torch.testing.assert_close(found, wanted)
    weight = torch.randn_like(wanted)
    (a,) = torch.autograd.grad((found * weight).sum(), [q])
    (b_,) = torch.autograd.grad((wanted * weight).sum(), [q])
    torch.testing.assert_close(a, b_)


@pytest.mark.parametrize("keep", [0, plan.MOST_KEPT_WEIGHTS])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_error_is_at_most_twice_that_of_pytorch_in_the_same_dtype(
    dtype: torch.dtype, keep: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Root mean square against float64, output and every gradient; PyTorch's way is n x n."""
    monkeypatch.setattr(plan, "MOST_KEPT_WEIGHTS", keep)
    n, reach = 300, 20
    exact = [torch.randn(2, 3, n, 16, dtype=F64) for _ in range(3)]
    band = torch.randn(1, 3, 1, 2 * reach + 1, dtype=F64)
    weight = torch.randn(2, 3, n, 16, dtype=F64)

    def gradients(kind: torch.dtype, ours: bool) -> list[Tensor]:
        qkv = [x.to(dtype).to(kind).requires_grad_() for x in exact]
        table = band.to(dtype).to(kind if kind == F64 else torch.float32).requires_grad_()
        if ours:
            out = attend(*qkv, bias=LagBias(table, Line(), Line()), backend="sdpa")
        else:
            pos = torch.arange(n)
            bias = LagBias(table, Line(), Line()).to_dense(pos, pos).to(kind)
            logits = qkv[0] @ qkv[1].transpose(-1, -2) * 16**-0.5 + bias
            out = torch.softmax(logits, -1) @ qkv[2]
        out.backward(weight.to(dtype).to(kind))
        assert table.grad is not None
        return [out.detach(), *(x.grad for x in qkv if x.grad is not None), table.grad]

    truth = gradients(F64, False)
    for ours, theirs, true in zip(
        gradients(dtype, True), gradients(dtype, False), truth, strict=True
    ):
        error = (ours.to(F64) - true).square().mean().sqrt()
        assert error <= 2 * (theirs.to(F64) - true).square().mean().sqrt()


@pytest.mark.parametrize(
    ("dtype", "d", "d_v", "heads"),
    [(torch.bfloat16, 64, 64, 2), (torch.float32, 64, 64, 4), (torch.bfloat16, 20, 12, 2)],
)
def test_plain_calls_reach_a_gpu_s_kernels_in_a_form_they_take(
    dtype: torch.dtype, d: int, d_v: int, heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Tensor] = []

    def kernel(q: Tensor, k: Tensor, v: Tensor, **options: object) -> Tensor:
        seen.extend((q, k, v))
        return v.new_empty(*q.shape[:3], v.shape[-1])

    monkeypatch.setattr(sdpa, "scaled_dot_product_attention", kernel)
    q = torch.empty(1, 4, 9, d, dtype=dtype, device="meta")
    k, v = (torch.empty(1, 2, 9, n, dtype=dtype, device="meta") for n in (d, d_v))
    assert attend(q, k, v, causal=True, backend="sdpa").shape == (1, 4, 9, d_v)
    width = -(-d // 8) * 8  # or PyTorch would build the matrix of logits
    assert [x.shape[-1] for x in seen] == [width] * 3
    assert [x.shape[1] for x in seen] == [4, heads, heads]  # nor does it group those of float32


def test_plain_calls_are_not_copied_but_to_put_columns_side_by_side(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[Tensor] = []
    plain = sdpa.scaled_dot_product_attention
    monkeypatch.setattr(
        sdpa,
        "scaled_dot_product_attention",
        lambda *qkv, **options: seen.extend(qkv) or plain(*qkv, **options),
    )
    q, k, v = torch.randn(3, 1, 2, 9, 4)
    turned = torch.randn(1, 2, 4, 9).transpose(-1, -2)
    attend(q, k, v)
    assert all(x is y for x, y in zip(seen, (q, k, v), strict=True))
    out = attend(turned, turned, turned)
    assert all(x.stride(-1) == 1 for x in seen)
    torch.testing.assert_close(out, attend(turned, turned, turned, backend="reference"))


def test_explain_tells_what_each_backend_would_do() -> None:
    q = torch.randn(1, 2, 9, 4)
    bias = LagBias.clipped(torch.zeros(1, 2, 1, 3))
    text = str(explain(q, q, q, bias=bias, dropout=0.1))
    assert "-> sdpa" in text
    assert "fused     refuses  runs on an NVIDIA GPU" in text
    assert "flex" not in text
    assert "reference runs     holds the n x n logits: quadratic memory" in text
    half = explain(q.bfloat16(), q.bfloat16(), q.bfloat16(), bias=bias)
    assert {name: runs for name, runs, _ in half.rows}["reference"] is False


def test_explain_names_a_band_that_is_as_long_as_the_keys() -> None:
    q = torch.randn(1, 2, 9, 4)
    wide = LagBias.clipped(torch.zeros(1, 2, 9, 17))
    assert "linear memory; the bias is 17 lags for each query" in str(explain(q, q, q, bias=wide))
    narrow = LagBias.clipped(torch.zeros(1, 2, 9, 5))
    assert "lags for each query" not in str(explain(q, q, q, bias=narrow))


def test_nothing_to_attend_to_gives_zeros() -> None:
    q, none = torch.randn(1, 2, 5, 4), torch.randn(1, 2, 0, 4)
    for backend in ("reference", "sdpa"):
        torch.testing.assert_close(attend(q, none, none, backend=backend), torch.zeros(1, 2, 5, 4))
        assert attend(none, q, q, backend=backend).shape == (1, 2, 0, 4)


def test_gradients_are_bitwise_equal_on_every_run() -> None:
    q = torch.randn(2, 4, 300, 16)
    results = []
    for _ in range(3):
        band = torch.linspace(-1, 1, 4 * 41).view(1, 4, 1, 41).requires_grad_()
        attend(q, q, q, bias=LagBias.clipped(band), backend="sdpa").square().sum().backward()
        results.append(band.grad)
    assert results[0] is not None
    for other in results[1:]:
        assert other is not None
        assert torch.equal(results[0], other)


@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("change", ["keys", "segments", "pairs", "k"])
def test_a_mask_or_key_changed_in_place_before_backward_raises(
    change: str, dense: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "MOST_ROWS", 16)
    monkeypatch.setattr(plan, "MOST_KEPT_WEIGHTS", 0)  # so that backward reads the mask again
    q, k, v = torch.randn(3, 1, 2, 40, 4).unbind(0)
    segments, pos = torch.ones(1, 40).long(), torch.arange(40)
    mask = Mask(
        keys=torch.ones(1, 40, dtype=torch.bool),
        segments=(segments, segments),
        pairs=torch.ones(1, 1, 40, 40, dtype=torch.bool),
    )
    bias = LagBias.clipped(torch.randn(1, 2, 1, 3))
    if dense:
        bias = DenseBias(lambda i, j: (i[:, None] * j)[None, None] / 40.0, pos, pos, "a product")
    out = attend(q.requires_grad_(), k, v, bias=bias, mask=mask, backend="sdpa")
    changed = {"keys": mask.keys, "segments": segments, "pairs": mask.pairs, "k": k}[change]
    assert changed is not None
    changed[..., 0] = 0
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.square().sum().backward()


@pytest.mark.parametrize("keep", [0, plan.MOST_KEPT_WEIGHTS])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("reason", ["dropout", "values"])
def test_a_query_with_one_key_has_no_gradient_of_the_bias_in_half_precision(
    reason: str, dtype: torch.dtype, keep: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its weight is 1 whatever the bias is. The output is no value of the dtype, so it is rounded."""
    monkeypatch.setattr(plan, "MOST_KEPT_WEIGHTS", keep)
    q, k, v = (x.to(dtype).requires_grad_() for x in torch.randn(3, 1, 2, 8, 64))
    band = torch.zeros(1, 2, 1, 5, requires_grad=True)
    values = LagValues(torch.randn(2, 3, 64)) if reason == "values" else None
    out = attend(
        q,
        k,
        v,
        bias=LagBias(band, Line(), Line()),
        values=values,
        window=0,
        dropout=0.3 if reason == "dropout" else 0.0,
        backend="sdpa",
    )
    out.backward(torch.randn(1, 2, 8, 64).to(dtype))
    assert band.grad is not None
    torch.testing.assert_close(band.grad, torch.zeros_like(band), rtol=0, atol=1e-4)


def test_a_shared_band_may_have_tails_for_each_query() -> None:
    q, k, v = torch.randn(3, 2, 2, 8, 4, dtype=F64).unbind(0)
    band, const, slope = (
        torch.randn(shape, dtype=F64).requires_grad_()
        for shape in ((1, 2, 1, 3), (2, 2, 8), (1, 2, 8))
    )
    bias = LagBias(band, Line(const, slope), Line(const))
    found, wanted = (attend(q, k, v, bias=bias, backend=name) for name in ("sdpa", "reference"))
    for a, b in zip(
        torch.autograd.grad(found.square().sum(), [band, const, slope]),
        torch.autograd.grad(wanted.square().sum(), [band, const, slope]),
        strict=True,
    ):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("backend", ["sdpa", "reference"])
def test_segments_are_compared_in_all_their_bits(backend: str) -> None:
    q, k, v = torch.randn(3, 1, 2, 4, 4).unbind(0)
    far_apart = torch.tensor([[0, 0, 1 << 32, 1 << 32]])  # the same in 32 bits
    near = torch.tensor([[0, 0, 1, 1]])
    found, wanted = (
        attend(q, k, v, mask=Mask(segments=(x, x)), backend=backend) for x in (far_apart, near)
    )
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)


def test_a_short_call_without_position_is_left_to_the_fused_kernels_on_a_gpu() -> None:
    pytest.importorskip("triton", reason="Triton is a Linux package")

    def chosen(n: int, **options: Any) -> str:
        q = torch.empty(2, 4, n, 64, device="cuda", dtype=torch.bfloat16)
        return explain(q, q, q, **options).chosen

    with FakeTensorMode():
        assert chosen(128, causal=True) == chosen(64) == "fused"
        assert chosen(129, causal=True) == chosen(65) == "sdpa"
        assert chosen(64, dropout=0.1) == "sdpa"  # not measured
