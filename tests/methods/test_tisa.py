"""TISA against its formula, pair by pair, and the promise that its extent cuts nothing off."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from whence import LagBias, build
from whence.methods.tisa import Tisa
from whence.nn import positioned_attention


def formula(method: Tisa, lag: int, head: int) -> float:
    """f(lag) = sum_s a_s exp(-|b_s| (lag - c_s)^2), with Python's own floats."""
    a, b, c = (p[head].tolist() for p in (method.amplitude, method.sharpness, method.offset))
    return sum(a[s] * math.exp(-abs(b[s]) * (lag - c[s]) ** 2) for s in range(method.kernels))


def matrix_by_loops(method: Tisa, q_pos: Tensor, k_pos: Tensor) -> Tensor:
    rows = [
        [[formula(method, j - i, h) for j in k_pos.tolist()] for i in q_pos.tolist()]
        for h in range(method.n_heads)
    ]
    return torch.tensor(rows, dtype=torch.float64)[None]


def bias_of(method: Tisa, q_pos: Tensor, k_pos: Tensor) -> LagBias:
    q = torch.zeros(1, method.n_heads, len(q_pos), 4, dtype=method.offset.dtype)
    return method.score_term(q, q_pos, k_pos)


@pytest.mark.parametrize(("n_heads", "kernels"), [(1, 1), (3, 5), (12, 2)])
@pytest.mark.parametrize(("n_q", "n_k", "shift"), [(1, 1, 0), (9, 9, 0), (2, 9, 0), (5, 5, 1000)])
def test_tisa_equals_its_formula_pair_by_pair(n_heads, kernels, n_q, n_k, shift):
    method = Tisa(n_heads, kernels=kernels).double()
    q_pos, k_pos = shift + torch.arange(n_k - n_q, n_k), shift + torch.arange(n_k)
    got = bias_of(method, q_pos, k_pos).to_dense(q_pos, k_pos)
    assert_close(got, matrix_by_loops(method, q_pos, k_pos))


def test_the_sign_of_the_sharpness_does_not_matter():
    method, place, sharpness = Tisa(2), torch.arange(20), torch.rand(2, 5)
    method.sharpness = sharpness
    before = bias_of(method, place, place).to_dense(place, place)
    method.sharpness = -sharpness
    assert_close(bias_of(method, place, place).to_dense(place, place), before, rtol=0, atol=0)


def test_a_positive_offset_looks_ahead():
    """lag = key - query: a peak at lag 3 lies on the third diagonal above the main one."""
    method, place = Tisa(1, kernels=1), torch.arange(8)
    method.amplitude, method.sharpness, method.offset = 1.0, 1.0, 3.0
    matrix = bias_of(method, place, place).to_dense(place, place)[0, 0]
    assert_close(matrix.diagonal(3), torch.ones(5))
    assert matrix.diagonal(-3).max() < 1e-6


def test_attention_adds_the_bias_after_the_scaling():
    method, n = Tisa(3, kernels=2).double(), 7
    q, k, v = torch.randn(3, 2, 3, n, 4, dtype=torch.float64).unbind()
    place = torch.arange(n)
    want = torch.softmax(q @ k.mT / 2 + matrix_by_loops(method, place, place), dim=-1) @ v
    assert_close(positioned_attention(method, q, k, v, backend="reference"), want)


def test_released_weights_are_read_at_query_minus_key_minus_one():
    a, b, c = (torch.randn(4, 5) for _ in range(3))
    method, place = Tisa.from_released(a, b, c).double(), torch.arange(6)
    released = Tisa(4, kernels=5).double()
    released.load_state_dict({"amplitude": a, "sharpness": b, "offset": c})
    want = torch.tensor(
        [[[formula(released, i - j - 1, h) for j in range(6)] for i in range(6)] for h in range(4)],
        dtype=torch.float64,
    )[None]
    got = bias_of(method, place, place).to_dense(place, place)
    assert_close(got, want, rtol=1e-5, atol=1e-6)  # -(c + 1) was rounded to float32


sharpnesses = st.one_of(
    st.floats(-1e3, 1e3, width=32),
    st.sampled_from([0.0, 1e-45, 1e-38, 1e-20, 1e-6, 1e-3, 1e8, 3e38]),
)
kernel_numbers = st.lists(
    st.tuples(st.floats(-1e6, 1e6, width=32), sharpnesses, st.floats(-300, 300, width=32)),
    min_size=2,
    max_size=2,
)


def method_of(kernels, dtype: torch.dtype) -> Tisa:
    method = Tisa(2, kernels=1).to(dtype)
    numbers = torch.tensor(kernels, dtype=torch.float64)
    method.amplitude, method.sharpness, method.offset = numbers.split(1, dim=1)
    return method


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@given(kernels=kernel_numbers, longest=st.integers(0, 2000))
def test_the_extent_never_cuts_a_value_that_is_not_zero(dtype, kernels, longest):
    method = method_of(kernels, dtype)
    extent = method.extent(longest)
    assert extent.dtype == torch.int64
    lag = torch.arange(-longest, longest + 1)
    beyond = method.curve(lag)[lag.abs() > extent[:, None]]
    assert_close(beyond, torch.zeros_like(beyond), rtol=0, atol=0)


@pytest.mark.parametrize("name", ["tisa", "tisa2d"])
def test_gradients_are_finite_for_every_width_and_zero_where_a_gaussian_is_no_wider_than_a_lag(
    name,
):
    method = build(name, n_heads=1, max_length=9, d_head=4)
    log_widths = torch.tensor([-1e3, -89.0, -46.0, 46.0, 1e3])  # float32 ends at about +-88
    with torch.no_grad():
        method.raw_deviation.copy_(log_widths / 32)
        for offset in method.offsets:
            getattr(method, f"raw_{offset}").copy_(torch.tensor([0.0, 1e20, 1.0, 1.0, 0.0]) / 32)
        method.amplitude = 1.0
    lag = torch.arange(-8, 9)
    curve = method.curve(lag) if name == "tisa" else method.surface(lag, lag)
    assert curve.isfinite().all()
    gradients = torch.autograd.grad((curve * torch.randn_like(curve)).sum(), method.parameters())
    assert all(gradient.isfinite().all() for gradient in gradients)
    narrow = dict(zip([n for n, _ in method.named_parameters()], gradients, strict=True))
    assert_close(narrow["raw_deviation"][0, :3], torch.zeros(3), rtol=0, atol=0)


@given(log_width=st.floats(-3, 7))
def test_the_extent_of_a_centred_gaussian_is_its_last_lag_that_is_not_zero(log_width):
    """One more would make a whole tile of a kernel near."""
    method = Tisa(1, kernels=1)
    method.deviation, method.offset, method.amplitude = math.exp(log_width), 0.0, 1.0
    lag = torch.arange(10_000)
    last = lag[method.curve(lag)[0] != 0].max()
    assert method.extent(10_000).item() - last.item() in (0, 1)  # 1 where rounding decides


@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 60), (torch.float64, 120)])
def test_the_extent_is_short_where_the_gaussians_are_narrow(dtype, most):
    """A bound that is always `longest` would be safe and useless."""
    method = Tisa(8, kernels=5, start="released").to(dtype)
    extent = method.extent(10_000)
    assert extent.max() < most
    lag = torch.arange(-10_000, 10_001)
    seen = [lag[row != 0].abs().max() for row in method.curve(lag)]
    assert (extent - torch.stack(seen)).max() < 15


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["raw_amplitude", "raw_deviation", "raw_offset"])
def test_a_parameter_that_is_not_finite_is_named_by_validate(name, value):
    method = Tisa(3, kernels=2)
    method.validate()
    getattr(method, name).data[1, 0] = value
    with pytest.raises(ValueError, match=rf"Tisa\.{name} holds NaN or infinity"):
        method.validate()


@pytest.mark.parametrize(
    ("name", "parameter"),
    [("amplitude", "raw_amplitude"), ("sharpness", "raw_deviation"), ("offset", "raw_offset")],
)
def test_a_nan_that_was_assigned_is_not_hidden(name, parameter):
    method = Tisa(3, kernels=2)
    values = getattr(method, name).detach().clone()
    values[1, 0] = math.nan
    setattr(method, name, values)
    with pytest.raises(ValueError, match=rf"Tisa\.{parameter} holds NaN or infinity"):
        method.validate()
    n = 200
    place = torch.arange(n)
    assert method.extent(n - 1)[1] == n - 1
    bias = bias_of(method, place, place)
    assert bias.trimmed().reach == n - 1
    assert bias.to_dense(place, place)[0, 1].isnan().all()
    q, k, v = torch.randn(3, 1, 3, n, 4).unbind()
    out = positioned_attention(method, q, k, v, backend="reference")
    assert out[:, 1].isnan().all()
    assert out[:, [0, 2]].isfinite().all()


def test_an_infinite_amplitude_is_not_cut_off():
    method = Tisa(1, kernels=1)
    method.amplitude = math.inf
    assert method.extent(500).tolist() == [500]  # inf * 0 is NaN at every far lag


def test_reach_makes_the_function_zero_beyond_it():
    plain, n = Tisa(2), 30
    near = Tisa(2, reach=4)
    near.load_state_dict(plain.state_dict())
    place = torch.arange(n)
    bias = bias_of(near, place, place)
    assert bias.reach == 4
    assert bias.extent.max() <= 4
    lag = (place - place[:, None]).abs()
    want = bias_of(plain, place, place).to_dense(place, place).masked_fill(lag > 4, 0.0)
    got = bias.to_dense(place, place)
    assert_close(got, want)
    assert_close(got[..., lag > 4], torch.zeros_like(got[..., lag > 4]), rtol=0, atol=0)


@pytest.mark.parametrize("n", [1, 3])
def test_reach_beyond_the_sequence_is_no_longer_than_the_sequence(n):
    place = torch.arange(n)
    assert bias_of(Tisa(2, reach=100), place, place).reach == n - 1


def test_a_decoding_row_knows_all_the_lags_it_needs():
    method, n = Tisa(2), 40
    place = torch.arange(n)
    whole = bias_of(method, place, place).to_dense(place, place)
    row = bias_of(method, place[-1:], place).to_dense(place[-1:], place)
    assert_close(row, whole[:, :, -1:], rtol=0, atol=0)


def test_parameters_have_the_names_and_shapes_of_checkpoints():
    state = build("tisa:kernels=5", n_heads=12, d_head=64).state_dict()
    assert list(state) == ["raw_amplitude", "raw_deviation", "raw_offset"]
    assert {tuple(value.shape) for value in state.values()} == {(12, 5)}


@pytest.mark.parametrize("kernels", [1, 3, 5])
def test_twelve_layers_of_twelve_heads_have_3_S_H_L_parameters(kernels):  # noqa: N802
    layers = [build(f"tisa:kernels={kernels}", n_heads=12, d_head=64) for _ in range(12)]
    total = sum(layer.n_parameters() for layer in layers)
    assert total == sum(layer.n_parameters_by_formula() for layer in layers)
    assert total == 3 * kernels * 12 * 12
    assert kernels != 5 or total == 2160


@pytest.mark.parametrize(
    ("name", "mean", "deviation"),
    [("amplitude", 0.1, 0.01), ("sharpness", 0.1, 0.01), ("offset", 0.0, 5.0)],
)
def test_the_released_start_is_the_authors(name, mean, deviation):
    values = getattr(Tisa(100, kernels=100, start="released"), name).detach()
    assert abs(values.mean() - mean) < 5 * deviation / 100
    assert_close(values.std(), torch.tensor(deviation), rtol=0.05, atol=0)


def test_gradients_reach_all_three_parameters():
    method = Tisa(2, kernels=2).double()
    q_pos, k_pos = torch.arange(3, 6), torch.arange(6)

    def matrix(*parameters):  # gradcheck nudges the parameters in place
        return bias_of(method, q_pos, k_pos).to_dense(q_pos, k_pos)

    assert torch.autograd.gradcheck(matrix, tuple(method.parameters()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_bias_keeps_the_methods_dtype(dtype):
    method, place = Tisa(2).to(dtype), torch.arange(5)
    assert bias_of(method, place, place).to_dense(place, place).dtype == dtype


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n_heads": 0}, "n_heads must be at least 1, got 0"),
        ({"n_heads": 2, "kernels": 0}, "kernels must be at least 1, got 0"),
        ({"n_heads": 2, "reach": -1}, "reach must be at least 0, got -1"),
    ],
)
def test_tisa_refuses_what_has_no_meaning(options, message):
    with pytest.raises(ValueError, match=message):
        Tisa(**options)
