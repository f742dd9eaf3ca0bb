"""TUPE against slow versions of the paper's formula and of the released code's reset."""

import math

import pytest
import torch
from torch import nn
from torch.testing import assert_close
from transformers.models.t5.modeling_t5 import T5Attention

from whence import DenseBias, LagBias, LowRankBias, attend, build, explain
from whence.methods.tupe import Tupe
from whence.nn import positioned_attention


def randomised(method):
    with torch.no_grad():
        for parameter in method.parameters():
            parameter.normal_()
    return method


def dense(method, q_pos, k_pos):
    q = torch.zeros(1, method.n_heads, len(q_pos), method.d_head, dtype=method.table.dtype)
    return method.score_term(q, q_pos, k_pos).to_dense(q_pos, k_pos)


def slow(method, q_pos, k_pos):
    """The position part pair by pair: the product, then the reset, then the buckets and their reset."""
    d, n_heads = method.d_head, method.n_heads
    out = torch.empty(1, n_heads, len(q_pos), len(k_pos), dtype=method.table.dtype)

    def normed(row):
        centred = row - row.mean()
        unit = centred / (centred.square().mean() + method.norm.eps).sqrt()
        return unit * method.norm.weight + method.norm.bias

    for a, i in enumerate(q_pos.tolist()):
        for b, j in enumerate(k_pos.tolist()):
            query = (method.query.weight @ normed(method.table[i])).view(n_heads, d)
            key = (method.key.weight @ normed(method.table[j])).view(n_heads, d)
            value = (query * key).sum(-1) / math.sqrt(2 * d)
            bucket = None
            if method.relative:
                lag = torch.tensor([[j - i]])
                bucket = int(
                    T5Attention._relative_position_bucket(
                        lag, True, method.buckets, method.max_distance
                    )
                )
            if method.cls and j == 0:
                value, bucket = method.column, method.buckets
            if method.cls and i == 0:
                value, bucket = method.row, method.buckets // 2
            out[0, :, a, b] = value + method.lags[bucket] if method.relative else value
    return out


@pytest.mark.parametrize("cls", [True, False])
@pytest.mark.parametrize("relative", [True, False])
@pytest.mark.parametrize(
    ("first_q", "first_k", "n"), [(0, 0, 13), (9, 0, 13), (5, 3, 13), (0, 0, 1)]
)
def test_the_position_part_equals_the_formula_written_as_loops(cls, relative, first_q, first_k, n):
    method = Tupe(3, 5, 7, 13, cls=cls, relative=relative, buckets=8, max_distance=6)
    method = randomised(method.double())
    q_pos, k_pos = torch.arange(first_q, n), torch.arange(first_k, n)
    assert_close(dense(method, q_pos, k_pos), slow(method, q_pos, k_pos))


def test_content_and_position_share_the_scale_of_two_heads_sizes():
    method = randomised(Tupe(3, 4, 7, 9).double())
    q, k = torch.randn(2, 3, 9, 4).double(), torch.randn(2, 3, 9, 4).double()
    eye = torch.eye(9).double().expand(2, 3, 9, 9)
    pos = torch.arange(9)
    ours = positioned_attention(method, q, k, eye, backend="reference")
    logits = q @ k.mT / math.sqrt(2 * 4) + slow(method, pos, pos)
    assert_close(ours, logits.softmax(-1))


def released(pos, pos_proj, pos_ln, n_heads, n):
    """The absolute part as the released code defines it: rows 0 and 1 of its table hold [CLS]'s values."""
    d = pos.shape[1] // n_heads
    place = pos_proj(pos_ln(pos[: n + 1])).view(n + 1, 2, n_heads, d)
    product = torch.einsum("ihd,jhd->hij", place[:, 0], place[:, 1]) / math.sqrt(2 * d)
    bias = product[:, 1:, 1:].clone()
    bias[:, :, 0] = product[:, 1, 1, None]
    bias[:, 0, :] = product[:, 0, 0, None]
    return bias


def test_weights_of_the_released_code_can_be_carried_over():
    n, width, n_heads = 6, 12, 3
    pos, norm = torch.randn(n + 1, width).double(), nn.LayerNorm(width).double()
    projection = nn.Linear(width, 2 * width, bias=False).double()
    theirs = released(pos, projection, norm, n_heads, n)
    method = Tupe(n_heads, 4, width, n).double()
    with torch.no_grad():
        method.table.copy_(pos[1:])
        method.query.weight.copy_(projection.weight[:width])
        method.key.weight.copy_(projection.weight[width:])
        method.row.copy_(theirs[:, 0, 0])
        method.column.copy_(theirs[:, 1, 0])
    place = torch.arange(n)
    assert_close(dense(method, place, place)[0], theirs)


def test_every_lag_leaves_the_spare_bucket_of_the_cls_row_alone():
    method = Tupe(1, 2, 4, 100, relative=True, cls=False, buckets=8, max_distance=20)
    with torch.no_grad():
        for parameter in method.parameters():
            parameter.zero_()
        method.lags[4] = 1.0
    pos = torch.arange(100)
    assert_close(dense(method, pos, pos), torch.zeros(1, 1, 100, 100))


def test_nothing_is_dense_and_the_lag_bias_stays_one_band_for_all_queries():
    method, pos = Tupe(2, 4, 8, 20, relative=True, max_distance=16), torch.arange(20)
    q = torch.randn(1, 2, 20, 4)
    terms = method.score_term(q, pos, pos).terms()
    assert isinstance(terms.lag, LagBias)
    assert isinstance(terms.low_rank, LowRankBias)
    assert terms.dense == ()
    assert terms.lag.band.shape == (1, 2, 1, 33)
    assert terms.low_rank.query.shape == (1, 2, 20, 6)
    plain = Tupe(2, 4, 8, 20).score_term(q, pos, pos)
    assert isinstance(plain, LowRankBias)
    assert not any(isinstance(part, DenseBias) for part in plain.terms().parts())
    assert explain(q, q, q, bias=plain).dense == ()


def test_wider_heads_attend_as_the_dense_matrix_does():
    method = randomised(Tupe(3, 4, 6, 11, relative=True, buckets=8, max_distance=6).double())
    q, k, v = (torch.randn(2, 3, 11, 4).double() for _ in range(3))
    pos = torch.arange(11)
    bias = slow(method, pos, pos)
    given = DenseBias(lambda q_pos, k_pos: bias[:, :, q_pos], pos, pos, "test")
    expected = attend(q / math.sqrt(2), k, v, bias=given, backend="reference")
    assert_close(positioned_attention(method, q, k, v, backend="reference"), expected)
    last = positioned_attention(method, q[:, :, 8:], k, v, backend="reference")
    assert_close(last, expected[:, :, 8:])


def test_every_parameter_and_input_passes_gradcheck():
    method = Tupe(2, 2, 3, 4, relative=True, buckets=4, max_distance=3)
    method = randomised(method.double())
    parameters = list(method.parameters())
    q, k, v = (torch.randn(1, 2, 4, 2, dtype=torch.float64, requires_grad=True) for _ in range(3))

    def run(q, k, v, *values):
        assert len(values) == 8
        return positioned_attention(method, q, k, v, backend="reference")

    assert torch.autograd.gradcheck(run, (q, k, v, *parameters), fast_mode=True)


@pytest.mark.parametrize("options", ["", "cls=no", "relative=yes", "relative=yes,cls=no,buckets=6"])
def test_the_formula_counts_the_parameters(options):
    method = build(f"tupe:{options}", n_heads=3, d_head=5, d_model=11, max_length=17)
    assert method.n_parameters() == method.n_parameters_by_formula()
    assert method.shared_by_layers
    assert method.fixed_length


def test_positions_beyond_the_table_are_an_error_that_says_the_way_out():
    method, q = build("tupe", n_heads=2, d_head=4, max_length=8), torch.randn(1, 2, 3, 4)
    with pytest.raises(ValueError, match=r"positions 0\.\.7 .* got position 8\. Build it with"):
        method.score_term(q, torch.arange(6, 9), torch.arange(9))
    with pytest.raises(ValueError, match="got position -1"):
        method.score_term(q, torch.arange(3), torch.arange(-1, 3))


def test_wrong_options_are_refused():
    with pytest.raises(ValueError, match="buckets must be even, from 4 on, got 7"):
        build("tupe:buckets=7", n_heads=2, d_head=4)
    with pytest.raises(ValueError, match=r"max_distance must be above 8, .* got 8"):
        build("tupe:max_distance=8", n_heads=2, d_head=4)
