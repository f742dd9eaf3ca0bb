"""Methods that look at content: CoPE, the forgetting gate and the content-conditioned band."""

import math

import pytest
import torch
from torch.testing import assert_close
from transformers.models.inkling.modeling_inkling import InklingRelativeLogits

from whence.lag import DenseBias, LagBias
from whence.method import Content
from whence.methods import build
from whence.methods.content_band import ContentBand
from whence.methods.cope import Cope
from whence.methods.forget import Forget
from whence.nn.positioned import positioned_attention

SPECS = ["cope:positions=3", "cope:per_head=true,positions=4", "forget", "content_band:width=5"]
ROWS = [(0, 0, 9, 9), (0, 6, 9, 3), (5, 11, 7, 1), (0, 0, 1, 1), (3, 4, 8, 2)]


def positions(k_start, q_start, n_k, n_q):
    return torch.arange(q_start, q_start + n_q), torch.arange(k_start, k_start + n_k)


def randomised(method):
    with torch.no_grad():
        for parameter in method.parameters():
            parameter.add_(torch.randn_like(parameter))
    return method


def random(*shape):
    return torch.randn(shape, dtype=torch.float64)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize("size", [1, 3, 64])
def test_cope_counts_gates_and_interpolates_pair_by_pair(rows, per_head, size):
    b, h, d = 2, 3, 5
    method = randomised(Cope(h, d, positions=size, per_head=per_head).double())
    q_pos, k_pos = positions(*rows)
    q, k = random(b, h, len(q_pos), d), random(b, h, len(k_pos), d)
    bias = method.score_term(q, q_pos, k_pos, content=Content(k=k))
    assert isinstance(bias, DenseBias)
    dense = bias.to_dense(q_pos, k_pos)
    for n in range(b):
        for head in range(h):
            table = method.table[head if per_head else 0]
            for row, i in enumerate(q_pos):
                query = q[n, head, row]
                for column, j in enumerate(k_pos):
                    if j > i:
                        continue
                    between = [t for t, pos in enumerate(k_pos) if j <= pos <= i]
                    gates = [torch.sigmoid(query @ k[n, head, t] / math.sqrt(d)) for t in between]
                    place = min(sum(gates).item(), size - 1)
                    low, high = math.floor(place), math.ceil(place)
                    e = (1 - place + low) * table[low] + (place - low) * table[high]
                    assert_close(dense[n, head, row, column], query @ e)


def test_cope_with_open_gates_is_the_plain_distance():
    method = randomised(Cope(1, 2, positions=4).double())
    pos, q, k = torch.arange(6), random(1, 1, 6, 2), random(1, 1, 6, 2)
    q[..., 0], k[..., 0] = 1.0, 1e4
    dense = method.score_term(q, pos, pos, content=Content(k=k)).to_dense(pos, pos)
    distance = (pos[:, None] - pos + 1).clamp(0, 3)  # the query's own gate makes it start at 1
    expected = (q[0, 0] @ method.table[0].T).gather(-1, distance)
    assert_close(dense[0, 0].tril(), expected.tril())


def test_cope_groups_its_key_heads_as_attention_does():
    method = randomised(Cope(6, 4).double())
    pos, q, k = torch.arange(7), random(2, 6, 7, 4), random(2, 2, 7, 4)
    grouped = method.score_term(q, pos, pos, content=Content(k=k))
    every = method.score_term(q, pos, pos, content=Content(k=k.repeat_interleave(3, dim=1)))
    assert_close(grouped.to_dense(pos, pos), every.to_dense(pos, pos))


@pytest.mark.parametrize("rows", ROWS)
def test_forget_sums_the_logarithms_of_the_gates_between(rows):
    b, h, d = 2, 3, 5
    method = randomised(Forget(h, d).double())
    q_pos, k_pos = positions(*rows)
    x = random(b, len(k_pos), d)
    q = random(b, h, len(q_pos), 4)
    bias = method.score_term(q, q_pos, k_pos, content=Content(x_k=x))
    assert isinstance(bias, DenseBias)
    expected = torch.zeros(b, h, len(q_pos), len(k_pos), dtype=torch.float64)
    for n in range(b):
        for head in range(h):
            for row, i in enumerate(q_pos):
                for column, j in enumerate(k_pos):
                    for t, pos in enumerate(k_pos):
                        if j < pos <= i:
                            logit = method.gate.weight[head] @ x[n, t] + method.gate.bias[head]
                            expected[n, head, row, column] += torch.sigmoid(logit).log()
    assert_close(bias.to_dense(q_pos, k_pos), expected.detach())


def test_forget_of_a_constant_gate_is_alibi():
    method, pos = Forget(1, 3).double(), torch.arange(9)
    torch.nn.init.constant_(method.gate.bias, math.log(math.exp(-0.25) / -math.expm1(-0.25)))
    content = Content(x_k=torch.zeros(1, 9, 3).double())
    dense = method.score_term(random(1, 1, 9, 4), pos, pos, content=content).to_dense(pos, pos)
    assert_close(dense[0, 0], -0.25 * (pos[:, None] - pos).clamp(min=0).double())


def test_forget_keeps_its_digits_over_a_long_half_precision_sequence():
    method, x = Forget(2, 4).bfloat16(), torch.randn(1, 4096, 4).bfloat16()
    k_pos, q_pos = torch.arange(4096), torch.tensor([4095])
    q = torch.zeros(1, 2, 1, 4).bfloat16()
    half = method.score_term(q, q_pos, k_pos, content=Content(x_k=x)).to_dense(q_pos, k_pos)
    gates = torch.nn.functional.logsigmoid(method.gate(x).double())[0].T
    exact = torch.stack([gates[:, j + 1 :].sum(-1) for j in range(4080, 4096)], dim=-1)
    assert_close(half[0, :, 0, 4080:].double(), exact, rtol=0, atol=2e-3)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("width", [1, 4, 7, 1024])
def test_content_band_equals_inklings_relative_logits(rows, width):
    b, h, d = 2, 3, 6
    q_pos, k_pos = positions(*rows)
    method = randomised(ContentBand(h, d, rank=5, width=width).double())
    theirs = InklingRelativeLogits(5, width)
    theirs.proj = method.profiles
    x = random(b, len(q_pos), d)
    mixed = (x @ method.mix.weight.T).view(b, len(q_pos), h, 5)
    expected = theirs(mixed, q_pos, k_pos)
    bias = method.score_term(
        random(b, h, len(q_pos), 4), q_pos, k_pos, content=Content(x_q=x, k=None)
    )
    assert isinstance(bias, LagBias)
    assert bias.reach <= width - 1
    assert_close(bias.to_dense(q_pos, k_pos), expected)


def test_a_symmetric_content_band_looks_ahead_as_it_looks_back():
    method = randomised(ContentBand(2, 6, rank=3, width=4, symmetric=True).double())
    pos, x = torch.arange(9), random(1, 9, 6)
    bias = method.score_term(random(1, 2, 9, 4), pos, pos, content=Content(x_q=x))
    dense = bias.to_dense(pos, pos)
    for i in range(9):
        for j in range(9):
            mix = (method.mix.weight @ x[0, i]).view(2, 3)
            far = abs(i - j) >= 4
            expected = torch.zeros_like(mix[:, 0]) if far else mix @ method.profiles[:, abs(i - j)]
            assert_close(dense[0, :, i, j], expected)


@pytest.mark.parametrize("spec", SPECS)
def test_gradients_of_content_methods_are_right(spec):
    method = randomised(build(spec, n_heads=2, d_head=3).double())
    q_pos, k_pos = positions(2, 4, 5, 3)
    q, k = random(1, 2, 3, 3).requires_grad_(), random(1, 2, 5, 3).requires_grad_()
    x = random(1, 5, 6).requires_grad_()

    def dense(q, k, x, *_):
        content = Content(x_q=x[:, 2:], x_k=x, k=k)
        bias = method.score_term(q, q_pos, k_pos, content=content).to_dense(q_pos, k_pos)
        return bias + 0 * (q.sum() + k.sum() + x.sum())

    assert torch.autograd.gradcheck(dense, (q, k, x, *method.parameters()))


@pytest.mark.parametrize("spec", SPECS)
def test_a_cached_decoding_step_of_content_methods_equals_the_full_pass(spec):
    method = randomised(build(spec, n_heads=3, d_head=4).double())
    q, k, v = random(3, 2, 3, 11, 4).unbind()
    x = random(2, 11, 12)

    def run(rows, keys, **where):
        return positioned_attention(
            method,
            q[:, :, rows],
            k[:, :, keys],
            v[:, :, keys],
            x_q=x[:, rows],
            x_k=x[:, keys],
            causal=True,
            backend="reference",
            **where,
        )

    whole = run(slice(0, 11), slice(0, 11))
    assert_close(run(slice(0, 11), slice(0, 11), k_start=7), whole)
    for n in (1, 6, 11):
        assert_close(run(slice(n - 1, n), slice(0, n)), whole[:, :, n - 1 : n])
    assert_close(run(slice(4, 8), slice(0, 8)), whole[:, :, 4:8])


@pytest.mark.parametrize("spec", SPECS)
def test_padding_at_either_end_changes_no_row_of_content_methods(spec):
    method = randomised(build(spec, n_heads=2, d_head=4).double())
    q, k, v = random(3, 1, 2, 10, 4).unbind()
    x, exists = random(1, 10, 8), torch.ones(1, 10, dtype=torch.bool)
    exists[:, :2], exists[:, 8:] = False, False

    def run(keep, mask):
        heads = (t[:, :, keep] for t in (q, k, v))
        y = x[:, keep]
        return positioned_attention(
            method, *heads, x_q=y, x_k=y, mask=mask, causal=True, backend="reference"
        )

    padded = run(slice(0, 10), exists)[:, :, 2:8]
    assert_close(padded, run(slice(2, 8), None))


@pytest.mark.parametrize("spec", SPECS)
def test_content_in_half_precision_meets_parameters_in_float32(spec):
    method, pos = randomised(build(spec, n_heads=2, d_head=4)), torch.arange(5)
    x, heads = torch.randn(1, 5, 8), torch.randn(2, 1, 2, 5, 4)

    def dense(dtype):
        q, k, y = heads[0].to(dtype), heads[1].to(dtype), x.to(dtype)
        return method.score_term(q, pos, pos, content=Content(y, y, k)).to_dense(pos, pos)

    assert_close(dense(torch.bfloat16).float(), dense(torch.float32), rtol=0.1, atol=0.3)


@pytest.mark.parametrize("spec", SPECS)
def test_rows_of_a_content_method_are_the_rows_of_the_whole(spec):
    method = randomised(build(spec, n_heads=3, d_head=4).double())
    q_pos, k_pos = positions(1, 3, 9, 7)
    content = Content(random(2, 7, 12), random(2, 9, 12), random(2, 3, 9, 4))
    bias = method.score_term(random(2, 3, 7, 4), q_pos, k_pos, content=content)
    part = bias.rows(2, 5).to_dense(q_pos[2:5], k_pos)
    assert_close(part, bias.to_dense(q_pos, k_pos)[:, :, 2:5])


@pytest.mark.parametrize("spec", SPECS)
def test_content_methods_have_as_many_parameters_as_their_formula_says(spec):
    method = build(spec, n_heads=7, d_head=4)
    assert method.n_parameters() == method.n_parameters_by_formula()
    assert method.causal_only == (not spec.startswith("content_band"))


@pytest.mark.parametrize(
    ("name", "part"), [("cope", "k"), ("forget", "x_k"), ("content_band", "x_q")]
)
def test_a_content_method_without_content_says_what_it_needs(name, part):
    method, pos = build(name, n_heads=2, d_head=4), torch.arange(3)
    with pytest.raises(ValueError, match=f"needs {part}: pass content=Content"):
        method.score_term(torch.zeros(1, 2, 3, 4), pos, pos, content=Content())


def test_forget_refuses_inputs_that_do_not_belong_to_its_keys():
    method, q = Forget(2, 8), torch.zeros(1, 2, 3, 4)
    pos = torch.arange(3)
    with pytest.raises(ValueError, match="x_k has 1 rows for 3 keys"):
        method.score_term(q, pos, pos, content=Content(x_k=torch.zeros(1, 1, 8)))
    with pytest.raises(ValueError, match="every query among the keys, got 3 queries that 3 keys"):
        method.score_term(q, pos + 1, pos, content=Content(x_k=torch.zeros(1, 3, 8)))


@pytest.mark.parametrize(
    "spec", ["cope:positions=0", "content_band:rank=0", "content_band:width=0"]
)
def test_bad_options_of_content_methods_are_refused(spec):
    with pytest.raises(ValueError, match="must be at least 1, got 0"):
        build(spec, n_heads=2, d_head=4)
