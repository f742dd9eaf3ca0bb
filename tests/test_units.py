"""Numbers that are trained in other units than those of the formula (whence.units)."""

import copy
import math
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from hf_models import hidden, inputs, tiny
from models import VOCAB, causal
from shaking import shake
from whence import build
from whence.hf import attach
from whence.methods.tisa import Tisa
from whence.methods.tisa2d import Tisa2d
from whence.units import GAIN, VECTOR_GAIN

SPECS = ["tisa", "tisa2d:width=3", "t5", "table2d:prefix=1", "shaw:clip=2", "shaw:keys=false"]


def small(spec: str):
    method = build(spec, n_heads=2, d_head=4, max_length=9)
    shake(method, 0.5)
    return method


STEPS = {
    "an amplitude": ("tisa", "raw_amplitude", lambda m: m.amplitude, GAIN),
    "the logarithm of a width": ("tisa", "raw_deviation", lambda m: m.deviation.log(), GAIN),
    "an offset in widths": ("tisa", "raw_offset", lambda m: m.offset / m.deviation, GAIN),
    "an offset on a grid": ("tisa2d", "raw_offset_y", lambda m: m.offset_y / m.deviation, GAIN),
    "a number of T5": ("t5", "raw_table", lambda m: m.table, GAIN),
    "a number of a grid's table": ("table2d", "raw_table", lambda m: m.table, GAIN),
    "a vector for keys": ("shaw", "raw_key_table", lambda m: m.key_table, VECTOR_GAIN),
    "a vector for values": ("shaw", "raw_value_table", lambda m: m.value_table, VECTOR_GAIN),
}


@pytest.mark.parametrize("what", STEPS)
def test_a_step_of_adam_moves_a_number_by_its_gain_times_the_rate(what):
    spec, parameter, read, gain = STEPS[what]
    method, rate = small(spec).double(), 1e-3
    before = read(method).detach()
    optimizer = torch.optim.Adam([method.get_parameter(parameter)], lr=rate)
    read(method).sum().backward()
    optimizer.step()
    assert_close(before - read(method), torch.full_like(before, gain * rate), rtol=1e-6, atol=0)


numbers = st.floats(-1e6, 1e6, width=32)
sharpnesses = st.one_of(
    st.floats(-1e3, 1e3, width=32), st.sampled_from([0.0, 1e-45, -1e-30, 1e-9, 1e8, -1e29])
)


@pytest.mark.parametrize("cls", [Tisa, Tisa2d])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@given(amplitude=numbers, sharpness=sharpnesses, offset=numbers)
def test_what_was_assigned_is_read_back(cls, dtype, amplitude, sharpness, offset):
    method = (cls(1, kernels=1) if cls is Tisa else cls(1, 16, kernels=1)).to(dtype)
    method.amplitude, method.sharpness = amplitude, sharpness
    # A width is held as its logarithm, which is 44 at most: that many roundings of float32.
    near = {"rtol": 2e-5 if dtype == torch.float32 else 1e-12, "atol": 2e-38}  # no width is endless
    assert_close(method.amplitude.item(), amplitude, rtol=3e-7, atol=1e-38)
    assert_close(method.sharpness.item(), abs(sharpness), **near)
    for name in method.offsets:
        setattr(method, name, offset)
        assert_close(getattr(method, name).item(), offset, rtol=near["rtol"], atol=1e-20)


@given(first=sharpnesses, second=sharpnesses, offset=st.floats(-300, 300, width=32))
def test_assigning_the_sharpness_leaves_the_offset_where_it_was(first, second, offset):
    method = Tisa(1, kernels=1)
    method.sharpness, method.offset = first, offset
    method.sharpness = second
    assert_close(method.offset.item(), offset, rtol=1e-6, atol=1e-20)


@pytest.mark.parametrize("spec", ["t5", "table2d", "shaw:clip=2"])
def test_a_table_that_was_assigned_is_read_back(spec):
    method = small(spec)
    for name in method.former_names:
        table = torch.randn(getattr(method, name).shape)
        setattr(method, name, table)
        assert_close(getattr(method, name), table, rtol=2e-7, atol=0)
        getattr(method, name).data.zero_()
        assert_close(getattr(method, name), table, rtol=2e-7, atol=0)


@pytest.mark.parametrize("spec", SPECS)
def test_numbers_of_half_precision_are_converted_in_full(spec):
    method = small(spec)
    for name in method.former_names:
        value = (3 * torch.rand(getattr(method, name).shape) + 0.1).bfloat16()
        setattr(method, name, value)
        assert_close(getattr(method, name), value.float(), rtol=2e-6, atol=1e-6)


def test_assigned_numbers_give_the_formula_pair_by_pair():
    method = Tisa(3, kernels=4).double()
    a, b, c = (
        torch.randn(3, 3, 4, dtype=torch.float64) * torch.tensor([2.0, 0.3, 9.0])[:, None, None]
    )
    method.amplitude, method.sharpness, method.offset = a, b, c
    want = [
        [
            sum(
                a[h, s].item() * math.exp(-abs(b[h, s].item()) * (lag - c[h, s].item()) ** 2)
                for s in range(4)
            )
            for lag in range(-30, 31)
        ]
        for h in range(3)
    ]
    got = method.curve(torch.arange(-30, 31))
    assert_close(got, torch.tensor(want, dtype=torch.float64), rtol=1e-10, atol=1e-12)


def test_gradients_of_the_curves_are_right():
    line, grid = (small(spec).double() for spec in ("tisa:kernels=2", "tisa2d:kernels=2"))
    lag = torch.arange(-4, 5)
    assert torch.autograd.gradcheck(lambda *_: line.curve(lag), tuple(line.parameters()))
    assert torch.autograd.gradcheck(lambda *_: grid.surface(lag, lag), tuple(grid.parameters()))


CASTS = {
    "bfloat16()": lambda m: m.bfloat16(),
    "half()": lambda m: m.half(),
    "to(float16)": lambda m: m.to(torch.float16),
    "to(a tensor)": lambda m: m.to(torch.zeros(1, dtype=torch.bfloat16)),
}


@pytest.mark.parametrize("cast", CASTS)
@pytest.mark.parametrize("kind", ["native", "attached"])
def test_numbers_that_make_up_a_logit_stay_in_float32_in_a_model_of_half_precision(kind, cast):
    if kind == "native":
        model, given = causal("tisa+t5+shaw"), {"input_ids": torch.randint(2, VOCAB, (1, 9))}
    else:
        model, given = tiny("bert"), inputs("bert")
        shake(attach(model, "tisa+t5+shaw").model.whence, 0.5)
    before = {key: p.detach().clone() for key, p in model.named_parameters()}
    CASTS[cast](model)
    dtype = model.get_input_embeddings().weight.dtype
    assert dtype in (torch.float16, torch.bfloat16)
    kept = {key for key, p in model.named_parameters() if p.dtype == torch.float32}
    assert kept == {key for key in before if "tisa.raw" in key or "t5.raw" in key}
    for key in kept:
        assert_close(model.get_parameter(key), before[key], rtol=0, atol=0)
    out = hidden(model, given)
    assert out.dtype == dtype
    assert out.isfinite().all()
    model.double()
    assert {p.dtype for p in model.parameters()} == {torch.float64}


@pytest.mark.parametrize("spec", SPECS)
def test_copies_pickles_and_state_dicts_hold_the_same_bits(spec):
    method = small(spec)
    fresh = build(spec, n_heads=2, d_head=4, max_length=9)
    fresh.load_state_dict(method.state_dict())
    for twin in (copy.deepcopy(method), pickle.loads(pickle.dumps(method)), fresh):
        assert_close(twin.state_dict(), method.state_dict(), rtol=0, atol=0)
        for name in method.former_names:
            assert_close(getattr(twin, name), getattr(method, name), rtol=0, atol=0)
        for name in method.former_names:
            setattr(twin, name, 7.0)
            assert not torch.allclose(getattr(method, name), torch.tensor(7.0))


@pytest.mark.parametrize("spec", ["tisa", "t5", "shaw"])
def test_numbers_of_another_shape_are_refused(spec):
    method = small(spec)
    for name in method.former_names:
        shape = getattr(method, name).shape
        with pytest.raises(ValueError, match=r"has the shape .* and was given \(.*, 1\)"):
            setattr(method, name, torch.ones(*shape[:-1], 1))


def test_a_parameter_may_be_assigned_as_any_tensor():
    method, table = build("t5", n_heads=2, d_head=4), torch.nn.Parameter(torch.randn(32, 2))
    method.table = table
    assert_close(method.table.detach(), table.detach(), rtol=0, atol=0)
    assert list(method.state_dict()) == ["raw_table"]


def test_a_method_without_memory_is_filled_from_numbers_of_an_earlier_version():
    with torch.device("meta"):
        method = build("kerple", n_heads=2, d_head=4)
    method.load_state_dict({"raw_p": torch.ones(2), "raw_a": torch.zeros(2)}, assign=True)
    assert_close(method.p.detach(), torch.full((2,), 1.3132617))


def test_a_tensor_with_a_gradient_is_refused_as_it_would_lose_it():
    one, other = (build("tisa", n_heads=2, d_head=4) for _ in range(2))
    with pytest.raises(ValueError, match=r"Tisa\.amplitude was given a tensor with a gradient"):
        one.amplitude = other.amplitude
    one.amplitude = other.amplitude.detach()


def test_a_table_that_was_not_built_cannot_be_assigned():
    with pytest.raises(ValueError, match="this Shaw has no key_table"):
        build("shaw:keys=false", n_heads=2, d_head=4).key_table = torch.zeros(1, 33, 4)


def test_assigning_a_deviation_leaves_the_offsets_and_refuses_none():
    method = build("tisa", n_heads=2, d_head=4)
    method.offset = 2.0
    method.deviation = 7.0
    assert_close(method.offset.detach(), torch.full((2, 5), 2.0))
    with pytest.raises(ValueError, match="a deviation must be above 0"):
        method.deviation = 0.0
