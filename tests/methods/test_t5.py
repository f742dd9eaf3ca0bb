"""T5's buckets and bias against the models in transformers that use them."""

import copy

import pytest
import torch
from torch.testing import assert_close
from transformers import MPNetConfig, T5Config, UMT5Config
from transformers.models.mpnet.modeling_mpnet import MPNetEncoder
from transformers.models.t5.modeling_t5 import T5Attention
from transformers.models.umt5.modeling_umt5 import UMT5Attention

from whence import LagBias, build
from whence.methods.t5 import T5, t5_bucket
from whence.nn import positioned_attention

LENGTHS = [1, 2, 3, 17, 127, 128, 129, 130, 500]


def bias_of(method: T5, n_q: int, n_k: int) -> torch.Tensor:
    q_pos, k_pos = torch.arange(n_k - n_q, n_k), torch.arange(n_k)
    q = torch.zeros(1, method.n_heads, n_q, 4)
    return method.score_term(q, q_pos, k_pos).to_dense(q_pos, k_pos)


def t5_attention(cls=T5Attention, config=T5Config, *, causal: bool, **sizes):
    made = config(
        d_model=12, d_kv=4, num_heads=3, num_layers=1, is_decoder=causal, dropout_rate=0.0, **sizes
    )
    return cls(made, has_relative_attention_bias=True, layer_idx=0).eval()


def with_table(weight: torch.Tensor, **options) -> T5:
    """Our method with the weights of an nn.Embedding [buckets, heads]: the layouts are the same."""
    method = T5(weight.shape[1], buckets=weight.shape[0], **options).to(weight.dtype)
    method.load_state_dict({"table": weight})
    return method


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("buckets", "max_distance"),
    [
        (32, 128),
        (4, 3),
        (6, 20),
        (8, 5),
        (33, 100),
        (64, 1000),
        (9, 128),  # here, causal, and in the next, bidirectional, a float64 logarithm would differ
        (18, 128),
    ],
)
def test_t5_buckets_equal_transformers_in_both_directions(causal, buckets, max_distance):
    lag = torch.arange(-3000, 3001)
    want = T5Attention._relative_position_bucket(
        lag, bidirectional=not causal, num_buckets=buckets, max_distance=max_distance
    )
    got = t5_bucket(lag, buckets, max_distance, causal=causal)
    assert_close(got, want, rtol=0, atol=0)
    assert got.max() < buckets


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("n", LENGTHS)
def test_t5_bias_equals_transformers_at_every_length(n, causal):
    theirs = t5_attention(causal=causal)
    ours = with_table(theirs.relative_attention_bias.weight, causal=causal)
    assert_close(bias_of(ours, n, n), theirs.compute_bias(n, n), rtol=0, atol=0)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("n_q", "n_k"), [(1, 1), (1, 130), (3, 129), (7, 200)])
def test_t5_bias_of_the_last_rows_equals_transformers_with_a_cache(n_q, n_k, causal):
    theirs = t5_attention(causal=causal)
    ours = with_table(theirs.relative_attention_bias.weight, causal=causal)
    want = theirs.compute_bias(n_q, n_k, past_seen_tokens=n_k - n_q)
    assert_close(bias_of(ours, n_q, n_k), want, rtol=0, atol=0)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("n", [1, 9, 140])
def test_umt5_has_the_same_bias_in_a_table_for_each_layer(n, causal):
    theirs = t5_attention(UMT5Attention, UMT5Config, causal=causal)
    ours = with_table(theirs.relative_attention_bias.weight, causal=causal)
    assert_close(bias_of(ours, n, n), theirs.compute_bias(n, n), rtol=0, atol=0)


@pytest.mark.parametrize("n", LENGTHS)
def test_mpnet_has_the_bidirectional_rule_and_our_table_takes_its_weights(n):
    """MPNet counts query - key and gives its upper half of buckets to n < 0: T5's rule, in words."""
    config = MPNetConfig(
        hidden_size=12, num_attention_heads=3, num_hidden_layers=1, intermediate_size=8
    )
    theirs = MPNetEncoder(config).eval()
    ours = with_table(theirs.relative_attention_bias.weight)
    want = theirs.compute_position_bias(torch.zeros(1, n, 12))
    assert_close(bias_of(ours, n, n), want, rtol=0, atol=0)


@pytest.mark.parametrize("causal", [False, True])
def test_attention_equals_t5s_own_which_does_not_scale(causal):
    theirs = t5_attention(causal=causal).double()
    ours = with_table(theirs.relative_attention_bias.weight, causal=causal)
    b, n, h = 2, 150, 3
    x = torch.randn(b, n, 12, dtype=torch.float64)
    q, k, v = (f(x).view(b, n, h, 4).transpose(1, 2) for f in (theirs.q, theirs.k, theirs.v))
    below = torch.ones(n, n).tril() if causal else torch.ones(n, n)
    mask = torch.where(below == 1, 0.0, -torch.inf).double()[None, None]
    want = theirs(x, mask=mask)[0]
    got = positioned_attention(ours, q, k, v, scale=1.0, causal=causal, backend="reference")
    assert_close(theirs.o(got.transpose(1, 2).reshape(b, n, 12)), want)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("buckets", "distance"), [(8, 20), (32, 128), (7, 9), (64, 1000), (4, 40), (33, 200)]
)
def test_t5_is_a_band_to_its_last_buckets_with_constant_tails(buckets, distance, causal):
    method = T5(2, buckets=buckets, max_distance=distance, causal=causal)
    bias = method.score_term(torch.zeros(1, 2, 1, 4), torch.arange(1), torch.arange(1))
    assert isinstance(bias, LagBias)
    assert bias.reach <= distance
    assert bias.band.shape[:3] == (1, 2, 1)
    assert bias.left.slope is None
    lag = torch.arange(-3 * distance, 3 * distance + 1)
    want = method.table[t5_bucket(lag, buckets, distance, causal=causal)].T
    assert_close(bias.at(lag)[0, :, 0], want, rtol=0, atol=0)


def test_the_last_buckets_of_t5_begin_before_max_distance():
    assert build("t5", n_heads=1, d_head=4).reach == 92


def test_causal_t5_puts_every_later_key_into_bucket_0():
    assert t5_bucket(torch.tensor([0, 1, 5, 500]), 32, 128, causal=True).tolist() == [0] * 4


def test_build_takes_the_direction_from_the_model():
    assert build("t5", n_heads=2, d_head=4, causal=True).causal
    assert not build("t5:causal=false", n_heads=2, d_head=4, causal=True).causal


def test_t5_counts_its_parameters_and_is_shared_by_layers():
    method = build("t5", n_heads=12, d_head=64)
    assert method.n_parameters() == method.n_parameters_by_formula() == 32 * 12
    assert method.shared_by_layers


def test_gradients_reach_the_table():
    method = T5(2, buckets=6, max_distance=5).double()
    place, q = torch.arange(8), torch.zeros(1, 2, 8, 4, dtype=torch.float64)

    def matrix(table):  # gradcheck nudges the parameter in place
        return method.score_term(q, place, place).to_dense(place, place)

    assert torch.autograd.gradcheck(matrix, (method.raw_table,))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"buckets": 3}, "buckets must be at least 4, got 3"),
        ({"buckets": 1, "causal": True}, "buckets must be at least 2, got 1"),
        ({"max_distance": 8}, "max_distance must be above 8, .* got 8"),
        ({"max_distance": 16, "causal": True}, "max_distance must be above 16, .* got 16"),
    ],
)
def test_t5_refuses_sizes_that_leave_no_logarithmic_bucket(options, message):
    with pytest.raises(ValueError, match=message):
        T5(2, **options)


class Total(torch.nn.Module):
    def __init__(self, method: T5) -> None:
        super().__init__()
        self.method = method

    def forward(self) -> torch.Tensor:
        pos = torch.arange(5)
        return self.method.score_term(torch.zeros(1, 2, 5, 4), pos, pos).band.sum()


def test_the_buckets_outlive_a_transform_of_torch_func() -> None:
    total = Total(T5(2))
    torch.func.grad(
        lambda table: torch.func.functional_call(total, {"method.raw_table": table}, ())
    )(total.method.raw_table.detach())
    again = copy.deepcopy(total)  # a tensor of the transform could not be copied
    assert_close(again(), total())


def test_buckets_found_for_inference_can_be_trained_with() -> None:
    method = T5(2)
    with torch.inference_mode():
        expected = bias_of(method, 5, 5)
    found = bias_of(method, 5, 5)
    found.sum().backward()
    assert_close(found, expected.clone())
