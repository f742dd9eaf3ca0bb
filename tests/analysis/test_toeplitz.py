"""Toeplitzness and its relatives, on matrices whose answer is known."""

import numpy as np
import pytest
import scipy.linalg
import scipy.stats
import torch
from hypothesis import given
from hypothesis import strategies as st

from whence.analysis.results import TableReport
from whence.analysis.toeplitz import (
    diagonals,
    monotonicity,
    principal_components,
    symmetry,
    table_report,
    toeplitzness,
    window_stops,
)
from whence.methods.sinusoidal import Sinusoidal

sizes, seeds = st.integers(4, 24), st.integers(0, 10_000)


def close(found, expected, **bounds) -> None:
    torch.testing.assert_close(
        torch.as_tensor(found, dtype=torch.float64),
        torch.as_tensor(expected, dtype=torch.float64),
        **bounds,
    )


def report(table):
    return table_report(table, space="", rows="")


def by_loops(matrix, *, main=True, causal=False) -> float:
    n = len(matrix)
    cells = [
        (i, j) for i in range(n) for j in range(n) if (main or i != j) and (not causal or j <= i)
    ]
    everything = [matrix[i, j] for i, j in cells]
    middle = sum(everything) / len(everything)
    left = 0.0
    for i, j in cells:
        diagonal = [matrix[a, b] for a, b in cells if b - a == j - i]
        left += (matrix[i, j] - sum(diagonal) / len(diagonal)) ** 2
    return 1 - left / sum((x - middle) ** 2 for x in everything)


@pytest.mark.parametrize("n", [4, 5, 9])
@pytest.mark.parametrize("causal", [False, True])
def test_r2_equals_the_loops_of_its_definition(n, causal):
    matrix = np.random.default_rng(n).normal(size=(n, n))
    found = diagonals(matrix, causal=causal)
    close(found.r2(), by_loops(matrix, causal=causal))
    close(found.r2(main=False), by_loops(matrix, main=False, causal=causal))
    close(found.mean, [np.diagonal(matrix, int(lag)).mean() for lag in found.lag])
    close(found.spread(), [np.diagonal(matrix, int(lag)).std() for lag in found.lag])


def test_a_perfect_toeplitz_matrix_has_r2_1():
    random = np.random.default_rng(0)
    found = diagonals(scipy.linalg.toeplitz(random.normal(size=40), random.normal(size=40)))
    close([found.r2(), found.r2(main=False)], [1.0, 1.0])


def test_a_sinusoidal_table_has_r2_1_in_every_window():
    table = Sinusoidal(d_model=384).double().input_term(torch.arange(512)).numpy()
    found = report(table)
    for part in (found.whole, *found.windows):
        close([part.r2, part.r2_off_diagonal], [1.0, 1.0], atol=1e-9, rtol=0)
    close(found.symmetry, 1.0, atol=1e-9, rtol=0)


def test_a_matrix_of_white_noise_has_r2_of_about_2_over_n():
    noise = np.random.default_rng(0).normal(size=(512, 512))
    close(diagonals(noise).r2(), 2 / 512, atol=3e-4, rtol=0)


def test_a_random_table_is_its_own_null_and_only_its_diagonal_makes_it_look_toeplitz():
    found = report(np.random.default_rng(1).normal(size=(512, 384))).whole
    close(found.r2, 0.43, atol=0.005, rtol=0)
    close(found.null_r2, 0.43, atol=0.005, rtol=0)
    close(found.r2_off_diagonal, 0.004, atol=5e-4, rtol=0)
    close(found.null_r2_off_diagonal, 0.004, atol=5e-4, rtol=0)


def test_the_null_keeps_the_norms_of_the_rows():
    """One row of a thousand times the norm leaves R^2 to that row's own cell."""
    table = np.random.default_rng(0).normal(size=(64, 32))
    plain = report(table).whole.null_r2
    table[0] *= 1000
    assert report(table).whole.null_r2 < 0.1 < 0.3 < plain


def test_the_null_is_the_same_on_every_call():
    table = np.random.default_rng(0).normal(size=(20, 8))
    assert report(table).to_json() == report(table).to_json()


@given(n=sizes, seed=seeds, scale=st.floats(0.01, 100), constant=st.floats(-100, 100))
def test_r2_does_not_change_with_scale_or_a_constant(n, seed, scale, constant):
    matrix = np.random.default_rng(seed).normal(size=(n, n))
    for main in (True, False):
        close(
            diagonals(scale * matrix + constant).r2(main=main),
            diagonals(matrix).r2(main=main),
            atol=1e-7,
            rtol=0,
        )


@given(n=sizes, seed=seeds)
def test_r2_lies_in_0_to_1_and_is_the_same_for_the_transpose_and_the_reverse(n, seed):
    matrix = np.random.default_rng(seed).normal(size=(n, n))
    found = diagonals(matrix).r2()
    assert 0 <= found <= 1
    close(diagonals(matrix.T).r2(), found)
    close(diagonals(matrix[::-1, ::-1]).r2(), found)


@given(n=sizes, seed=seeds)
def test_the_fit_has_r2_1_and_what_is_left_of_it_0(n, seed):
    matrix = np.random.default_rng(seed).normal(size=(n, n))
    curve = diagonals(matrix).mean
    fit = curve[np.arange(n)[None] - np.arange(n)[:, None] + n - 1]
    close(diagonals(fit).r2(), 1.0)
    close(diagonals(matrix - fit).r2(), 0.0, atol=1e-12, rtol=0)


@given(n=sizes, value=st.floats(-1e6, 1e6))
def test_a_constant_matrix_has_no_variance_and_no_r2(n, value):
    matrix = np.full((n, n), value)
    found = diagonals(matrix)
    assert (found.r2(), found.r2(main=False)) == (None, None)
    assert (found.strength(), symmetry(matrix), monotonicity(matrix)) == (0.0, None, None)


def test_windows_leave_out_row_0_and_hold_rows_1_to_63():
    assert window_stops(512) == (16, 32, 64, 128, 256, 512)
    assert window_stops(1500)[-2:] == (1024, 1500)
    assert window_stops(4) == ()
    gram = np.random.default_rng(0).normal(size=(70, 70))
    close(toeplitzness(gram, [], 1, 64).r2, diagonals(gram[1:64, 1:64]).r2())
    assert toeplitzness(gram, [], 1, 64).null_r2 is None


def test_monotonicity_is_the_mean_of_spearmans_correlations():
    gram = np.random.default_rng(0).normal(size=(9, 9))
    rows = []
    for i in range(9):
        others = [j for j in range(9) if j != i]
        rows.append(scipy.stats.spearmanr(gram[i, others], [-abs(i - j) for j in others])[0])
    close(monotonicity(gram), np.mean(rows))


def test_monotonicity_is_1_where_every_step_away_lowers_the_product():
    lag = np.arange(30)[None] - np.arange(30)[:, None]
    close(monotonicity(-np.abs(lag).astype(float)), 1.0)
    close(monotonicity(np.abs(lag).astype(float)), -1.0)


def test_symmetry_compares_the_two_sides_of_each_row():
    lag = np.arange(20)[None] - np.arange(20)[:, None]
    close(symmetry(np.cos(lag / 3.0)), 1.0)
    assert symmetry(np.sin(lag / 3.0)) == 0.0
    gram = np.random.default_rng(0).normal(size=(7, 7))
    x, y = [], []
    for i in range(7):
        for k in range(1, 7):
            if i - k >= 0 and i + k < 7:
                x.append(gram[i, i - k])
                y.append(gram[i, i + k])
    covariance = np.cov(x, y, bias=True)
    expected = (
        2
        * covariance[0, 1]
        / (covariance[0, 0] + covariance[1, 1] + (np.mean(x) - np.mean(y)) ** 2)
    )
    close(symmetry(gram), max(0.0, expected))


@pytest.mark.parametrize("shape", [(12, 5), (6, 20)])
def test_components_equal_those_of_a_singular_value_decomposition(shape):
    table = np.random.default_rng(0).normal(size=shape)
    share, scores = principal_components(table @ table.T, min(shape))
    u, s, _ = np.linalg.svd(table - table.mean(axis=0), full_matrices=False)
    close(share, s**2 / (s**2).sum(), atol=1e-9, rtol=0)
    close(np.abs(scores), np.abs(u * s), atol=1e-6, rtol=0)


def test_a_table_of_one_cosine_has_one_component_at_its_frequency():
    wave = np.cos(2 * np.pi * 8 * np.arange(64) / 64)
    found = report(np.outer(wave, np.random.default_rng(0).normal(size=10)))
    close(found.effective_dimensions, 1.0)
    assert found.components_for_90 == 1
    first = found.components[0]
    close(first.frequency[first.power.argmax()], 8 / 64)
    close(first.power.max(), 1.0, atol=1e-5, rtol=0)


def test_a_table_of_k_equal_directions_has_k_effective_dimensions():
    table = np.linalg.qr(np.random.default_rng(0).normal(size=(40, 6)))[0]
    table -= table.mean(axis=0)
    table = np.linalg.qr(table)[0]
    close(report(table).effective_dimensions, 6.0, atol=1e-6, rtol=0)


def test_the_null_of_the_effective_dimensions_is_that_of_a_random_table():
    random = np.random.default_rng(3)
    table = random.normal(size=(96, 48))
    found = report(table)
    close(found.null_effective_dimensions, found.effective_dimensions, atol=0, rtol=0.03)
    close(found.null_effective_dimensions, 96 * 48 / (96 + 48), atol=0, rtol=0.05)
    smooth = np.cos(np.arange(96)[:, None] / 5 + np.arange(48))
    assert report(smooth).effective_dimensions < 3 < 25 < report(smooth).null_effective_dimensions


@pytest.mark.parametrize("value", [0.0, 0.1, -1e6])
def test_a_table_without_variance_has_no_number_for_what_explains_it(value):
    found = report(np.full((40, 3), value))
    for part in (found.whole, *found.windows):
        assert (part.r2, part.r2_off_diagonal) == (None, None)
    assert (found.symmetry, found.monotonicity) == (None, None)
    assert (found.effective_dimensions, found.components_for_90) == (None, None)
    assert (found.components, found.explained.size) == ((), 0)
    assert TableReport.from_json(found.to_json()).to_json() == found.to_json()
    assert (found.whole.null_r2 is None) == (value == 0)


def test_one_vector_a_position_leaves_nothing_to_explain_off_the_diagonal():
    found = report(np.eye(8)).whole
    assert (found.r2, found.r2_off_diagonal) == (pytest.approx(1.0), None)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("measure", [report, diagonals, monotonicity, symmetry])
def test_a_number_that_is_none_is_refused_and_counted(measure, bad):
    table = np.random.default_rng(0).normal(size=(8, 8))
    table[3, 2] = bad
    with pytest.raises(ValueError, match="has NaN or infinity in 1 of 64 numbers"):
        measure(table)


def test_vectors_too_long_for_their_products_and_tables_of_nothing_are_refused():
    with pytest.raises(ValueError, match="too large for float64"):
        report(np.full((8, 4), 1e200))
    with pytest.raises(ValueError, match="without dimensions"):
        report(np.ones((8, 0)))
    with pytest.raises(ValueError, match="has 0 positions"):
        report(np.ones((0, 3)))
    with pytest.raises(ValueError, match="without rows"):
        diagonals(np.ones((0, 0)))
    one = diagonals(np.ones((1, 1)))
    assert (one.r2(), one.r2(main=False), symmetry(np.ones((1, 1)))) == (None, None, None)


def test_a_table_of_two_rows_is_refused():
    with pytest.raises(ValueError, match=r"has 2 positions; .* from 4 on"):
        report(np.ones((2, 3)))
