"""Synthesizer, every kind and mixture, against slow versions of the formulas."""

import math

import pytest
import torch
from torch.testing import assert_close

from whence import Content, DenseBias, LowRankBias, build
from whence.methods import Sum
from whence.methods.synthesizer import KINDS, Synthesizer
from whence.nn import positioned_attention

N, H, D, WIDTH = 12, 3, 4, 7


def made(**options):
    """A small one in double precision with every parameter drawn at random."""
    method = Synthesizer(H, D, WIDTH, N, **options).double()
    with torch.no_grad():
        for parameter in method.parameters():
            parameter.normal_()
    return method


def slow(name, part, x, q_pos, k_pos):
    """S of one kind, pair by pair."""
    out = torch.empty(len(x), H, len(q_pos), len(k_pos)).double()
    for b in range(len(x)):
        for h in range(H):
            for row, i in enumerate(q_pos.tolist()):
                for column, j in enumerate(k_pos.tolist()):
                    if name in ("random", "fixed"):
                        value = part.matrix[h, i, j]
                    elif name == "factorized_random":
                        value = part.query[h, i] @ part.key[h, j]
                    else:
                        hidden = part.inner.weight[h] @ x[b, row] + part.inner.bias[h]
                        hidden = hidden.clamp(min=0)
                        if name == "dense":
                            value = part.outer.weight[h, j] @ hidden + part.outer.bias[h, j]
                        else:
                            whole = part.whole.weight[h] @ hidden + part.whole.bias[h]
                            each = part.each.weight[h] @ hidden + part.each.bias[h]
                            # A_i repeated as a whole, each element of B_i repeated in place.
                            value = (whole.tile(4) * each.repeat_interleave(3))[j]
                    out[b, h, row, column] = value
    return out


CASES = [(torch.arange(N), torch.arange(N)), (torch.arange(8, 11), torch.arange(2, 11))]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("q_pos", "k_pos"), CASES)
def test_a_kind_alone_replaces_the_logits_by_its_formula(kind, q_pos, k_pos):
    method = made(kind=kind, rank=2, hidden=5)
    q, x = torch.randn(2, H, len(q_pos), D).double(), torch.randn(2, len(q_pos), WIDTH).double()
    bias = method.logits(q, q_pos, k_pos, content=Content(x_q=x))
    assert method.score_term(q, q_pos, k_pos, content=Content(x_q=x)) is None
    assert method.query_heads(q, q_pos) is q
    expected = slow(kind, method.parts[0], x, q_pos, k_pos)
    assert_close(bias.to_dense(q_pos, k_pos).expand_as(expected), expected)
    rows = bias.rows(1, 3).to_dense(q_pos[1:3], k_pos)
    assert_close(rows.expand(2, -1, -1, -1), expected[:, :, 1:3])


@pytest.mark.parametrize(
    ("kind", "type_"),
    [
        ("random", DenseBias),
        ("fixed", DenseBias),
        ("factorized_random", LowRankBias),
        ("dense", LowRankBias),
        ("factorized_dense", DenseBias),
    ],
)
def test_inner_products_are_low_rank_and_the_rest_says_that_it_is_dense(kind, type_):
    pos, x = torch.arange(5), torch.randn(1, 5, WIDTH).double()
    term = made(kind=kind).logits(torch.randn(1, H, 5, D), pos, pos, content=Content(x_q=x))
    assert isinstance(term, type_)


@pytest.mark.parametrize(
    ("kind", "mixture"),
    [
        ("random", "softmax"),
        ("dense", "softmax"),
        ("factorized_random-factorized_dense-fixed", "softmax"),
        ("random", "plus_alpha"),
        ("dense", "plus_alpha"),
    ],
)
def test_a_mixture_weights_the_dot_product_and_every_kind(kind, mixture):
    method = made(kind=kind, mixture=mixture)
    q, k = torch.randn(2, H, N, D).double(), torch.randn(2, H, N, D).double()
    x, pos = torch.randn(2, N, WIDTH).double(), torch.arange(N)
    assert method.logits(q, pos, pos, content=Content(x_q=x)) is None
    eye = torch.eye(N).double().expand(2, H, N, N)
    ours = positioned_attention(method, q, k, eye, x_q=x, backend="reference")
    dot = q @ k.mT / math.sqrt(D)
    parts = [slow(n, p, x, pos, pos) for n, p in zip(method.kinds, method.parts, strict=True)]
    if mixture == "plus_alpha":
        alpha = 1 / (1 + math.exp(-method.mix.item()))
        logits = (1 - alpha) * dot + alpha * parts[0]
    else:
        shares = [math.exp(w) for w in method.mix.tolist()]
        logits = sum(s * p for s, p in zip(shares, [*parts, dot], strict=True)) / sum(shares)
    assert_close(ours, logits.softmax(-1))


def test_a_mixture_without_the_dot_product_replaces_the_logits():
    method = made(kind="random-dense", mixture="softmax", dot=False)
    q, k, v = (torch.randn(2, H, N, D).double() for _ in range(3))
    x, pos = torch.randn(2, N, WIDTH).double(), torch.arange(N)
    weights = method.mix.softmax(0)
    parts = [slow(n, p, x, pos, pos) for n, p in zip(method.kinds, method.parts, strict=True)]
    expected = (weights[0] * parts[0] + weights[1] * parts[1]).softmax(-1) @ v
    assert_close(positioned_attention(method, q, k, v, x_q=x, backend="reference"), expected)


@pytest.mark.parametrize("mixture", ["softmax", "plus_alpha"])
def test_a_mixture_begins_with_equal_weights(mixture):
    method = Synthesizer(H, D, WIDTH, N, mixture=mixture)
    assert_close(method.weights(), torch.tensor([0.5, 0.5]))


@pytest.mark.parametrize("kind", ["random", "dense", "factorized_dense", "factorized_random"])
def test_attention_does_not_look_at_queries_and_keys_without_a_mixture(kind):
    method, x = made(kind=kind), torch.randn(2, N, WIDTH).double()
    v = torch.randn(2, H, N, D).double()
    one, other = (
        positioned_attention(
            method,
            torch.randn(2, H, N, D).double(),
            torch.randn(2, H, N, D).double(),
            v,
            x_q=x,
            backend="reference",
        )
        for _ in range(2)
    )
    assert_close(one, other)


def test_the_other_part_of_a_sum_is_added_to_what_replaces_the_logits():
    method, alibi = made(), build("alibi", n_heads=H, d_head=D)
    q, pos = torch.randn(1, H, N, D).double(), torch.arange(N)
    both = Sum(method, alibi).logits(q, pos, pos).to_dense(pos, pos)
    expected = method.parts[0].matrix[None] + alibi.score_term(q, pos, pos).to_dense(pos, pos)
    assert_close(both, expected)


def test_rows_of_a_cache_equal_the_rows_of_the_whole():
    method = made(kind="dense-factorized_dense-random", mixture="softmax")
    q, k, v = (torch.randn(2, H, N, D).double() for _ in range(3))
    x = torch.randn(2, N, WIDTH).double()
    whole = positioned_attention(method, q, k, v, x_q=x, causal=True, backend="reference")
    last = positioned_attention(
        method, q[:, :, 9:], k, v, x_q=x[:, 9:], causal=True, backend="reference"
    )
    assert_close(last, whole[:, :, 9:])


def test_a_fixed_matrix_is_saved_and_not_trained():
    method = Synthesizer(2, 4, 8, 5, kind="fixed")
    assert method.n_parameters() == 0
    other = Synthesizer(2, 4, 8, 5, kind="fixed")
    other.load_state_dict(method.state_dict())
    assert_close(other.parts[0].matrix, method.parts[0].matrix)


@pytest.mark.parametrize("length", [1, 7, 30])
@pytest.mark.parametrize("kind", [*KINDS, "random-dense-factorized_dense-factorized_random"])
@pytest.mark.parametrize("mixture", ["none", "softmax", "plus_alpha"])
def test_the_formula_counts_the_parameters(kind, mixture, length):
    if "-" in kind:
        mixture = "softmax"
    spec = f"synthesizer:kind={kind},mixture={mixture},rank=3"
    method = build(spec, n_heads=3, d_head=5, d_model=11, max_length=length)
    assert method.n_parameters() == method.n_parameters_by_formula()
    assert method.a * method.b == length
    assert method.fixed_length


def test_the_formula_counts_a_mixture_without_the_dot_product():
    method = build("synthesizer:mixture=softmax,dot=no", n_heads=2, d_head=4, max_length=6)
    assert method.n_parameters() == method.n_parameters_by_formula() == 2 * 36 + 1


@pytest.mark.parametrize("kind", ["random", "factorized_random", "dense", "factorized_dense"])
@pytest.mark.parametrize("mixture", ["none", "softmax", "plus_alpha"])
def test_every_parameter_and_input_passes_gradcheck(kind, mixture):
    method = Synthesizer(2, 2, 3, 4, kind=kind, mixture=mixture, rank=2).double()
    parameters = list(method.parameters())
    q, k, v = (torch.randn(1, 2, 4, 2, dtype=torch.float64, requires_grad=True) for _ in range(3))
    x = torch.randn(1, 4, 3, dtype=torch.float64, requires_grad=True)

    def run(q, k, v, x, *values):
        return positioned_attention(method, q, k, v, x_q=x, backend="reference")

    assert torch.autograd.gradcheck(run, (q, k, v, x, *parameters), fast_mode=True)


def test_positions_beyond_the_length_are_an_error_that_says_the_way_out():
    method, q = build("synthesizer", n_heads=2, d_head=4, max_length=8), torch.randn(1, 2, 3, 4)
    with pytest.raises(ValueError, match=r"positions 0\.\.7 \(max_length=8\), got position 8"):
        method.logits(q, torch.arange(6, 9), torch.arange(9))


def test_wrong_options_are_refused_with_the_way_out():
    def refused(options, match):
        with pytest.raises(ValueError, match=match):
            build(f"synthesizer:{options}", n_heads=2, d_head=4, max_length=8)

    refused("kind=randm", "Unknown kind of synthesizer 'randm'. Did you mean 'random'")
    refused("kind=random-dense", "mixture='none' takes one kind, got 'random-dense'")
    refused("kind=random-dense,mixture=plus_alpha", "For several take 'softmax'")
    refused("kind=dense-dense,mixture=softmax", "twice")
    refused("dot=no", "dot=false is for mixture='softmax', got mixture='none'")
    refused("rank=0", "rank must be at least 1, got 0")
    refused("mixture=sum", "mixture")
    pos = torch.arange(3)
    dense = build("synthesizer:kind=dense", n_heads=2, d_head=4, max_length=8)
    with pytest.raises(ValueError, match="looks at content and needs x_q"):
        dense.logits(torch.randn(1, 2, 3, 4), pos, pos)
