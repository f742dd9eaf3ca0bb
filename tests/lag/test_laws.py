"""The laws of the lag algebra: sums, widening, rows and shifts never change the function."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from whence import DenseBias, LagBias, LagValues, Line, LowRankBias, build
from whence.lag import Terms

BATCH, HEADS = 2, 3
lengths = st.integers(1, 9)
seeds = st.integers(0, 2**20)


def rand(*shape: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


@st.composite
def lines(draw, axes: tuple[int, int, int]) -> Line:
    parts = {}
    for name in draw(st.sets(st.sampled_from(["const", "slope"]))):
        shape = [draw(st.sampled_from(sorted({1, size}))) for size in axes]
        parts[name] = rand(*shape, seed=draw(seeds))
    return Line(**parts)


@st.composite
def lag_biases(draw, n: int, *, tails: bool | None = None) -> LagBias:
    """Any lag bias that n queries at the last n of at most n keys may ask every lag of."""
    axes = tuple(draw(st.sampled_from(sorted({1, size}))) for size in (BATCH, HEADS, n))
    has_tails = draw(st.booleans()) if tails is None else tails
    reach = draw(st.integers(0, n + 2) if has_tails else st.integers(n - 1, n + 2))
    band = rand(*axes, 2 * reach + 1, seed=draw(seeds))
    if not has_tails:
        return LagBias(band)
    return LagBias(band, draw(lines(axes)), draw(lines(axes)))


def dense(bias, n: int, *, shift: int = 0) -> Tensor:
    place = torch.arange(n) + shift
    return bias.to_dense(place, place).expand(BATCH, HEADS, n, n)


@given(data=st.data(), n=lengths)
def test_to_dense_is_the_band_near_and_a_line_in_the_distance_far(data, n):
    bias = data.draw(lag_biases(n))
    want = torch.empty(BATCH, HEADS, n, n, dtype=torch.float64)
    for i, j, row, key in itertools.product(*map(range, want.shape)):
        lag = key - row
        if abs(lag) <= bias.reach:
            want[i, j, row, key] = own(bias.band, i, j, row)[lag + bias.reach]
        else:
            tail = bias.left if lag < 0 else bias.right
            const = 0.0 if tail.const is None else own(tail.const, i, j, row)
            slope = 0.0 if tail.slope is None else own(tail.slope, i, j, row)
            want[i, j, row, key] = const + slope * abs(lag)
    assert_close(dense(bias, n), want)


def own(x: Tensor, *place: int) -> Tensor:
    """x at a place; an axis of size 1 serves every place."""
    for at in place:
        x = x[at if len(x) > 1 else 0]
    return x


@given(data=st.data(), n=lengths)
def test_the_sum_of_two_biases_is_the_bias_of_the_sum(data, n):
    a, b = data.draw(lag_biases(n)), data.draw(lag_biases(n))
    total = a + b
    assert isinstance(total, LagBias)
    assert_close(dense(total, n), dense(a, n) + dense(b, n))


@given(data=st.data(), n=lengths)
def test_addition_is_commutative_and_associative(data, n):
    a, b, c = (data.draw(lag_biases(n)) for _ in range(3))
    assert_close(dense(a + b, n), dense(b + a, n), rtol=0, atol=0)
    assert_close(dense((a + b) + c, n), dense(a + (b + c), n))


@given(data=st.data(), n=lengths, more=st.integers(0, 5))
def test_widening_changes_nothing(data, n, more):
    bias = data.draw(lag_biases(n, tails=True))
    wide = bias.widen(bias.reach + more)
    assert wide.reach == bias.reach + more
    assert_close(dense(wide, n), dense(bias, n), rtol=0, atol=0)


@given(data=st.data(), n=lengths, more=st.integers(0, 5))
def test_narrowing_undoes_widening(data, n, more):
    bias = data.draw(lag_biases(n, tails=True))
    again = bias.widen(bias.reach + more).narrow(bias.reach)
    assert_close(again.band.expand_as(bias.band), bias.band, rtol=0, atol=0)
    assert_close(dense(again, n), dense(bias, n), rtol=0, atol=0)


@given(data=st.data(), n=lengths)
def test_rows_are_the_rows_of_the_full_matrix(data, n):
    start = data.draw(st.integers(0, n - 1))
    stop = data.draw(st.integers(start + 1, n))
    bias = data.draw(lag_biases(n)) + data.draw(lag_biases(n))
    place = torch.arange(n)
    got = bias.rows(start, stop).to_dense(place[start:stop], place)
    assert_close(got, bias.to_dense(place, place)[:, :, start:stop], rtol=0, atol=0)


@given(data=st.data(), n=lengths, shift=st.integers(-(10**6), 10**6))
def test_a_shift_of_all_positions_changes_nothing(data, n, shift):
    bias = data.draw(lag_biases(n))
    assert_close(dense(bias, n, shift=shift), dense(bias, n), rtol=0, atol=0)


@given(data=st.data(), n=lengths)
def test_at_gives_the_lags_asked_for(data, n):
    bias = data.draw(lag_biases(n))
    lag = torch.arange(-(n - 1), 1)  # the last query, whose key is each of them in turn
    got = bias.at(lag)[:, :, -1:].expand(BATCH, HEADS, 1, n)
    assert_close(got, dense(bias, n)[:, :, -1:], rtol=0, atol=0)


@given(data=st.data(), n=lengths)
def test_a_sum_of_different_kinds_is_the_sum_of_their_matrices(data, n):
    lag = data.draw(lag_biases(n))
    low = LowRankBias(rand(1, HEADS, n, 2, seed=1), rand(BATCH, 1, n, 2, seed=2))
    low_too = LowRankBias(rand(BATCH, 1, n, 3, seed=3), rand(1, HEADS, n, 3, seed=4))
    place = torch.arange(n)
    per_query = rand(BATCH, HEADS, n, 1, seed=5)

    def waves(q_pos, k_pos, gate):
        return gate * torch.sin((q_pos[:, None] + k_pos).double())

    wave = DenseBias(waves, place, place, "depends on the sum of the positions", (per_query,))
    parts = data.draw(st.permutations([lag, lag, low, low_too, wave, wave]))
    total = sum(parts[1:], start=parts[0])
    assert isinstance(total, Terms)
    assert isinstance(total.lag, LagBias)
    assert total.low_rank.query.shape[-1] == 5
    assert len(total.dense) == 2
    assert_close(dense(total, n), sum(dense(part, n) for part in parts))
    start = data.draw(st.integers(0, n - 1))
    got = total.rows(start, n).to_dense(place[start:], place)
    assert_close(got, total.to_dense(place, place)[:, :, start:])


def test_a_sum_of_one_kind_is_of_that_kind():
    low = LowRankBias(rand(1, 1, 3, 2, seed=1), rand(1, 1, 4, 2, seed=2))
    assert isinstance(low + low, LowRankBias)
    line = LagBias.line(torch.ones(2))
    assert isinstance(line + line, LagBias)
    assert isinstance(low + line, Terms)


def test_a_sum_of_biases_knows_the_lags_that_all_of_them_know():
    short, long = LagBias(torch.zeros(1, 1, 1, 3)), LagBias(torch.zeros(1, 1, 1, 7))
    with_tails = LagBias(torch.zeros(1, 1, 1, 1), Line(), Line())
    assert (short + long).reach == 1
    assert (long + with_tails).reach == 3
    with pytest.raises(ValueError, match=r"knows lags -1\.\.1 and has no tails, got 2"):
        dense(short + long + with_tails, 3)


sharpnesses = st.sampled_from([0.0, 1e-42, 1e-30, 1e-9, 1e-4, -0.1, 0.1, 1.0, -50.0, 1e6, 1e30])
offsets = st.one_of(st.floats(-70, 70), st.sampled_from([0.0, -0.0, 1e9, -1e9]))


three = {"min_size": HEADS, "max_size": HEADS}  # one kernel a head
tisa_numbers = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from([torch.float32, torch.float64]),
        "amplitude": st.lists(st.floats(-1e3, 1e3), **three),
        "sharpness": st.lists(sharpnesses, **three),
        "offset": st.lists(offsets, **three),
    }
)


def tisa_of(numbers):
    method = build("tisa:kernels=1", n_heads=HEADS, d_head=4).to(numbers["dtype"])
    for name in ("amplitude", "sharpness", "offset"):
        setattr(method, name, torch.tensor(numbers[name], dtype=torch.float64)[:, None])
    return method


def bias_of(method, n: int) -> LagBias:
    place, q = torch.arange(n), torch.zeros(1, 1, n, 4)
    return method.score_term(q, place, place)


@given(numbers=tisa_numbers, n=st.integers(1, 70))
def test_a_trimmed_tisa_is_the_same_function_bit_for_bit(numbers, n):
    bias = bias_of(tisa_of(numbers), n)
    trimmed = bias.trimmed()
    assert trimmed.reach <= bias.reach
    place = torch.arange(n)
    assert_close(trimmed.to_dense(place, place), bias.to_dense(place, place), rtol=0, atol=0)


@given(
    numbers=tisa_numbers,
    n=st.integers(1, 70),
    others=st.lists(st.sampled_from(["alibi", "t5:max_distance=20"]), max_size=4),
)
def test_a_trimmed_sum_with_tails_is_the_same_function_bit_for_bit(numbers, n, others):
    bias = bias_of(tisa_of(numbers), n)
    for name in others:
        other = build(name, n_heads=HEADS, d_head=4).to(numbers["dtype"])
        for number in [*other.parameters(), *other.buffers()]:
            if number.is_floating_point():
                number.data.mul_(1 + torch.rand_like(number))  # no round numbers
        bias = bias + bias_of(other, n)
    place = torch.arange(n)
    assert_close(bias.trimmed().to_dense(place, place), bias.to_dense(place, place), rtol=0, atol=0)


@pytest.mark.parametrize("others", [["alibi"] * 2, ["t5", "alibi", "t5"], ["t5", "t5", "alibi"]])
def test_tails_that_round_in_another_order_than_the_band_are_not_trimmed(others):
    n, place = 300, torch.arange(300)
    bias = bias_of(build("tisa", n_heads=3, d_head=4), n)
    for name in others:
        other = build("alibi:learned=true" if name == "alibi" else name, n_heads=3, d_head=4)
        torch.nn.init.normal_(next(other.parameters()))
        bias = bias + bias_of(other, n)
    assert_close(bias.trimmed().to_dense(place, place), bias.to_dense(place, place), rtol=0, atol=0)


def test_the_extent_of_a_sum_has_a_number_for_each_head_of_the_sum():
    one_head = bias_of(build("tisa", n_heads=1, d_head=4), 50)
    three_heads = bias_of(build("alibi", n_heads=3, d_head=4), 50)
    for total in (one_head + three_heads, three_heads + one_head):
        assert total.band.shape[1] == 3
        assert_close(total.extent, one_head.extent.expand(3))


def test_tisa_keeps_its_extent_in_a_sum_with_alibi_or_t5_or_both():
    tisa, alibi, t5 = (
        bias_of(build(name, n_heads=3, d_head=4), 300)
        for name in ("tisa:start=released", "alibi", "t5")
    )
    assert_close((tisa + alibi).extent, tisa.extent)
    assert (t5 + tisa).extent.tolist() == [t5.reach] * 3
    assert (alibi + tisa + t5).extent.tolist() == [t5.reach] * 3


def test_a_bias_without_extent_or_tails_is_its_own_trimmed():
    for bias in (LagBias(torch.zeros(1, 1, 1, 5)), LagBias.clipped(torch.zeros(1, 1, 1, 5))):
        assert bias.trimmed() is bias


def test_a_line_needs_no_table():
    bias = LagBias.line(torch.tensor([1.0, -2.0]))
    assert bias.reach == 0
    place = torch.arange(5)
    distance = (place[None] - place[:, None]).abs().float()
    assert_close(bias.to_dense(place, place)[0], torch.stack([distance, -2 * distance]))


def test_a_clipped_bands_ends_go_on_for_ever():
    band = torch.arange(5.0).view(1, 1, 1, 5)
    got = LagBias.clipped(band).to_dense(torch.tensor([4]), torch.arange(9))
    assert got.flatten().tolist() == [0, 0, 0, 1, 2, 3, 4, 4, 4]


def test_from_function_asks_for_the_lags_in_order():
    bias = LagBias.from_function(lambda lag: torch.stack([lag, 2 * lag]).float(), reach=2)
    assert bias.band.tolist() == [[[[-2, -1, 0, 1, 2]], [[-4, -2, 0, 2, 4]]]]
    with pytest.raises(ValueError, match="reach must be at least 0, got -1"):
        LagBias.from_function(lambda lag: lag[None].float(), reach=-1)


@given(data=st.data(), n=lengths)
def test_a_bias_in_another_dtype_is_the_bias_cast(data, n):
    bias = data.draw(lag_biases(n))
    single = bias.to(torch.float32)
    assert single.to_dense(torch.arange(n), torch.arange(n)).dtype == torch.float32
    assert_close(dense(single, n).double(), dense(bias, n), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("q_axis", [1, 4])
def test_gradients_pass_to_dense_through_band_and_tails(q_axis):
    band = rand(1, 2, q_axis, 3, seed=0).requires_grad_()
    consts = [rand(1, 2, q_axis, seed=s).requires_grad_() for s in (1, 2)]
    slopes = [rand(1, 1, 1, seed=s).requires_grad_() for s in (3, 4)]
    q_pos, k_pos = torch.arange(1, 5), torch.arange(5)

    def matrix(band, left, right, falling, rising):
        return LagBias(band, Line(left, falling), Line(right, rising)).to_dense(q_pos, k_pos)

    assert torch.autograd.gradcheck(matrix, (band, *consts, *slopes))


def test_gradients_pass_through_sums_of_all_kinds():
    band = rand(1, 2, 1, 3, seed=0).requires_grad_()
    query, key = (rand(1, 2, 4, 2, seed=s).requires_grad_() for s in (1, 2))
    place = torch.arange(4)

    def matrix(band, query, key):
        clipped = LagBias.clipped(band)
        square = DenseBias(lambda q, k, x: x.square().sum(-1, True) * k, place, place, "", (query,))
        return (clipped + clipped + LowRankBias(query, key) + square).to_dense(place, place)

    assert torch.autograd.gradcheck(matrix, (band, query, key))


@given(a=st.integers(0, 4), b=st.integers(0, 4), heads=st.sampled_from([1, 3]), seed=seeds)
def test_the_sum_of_two_lag_values_is_the_table_of_the_sum(a, b, heads, seed):
    first, second = (
        LagValues(rand(h, 2 * reach + 1, 5, seed=seed + h)) for h, reach in ((heads, a), (1, b))
    )
    for lag in range(-7, 8):
        want = _value_at(first, lag) + _value_at(second, lag)
        assert_close(_value_at(first + second, lag), want)


@given(reach=st.integers(0, 4), more=st.integers(0, 4), seed=seeds)
def test_widening_lag_values_changes_nothing(reach, more, seed):
    values = LagValues(rand(2, 2 * reach + 1, 5, seed=seed))
    wide = values.widen(reach + more)
    assert wide.reach == reach + more
    for lag in range(-10, 11):
        assert_close(_value_at(wide, lag), _value_at(values, lag), rtol=0, atol=0)


def _value_at(values: LagValues, lag: int) -> Tensor:
    reach = values.reach
    return values.table[:, min(max(lag, -reach), reach) + reach]


def test_an_even_band_is_refused_with_its_shape():
    with pytest.raises(ValueError, match=r"odd last axis \(lags -reach\.\.reach\), got 4 in shape"):
        LagBias(torch.zeros(1, 2, 1, 4))


def test_an_even_value_table_is_refused_with_its_shape():
    with pytest.raises(ValueError, match=r"odd lag axis, got \(1, 4, 8\)"):
        LagValues(torch.zeros(1, 4, 8))


@pytest.mark.parametrize("side", ["left", "right"])
def test_one_tail_without_the_other_is_refused(side):
    with pytest.raises(ValueError, match=r"both tails or neither: give left=Line\(\)"):
        LagBias(torch.zeros(1, 1, 1, 3), **{side: Line()})


def test_a_lag_beyond_a_bias_without_tails_is_an_error_not_a_guess():
    bias = LagBias(torch.zeros(1, 1, 1, 5))
    with pytest.raises(ValueError, match=r"knows lags -2\.\.2 and has no tails, got 3"):
        bias.to_dense(torch.arange(4), torch.arange(4))
    with pytest.raises(ValueError, match="no tails, got 4"):
        bias.to_dense(torch.tensor([4]), torch.arange(3))
    with pytest.raises(ValueError, match="no tails, got 3"):
        bias.widen(3)


@pytest.mark.parametrize("lag", [[-3], [3], [0, 5, 1]])
def test_at_refuses_lags_beyond_a_bias_without_tails(lag):
    with pytest.raises(ValueError, match=r"knows lags -2\.\.2 and has no tails"):
        LagBias(torch.zeros(1, 1, 1, 5)).at(torch.tensor(lag))


def test_too_few_rows_are_refused_with_the_way_out():
    bias = LagBias.clipped(torch.zeros(1, 1, 6, 3))
    with pytest.raises(ValueError, match=r"each of 6 queries, got 2 query positions.*rows\(start"):
        bias.to_dense(torch.arange(2), torch.arange(6))


def test_a_low_rank_bias_answers_only_for_its_own_positions():
    low = LowRankBias(torch.zeros(1, 1, 3, 2), torch.zeros(1, 1, 4, 2))
    with pytest.raises(ValueError, match=r"made for \(queries, keys\) = \(3, 4\), got \(2, 4\)"):
        low.to_dense(torch.arange(2), torch.arange(4))
    # The run-time shape check of the tests speaks first, with its own words.
    with pytest.raises((ValueError, TypeError), match=r"one rank for both factors|bk hk k r"):
        LowRankBias(torch.zeros(1, 1, 3, 2), torch.zeros(1, 1, 4, 3))


def test_narrowing_to_more_and_widening_to_less_are_refused():
    bias = LagBias.clipped(torch.zeros(1, 1, 1, 5))
    with pytest.raises(ValueError, match="cannot widen a LagBias of reach 2 to 1"):
        bias.widen(1)
    with pytest.raises(ValueError, match="cannot narrow a LagBias of reach 2 to 3"):
        bias.narrow(3)
    with pytest.raises(ValueError, match="cannot widen LagValues of reach 1 to 0"):
        LagValues(torch.zeros(1, 3, 2)).widen(0)
