"""Embeddings added to the input: sinusoidal and learned."""

import math

import pytest
import torch
from torch import nn
from torch.testing import assert_close
from transformers import BertConfig, OPTConfig
from transformers.models.bert.modeling_bert import BertEmbeddings
from transformers.models.distilbert.modeling_distilbert import create_sinusoidal_embeddings
from transformers.models.m2m_100.modeling_m2m_100 import M2M100SinusoidalPositionalEmbedding
from transformers.models.marian.modeling_marian import MarianSinusoidalPositionalEmbedding
from transformers.models.opt.modeling_opt import OPTLearnedPositionalEmbedding

from whence import build
from whence.methods.learned import Learned
from whence.methods.sinusoidal import Sinusoidal

WHERE = torch.arange(40)


@pytest.mark.parametrize("d", [1, 2, 7, 16])
def test_interleaved_sinusoids_equal_distilberts_also_for_odd_sizes(d):
    theirs = create_sinusoidal_embeddings(40, d, torch.empty(40, d))
    assert_close(Sinusoidal(d).input_term(WHERE), theirs, atol=1e-5, rtol=0)


@pytest.mark.parametrize("d", [1, 2, 7, 16])
def test_sinusoids_in_halves_equal_marians_also_for_odd_sizes(d):
    theirs = MarianSinusoidalPositionalEmbedding(40, d).create_weight()
    assert_close(Sinusoidal(d, layout="halves").input_term(WHERE), theirs, atol=1e-5, rtol=0)


def test_sinusoids_with_endpoint_equal_those_of_fairseq_and_tensor2tensor():
    theirs = M2M100SinusoidalPositionalEmbedding.get_embedding(40, 16)
    ours = Sinusoidal(16, layout="halves", endpoint=True)
    assert_close(ours.input_term(WHERE), theirs, atol=1e-5, rtol=0)
    assert_close(ours.frequency[-1].item(), 1e-4)


def test_sinusoids_follow_the_formula_in_float64_at_a_far_position():
    row = Sinusoidal(6, base=500.0).double().input_term(torch.tensor([123456]))[0]
    for i in range(3):
        angle = 123456 / 500.0 ** (2 * i / 6)
        assert_close(row[2 * i : 2 * i + 2].tolist(), [math.sin(angle), math.cos(angle)])


def test_sinusoids_of_each_sequences_own_positions():
    method, pos = Sinusoidal(6), torch.tensor([[0, 1, 2], [7, 8, 9]])
    out = method.input_term(pos)
    assert_close(out, torch.stack([method.input_term(row) for row in pos]))
    assert method.input_term(torch.arange(0)).shape == (0, 6)


def test_a_cast_to_half_precision_does_not_blur_the_frequencies():
    exact, pos = Sinusoidal(16).double().input_term(WHERE), WHERE
    for dtype in (torch.bfloat16, torch.float16):
        out = Sinusoidal(16).to(dtype).input_term(pos)
        assert out.dtype == dtype
        assert_close(out.double(), exact, atol=torch.finfo(dtype).eps, rtol=0)
    back = Sinusoidal(16).bfloat16().double()
    assert_close(back.input_term(pos), exact)


def test_sinusoids_survive_a_module_made_without_memory():
    with torch.device("meta"):
        method = Sinusoidal(8)
    assert_close(method.to_empty(device="cpu").input_term(WHERE), Sinusoidal(8).input_term(WHERE))
    assert not Sinusoidal(8).state_dict()


def test_sinusoidal_refuses_what_it_cannot_define():
    with pytest.raises(ValueError, match="even d_model of at least 4, got 7"):
        Sinusoidal(7, endpoint=True)
    with pytest.raises(ValueError, match="base must be above 1, got"):
        Sinusoidal(8, base=1.0)
    with pytest.raises(ValueError, match="d_model must be at least 1"):
        Sinusoidal(0)


def test_learned_rows_equal_an_embedding_and_its_gradient():
    method, theirs = Learned(5, 9), nn.Embedding(9, 5)
    theirs.weight.data.copy_(method.table.data)
    pos, weight = torch.tensor([[0, 3, 8], [3, 3, 1]]), torch.randn(2, 3, 5)
    assert_close(method.input_term(pos), theirs(pos))
    (method.input_term(pos) * weight).sum().backward()
    (theirs(pos) * weight).sum().backward()
    assert_close(method.table.grad, theirs.weight.grad)


def test_learned_equals_berts_position_embeddings():
    config = BertConfig(
        hidden_size=12, max_position_embeddings=20, vocab_size=7, hidden_dropout_prob=0.0
    )
    bert, method = BertEmbeddings(config).eval(), Learned(12, 20)
    method.table.data.copy_(bert.position_embeddings.weight.data)
    tokens = torch.tensor([[1, 2, 3, 4]])
    plain = bert.word_embeddings(tokens) + bert.token_type_embeddings.weight[0]
    ours = bert.LayerNorm(plain + method.input_term(torch.arange(4)))
    assert_close(ours, bert(tokens))


def test_learned_with_offset_two_equals_opts_table():
    config = OPTConfig(max_position_embeddings=10, hidden_size=6, vocab_size=7)
    theirs = OPTLearnedPositionalEmbedding(config.max_position_embeddings, 6)
    method = Learned(6, 10, offset=2)
    assert method.table.shape == theirs.weight.shape
    method.table.data.copy_(theirs.weight.data)
    assert_close(method.input_term(torch.arange(10))[None], theirs(torch.ones(1, 10).long(), 0))
    last = theirs(torch.ones(1, 10).long(), 7)  # what a cache of seven asks for
    assert_close(method.input_term(torch.arange(7, 10))[None], last)


def test_learned_starts_with_small_numbers_and_counts_its_parameters():
    method = build("learned:max_length=900,offset=2", n_heads=4, d_head=16)
    assert_close(method.table.std().item(), 0.02, atol=2e-3, rtol=0)
    assert method.n_parameters() == method.n_parameters_by_formula() == 902 * 64
    assert method.fixed_length
    assert method.max_length == 900


@pytest.mark.parametrize("pos", [torch.arange(3, 6), torch.tensor([[0, 1], [0, 5]])])
def test_learned_says_which_position_is_beyond_its_table(pos):
    with pytest.raises(ValueError, match=r"max_length=5.*got position 5.*larger max_length"):
        Learned(4, 5).input_term(pos)


def test_learned_refuses_negative_positions_which_would_read_from_the_end():
    with pytest.raises(ValueError, match="got position -1"):
        Learned(4, 5, offset=2).input_term(torch.arange(-1, 2))
    assert Learned(4, 5).input_term(torch.arange(0)).shape == (0, 4)


def test_learned_judges_by_the_number_of_positions_where_it_cannot_read_them():
    method = Learned(4, 5).to("meta")
    with pytest.raises(ValueError, match="got position 5"):
        method.input_term(torch.arange(6, device="meta"))
    assert method.input_term(torch.arange(5, device="meta")).shape == (5, 4)


def test_the_text_form_reaches_every_option():
    method = build("sinusoidal:layout=halves,base=500,endpoint=true", n_heads=2, d_head=4)
    assert (method.layout, method.base, method.endpoint, method.d_model) == (
        "halves",
        500.0,
        True,
        8,
    )
    assert method.sites() == ("input",)
    with pytest.raises(ValueError, match="'interleaved'"):
        build("sinusoidal:layout=interleave", n_heads=2, d_head=4)


def test_learned_is_differentiable_in_double():
    method = Learned(3, 4).double()
    pos = torch.tensor([1, 3])

    def rows(table):
        return torch.func.functional_call(Wrap(method), {"method.table": table}, (pos,))

    assert torch.autograd.gradcheck(rows, (method.table.detach().requires_grad_(),))


class Wrap(nn.Module):
    def __init__(self, method):
        super().__init__()
        self.method = method

    def forward(self, pos):
        return self.method.input_term(pos)


def test_amplitude_multiplies_the_sinusoids_and_must_be_above_zero() -> None:
    pos = torch.arange(7)
    plain, small = (
        build(spec, n_heads=2, d_head=4, d_model=8)
        for spec in ("sinusoidal", "sinusoidal:amplitude=0.02")
    )
    assert_close(small.input_term(pos), 0.02 * plain.input_term(pos))
    with pytest.raises(ValueError, match=r"amplitude must be above 0, got 0\.0"):
        build("sinusoidal:amplitude=0.0", n_heads=2, d_head=4, d_model=8)
