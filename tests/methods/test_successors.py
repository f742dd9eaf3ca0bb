"""TISAv2, KERPLE, Sandwich and FIRE against their formulas, written out pair by pair."""

import math

import pytest
import torch
from torch.testing import assert_close

from whence.lag import DenseBias, LagBias
from whence.methods import build
from whence.methods.alibi import Alibi, alibi_slopes
from whence.methods.fire import Fire
from whence.methods.kerple import Kerple
from whence.methods.sandwich import Sandwich
from whence.methods.tisa2 import Tisa2
from whence.nn.positioned import positioned_attention

SPECS = [
    "tisa2",
    "tisa2:agnostic=1",
    "kerple",
    "kerple:kind=power",
    "sandwich",
    "fire:threshold=4,hidden=3",
]
ROWS = [(0, 0, 9, 9), (0, 6, 9, 3), (5, 11, 7, 1), (0, 0, 1, 1), (3, 3, 2, 7)]


def positions(k_start, q_start, n_k, n_q):
    return torch.arange(q_start, q_start + n_q), torch.arange(k_start, k_start + n_k)


def term(method, q_pos, k_pos):
    return method.score_term(torch.zeros(1, method.n_heads, len(q_pos), 4).double(), q_pos, k_pos)


def loop(function, n_heads, q_pos, k_pos):
    """function(head, query position, key position), one pair at a time."""
    pairs = [[[function(h, int(i), int(j)) for j in k_pos] for i in q_pos] for h in range(n_heads)]
    return torch.tensor([pairs], dtype=torch.float64)


def randomised(method):
    with torch.no_grad():
        for parameter in method.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return method


@pytest.mark.parametrize("rows", ROWS)
def test_tisa2_is_the_logarithm_of_sigmoids_on_a_slope(rows):
    method = randomised(Tisa2(5, kernels=3, shortest=10.0, longest=90.0, agnostic=2).double())
    q_pos, k_pos = positions(*rows)

    def formula(h, i, j):
        if h >= 3:
            return 0.0
        lag, mass = j - i, 1e-8 + abs(method.floor[h].item())
        for a, c, w in zip(method.amplitude[h], method.offset[h], method.width[h], strict=True):
            z = math.copysign(1, a.item()) * (lag - c.item()) / w.item()
            mass += abs(a.item()) / (1 + math.exp(-z))
        view = 10 * 9 ** (h / 2)
        return math.log(mass) + math.log(1e-8) / (view / 2) * abs(lag)

    bias = term(method, q_pos, k_pos)
    assert isinstance(bias, LagBias)
    # The slopes are kept in float32, as ALiBi's are.
    assert_close(bias.to_dense(q_pos, k_pos), loop(formula, 5, q_pos, k_pos), rtol=1e-6, atol=1e-6)


def test_tisa2_loses_all_but_1e_8_of_the_weight_at_the_edge_of_each_field_of_view():
    slope = Tisa2(5, shortest=8.0, longest=128.0).slope
    assert_close(slope, -math.log(1e-8) / (torch.tensor([8.0, 16, 32, 64, 128]) / 2))
    assert_close(Tisa2(1, shortest=8.0, longest=128.0).slope, slope[:1])
    assert_close(Tisa2(6, agnostic=1, shortest=8.0, longest=128.0).slope, slope)


def test_tisa2_starts_as_released():
    method = Tisa2(10, kernels=1000)
    assert_close(method.amplitude.std().item(), 0.01, rtol=0.05, atol=0)
    assert_close(method.offset.std().item(), 15.0, rtol=0.05, atol=0)
    assert_close(method.amplitude.mean().item(), 0.0, rtol=0, atol=5e-4)
    assert_close(method.width, torch.full((10, 1000), 5.0))
    assert_close(method.floor, torch.ones(10))


def test_a_tisa2_kernel_without_amplitude_can_still_learn():
    method = Tisa2(2, kernels=2)
    torch.nn.init.zeros_(method.amplitude)
    method.curve(torch.arange(-5, 6)).sum().backward()
    assert torch.isfinite(method.amplitude.grad).all()
    assert (method.amplitude.grad > 0).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_tisa2_without_floor_or_kernels_stays_finite_in_every_precision(dtype):
    method = Tisa2(2, kernels=2)
    torch.nn.init.zeros_(method.amplitude)
    torch.nn.init.zeros_(method.floor)
    curve = method.to(dtype).curve(torch.tensor([0]))
    wide = torch.promote_types(dtype, torch.float32)
    assert_close(curve, torch.full((2, 1), math.log(1e-8), dtype=wide))


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("kind", ["log", "power"])
def test_kerple_is_its_kernel_of_the_distance(kind, rows):
    method = randomised(Kerple(3, kind=kind).double())
    q_pos, k_pos = positions(*rows)
    p, a = method.p.tolist(), method.a.tolist()

    def formula(h, i, j):
        distance = abs(i - j)
        return -p[h] * math.log(1 + a[h] * distance) if kind == "log" else -a[h] * distance ** p[h]

    bias = term(method, q_pos, k_pos)
    assert isinstance(bias, LagBias)
    assert_close(bias.to_dense(q_pos, k_pos), loop(formula, 3, q_pos, k_pos))


def test_kerple_of_power_one_is_alibi():
    method, q_pos = Kerple(6, kind="power").double(), torch.arange(9)
    with torch.no_grad():
        method.raw_p = 0.0
        method.raw_a = alibi_slopes(6).double().expm1().log()
    alibi = term(Alibi(6).double(), q_pos, q_pos).to_dense(q_pos, q_pos)
    assert_close(term(method, q_pos, q_pos).to_dense(q_pos, q_pos), alibi)


@pytest.mark.parametrize("kind", ["log", "power"])
def test_kerple_stays_a_kernel_wherever_its_parameters_go(kind):
    method = Kerple(4, kind=kind)
    start = torch.cat([method.p, method.a])
    assert (start > 0.009).all()
    assert (start < 2).all()
    with torch.no_grad():
        method.raw_p = torch.tensor([-30.0, -5.0, 5.0, 60.0])
        method.raw_a = torch.tensor([60.0, -5.0, 5.0, -30.0])
    assert (method.p > 0).all()
    assert (method.a > 0).all()
    if kind == "power":
        assert (method.p <= 2).all()


@pytest.mark.parametrize("kind", ["log", "power"])
def test_the_gradient_of_kerple_at_lag_zero_is_zero(kind):
    method = Kerple(2, kind=kind)
    method.curve(torch.tensor([0])).sum().backward()
    assert_close(method.held_p.grad, torch.zeros(2))
    assert_close(method.held_a.grad, torch.zeros(2))


@pytest.mark.parametrize("rows", ROWS)
def test_sandwich_is_the_product_of_two_sinusoidal_embeddings(rows):
    q_pos, k_pos = positions(*rows)
    angles = 10000.0 ** (-2 * torch.arange(1, 6).double() / 10)

    def embedding(pos):
        angle = pos[:, None] * angles
        return torch.cat([angle.sin(), angle.cos()], dim=-1)

    products = embedding(q_pos) @ embedding(k_pos).T
    ratio = torch.tensor([8 / 3, 16 / 3, 8], dtype=torch.float64)
    bias = term(Sandwich(3, dimensions=10).double(), q_pos, k_pos)
    assert isinstance(bias, LagBias)
    assert_close(bias.to_dense(q_pos, k_pos), (products / ratio[:, None, None])[None])


def test_the_heads_of_sandwich_are_flatter_from_first_to_last():
    curve = Sandwich(4).curve(torch.tensor([0, 1000]))
    drop = curve[:, 0] - curve[:, 1]
    assert_close(drop[0] / drop, torch.tensor([1.0, 2, 3, 4]))
    assert_close(curve[-1, 0], torch.tensor(8.0))  # 64 cosines of zero over a ratio of 8


@pytest.mark.parametrize("rows", ROWS)
def test_fire_is_a_network_of_the_distance_over_the_query_position(rows):
    method = Fire(3, hidden=5, threshold=4.0).double()
    q_pos, k_pos = positions(*rows)
    with torch.no_grad():
        method.c.fill_(-0.3)
        method.multiplier.fill_(1.3)
    first, _, last = method.mlp

    def formula(h, i, j):
        ratio = math.log(0.3 * abs(i - j) + 1) / (math.log(0.3 * max(5.2, i) + 1) + 1e-6)
        total = last.bias[h].item()
        for u in range(5):
            hidden = first.weight[u, 0].item() * ratio + first.bias[u].item()
            total += last.weight[h, u].item() * max(hidden, 0.0)
        return total

    bias = term(method, q_pos, k_pos)
    assert isinstance(bias, DenseBias)
    assert_close(bias.to_dense(q_pos, k_pos), loop(formula, 3, q_pos, k_pos))


def test_fire_is_a_function_of_the_lag_up_to_its_threshold_and_not_beyond():
    method, k_pos = Fire(2, threshold=20.0), torch.arange(12)
    near = term(method, k_pos, k_pos).to_dense(k_pos, k_pos)
    assert_close(near[..., 1:, 1:], near[..., :-1, :-1])
    far_pos = k_pos + 40
    far = term(method, far_pos, far_pos).to_dense(far_pos, far_pos)
    assert (far[..., 1:, :] - near[..., 1:, :]).abs().max() > 1e-3
    assert (far[..., 2, 1] - far[..., 11, 10]).abs().max() > 1e-5


def test_fire_at_position_zero_is_defined_when_its_threshold_has_shrunk_to_nothing():
    method, pos = Fire(2), torch.arange(3)
    with torch.no_grad():
        method.multiplier.zero_()
    assert torch.isfinite(term(method, pos, pos).to_dense(pos, pos)).all()


@pytest.mark.parametrize("spec", SPECS)
def test_gradients_of_the_successors_are_right(spec):
    method = randomised(build(spec, n_heads=3, d_head=4).double())
    q_pos, k_pos = positions(0, 3, 8, 5)
    parameters = tuple(method.parameters())
    if parameters:
        assert torch.autograd.gradcheck(
            lambda *_: term(method, q_pos, k_pos).to_dense(q_pos, k_pos), parameters
        )


@pytest.mark.parametrize("spec", SPECS)
def test_a_cached_decoding_step_of_the_successors_equals_the_full_pass(spec):
    method = randomised(build(spec, n_heads=3, d_head=4, causal=True).double())
    q, k, v = torch.randn(3, 2, 3, 11, 4, dtype=torch.float64).unbind()
    whole = positioned_attention(method, q, k, v, causal=True, backend="reference")
    for n in (1, 6, 11):
        step = positioned_attention(
            method, q[:, :, n - 1 : n], k[:, :, :n], v[:, :, :n], causal=True, backend="reference"
        )
        assert_close(step, whole[:, :, n - 1 : n])


@pytest.mark.parametrize("spec", SPECS)
def test_the_successors_have_as_many_parameters_as_their_formula_says(spec):
    method = build(spec, n_heads=7, d_head=4)
    assert method.n_parameters() == method.n_parameters_by_formula()
    assert method.sites() == ("score",)


@pytest.mark.parametrize("spec", SPECS)
def test_rows_of_a_successor_are_the_rows_of_the_whole(spec):
    method = randomised(build(spec, n_heads=3, d_head=4).double())
    q_pos, k_pos = positions(0, 2, 9, 7)
    bias = term(method, q_pos, k_pos)
    part = bias.rows(2, 5).to_dense(q_pos[2:5], k_pos)
    assert_close(part, bias.to_dense(q_pos, k_pos)[:, :, 2:5])


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("tisa2:agnostic=3", "agnostic must be below n_heads = 3, got 3"),
        ("tisa2:shortest=9,longest=8", "shortest <= longest, got 9.0 and 8.0"),
        ("tisa2:kernels=0", "kernels must be at least 1, got 0"),
        ("kerple:kind=square", "Unknown value of kerple:kind 'square'"),
        ("sandwich:dimensions=7", "dimensions must be even.*got 7"),
        ("fire:threshold=0", "threshold must be above 0 positions, got 0.0"),
        ("fire:hidden=0", "hidden must be at least 1, got 0"),
    ],
)
def test_bad_options_of_the_successors_are_refused(spec, message):
    with pytest.raises(ValueError, match=message):
        build(spec, n_heads=3, d_head=4)
