"""TISA fitted to lag curves: planted Gaussians are found, and awkward curves are answered."""

import dataclasses
import itertools
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from whence.analysis.fit import export_tisa, fit_curve, fit_heads, fitted, load_tisa
from whence.analysis.heads import report
from whence.analysis.results import Fit, HeadFits, HeadReport

PLANTED = [  # amplitude, sharpness, offset, level, length
    ([1.5], [0.1], [2.0], -3.0, 512),
    ([-0.7], [0.0001], [-150.0], 0.0, 512),
    ([1.0, -0.5], [0.05, 0.001], [0.0, -4.0], 1.0, 512),
    ([3.0, -2.0], [1.0, 0.2], [0.0, 0.0], 0.0, 128),
    ([2.0, 1.0, -1.0], [0.3, 0.02, 0.0005], [-1.0, 6.0, 0.0], 0.0, 256),
    ([0.1] * 5, [0.1] * 5, [-9.0, -4.0, 0.0, 5.0, 11.0], 7.0, 64),
    ([1.0, 0.8, -0.6, 0.5, 0.9], [0.2, 0.05, 0.01, 0.1, 0.003], [-3.0, 5, 0, 15, -40], 2.0, 128),
]


def gaussians(lag: np.ndarray, a: list[float], b: list[float], c: list[float]) -> np.ndarray:
    return sum(x * np.exp(-y * (lag - z) ** 2) for x, y, z in zip(a, b, c, strict=True))


def distance(fit: Fit, a: list[float], b: list[float], c: list[float]) -> float:
    """The largest error of any parameter, in the best order of kernels."""
    truth = np.array([a, b, c])
    found = np.array([fit.amplitude, fit.sharpness, fit.offset])
    orders = itertools.permutations(range(len(a)))
    return min(float(np.abs(found[:, order] - truth).max()) for order in orders)


def head(curve: np.ndarray, lag: np.ndarray, index: int = 0, layer: int = 0) -> HeadReport:
    small = np.zeros((1, 1), dtype=np.float32)
    lag, curve = lag.astype(np.float32), curve.astype(np.float32)
    return HeadReport(layer, index, False, small, lag, curve, 0 * curve, 0.0, 0.0, 0.0, True)


@pytest.mark.parametrize(("a", "b", "c", "level", "n"), PLANTED)
def test_planted_gaussians_are_recovered_to_a_thousandth(
    a: list[float], b: list[float], c: list[float], level: float, n: int
) -> None:
    lag = np.arange(1 - n, n)
    curve = (level + gaussians(lag, a, b, c)).astype(np.float32)
    fit = fit_curve(lag, curve, kernels=len(a), weights=n - np.abs(lag))
    assert distance(fit, a, b, c) < 1e-3
    assert fit.level == pytest.approx(level, abs=1e-3)
    assert fit.residual < 1e-6
    assert fit.r2 == pytest.approx(1)
    np.testing.assert_allclose(fitted(fit, lag) + fit.level, curve, atol=1e-5)
    assert list(np.abs(fit.amplitude)) == sorted(np.abs(fit.amplitude), reverse=True)


@pytest.mark.parametrize(("a", "b", "c", "level", "n"), [PLANTED[i] for i in (0, 2, 3, 4)])
def test_slight_noise_moves_the_curve_by_less_than_the_noise(
    a: list[float], b: list[float], c: list[float], level: float, n: int
) -> None:
    lag = np.arange(1 - n, n)
    clean = level + gaussians(lag, a, b, c)
    noise = 1e-4 * np.random.default_rng(0).standard_normal(len(lag))
    fit = fit_curve(lag, clean + noise, kernels=len(a))
    assert fit.residual == pytest.approx(1e-4, rel=0.15)
    error = fitted(fit, lag) + fit.level - clean
    assert float(np.sqrt(np.mean(error**2))) < 0.3e-4
    assert distance(fit, a, b, c) < 0.02


def test_the_criterion_picks_the_number_of_planted_kernels() -> None:
    lag = np.arange(-99, 100)
    noise = np.random.default_rng(1).standard_normal((4, len(lag)))
    noise *= np.sqrt(50 / (100 - np.abs(lag)))  # means of few entries are noisier
    for scale in (0.0, 1e-3):
        curves = [gaussians(lag, *PLANTED[i][:3]) + scale * noise[i - 1] for i in (0, 2, 3, 4)]
        heads = [head(curve, lag, index) for index, curve in enumerate(curves)]
        found = fit_heads(heads, most=5, reach=99)
        assert [one.chosen for one in found] == [1, 2, 2, 3]
        assert [one.head for one in found] == [0, 1, 2, 3]
        for one in found:
            residuals = [fit.residual for fit in one.fits]
            assert [fit.kernels for fit in one.fits] == [1, 2, 3, 4, 5]
            assert all(x >= y - 1e-6 for x, y in itertools.pairwise(residuals))


def test_bic_is_what_the_docstring_says() -> None:
    lag = np.arange(-30, 31)
    curve = np.random.default_rng(0).standard_normal(61)
    fit = fit_curve(lag, curve, kernels=2)
    left = curve - fitted(fit, lag) - fit.level
    assert fit.residual == pytest.approx(float(np.sqrt(np.mean(left**2))), rel=1e-4)
    assert fit.r2 == pytest.approx(1 - np.mean(left**2) / curve.var(), rel=1e-4)
    expected = 61 * np.log(np.mean(left**2)) + 7 * np.log(61)
    assert fit.criterion == pytest.approx(expected, rel=1e-4)


def test_the_criterion_of_a_head_is_that_of_its_whole_matrix() -> None:
    n = 40
    lag = np.arange(n)[None] - np.arange(n)[:, None]
    noise = np.random.default_rng(0).standard_normal((n, n))
    matrix = np.cos(lag / 5) + gaussians(lag, [2.0], [0.05], [1.0]) + 0.3 * noise
    one = report(matrix, 0, 0, False, causal=False)
    (found,) = fit_heads([one], most=3)
    for fit in found.fits:
        values = fitted(fit, one.lag) + fit.level
        left = np.mean((matrix - values[lag + n - 1]) ** 2)
        expected = n * np.log(left) + (3 * fit.kernels + 1) * np.log(n)
        assert fit.criterion == pytest.approx(expected, rel=1e-4)


def test_smooth_trifles_buy_no_kernels_where_lag_explains_little() -> None:
    lag = np.arange(-99, 100)
    smooth = 0.03 * np.cos(lag / 7 + 1) + 0.02 * np.sin(lag / 3)
    sure = head(gaussians(lag, [1.0], [0.01], [0.0]) + smooth, lag)
    vague = dataclasses.replace(sure, spread=np.full_like(sure.curve, 0.5))
    (first,), (second,) = fit_heads([sure], most=5), fit_heads([vague], most=5)
    assert (first.chosen, second.chosen) == (5, 1)


def test_far_diagonals_count_for_as_little_as_they_have_entries() -> None:
    lag = np.arange(-63, 64)
    clean = gaussians(lag, [1.0], [0.02], [3.0])
    spoilt = clean + np.where(np.abs(lag) >= 62, 1.0, 0.0)
    (weighted,) = fit_heads([head(spoilt, lag)], most=1)
    equal = fit_curve(lag, spoilt, kernels=1)
    plain = ([1.0], [0.02], [3.0])
    assert distance(weighted.fits[0], *plain) < 0.1 * distance(equal, *plain)


def test_a_fit_is_the_best_that_twenty_random_starts_of_scipy_can_find() -> None:
    from scipy.optimize import least_squares

    draw = np.random.default_rng(3)
    lag = np.arange(-20, 21)
    curve = np.cos(lag / 4) * np.exp(-np.abs(lag) / 8)

    def left(x: np.ndarray) -> np.ndarray:
        return x[0] + gaussians(lag, x[1:4], np.exp(x[4:7]), x[7:]) - curve

    low = np.array([-5.0] + [-20] * 3 + [-8] * 3 + [-30] * 3)
    high = np.array([5.0] + [20] * 3 + [2] * 3 + [30] * 3)
    costs = [
        least_squares(left, draw.uniform(low / 4, high / 4), bounds=(low, high), max_nfev=60).cost
        for _ in range(20)
    ]
    fit = fit_curve(lag, curve, kernels=3)
    assert 0.5 * len(lag) * fit.residual**2 <= min(costs) * 1.001


def test_the_answer_is_the_same_each_time_and_alone_or_in_company() -> None:
    lag = np.arange(-40, 41)
    draw = np.random.default_rng(0)
    heads = [head(np.cumsum(draw.standard_normal(81)) / 9, lag, index) for index in range(3)]
    together = fit_heads(heads, most=3)
    again = fit_heads(heads, most=3)
    assert [one.to_json() for one in together] == [one.to_json() for one in again]
    (alone,) = fit_heads(heads[1:2], most=3)
    np.testing.assert_allclose(
        fitted(alone.fits[-1], lag), fitted(together[1].fits[-1], lag), atol=1e-4
    )


def test_curves_to_one_side_and_of_unlike_lengths_are_fitted_in_one_call() -> None:
    causal, both = np.arange(-50, 1), np.arange(-20, 21)
    done: list[tuple[int, int]] = []
    heads = [
        head(gaussians(causal, [1.0], [0.01], [-5.0]), causal, 0),
        head(gaussians(both, [2.0], [0.1], [1.0]), both, 1),
    ]
    found = fit_heads(heads, most=2, progress=lambda *pair: done.append(pair))
    assert distance(found[0].fits[0], [1.0], [0.01], [-5.0]) < 1e-3
    assert distance(found[1].fits[0], [2.0], [0.1], [1.0]) < 1e-3
    assert done == [(1, 2), (2, 2)]


def test_no_pair_of_large_kernels_cancels() -> None:
    """The derivative of a Gaussian is what two that almost cancel come to."""
    lag = np.arange(-60, 61)
    curve = (lag - 9) * np.exp(-0.002 * (lag - 9.0) ** 2)
    for kernels in (2, 3, 5):
        fit = fit_curve(lag, curve, kernels=kernels)
        assert np.abs(fit.amplitude).max() <= 2 * np.ptp(curve) * (1 + 1e-9)
        assert fit.r2 is not None
        assert fit.r2 > 0.99


def test_a_kernel_more_is_never_worse() -> None:
    lag = np.arange(-40, 41)
    draw = np.random.default_rng(4)
    heads = [head(np.cumsum(draw.standard_normal(81)), lag, index) for index in range(4)]
    for one in fit_heads(heads):
        left = [fit.residual for fit in one.fits]
        assert left == sorted(left, reverse=True)


def test_heads_are_fitted_where_texts_are_and_say_so() -> None:
    """Waves far out, which few texts reach, would cost a kernel a crest."""
    lag = np.arange(-300, 301)
    curve = gaussians(lag, [2.0], [0.01], [3.0]) + np.where(np.abs(lag) > 64, np.cos(lag / 3), 0)
    (near,), (far,) = fit_heads([head(curve, lag)], most=2), fit_heads([head(curve, lag)], reach=99)
    assert distance(near.fits[0], [2.0], [0.01], [3.0]) < 1e-3
    assert ({fit.reach for fit in near.fits}, {fit.reach for fit in far.fits}) == ({64.0}, {99.0})
    assert far.fits[0].r2 is not None
    assert far.fits[0].r2 < 0.9
    with pytest.raises(ValueError, match="reach must be at least 1"):
        fit_heads([head(curve, lag)], reach=0)


def test_a_constant_curve_has_no_kernels_and_a_level() -> None:
    lag = np.arange(-20, 21)
    (found,) = fit_heads([head(np.full(41, 3.3), lag)])
    assert found.chosen == 1
    for fit in found.fits:
        assert fit.amplitude == (0.0,) * fit.kernels
        assert (fit.level, fit.residual, fit.r2) == (pytest.approx(3.3), 0.0, None)
        assert np.isfinite(fit.criterion)
    np.testing.assert_array_equal(fitted(found.fits[0], lag), np.zeros(41))


def test_a_short_curve_gets_as_many_kernels_as_its_lags_allow() -> None:
    lag = np.arange(-4, 5)
    (found,) = fit_heads([head(np.sin(lag.astype(float)), lag)])
    assert [fit.kernels for fit in found.fits] == [1, 2]


def test_curves_that_cannot_be_fitted_are_refused_in_one_sentence() -> None:
    lag = np.arange(-4, 5)
    with pytest.raises(ValueError, match="10 parameters, more than the 9 lags"):
        fit_curve(lag, np.sin(lag), kernels=3)
    with pytest.raises(ValueError, match="4 parameters, more than the 3 lags"):
        fit_heads([head(np.arange(3.0), np.arange(-1, 2))])
    with pytest.raises(ValueError, match="1 of 9 lags have a value that is not finite"):
        fit_curve(lag, np.where(lag == 2, np.nan, 1.0), kernels=1)
    with pytest.raises(ValueError, match="vectors of one length"):
        fit_curve(lag, np.zeros(8), kernels=1)
    with pytest.raises(ValueError, match="weights must be above 0"):
        fit_curve(lag, np.sin(lag), kernels=1, weights=np.zeros(9))
    with pytest.raises(ValueError, match="kernels must be at least 1"):
        fit_curve(lag, np.sin(lag), kernels=0)
    assert fit_heads([]) == ()


def three_heads() -> tuple[HeadFits, ...]:
    lag = np.arange(-60, 61)
    return fit_heads(
        [head(gaussians(lag, *PLANTED[i][:3]), lag, index) for index, i in enumerate((0, 2, 4))],
        most=4,
    )


@pytest.mark.parametrize("kernels", [None, 4])
def test_an_exported_layer_loads_as_tisa_with_the_curves_of_its_fits(
    tmp_path: Path, kernels: int | None
) -> None:
    fits = three_heads()
    path = export_tisa(fits[::-1], tmp_path / "deep" / "layer.safetensors", kernels=kernels)
    method = load_tisa(path)
    picked = [one.chosen if kernels is None else kernels for one in fits]
    assert (method.n_heads, method.kernels) == (3, max(picked))
    lag = torch.arange(-60, 61)
    wanted = [fitted(one.fits[s - 1], lag.numpy()) for one, s in zip(fits, picked, strict=True)]
    torch.testing.assert_close(method.curve(lag), torch.tensor(np.stack(wanted)), atol=1e-5, rtol=0)
    assert [found.name for found in path.parent.iterdir()] == ["layer.safetensors"]


def test_a_checkpoint_says_what_it_is(tmp_path: Path) -> None:
    from safetensors import safe_open

    path = export_tisa(three_heads(), tmp_path / "a.safetensors", source="a model, layer 0")
    with safe_open(path, "np") as file:
        assert file.metadata() == {
            "spec": "tisa:kernels=3",
            "n_heads": "3",
            "layer": "0",
            "source": "a model, layer 0",
        }
        assert sorted(file.keys()) == ["amplitude", "offset", "sharpness"]


def test_exports_that_make_no_layer_are_refused_and_leave_nothing_behind(tmp_path: Path) -> None:
    fits, path = three_heads(), tmp_path / "a.safetensors"
    with pytest.raises(ValueError, match="no fits to export"):
        export_tisa([], path)
    with pytest.raises(ValueError, match="needs every head once"):
        export_tisa(fits[1:], path)
    other = HeadFits(1, 3, fits[0].fits, 1)
    with pytest.raises(ValueError, match=r"fits of layers \[0, 1\]"):
        export_tisa([*fits, other], path)
    with pytest.raises(ValueError, match="head 0 has no fit with 7 kernels"):
        export_tisa(fits, path, kernels=7)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ValueError, match="there is no file"):
        load_tisa(path)
    path.write_bytes(b"not a checkpoint")
    with pytest.raises(ValueError, match="not a whole safetensors file"):
        load_tisa(path)


def test_four_heads_of_a_table_of_512_rows_are_fitted_in_seconds() -> None:
    """Processor time of this process, so that a busy machine does not decide."""
    lag = np.arange(-511, 512)
    draw = np.random.default_rng(0)
    heads = []
    for index in range(4):
        a, b, c = draw.normal(0, 1, 6), 10 ** draw.uniform(-4, 0, 6), draw.normal(0, 30, 6)
        curve = gaussians(lag, a, b, c) + 0.05 * draw.standard_normal(1023)
        heads.append(head(curve, lag, index))
    start = time.process_time()
    fit_heads(heads)
    assert time.process_time() - start < 5
