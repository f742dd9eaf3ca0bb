"""attend on its reference backend: the yardstick itself, held against PyTorch and against loops."""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from whence import DenseBias, LagBias, LagValues, Line, LowRankBias, Mask, attend, build, explain
from whence.kernels import BACKENDS
from whence.kernels.call import as_call

B, H, D = 2, 4, 3


def heads(n_q: int = 7, n_k: int = 7, *, h_kv: int = H, d_v: int = D, dtype=torch.float64):
    sizes = ((H, n_q, D), (h_kv, n_k, D), (h_kv, n_k, d_v))
    return tuple(torch.randn(B, *size, dtype=dtype) for size in sizes)


def reference(q: Tensor, k: Tensor, v: Tensor, **options) -> Tensor:
    return attend(q, k, v, backend="reference", **options)


def lags(n_q: int, n_k: int, q_start: int | None = None) -> Tensor:
    start = n_k - n_q if q_start is None else q_start
    return torch.arange(n_k) - torch.arange(start, start + n_q)[:, None]


def lag_bias(*axes: int, reach: int = 2) -> LagBias:
    return LagBias.clipped(torch.randn(*axes, 2 * reach + 1, dtype=torch.float64))


SEEN = {  # options of attend, and the lags that they leave
    "all": ({}, lambda lag: lag == lag),
    "causal": ({"causal": True}, lambda lag: lag <= 0),
    "window": ({"window": 2}, lambda lag: lag.abs() <= 2),
    "before": ({"window": (1, None)}, lambda lag: lag >= -1),
    "after": ({"window": (None, 1)}, lambda lag: lag <= 1),
    "none": ({"window": (None, None)}, lambda lag: lag == lag),
    "both": ({"window": (3, 1)}, lambda lag: (lag >= -3) & (lag <= 1)),
    "self": ({"window": 0}, lambda lag: lag == 0),
    "causal window": ({"window": 2, "causal": True}, lambda lag: (lag >= -2) & (lag <= 0)),
}


@pytest.mark.parametrize("seen", SEEN)
@pytest.mark.parametrize("h_kv", [4, 2, 1])
@pytest.mark.parametrize(("n_q", "n_k"), [(7, 7), (1, 7), (3, 7), (1, 1)])
def test_reference_equals_pytorch(seen, h_kv, n_q, n_k):
    q, k, v = heads(n_q, n_k, h_kv=h_kv, d_v=5)
    options, rule = SEEN[seen]
    want = F.scaled_dot_product_attention(q, k, v, attn_mask=rule(lags(n_q, n_k)), enable_gqa=True)
    assert_close(reference(q, k, v, **options), want)


@pytest.mark.parametrize("scale", [None, 1.0, 0.3, -0.7])
def test_scale_is_pytorchs(scale):
    q, k, v = heads()
    # Not is_causal=True: PyTorch's own CPU kernel gives NaN for that with a negative scale.
    want = F.scaled_dot_product_attention(q, k, v, attn_mask=lags(7, 7) <= 0, scale=scale)
    assert_close(reference(q, k, v, causal=True, scale=scale), want)


@pytest.mark.parametrize("form", ["keys", "Mask", "padding", "pairs"])
def test_padding_equals_pytorch_in_every_form(form):
    q, k, v = heads(5, 7)
    lengths = torch.tensor([7, 3])
    keys = torch.arange(7) < lengths[:, None]
    mask = {
        "keys": keys,
        "Mask": Mask(keys=keys),
        "padding": Mask.padding(lengths, 7),
        "pairs": keys[:, None, None].expand(B, 1, 5, 7),
    }[form]
    want = F.scaled_dot_product_attention(q, k, v, attn_mask=keys[:, None, None])
    assert_close(reference(q, k, v, mask=mask), want)


def test_a_mask_and_a_window_must_both_allow_a_pair():
    q, k, v = heads()
    pairs = torch.rand(1, H, 7, 7) > 0.3
    keys = torch.arange(7) < torch.tensor([[7], [5]])
    allowed = pairs & keys[:, None, None] & (lags(7, 7) <= 0)
    allowed = allowed | torch.zeros(B, H, 7, 7, dtype=torch.bool)
    got = reference(q, k, v, mask=Mask(keys=keys, pairs=pairs), causal=True)
    want = F.scaled_dot_product_attention(q, k, v, attn_mask=allowed)
    some = allowed.any(-1)
    assert_close(got[some], want[some])
    assert_close(got[~some], torch.zeros_like(got[~some]), rtol=0, atol=0)


@pytest.mark.parametrize("q_start", [0, 2, 5, -3, 20])
def test_q_start_places_the_queries_among_the_keys(q_start):
    q, k, v = heads(3, 7)
    bias = lag_bias(1, H, 1)
    lag = lags(3, 7, q_start)
    matrix = bias.band[..., 0, :][..., lag.clamp(-2, 2) + 2]
    want = F.scaled_dot_product_attention(q, k, v, attn_mask=matrix)
    assert_close(reference(q, k, v, bias=bias, q_start=q_start), want)


@pytest.mark.parametrize("backend", ["reference", "sdpa"])
@pytest.mark.parametrize("q_start", [2**20, 10**12, -(2**20), -(10**12)])
def test_a_line_is_exact_at_any_distance_from_the_keys(q_start, backend):
    q, k, v = heads(3, 7, dtype=torch.float32)
    bias, distance = LagBias.line(torch.linspace(-1, 1, H)), lags(3, 7, q_start).abs()
    # What all keys of a row have in common, a softmax does not see.
    matrix = torch.linspace(-1, 1, H).double()[:, None, None] * (distance - distance.min())
    nearest = distance.amin(dim=1)
    for window in (None, int(nearest.max()) + 1, int(nearest.max()) + 3):
        allowed = torch.ones_like(distance).bool() if window is None else distance <= window
        mask = matrix.masked_fill(~allowed, -math.inf)
        want = F.scaled_dot_product_attention(*(x.double() for x in (q, k, v)), attn_mask=mask)
        got = attend(q, k, v, bias=bias, q_start=q_start, window=window, backend=backend)
        assert_close(got, want.float())
    nothing = attend(q, k, v, bias=bias, q_start=q_start, window=10, backend=backend)
    assert_close(nothing, torch.zeros_like(nothing), rtol=0, atol=0)


def loop(q, k, v, *, bias=None, values=None, allowed=None, scale=None) -> Tensor:
    """Attention one number at a time; bias and values are [b, h, q, k] and [b, h, q, k, d_v]."""
    (b, h, n_q, d), (h_kv, n_k) = q.shape, k.shape[1:3]
    scale = 1 / math.sqrt(d) if scale is None else scale
    out = torch.zeros(b, h, n_q, v.shape[3], dtype=q.dtype)
    for s, head, i in itertools.product(range(b), range(h), range(n_q)):
        own = head * h_kv // h
        weights = {}
        for j in range(n_k):
            if allowed is None or allowed[i, j]:
                logit = scale * float(q[s, head, i] @ k[s, own, j])
                weights[j] = math.exp(logit + (0.0 if bias is None else float(bias[s, head, i, j])))
        for j, weight in weights.items():
            value = v[s, own, j] + (0.0 if values is None else values[s, head, i, j])
            out[s, head, i] += weight / sum(weights.values()) * value
    return out


@given(
    n_q=st.integers(1, 4),
    past=st.integers(0, 3),
    h_kv=st.sampled_from([1, 2, 4]),
    seen=st.sampled_from(sorted(SEEN)),
    axes=st.tuples(st.sampled_from([1, B]), st.sampled_from([1, H]), st.booleans()),
    table_heads=st.sampled_from([1, H]),
)
def test_reference_equals_a_loop_with_bias_and_values(n_q, past, h_kv, seen, axes, table_heads):
    n_k = n_q + past
    q, k, v = heads(n_q, n_k, h_kv=h_kv, d_v=2)
    bias = lag_bias(axes[0], axes[1], n_q if axes[2] else 1)
    values = LagValues(torch.randn(table_heads, 3, 2, dtype=torch.float64))
    options, rule = SEEN[seen]
    lag = lags(n_q, n_k)
    place = torch.arange(n_k)
    want = loop(
        q,
        k,
        v,
        bias=bias.to_dense(place[past:], place).expand(B, H, n_q, n_k),
        values=values.table[:, lag.clamp(-1, 1) + 1].expand(B, H, n_q, n_k, 2),
        allowed=rule(lag),
    )
    assert_close(reference(q, k, v, bias=bias, values=values, **options), want)


@pytest.mark.parametrize("masked", ["keys", "pairs", "window"])
def test_a_query_that_may_look_at_nothing_gets_zeros_and_finite_gradients(masked):
    q, k, v = (x.requires_grad_() for x in heads())
    values = LagValues(torch.randn(1, 3, D, dtype=torch.float64).requires_grad_())
    bias = lag_bias(1, H, 7)
    bias.band.requires_grad_()
    options = {
        "keys": {"mask": torch.tensor([[True] * 7, [False] * 7])},
        "pairs": {"mask": (torch.arange(7) != 4).view(1, 1, 7, 1).expand(1, 1, 7, 7)},
        "window": {"q_start": 5, "window": 1},
    }[masked]
    empty = {
        "keys": (slice(1, 2), slice(None)),
        "pairs": (slice(None), slice(4, 5)),
        "window": (slice(None), slice(3, 7)),
    }[masked]
    out = reference(q, k, v, bias=bias, values=values, **options)
    nothing = out[empty[0], :, empty[1]]
    assert_close(nothing, torch.zeros_like(nothing), rtol=0, atol=0)
    leaves = (q, k, v, bias.band, values.table)
    grads = torch.autograd.grad(out.square().sum(), leaves)
    assert all(grad.isfinite().all() for grad in grads)
    assert_close(grads[0][empty[0], :, empty[1]], torch.zeros_like(nothing), rtol=0, atol=0)


@pytest.mark.parametrize(("n_q", "n_k"), [(0, 4), (3, 0), (0, 0)])
def test_no_queries_or_no_keys_are_no_error(n_q, n_k):
    q, k, v = heads(n_q, n_k)
    bias, values = LagBias.line(torch.ones(H)), LagValues(torch.ones(1, 3, D))
    out = reference(q, k, v, bias=bias, values=values, causal=True)
    assert_close(out, torch.zeros(B, H, n_q, D, dtype=torch.float64))


def test_a_batch_of_no_sequences_has_gradients_of_zero():
    q, k, v = (torch.randn(0, H, 5, D, requires_grad=True) for _ in range(3))
    band, line, table = (
        torch.randn(*shape, requires_grad=True) for shape in ((1, H, 1, 3), (1, H, 1), (1, 3, D))
    )
    terms = {"bias": LagBias(band, Line(line, line), Line()), "values": LagValues(table)}
    out = attend(q, k, v, backend="sdpa", **terms)
    assert out.shape == (0, H, 5, D)
    for grad in torch.autograd.grad(out.sum(), [band, line, table]):
        assert_close(grad, torch.zeros_like(grad))


@pytest.mark.parametrize("causal", [False, True])
def test_packed_sequences_equal_the_separate_ones(causal):
    lengths = [3, 1, 5]
    method = build("tisa+shaw:clip=1,keys=false", n_heads=H, d_head=D).double()
    n = sum(lengths)
    q, k, v = heads(n, n)
    place = torch.arange(n)
    terms = {"bias": method.score_term(q, place, place), "values": method.value_term(place, place)}
    cuts = torch.tensor([0, *itertools.accumulate(lengths)])
    packed = reference(q, k, v, mask=Mask.packed(cuts, n), causal=causal, **terms)
    separate = [
        reference(*(x[:, :, start:stop] for x in (q, k, v)), causal=causal, **terms)
        for start, stop in itertools.pairwise(cuts.tolist())
    ]
    assert_close(packed, torch.cat(separate, dim=2))


def test_mask_constructors_say_what_they_mean():
    padding = Mask.padding(torch.tensor([2, 0, 3]), 3)
    assert padding.keys.tolist() == [[True, True, False], [False] * 3, [True] * 3]
    q_segment, k_segment = Mask.packed(torch.tensor([0, 2, 3, 6], dtype=torch.int32), 6).segments
    assert_close(q_segment, k_segment, rtol=0, atol=0)
    assert (q_segment[0] - q_segment[0, 0]).tolist() == [0, 0, 1, 2, 2, 2]
    assert Mask().tile(slice(0, 2), slice(0, 2)) is None


def test_a_tile_of_a_mask_is_that_part_of_the_whole():
    segments = torch.tensor([[0, 0, 1, 1, 2]])
    mask = Mask(
        keys=torch.rand(2, 5) > 0.3,
        segments=(segments, segments),
        pairs=torch.rand(1, 3, 5, 5) > 0.3,
    )
    whole = mask.tile(slice(0, 5), slice(0, 5))
    assert whole.shape == (2, 3, 5, 5)
    assert_close(mask.tile(slice(1, 4), slice(2, 5)), whole[:, :, 1:4, 2:5])


def test_different_segments_for_queries_and_keys_make_packed_cross_attention():
    q, k, v = heads(3, 5)
    mask = Mask(segments=(torch.tensor([[0, 1, 1]]), torch.tensor([[0, 0, 1, 1, 1]])))
    want = torch.cat(
        [
            reference(q[:, :, :1], k[:, :, :2], v[:, :, :2]),
            reference(q[:, :, 1:], k[:, :, 2:], v[:, :, 2:]),
        ],
        dim=2,
    )
    assert_close(reference(q, k, v, mask=mask), want)


def test_scale_zero_drops_the_content_product():
    q, k, v = heads()
    bias = lag_bias(1, H, 1)
    place = torch.arange(7)
    want = torch.softmax(bias.to_dense(place, place), dim=-1) @ v
    assert_close(reference(q, k, v, bias=bias, scale=0.0), want)
    nothing = torch.full_like(q, torch.nan)
    assert_close(reference(nothing, k, v, bias=bias, scale=0.0), want)
    uniform = v.mean(2, keepdim=True).expand_as(v)
    assert_close(reference(q, k, v, scale=0.0), uniform)


@pytest.mark.parametrize("scale", [None, 2.0, -0.5, 0.0])
@pytest.mark.parametrize("h_kv", [4, 2])
@pytest.mark.parametrize(("one", "other"), [((1, 1), (B, H)), ((B, 1), (1, H)), ((1, H), (1, H))])
def test_a_low_rank_bias_equals_its_matrix(scale, h_kv, one, other):
    q, k, v = heads(5, 7, h_kv=h_kv)
    low = LowRankBias(
        torch.randn(*one, 5, 6, dtype=torch.float64), torch.randn(*other, 7, 6, dtype=torch.float64)
    )
    matrix = low.to_dense(torch.arange(2, 7), torch.arange(7))
    want = F.scaled_dot_product_attention(
        q, k, v, attn_mask=matrix.expand(B, H, 5, 7), scale=scale, enable_gqa=True
    )
    assert_close(reference(q, k, v, bias=low, scale=scale), want)


@pytest.mark.parametrize("causal", [False, True])
def test_a_dense_bias_equals_its_matrix(causal):
    q, k, v = heads(5, 7)
    gate = torch.randn(B, H, 5, 1, dtype=torch.float64)
    q_pos, k_pos = torch.arange(2, 7), torch.arange(7)

    def function(q_pos, k_pos, gate):
        return gate * torch.sin((q_pos[:, None] * k_pos).double())

    bias = DenseBias(function, q_pos, k_pos, "depends on the product of the positions", (gate,))
    allowed = lags(5, 7) <= 0 if causal else torch.ones(5, 7, dtype=torch.bool)
    matrix = function(q_pos, k_pos, gate).masked_fill(~allowed, -torch.inf)
    want = F.scaled_dot_product_attention(q, k, v, attn_mask=matrix)
    assert_close(reference(q, k, v, bias=bias, causal=causal), want)


def test_a_sum_of_all_kinds_equals_its_matrix():
    q, k, v = heads(5, 7, h_kv=2)
    q_pos, k_pos = torch.arange(2, 7), torch.arange(7)
    low = LowRankBias(*(torch.randn(1, H, n, 2, dtype=torch.float64) for n in (5, 7)))
    dense = DenseBias(lambda q, k: (q[:, None] * k)[None, None] / 9.0, q_pos, k_pos, "a product")
    bias = lag_bias(1, H, 5) + low + dense + low + LagBias.line(torch.randn(H).double())
    want = F.scaled_dot_product_attention(
        q, k, v, attn_mask=bias.to_dense(q_pos, k_pos).expand(B, H, 5, 7), enable_gqa=True
    )
    assert_close(reference(q, k, v, bias=bias), want)


@pytest.mark.parametrize("mask", [None, "padding"])
def test_gradients_of_the_reference_are_right(mask):
    q, k, v = (x[:1, :2].clone().requires_grad_() for x in heads(3, 4, h_kv=2))
    band = torch.randn(1, 2, 3, 3, dtype=torch.float64, requires_grad=True)
    table = torch.randn(1, 3, D, dtype=torch.float64, requires_grad=True)
    keys = None if mask is None else torch.tensor([[False, True, True, True]])

    def out(q, k, v, band, table):
        bias, values = LagBias.clipped(band), LagValues(table)
        return reference(q, k, v, bias=bias, values=values, mask=keys, causal=True)

    assert torch.autograd.gradcheck(out, (q, k, v, band, table))


def test_dropout_keeps_the_mean_and_follows_the_seed():
    q, k, v = (x[:1] for x in heads(dtype=torch.float32))
    many = [x.expand(3000, *x.shape[1:]) for x in (q, k, v)]
    drops = reference(*many, dropout=0.3)
    assert_close(drops.mean(0, keepdim=True), reference(q, k, v), rtol=0, atol=0.05)
    assert drops.std(0).min() > 0.01
    torch.manual_seed(3)
    first = reference(q, k, v, dropout=0.3)
    torch.manual_seed(3)
    assert_close(reference(q, k, v, dropout=0.3), first, rtol=0, atol=0)


def test_keys_and_values_may_have_different_numbers_of_heads():
    q, k, v = heads(h_kv=2)
    got = reference(q, k, v[:, :1])
    assert_close(got, reference(q, k, v[:, :1].expand(B, 2, 7, D)))


def test_float32_stays_float32_whatever_the_dtype_of_the_bias():
    q, k, v = heads(dtype=torch.float32)
    values = LagValues(torch.randn(1, 3, D, dtype=torch.float64))
    assert reference(q, k, v, bias=lag_bias(1, H, 1), values=values).dtype == torch.float32


def test_non_contiguous_heads_are_no_different():
    q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in heads())
    assert not q.is_contiguous()
    want = reference(*(x.contiguous() for x in (q, k, v)))
    assert_close(reference(q, k, v), want)


def call(q=(B, H, 5, D), k=(B, H, 7, D), v=(B, H, 7, D), **options):
    """Through as_call, whose own messages the run-time shape checks do not forestall."""
    tensors = (x if isinstance(x, Tensor) else torch.zeros(x) for x in (q, k, v))
    names = ("bias", "values", "mask", "window", "scale", "q_start")
    defaults = dict.fromkeys(names) | {"causal": False, "dropout": 0.0}
    return as_call(*tensors, **(defaults | options))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"q": (H, 5, D)}, r"attend needs q as floating point \[b, h, n, d\], got torch.float32"),
        ({"k": torch.zeros(B, H, 7, D).long()}, "attend needs k as floating point.*torch.int64"),
        ({"q": (B, 0, 5, D)}, r"one head and one column or more in q, got \(2, 0, 5, 3\)"),
        ({"k": (B, 0, 7, D)}, "one head and one column or more in k"),
        ({"q": (B, H, 5, 0), "k": (B, H, 7, 0)}, "one head and one column or more in q"),
        ({"v": (B, H, 7, 0)}, "one head and one column or more in v"),
        ({"k": (3, H, 7, D)}, r"must share the batch, got q \(2, 4, 5, 3\), k \(3, 4, 7, 3\)"),
        ({"v": (1, H, 7, D)}, "must share the batch"),
        ({"k": (B, H, 7, 9)}, "q and k must share the head size"),
        ({"v": (B, H, 6, D)}, "k and v must share the length"),
        ({"k": (B, 3, 7, D)}, "query heads must be a multiple of the key and value heads"),
        ({"v": (B, 8, 7, D)}, "query heads must be a multiple of the key and value heads"),
        (
            {"k": torch.zeros(B, H, 7, D).double()},
            "must share a dtype, got torch.float32, torch.fl",
        ),
        ({"dropout": 1.0}, r"dropout must be in \[0, 1\), got 1.0"),
        ({"dropout": -0.1}, r"dropout must be in \[0, 1\), got -0.1"),
        ({"window": -1}, "window before must be at least 0, got -1"),
        ({"window": (None, -2)}, "window after must be at least 0, got -2"),
        (
            {"bias": LagBias.line(torch.ones(3))},
            r"bias band must be \[1 or 2, 1 or 4, 1 or 5, lag\]",
        ),
        ({"bias": lag_bias(1, 1, 7)}, r"got \(1, 1, 7, 5\). Was the method built for another"),
        ({"bias": LagBias(torch.zeros(1, 1, 1, 5))}, "knows lags -2..2 and has no tails"),
        (
            {"bias": LagBias(torch.zeros(1, 1, 1, 5), Line(torch.zeros(3, 1, 1)), Line())},
            r"a bias' tails must be \[1 or 2, 1 or 4, 1 or 5\] for this call, got \(3, 1, 1\)",
        ),
        (
            {"bias": LowRankBias(torch.zeros(1, 1, 4, 2), torch.zeros(1, 1, 7, 2))},
            r"low-rank bias must be \[1 or 2, 1 or 4, 5 and 7, r\].*got \(1, 1, 4, 2\)",
        ),
        (
            {"bias": DenseBias(lambda q, k: q[:, None] * k, torch.arange(1), torch.arange(7), "")},
            r"DenseBias was made for \(queries, keys\) = \(1, 7\), this call has \(5, 7\)",
        ),
        ({"values": LagValues(torch.zeros(3, 5, D))}, r"values must be a LagValues table \[1 or 4"),
        ({"values": LagValues(torch.zeros(1, 5, 8))}, r"lag, 3\] for this call, got \(1, 5, 8\)"),
        ({"mask": torch.zeros(B, 7)}, "mask must be boolean with True = may be looked at"),
        ({"mask": torch.ones(B, 5).bool()}, r"mask keys must have shape \[2\|1, 7\].*got \(2, 5\)"),
        (
            {"mask": torch.ones(B, H, 7, 5).bool()},
            r"mask pairs must have shape \[2\|1, 4\|1, 5, 7\].*got \(2, 4, 7, 5\)",
        ),
        (
            {"mask": Mask(segments=(torch.zeros(1, 7).long(), torch.zeros(1, 7).long()))},
            r"mask segments \(queries\) must have shape \[2\|1, 5\]",
        ),
    ],
)
def test_a_wrong_argument_is_named_with_its_shape_and_the_rule(options, message):
    with pytest.raises(ValueError, match=message):
        call(**options)


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ({"keys": torch.ones(1, 3)}, "mask keys must be boolean with True = .*got torch.float32"),
        (
            {"pairs": torch.zeros(1, 1, 3, 3).long()},
            "mask pairs must be boolean with True = may be looked at, got torch.int64",
        ),
        (
            {"segments": (torch.zeros(1, 3).long(), torch.zeros(1, 3))},
            "mask segments must be integers that number the sequences, got torch.float32",
        ),
        (
            {"segments": (torch.ones(1, 3).bool(), torch.zeros(1, 3).long())},
            "mask segments must be integers that number the sequences, got torch.bool",
        ),
    ],
)
def test_a_mask_of_a_wrong_dtype_is_refused_when_it_is_made(part, message):
    with pytest.raises(ValueError, match=message):
        Mask(**part)


@pytest.mark.parametrize("window", [1.5, True])
def test_a_window_must_be_a_whole_number(window):
    with pytest.raises(TypeError):
        call(window=window)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_reference_refuses_half_precision_with_the_way_out(dtype):
    q, k, v = heads(dtype=dtype)
    message = rf"backend 'reference' cannot run this call.*got {dtype}.*\.float\(\)"
    with pytest.raises(ValueError, match=message):
        reference(q, k, v)


@pytest.mark.parametrize(("name", "near"), [("refrence", "reference"), ("fuse", "fused")])
def test_an_unknown_backend_suggests_the_nearest(name, near):
    with pytest.raises(ValueError, match=f"Unknown backend '{name}'. Did you mean '{near}'.*auto"):
        attend(*heads(), backend=name)


def test_explain_names_every_backend_and_marks_the_chosen_one():
    place = torch.arange(7)
    dense = DenseBias(lambda q, k: (q[:, None] * k)[None, None] / 9.0, place, place, "a product")
    q, k, v = heads()
    said = explain(q, k, v, bias=dense, causal=True)
    assert [name for name, _, _ in said.rows] == list(BACKENDS)
    assert said.chosen == next(name for name, runs, _ in said.rows if runs)
    lines = str(said).splitlines()
    marked = [line for line in lines if line.startswith("->")]
    assert len(marked) == 1
    assert marked[0].split()[:3] == ["->", said.chosen, "runs"]
    assert any(line.split()[:1] == ["dense"] and "a product" in line for line in lines)
    assert repr(said) == str(said)
    want = reference(q, k, v, bias=dense, causal=True)
    assert_close(attend(q, k, v, bias=dense, causal=True, backend=said.chosen), want)


def test_explain_gives_the_reason_that_attend_would_raise():
    q, k, v = heads(dtype=torch.float16)
    reasons = {name: text for name, runs, text in explain(q, k, v).rows if not runs}
    assert "float32 or float64, got torch.float16" in reasons["reference"]
    for name, reason in reasons.items():
        with pytest.raises(ValueError, match=f"backend '{name}' cannot run this call") as caught:
            attend(q, k, v, backend=name)
        assert reason in str(caught.value)


def test_a_nested_tensor_is_refused_with_a_way_out_that_works() -> None:
    rows = [torch.randn(n, 2, 4) for n in (3, 5)]
    nested = torch.nested.nested_tensor(rows, layout=torch.jagged).transpose(1, 2)
    bias = LagBias.line(torch.tensor([-1.0, -0.5]))
    for call in (attend, explain):
        with pytest.raises(TypeError, match=r"q is a nested tensor.*mask=Mask\.packed"):
            call(nested, nested, nested, bias=bias)
    packed, mask = nested.values()[None], Mask.packed(nested.offsets(), 8)
    found = attend(packed, packed, packed, bias=bias, mask=mask)
    alone = [attend(*[x.transpose(0, 1)[None]] * 3, bias=bias) for x in rows]
    assert_close(found, torch.cat(alone, dim=2))
