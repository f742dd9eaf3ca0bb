"""ALiBi against the three models in transformers that ship it."""

import pytest
import torch
from torch.testing import assert_close
from transformers.models.bloom.modeling_bloom import build_alibi_tensor as bloom_alibi
from transformers.models.falcon.modeling_falcon import build_alibi_tensor as falcon_alibi
from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor as mpt_alibi

from whence import LagBias, build
from whence.methods.alibi import Alibi, alibi_slopes
from whence.nn import positioned_attention

HEADS = [1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 20, 71]


def bias_of(method: Alibi, n_q: int, n_k: int) -> torch.Tensor:
    q_pos, k_pos = torch.arange(n_k - n_q, n_k), torch.arange(n_k)
    q = torch.zeros(1, method.n_heads, n_q, 4)
    return method.score_term(q, q_pos, k_pos).to_dense(q_pos, k_pos)


def causal_softmax(logits: torch.Tensor) -> torch.Tensor:
    n_q, n_k = logits.shape[-2:]
    seen = torch.ones(n_q, n_k, dtype=torch.bool).tril(n_k - n_q)
    return torch.softmax(logits.masked_fill(~seen, -torch.inf), dim=-1)


@pytest.mark.parametrize("n_heads", HEADS)
@pytest.mark.parametrize(("n_q", "n_k"), [(1, 1), (9, 9), (3, 9)])
def test_alibi_equals_bloom_up_to_a_constant_a_row(n_heads, n_q, n_k):
    """BLOOM writes slope * key position: ours plus slope * query position, which softmax drops."""
    theirs = bloom_alibi(torch.ones(1, n_k), n_heads, torch.float32)[None].expand(1, -1, n_q, -1)
    ours = bias_of(Alibi(n_heads), n_q, n_k)
    row = torch.arange(n_k - n_q, n_k, dtype=torch.float32)[:, None]
    seen = torch.ones(n_q, n_k, dtype=torch.bool).tril(n_k - n_q)
    want = theirs - alibi_slopes(n_heads)[:, None, None] * row
    assert_close(ours[..., seen], want[..., seen], rtol=1e-5, atol=1e-5)
    assert_close(causal_softmax(ours), causal_softmax(theirs))


@pytest.mark.parametrize("n_heads", HEADS)
def test_alibi_equals_mpt_up_to_a_constant_a_row(n_heads):
    n = 9
    theirs = mpt_alibi(n_heads, n)[None].expand(1, -1, n, -1)
    ours = bias_of(Alibi(n_heads), n, n)
    assert_close(causal_softmax(ours), causal_softmax(theirs))
    assert_close(ours[:, :, -1], theirs[:, :, -1])  # MPT counts from the last query


@pytest.mark.parametrize("n_heads", HEADS)
def test_alibi_equals_falcon_to_the_precision_of_its_bfloat16_slopes(n_heads):
    n = 9
    theirs = falcon_alibi(torch.ones(1, n), n_heads, torch.float32)[None].expand(1, -1, n, -1)
    ours = bias_of(Alibi(n_heads), n, n)
    assert_close(causal_softmax(ours), causal_softmax(theirs), rtol=0.04, atol=0.01)


@pytest.mark.parametrize("n_heads", [3, 8])
def test_attention_with_alibi_equals_attention_with_blooms_tensor(n_heads):
    q, k, v = torch.randn(3, 2, n_heads, 11, 4, dtype=torch.float64)
    theirs = bloom_alibi(torch.ones(1, 11), n_heads, torch.float64)[None]
    want = causal_softmax(q @ k.mT / 2 + theirs) @ v
    got = positioned_attention(Alibi(n_heads).double(), q, k, v, causal=True, backend="reference")
    assert_close(got, want, rtol=1e-6, atol=1e-6)  # both round their slopes to float32


def test_slopes_of_a_power_of_two_are_the_published_ones():
    assert alibi_slopes(8).tolist() == [2.0**-h for h in range(1, 9)]
    assert alibi_slopes(4).tolist() == [2.0**-h for h in (2, 4, 6, 8)]


def test_alibi_is_symmetric_and_needs_no_table():
    method = build("alibi", n_heads=6, d_head=4)
    bias = method.score_term(torch.zeros(1, 6, 5, 4), torch.arange(5), torch.arange(5))
    assert isinstance(bias, LagBias)
    assert bias.reach == 0
    matrix = bias_of(method, 5, 5)
    assert_close(matrix, matrix.mT, rtol=0, atol=0)


def test_fixed_slopes_are_no_parameters_and_not_in_the_checkpoint():
    method = Alibi(6)
    assert method.n_parameters() == method.n_parameters_by_formula() == 0
    assert method.state_dict() == {}


def test_learned_slopes_start_at_the_published_ones_and_take_gradients():
    method = build("alibi:learned=true", n_heads=6, d_head=4)
    assert method.n_parameters() == method.n_parameters_by_formula() == 6
    assert_close(method.slope.detach(), alibi_slopes(6), rtol=0, atol=0)
    matrix = bias_of(method, 4, 7)
    weight = torch.randn_like(matrix)
    (matrix * weight).sum().backward()
    distance = (torch.arange(7) - torch.arange(3, 7)[:, None]).abs()
    assert_close(method.slope.grad, -(weight * distance).sum((0, 2, 3)))


def test_gradients_of_learned_slopes_are_right_through_attention():
    method = Alibi(3, learned=True).double()
    q, k, v = torch.randn(3, 1, 3, 5, 2, dtype=torch.float64).unbind()

    def out(slope):  # gradcheck nudges the parameter in place
        return positioned_attention(method, q, k, v, causal=True, backend="reference")

    assert torch.autograd.gradcheck(out, (method.slope,))


def test_alibi_refuses_no_heads():
    with pytest.raises(ValueError, match="n_heads must be at least 1, got 0"):
        Alibi(0)
