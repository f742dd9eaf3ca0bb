"""DeBERTa against the attention of transformers, v1 and v2, and against the formula."""

import math
import warnings

import pytest
import torch
from torch.testing import assert_close
from transformers import DebertaConfig, DebertaV2Config

from whence import Content, build
from whence.methods.deberta import Deberta, log_bucket
from whence.nn import positioned_attention

with warnings.catch_warnings():  # both files call torch.jit.script, which is deprecated
    warnings.simplefilter("ignore", DeprecationWarning)
    from transformers.models.deberta import modeling_deberta as v1
    from transformers.models.deberta_v2 import modeling_deberta_v2 as v2


def randomised(method):
    with torch.no_grad():
        for parameter in method.parameters():
            parameter.normal_()
    return method


def heads(x, n_heads):
    return x.view(*x.shape[:2], n_heads, -1).transpose(1, 2)


def weights(method, q, k, start=0):
    """The attention weights of queries from row `start` on."""
    eye = torch.eye(k.shape[2], dtype=q.dtype).expand(*k.shape[:2], -1, -1)
    return positioned_attention(method, q[:, :, start:], k, eye, backend="reference")


@pytest.mark.parametrize("terms", [("c2p",), ("p2c",), ("c2p", "p2c")])
@pytest.mark.parametrize(("buckets", "distance"), [(-1, 5), (-1, 40), (8, 12), (4, 30)])
@pytest.mark.parametrize("share", [False, True])
def test_weights_of_deberta_v2_give_its_attention(terms, buckets, distance, share):
    config = DebertaV2Config(
        hidden_size=12,
        num_attention_heads=3,
        relative_attention=True,
        pos_att_type=list(terms),
        position_buckets=buckets,
        max_relative_positions=distance,
        share_att_key=share,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    theirs = randomised(v2.DisentangledSelfAttention(config)).double()
    method = Deberta(
        3,
        4,
        12,
        c2p="c2p" in terms,
        p2c="p2c" in terms,
        max_distance=distance,
        position_buckets=max(buckets, 0),
    ).double()
    method.table.data.normal_(0.0, 0.3)
    if method.key is not None:
        method.key.load_state_dict((theirs.key_proj if share else theirs.pos_key_proj).state_dict())
    if method.query is not None:
        method.query.load_state_dict(
            (theirs.query_proj if share else theirs.pos_query_proj).state_dict()
        )
    x, n = torch.randn(2, 19, 12).double() * 0.3, 19
    mask = torch.ones(2, 1, n, n, dtype=torch.bool)
    _, attended = theirs(x, mask, output_attentions=True, rel_embeddings=method.table)
    q, k = heads(theirs.query_proj(x), 3), heads(theirs.key_proj(x), 3)
    # Their scale is a float32 square root.
    assert_close(weights(method, q, k), attended, atol=1e-6, rtol=1e-5)
    assert_close(weights(method, q, k, start=13), attended[:, :, 13:], atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("distance", [6, 50])
def test_weights_of_deberta_v1_give_its_attention(distance):
    config = DebertaConfig(
        hidden_size=12,
        num_attention_heads=3,
        relative_attention=True,
        pos_att_type=["c2p", "p2c"],
        max_relative_positions=distance,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    theirs = randomised(v1.DisentangledSelfAttention(config))
    method = Deberta(3, 4, 12, max_distance=distance, position_buckets=0)
    method.table.data.normal_(0.0, 0.3)
    method.key.weight.data.copy_(theirs.pos_proj.weight)
    method.query.load_state_dict(theirs.pos_q_proj.state_dict())
    x, n = torch.randn(2, 17, 12) * 0.3, 17
    mask = torch.ones(2, 1, n, n, dtype=torch.bool)
    place = v1.build_relative_position(x, x)
    _, attended = theirs(
        x, mask, output_attentions=True, relative_pos=place, rel_embeddings=method.table
    )
    q, k, _ = theirs.transpose_for_scores(theirs.in_proj(x)).chunk(3, dim=-1)
    q = q + theirs.transpose_for_scores(theirs.q_bias[None, None])
    assert_close(weights(method, q, k), attended, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(("buckets", "distance"), [(256, 512), (32, 128), (8, 12), (4, 4)])
def test_log_buckets_equal_transformers(buckets, distance):
    x = torch.arange(-2 * distance, 2 * distance + 1)
    theirs = v2.make_log_bucket_position(x, buckets, distance).long()
    assert_close(log_bucket(x, buckets, distance), theirs)


@pytest.mark.parametrize("terms", [(True, False), (False, True), (True, True)])
def test_logits_equal_the_formula_written_as_loops_with_shifted_positions(terms):
    c2p, p2c = terms
    method = Deberta(3, 5, 7, c2p=c2p, p2c=p2c, max_distance=3, position_buckets=0)
    method = randomised(method.double())
    q, k = torch.randn(2, 3, 3, 5).double(), torch.randn(2, 3, 8, 5).double()
    q_pos, k_pos = torch.arange(9, 12), torch.arange(4, 12)
    bias = method.score_term(q, q_pos, k_pos, content=Content(k=k)).to_dense(q_pos, k_pos)
    ours = method.query_heads(q, q_pos) @ k.mT / math.sqrt(5) + bias
    for b in range(2):
        for h in range(3):
            for i in range(3):
                for j in range(8):
                    slot = min(max(int(q_pos[i] - k_pos[j]) + 3, 0), 5)
                    total = q[b, h, i] @ k[b, h, j]
                    if c2p:
                        total = total + q[b, h, i] @ method.key(method.table[slot]).view(3, 5)[h]
                    if p2c:
                        total = total + k[b, h, j] @ method.query(method.table[slot]).view(3, 5)[h]
                    assert_close(ours[b, h, i, j], total / math.sqrt(5 * (1 + c2p + p2c)))


def test_content_to_position_alone_is_a_lag_bias_that_saturates():
    method = randomised(Deberta(2, 3, 6, p2c=False, max_distance=4, position_buckets=0))
    pos = torch.arange(40)
    bias = method.score_term(torch.randn(1, 2, 40, 3), pos, pos)
    assert bias.reach == 4
    short = method.score_term(torch.randn(1, 2, 3, 3), pos[:3], pos[:3])
    assert short.reach == 2
    with pytest.raises(ValueError, match="has no tails"):
        short.to_dense(pos[:3], pos[:4])


def test_position_to_content_is_right_for_any_rows_and_for_grouped_keys():
    method, pos = randomised(Deberta(4, 3, 6, max_distance=9, position_buckets=6)), torch.arange(11)
    q, k = torch.randn(2, 4, 11, 3), torch.randn(2, 2, 11, 3)
    bias = method.score_term(q, pos, pos, content=Content(k=k))
    dense = bias.to_dense(pos, pos)
    assert_close(bias.rows(4, 7).to_dense(pos[4:7], pos), dense[:, :, 4:7])
    each = Content(k=k.repeat_interleave(2, dim=1))
    assert_close(method.score_term(q, pos, pos, content=each).to_dense(pos, pos), dense)


def test_every_parameter_and_input_passes_gradcheck():
    method = randomised(Deberta(2, 3, 4, max_distance=2, position_buckets=0).double())
    parameters = list(method.parameters())
    q, k, v = (torch.randn(1, 2, 4, 3, dtype=torch.float64, requires_grad=True) for _ in range(3))

    def run(q, k, v, *values):
        assert len(values) == 5
        return positioned_attention(method, q, k, v, backend="reference")

    assert torch.autograd.gradcheck(run, (q, k, v, *parameters), fast_mode=True)


@pytest.mark.parametrize(
    "spec",
    ["deberta", "deberta:c2p=false,max_distance=5,position_buckets=0", "deberta:p2c=no"],
)
def test_the_formula_counts_the_parameters(spec):
    method = build(spec, n_heads=3, d_head=5, d_model=11)
    assert method.n_parameters() == method.n_parameters_by_formula()


def test_wrong_options_are_refused_with_the_way_out():
    with pytest.raises(ValueError, match="c2p=true or p2c=true"):
        build("deberta:c2p=no,p2c=no", n_heads=2, d_head=4)
    with pytest.raises(ValueError, match="even and at least 4, got 7"):
        build("deberta:position_buckets=7", n_heads=2, d_head=4)
    with pytest.raises(ValueError, match=r"max_distance must be above 129 .* got 100"):
        build("deberta:max_distance=100", n_heads=2, d_head=4)
    pos = torch.arange(3)
    with pytest.raises(ValueError, match="looks at content and needs k"):
        build("deberta", n_heads=2, d_head=4).score_term(torch.randn(1, 2, 3, 4), pos, pos)
