"""Transformer-XL against XLNet and the Conformer of transformers, and against the formula."""

import math

import pytest
import torch
from torch.testing import assert_close
from transformers import Wav2Vec2ConformerConfig, XLNetConfig, XLNetModel
from transformers.models.wav2vec2_conformer import modeling_wav2vec2_conformer as conformer

from whence import build
from whence.methods.transformer_xl import TransformerXL, sinusoid
from whence.nn import positioned_attention


def randomised(method):
    with torch.no_grad():
        for parameter in method.parameters():
            parameter.normal_()
    return method


def logits(method, q, k, q_pos, k_pos):
    bias = method.score_term(q, q_pos, k_pos).to_dense(q_pos, k_pos)
    return method.query_heads(q, q_pos) @ k.mT * method.d_head**-0.5 + bias


@pytest.mark.parametrize(("n_memory", "clamp"), [(0, -1), (5, -1), (5, 3)])
def test_weights_of_xlnet_give_xlnets_attention_with_and_without_memory(n_memory, clamp):
    config = XLNetConfig(
        vocab_size=7, d_model=12, n_layer=1, n_head=3, d_inner=8, dropout=0.0, clamp_len=clamp
    )
    model = XLNetModel(config).double().eval()
    layer, n, d = model.layer[0].rel_attn, 6, 4
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_()
    method = TransformerXL(3, d, 12, clamp=None if clamp < 0 else clamp).double()
    with torch.no_grad():
        method.content_bias.copy_(layer.r_w_bias)
        method.position_bias.copy_(layer.r_r_bias)
        method.projection.weight.copy_(layer.r.reshape(12, 12).T)

    h, memory = torch.randn(n, 2, 12).double(), torch.randn(n_memory, 2, 12).double()
    r = model.relative_positional_encoding(n, n + n_memory, bsz=2).double()
    attended = layer(h, None, None, None, r, None, mems=memory, output_attentions=True)[-1]

    x = torch.cat([memory, h])
    q = torch.einsum("ibm,mhd->bhid", h, layer.q)
    k = torch.einsum("ibm,mhd->bhid", x, layer.k)
    k_pos = torch.arange(len(x))
    ours = logits(method, q, k, k_pos[n_memory:], k_pos).softmax(-1)
    # XLNet makes its sinusoids in float32.
    assert_close(ours, attended.permute(2, 3, 0, 1), atol=1e-5, rtol=1e-5)


def test_weights_of_a_conformer_give_its_attention_once_the_columns_are_permuted():
    config = Wav2Vec2ConformerConfig(
        hidden_size=12, num_attention_heads=3, attention_dropout=0.0, max_source_positions=20
    )
    config.position_embeddings_type = "relative"
    config._attn_implementation = "eager"
    theirs = conformer.Wav2Vec2ConformerSelfAttention(config).eval()
    with torch.no_grad():
        theirs.pos_bias_u.normal_()
        theirs.pos_bias_v.normal_()
    method = TransformerXL(3, 4, 12)
    with torch.no_grad():
        method.content_bias.copy_(theirs.pos_bias_u)
        method.position_bias.copy_(theirs.pos_bias_v)
        weight = theirs.linear_pos.weight  # columns: sin 0, cos 0, sin 1, cos 1, ...
        method.projection.weight.copy_(torch.cat([weight[:, ::2], weight[:, 1::2]], dim=1))
    x = torch.randn(2, 7, 12)
    r = conformer.Wav2Vec2ConformerRelPositionalEmbedding(config)(x)
    out, _ = theirs(x, relative_position_embeddings=r, output_attentions=True)
    q, k, v = (
        f(x).view(2, 7, 3, 4).transpose(1, 2)
        for f in (theirs.linear_q, theirs.linear_k, theirs.linear_v)
    )
    ours = positioned_attention(method, q, k, v, backend="reference")
    assert_close(theirs.linear_out(ours.transpose(1, 2).flatten(2)), out, atol=1e-5, rtol=1e-5)


def test_logits_equal_the_formula_written_as_loops_with_an_odd_width_and_shifted_positions():
    method = randomised(TransformerXL(3, 5, 7).double())
    q, k = torch.randn(2, 3, 3, 5).double(), torch.randn(2, 3, 8, 5).double()
    q_pos, k_pos = torch.arange(9, 12), torch.arange(4, 12)
    ours = logits(method, q, k, q_pos, k_pos)
    weight = method.projection.weight.view(3, 5, 7)
    for b in range(2):
        for h in range(3):
            for i in range(3):
                for j in range(8):
                    x = int(q_pos[i] - k_pos[j])
                    angle = [x / 10000 ** (2 * m / 7) for m in range(4)]
                    r = [math.sin(a) for a in angle] + [math.cos(a) for a in angle[:3]]
                    key = weight[h] @ torch.tensor(r, dtype=torch.float64)
                    content = (q[b, h, i] + method.content_bias[h]) @ k[b, h, j]
                    place = (q[b, h, i] + method.position_bias[h]) @ key
                    assert_close(ours[b, h, i, j], (content + place) / math.sqrt(5))


def test_left_and_right_neighbours_differ():
    band = randomised(TransformerXL(2, 4, 8)).lag_keys(torch.tensor([-1, 1]))
    assert (band[:, 0] - band[:, 1]).abs().max() > 0.1


def test_clamped_distances_bound_the_band_and_go_on_as_tails():
    method = randomised(TransformerXL(2, 4, 8, clamp=2))
    pos = torch.arange(30)
    bias = method.score_term(torch.randn(1, 2, 30, 4), pos, pos)
    assert bias.reach == 2
    dense = bias.to_dense(pos, pos)
    assert_close(dense[0, :, 20, :18], dense[0, :, 20, 18:19].expand(-1, 18))


def test_rows_of_a_cache_equal_the_rows_of_the_whole():
    method, k_pos = randomised(TransformerXL(3, 4, 12)), torch.arange(9)
    q, k, v = (torch.randn(2, 3, 9, 4) for _ in range(3))
    whole = positioned_attention(method, q, k, v, causal=True, backend="reference")
    last = positioned_attention(method, q[:, :, 7:], k, v, causal=True, backend="reference")
    assert_close(last, whole[:, :, 7:])
    one = method.score_term(q[:, :, :1], k_pos[:1], k_pos[:1])
    assert one.to_dense(k_pos[:1], k_pos[:1]).shape == (2, 3, 1, 1)


def test_every_parameter_and_input_passes_gradcheck():
    method = randomised(TransformerXL(2, 3, 4).double())
    parameters = dict(method.named_parameters())
    q, k, v = (torch.randn(1, 2, 4, 3, dtype=torch.float64, requires_grad=True) for _ in range(3))

    def run(q, k, v, *values):
        assert len(values) == len(parameters)
        return positioned_attention(method, q, k, v, backend="reference")

    assert torch.autograd.gradcheck(run, (q, k, v, *parameters.values()), fast_mode=True)


def test_the_formula_counts_the_parameters_and_half_precision_is_kept():
    method = build("transformer_xl:clamp=4", n_heads=3, d_head=5, d_model=11)
    assert method.n_parameters() == method.n_parameters_by_formula()
    method, pos = method.bfloat16(), torch.arange(4)
    bias = method.score_term(torch.randn(1, 3, 4, 5).bfloat16(), pos, pos)
    assert bias.band.dtype == torch.bfloat16
    assert sinusoid(pos, 3, torch.float64).dtype == torch.float64


def test_a_negative_clamp_is_refused():
    with pytest.raises(ValueError, match="clamp must be at least 0, got -1"):
        build("transformer_xl:clamp=-1", n_heads=2, d_head=4)
