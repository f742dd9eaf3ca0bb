"""Shaw's keys and values against the article's algorithm, a loop over pairs, and wav2vec2-BERT."""

import math

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close
from transformers import Wav2Vec2BertConfig
from transformers.models.wav2vec2_bert.modeling_wav2vec2_bert import Wav2Vec2BertSelfAttention

from whence import LagBias, attend, build
from whence.bench.shaw_article import article_attention, lookup, naive_attention
from whence.methods.shaw import Shaw
from whence.nn import positioned_attention

TABLES = {"both": {}, "keys": {"values": False}, "values": {"keys": False}}
CLIPS = [{"clip": 3}, {"clip": 0}, {"left": 4, "right": 1}, {"left": 0, "right": 2}, {"clip": 30}]


def heads(b: int, h: int, n_q: int, n_k: int, d: int) -> tuple[Tensor, Tensor, Tensor]:
    return tuple(torch.randn(b, h, n, d, dtype=torch.float64) for n in (n_q, n_k, n_k))


def shaw(n_heads: int, d_head: int, **options) -> Shaw:
    return Shaw(n_heads, d_head, **options).double()


def loop_attention(method: Shaw, q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Tensor:
    """e_ij and z_i pair by pair, from the formula."""
    (b, h, n_q, d), n_k = q.shape, k.shape[2]
    out = torch.zeros(b, h, n_q, v.shape[3], dtype=q.dtype)

    def vector(table, head, lag):
        if table is None:
            return 0.0
        own = head if method.per_head else 0
        return table[own, max(-method.left, min(method.right, lag)) + method.left]

    for s in range(b):
        for head in range(h):
            for i in range(n_q):
                place = n_k - n_q + i
                keys = [j for j in range(n_k) if not causal or j <= place]
                logits = []
                for j in keys:
                    key = k[s, head, j] + vector(method.key_table, head, j - place)
                    logits.append(q[s, head, i] @ key / math.sqrt(d))
                alpha = torch.softmax(torch.stack(logits), dim=0)
                for weight, j in zip(alpha, keys, strict=True):
                    value = v[s, head, j] + vector(method.value_table, head, j - place)
                    out[s, head, i] += weight * value
    return out


def test_the_lookup_table_is_the_articles():
    rows = lookup(10, 10, 3, 3).tolist()
    assert rows[0] == [3, 4, 5, 6, 6, 6, 6, 6, 6, 6]
    assert rows[4] == [0, 0, 1, 2, 3, 4, 5, 6, 6, 6]
    assert rows[-1] == [0, 0, 0, 0, 0, 0, 0, 1, 2, 3]


@pytest.mark.parametrize("n_q", [10, 1, 4])
def test_a_query_reads_the_rows_that_the_articles_table_names(n_q):
    """With q . A_K[r] = r the bias is the row that was looked up."""
    method = shaw(1, 1, clip=3)
    method.key_table = torch.arange(7.0).view(1, 7, 1)
    q_pos, k_pos = torch.arange(10 - n_q, 10), torch.arange(10)
    q = torch.ones(1, 1, n_q, 1, dtype=torch.float64)
    got = method.score_term(q, q_pos, k_pos).to_dense(q_pos, k_pos)
    assert_close(got[0, 0].long(), lookup(n_q, 10, 3, 3), rtol=0, atol=0)


@pytest.mark.parametrize("tables", TABLES)
@pytest.mark.parametrize("clips", CLIPS, ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_shaw_equals_the_articles_algorithm_and_its_equations(tables, clips, causal):
    method = shaw(3, 4, **clips, **TABLES[tables])
    q, k, v = heads(2, 3, 10, 10, 4)
    got = positioned_attention(method, q, k, v, causal=causal, backend="reference")
    for attention in (article_attention, naive_attention):
        want = attention(
            q,
            k,
            v,
            key_table=None if method.key_table is None else method.key_table[0],
            value_table=None if method.value_table is None else method.value_table[0],
            left=method.left,
            right=method.right,
            causal=causal,
        )
        assert_close(got, want)


@pytest.mark.parametrize("tables", TABLES)
@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize("clips", [{"clip": 2}, {"left": 3, "right": 1}], ids=str)
@pytest.mark.parametrize(("n_q", "causal"), [(6, False), (6, True), (2, True), (1, False)])
def test_shaw_equals_a_loop_over_pairs(tables, per_head, clips, n_q, causal):
    method = shaw(3, 5, per_head=per_head, **clips, **TABLES[tables])
    q, k, v = heads(1, 3, n_q, 6, 5)
    got = positioned_attention(method, q, k, v, causal=causal, backend="reference")
    assert_close(got, loop_attention(method, q, k, v, causal=causal))


@pytest.mark.parametrize("n_q", [1, 3])
def test_decoded_rows_are_the_last_rows_of_the_whole(n_q):
    method = shaw(2, 4, left=5, right=2, per_head=True)
    q, k, v = heads(2, 2, 9, 9, 4)
    whole = positioned_attention(method, q, k, v, causal=True, backend="reference")
    last = positioned_attention(method, q[:, :, -n_q:], k, v, causal=True, backend="reference")
    assert_close(last, whole[:, :, -n_q:])


def test_a_shift_of_all_positions_changes_nothing():
    method = shaw(2, 4)
    q, k, v = heads(1, 2, 5, 5, 4)
    near, far = (
        positioned_attention(method, q, k, v, k_start=start, backend="reference")
        for start in (0, 10_000)
    )
    assert_close(near, far, rtol=0, atol=0)


@pytest.mark.parametrize("tables", TABLES)
def test_dropout_falls_on_the_weights_before_both_value_terms(tables):
    """From one seed: the same weights must be missing from v and from the value table."""
    method = shaw(2, 4, clip=2, **TABLES[tables])
    q, k, v = heads(2, 2, 7, 7, 4)
    torch.manual_seed(5)
    want = article_attention(
        q,
        k,
        v,
        key_table=None if method.key_table is None else method.key_table[0],
        value_table=None if method.value_table is None else method.value_table[0],
        left=2,
        right=2,
        dropout=0.4,
    )
    torch.manual_seed(5)
    got = positioned_attention(method, q, k, v, dropout=0.4, backend="reference")
    assert_close(got, want)
    without = positioned_attention(method, q, k, v, backend="reference")
    assert not torch.allclose(got, without)


@pytest.mark.parametrize(("left", "right"), [(64, 8), (3, 1), (1, 3), (2, 2)])
@pytest.mark.parametrize("n", [1, 6, 11])
def test_keys_alone_equal_wav2vec2_bert_with_its_weights(left, right, n):
    """`relative_key` there counts key - query too, and clips to left and right limits of its own."""
    config = Wav2Vec2BertConfig(
        hidden_size=12,
        num_attention_heads=3,
        position_embeddings_type="relative_key",
        left_max_position_embeddings=left,
        right_max_position_embeddings=right,
        attention_dropout=0.0,
        attn_implementation="eager",
    )
    theirs = Wav2Vec2BertSelfAttention(config).double().eval()
    ours = shaw(3, 4, left=left, right=right, values=False)
    ours.load_state_dict({"key_table": theirs.distance_embedding.weight[None]})
    x = torch.randn(2, n, 12, dtype=torch.float64)
    q, k, v = (
        project(x).view(2, n, 3, 4).transpose(1, 2)
        for project in (theirs.linear_q, theirs.linear_k, theirs.linear_v)
    )
    got = positioned_attention(ours, q, k, v, backend="reference")
    assert_close(theirs.linear_out(got.transpose(1, 2).reshape(2, n, 12)), theirs(x)[0])


@pytest.mark.parametrize("options", [{}, {"per_head": True, "left": 1, "right": 3}], ids=str)
def test_gradients_reach_tables_and_heads(options):
    method = shaw(2, 2, clip=1, **options)
    q, k, v = (x.requires_grad_() for x in heads(1, 2, 3, 5, 2))

    def out(q, k, v, *tables):  # gradcheck nudges the tables in place
        return positioned_attention(method, q, k, v, causal=True, backend="reference")

    assert torch.autograd.gradcheck(out, (q, k, v, *method.parameters()))


def test_grouped_heads_share_the_tables():
    method = shaw(4, 3, clip=2)
    q, k, v = heads(2, 4, 6, 6, 3)
    k, v = k[:, :2], v[:, :2]
    want = positioned_attention(
        method, q, *(x.repeat_interleave(2, dim=1) for x in (k, v)), backend="reference"
    )
    assert_close(positioned_attention(method, q, k, v, backend="reference"), want)


def test_the_keys_term_is_a_band_for_each_query_never_a_square():
    method = Shaw(3, 4, clip=2)
    n = 50
    bias = method.score_term(torch.randn(2, 3, n, 4), torch.arange(n), torch.arange(n))
    assert isinstance(bias, LagBias)
    assert bias.band.shape == (2, 3, n, 5)
    assert bias.left.slope is None
    assert method.value_term(torch.arange(n), torch.arange(n)).table.shape == (1, 5, 4)


def test_terms_that_are_off_are_not_there():
    q, place = torch.randn(1, 2, 3, 4), torch.arange(3)
    assert Shaw(2, 4, keys=False).score_term(q, place, place) is None
    assert Shaw(2, 4, values=False).value_term(place, place) is None


def test_values_alone_are_plain_attention_plus_the_mass_at_each_lag():
    method = shaw(1, 3, clip=1, keys=False)
    q, k, v = heads(1, 1, 4, 4, 3)
    plain = attend(q, k, v, backend="reference")
    alpha = attend(q, k, torch.eye(4, dtype=torch.float64)[None, None], backend="reference")
    mass = torch.stack([(alpha * (lookup(4, 4, 1, 1) == row)).sum(-1) for row in range(3)], dim=-1)
    got = positioned_attention(method, q, k, v, backend="reference")
    assert_close(got, plain + mass @ method.value_table[0])


@pytest.mark.parametrize("options", [{}, {"per_head": True}, {"keys": False, "left": 2}], ids=str)
def test_shaw_counts_its_parameters(options):
    method = Shaw(3, 4, **options)
    assert method.n_parameters() == method.n_parameters_by_formula()
    assert build("shaw:clip=16", n_heads=8, d_head=64).n_parameters() == 2 * 33 * 64


@pytest.mark.parametrize("per_head", [False, True])
def test_each_table_may_start_as_xavier_of_its_rows_and_columns(per_head):
    """Glorot's bound for a matrix [lags, d], whatever the number of heads."""
    bound = math.sqrt(6 / (33 + 64))
    method = Shaw(8, 64, clip=16, per_head=per_head, start="xavier")
    for table in (method.key_table, method.value_table):
        assert 0.98 * bound < table.abs().max() <= bound


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"clip": -1}, "clip must be at least 0, got -1"),
        ({"left": -2}, "left must be at least 0, got -2"),
        ({"right": -3}, "right must be at least 0, got -3"),
        ({"keys": False, "values": False}, "keys=true or values=true; for neither use 'nope'"),
    ],
)
def test_shaw_refuses_what_has_no_meaning(options, message):
    with pytest.raises(ValueError, match=message):
        Shaw(2, 4, **options)
