"""Where learned biases begin: near keys first, or without an effect."""

import pytest
import torch
from torch.testing import assert_close

from hf_models import hidden, inputs, tiny
from whence import build
from whence.hf import attach, attached
from whence.method import Content
from whence.methods.content_band import ContentBand
from whence.methods.shaw import Shaw
from whence.methods.starts import NARROWEST, WIDEST, powers
from whence.methods.t5 import T5
from whence.methods.table2d import Table2d
from whence.methods.tisa import Tisa
from whence.methods.tisa2d import Tisa2d

LENGTHS = (1, 2, 4, 512, 100_000)


def dense(method, n: int) -> torch.Tensor:
    pos = torch.arange(n)
    return method.score_term(torch.zeros(1, method.n_heads, n, 4), pos, pos).to_dense(pos, pos)[0]


@pytest.mark.parametrize("kernels", [1, 2, 5, 8])
@pytest.mark.parametrize("max_length", LENGTHS)
def test_local_tisa_is_finite_even_and_never_increases_with_the_distance(kernels, max_length):
    method = Tisa(4, kernels=kernels, max_length=max_length)
    method.validate()
    lag = torch.arange(min(max_length, 600))
    curve = method.curve(lag)
    assert_close(method.curve(-lag), curve, rtol=0, atol=0)
    assert curve.isfinite().all()
    assert (curve.diff(dim=1) <= 0).all()


def test_local_tisa_is_steepest_in_the_first_head():
    curve = Tisa(4).curve(torch.arange(100))
    drop = curve[:, 1] - curve[:, -1]
    assert (drop.diff() < 0).all()
    assert drop[0] > 20 * drop[-1] > 0


@pytest.mark.parametrize("max_length", LENGTHS)
def test_the_widths_of_local_tisa_go_from_half_a_lag_to_a_quarter_of_the_length(max_length):
    width = Tisa(2, kernels=5, max_length=max_length).deviation
    most = max(NARROWEST, min(WIDEST, max_length / 4))
    assert_close(width[:, 0], torch.full((2,), NARROWEST), rtol=1e-5, atol=0)
    assert_close(width[:, -1], torch.full((2,), most), rtol=1e-5, atol=0)
    alone = Tisa(2, kernels=1, max_length=max_length).deviation  # their geometric mean
    assert_close(alone, torch.full((2, 1), (NARROWEST * most) ** 0.5), rtol=1e-5, atol=0)


@pytest.mark.parametrize(("kernels", "least"), [(5, 0.85), (8, 0.97)])
@pytest.mark.parametrize("max_length", [64, 512, 1024])
def test_local_tisa_falls_as_the_logarithm_of_the_lag(max_length, kernels, least):
    """From lag 1 to any other, to an eighth of the length, by `least` to 1.01 of p_h log |lag|."""
    method, lag = Tisa(6, kernels=kernels, max_length=max_length), torch.arange(2, max_length // 8)
    fall = method.curve(torch.tensor([1])) - method.curve(lag)
    share = fall / (powers(6)[:, None] * lag.log())
    assert share.min() > least
    assert share.max() < 1.01


def test_a_model_tells_tisa_how_long_its_sequences_are():
    assert build("tisa", n_heads=2, d_head=4, max_length=64).deviation.max() < 17


STARTS = {
    Tisa: (["local", "released", "zero"], lambda start: Tisa(4, start=start)),
    Tisa2d: (["local", "released", "zero"], lambda start: Tisa2d(4, 16, start=start)),
    T5: (["local", "normal", "zero"], lambda start: T5(4, start=start)),
    Table2d: (["local", "normal", "zero"], lambda start: Table2d(4, 16, start=start)),
    Shaw: (["wide", "xavier", "zero"], lambda start: Shaw(4, 8, start=start)),
    ContentBand: (["local", "normal", "zero"], lambda start: ContentBand(4, 32, start=start)),
}
NAMES = {"tisa": Tisa, "tisa2d": Tisa2d, "t5": T5, "table2d": Table2d, "shaw": Shaw}
NAMES |= {"content_band": ContentBand}


@pytest.mark.parametrize("name", NAMES)
def test_an_unknown_start_is_named_with_those_that_are_known(name):
    starts, make = STARTS[NAMES[name]]
    for start in starts:
        make(start).validate()
    for refused in (
        lambda: make("foo"),
        lambda: build(f"{name}:start=foo", n_heads=4, d_head=8, max_length=16),
    ):
        with pytest.raises((ValueError, TypeError), match="foo") as raised:
            # TypeError only where jaxtyping looks at the annotation first
            refused()
        assert all(start in str(raised.value) for start in ("start", *starts))


@pytest.mark.parametrize("name", NAMES)
def test_a_zero_start_adds_exactly_nothing_and_can_leave_it(name):
    method = build(f"{name}:start=zero", n_heads=4, d_head=8, max_length=16)
    q, x, pos = torch.randn(1, 4, 16, 8), torch.randn(1, 16, 32), torch.arange(16)
    bias = method.score_term(q, pos, pos, content=Content(x_q=x)).to_dense(pos, pos)
    assert_close(bias, torch.zeros_like(bias), rtol=0, atol=0)
    (bias * torch.randn_like(bias)).sum().backward()
    leaves = {"tisa": "raw_amplitude", "tisa2d": "raw_amplitude", "content_band": "profiles"}
    leaves |= {"t5": "raw_table", "table2d": "raw_table", "shaw": "raw_key_table"}
    assert method.get_parameter(leaves[name]).grad.abs().max() > 0
    if name == "shaw":
        assert_close(method.value_term(pos, pos).table, torch.zeros(1, 33, 8), rtol=0, atol=0)


@pytest.mark.parametrize("name", ["tisa", "t5", "content_band", "tisa+t5:buckets=8"])
def test_attach_adds_a_method_without_an_effect_unless_told_otherwise(name):
    model, given = tiny("bert"), inputs("bert")
    before = hidden(model, given)
    attach(model, name)
    assert_close(hidden(model, given), before, rtol=0, atol=0)
    assert attached(model).position.count("start=zero") == 1 + name.count("+")


@pytest.mark.parametrize("spec", ["shaw", "shaw:values=false"])
def test_attach_adds_shaw_without_an_effect_but_by_a_function_that_rounds_anew(spec):
    """The model's own attention function has no term for values, so `attend` runs it."""
    model, given = tiny("bert"), inputs("bert")
    before = hidden(model, given)
    attach(model, spec)
    assert_close(hidden(model, given), before, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "spec", ["tisa:start=local", "tisa:start=released", "t5:start=local", "shaw:start=wide"]
)
def test_attach_takes_the_start_that_the_text_names(spec):
    model, given = tiny("bert"), inputs("bert")
    before = hidden(model, given)
    handle = attach(model, spec)
    assert handle.position == spec
    assert not torch.allclose(hidden(model, given), before, atol=1e-3)


@pytest.mark.parametrize("buckets", [4, 7, 32])
def test_local_t5_is_even_in_a_bidirectional_model_and_decreases_with_the_distance(buckets):
    bias = dense(T5(3, buckets=buckets), 200)
    assert_close(bias, bias.mT, rtol=1e-6, atol=0)
    row = bias[:, 0]
    assert (row.diff(dim=1) <= 0).all()
    assert (row[:, 0] > row[:, -1]).all()
    assert_close(row[:, 0], torch.zeros(3), rtol=0, atol=0)


def test_local_t5_of_a_causal_model_decreases_into_the_past():
    row = dense(T5(3, causal=True), 200)[:, -1].flip(-1)
    assert (row.diff(dim=1) <= 0).all()
    assert (row[:, 0] > row[:, -1]).all()
    exact = -powers(3)[:, None] * torch.arange(16.0).log1p()  # buckets of one lag each
    assert_close(row[:, :16], exact, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("make", [Table2d, Tisa2d])
def test_local_biases_on_a_grid_depend_on_the_distance_alone_and_decrease_with_it(make):
    side = 6
    bias = dense(make(4, side * side), side * side)
    patch = torch.arange(side * side)
    place = torch.stack([patch // side, patch % side], dim=-1).float()
    distance = torch.cdist(place, place)
    order = distance.flatten().argsort(stable=True)
    far, values = distance.flatten()[order], bias.flatten(1)[:, order]
    same = far.diff() < 1e-4
    steps = values.diff(dim=1)
    assert_close(steps[:, same], torch.zeros_like(steps[:, same]), rtol=0, atol=1e-5)
    assert (steps[:, ~same] < 0).all()
    drop = values[:, 0] - values[:, -1]
    assert (drop.diff() < 0).all()


def test_pairs_with_a_prefix_begin_without_a_preference():
    for method in (Table2d(2, 17, prefix=1), Tisa2d(2, 17, prefix=1)):
        bias = dense(method, 17)
        assert not bias[:, 0].any()
        assert not bias[:, :, 0].any()


def test_wide_shaw_tells_lags_apart_and_adds_little_to_values():
    method = Shaw(4, 64, per_head=True)
    assert_close(method.key_table.std().item(), 1.0, rtol=0.05, atol=0)
    assert method.value_table.abs().max() <= (6 / (33 + 64)) ** 0.5 * (1 + 1e-6)


def test_local_content_bands_mix_profiles_that_fall_with_the_distance():
    method = ContentBand(2, 32, rank=4, width=64)
    assert (method.profiles.diff(dim=1) <= 0).all()
    assert_close(method.profiles[:, 0], torch.ones(4), rtol=0, atol=0)
    assert_close(method.mix.weight.std().item(), 0.1, rtol=0.1, atol=0)
