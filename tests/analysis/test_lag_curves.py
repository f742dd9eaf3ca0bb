"""Lag curves: the numbers behind the picture, for every method and for those with a formula."""

import math

import pytest
import torch

from whence import METHODS, build
from whence.analysis import lag_curves, position_matrix
from whence.lag import LagBias
from whence.method import Content
from whence.report import draw_lag_curves


@pytest.mark.parametrize("name", METHODS)
def test_every_method_has_finite_curves_at_the_lags_it_sees(name: str) -> None:
    curves = lag_curves(name, n_heads=3, d_head=8, reach=9, draws=4)
    assert curves.lag.tolist() == list(range(-9, 10))
    assert curves.mean.shape[0] in (1, 3)
    seen = curves.lag <= 0 if METHODS[name].causal_only else torch.ones(19, dtype=torch.bool)
    assert bool(torch.isfinite(curves.mean[:, seen]).all())
    assert bool(torch.isnan(curves.mean[:, ~seen]).all())
    assert curves.site in (*METHODS[name].sites(), "")


def test_curves_of_a_lag_bias_are_its_function() -> None:
    curves = lag_curves("alibi", n_heads=4, reach=5)
    slope = torch.tensor([2.0 ** (-2 * h) for h in range(1, 5)])
    torch.testing.assert_close(curves.mean, -slope[:, None] * curves.lag.abs())
    assert curves.spread is None


def test_curves_at_the_input_are_inner_products_of_position_vectors() -> None:
    curves = lag_curves("sinusoidal", n_heads=1, d_head=8, reach=6)
    expected = [
        sum(math.cos(lag * 10000 ** (-2 * i / 8)) for i in range(4)) / 8 for lag in range(-6, 7)
    ]
    torch.testing.assert_close(curves.mean[0], torch.tensor(expected))


def test_curves_of_rope_are_the_mean_cosine() -> None:
    curves = lag_curves("rope", n_heads=2, d_head=8, reach=6)
    expected = [
        sum(math.cos(lag * 10000 ** (-2 * i / 8)) for i in range(4)) / 4 for lag in range(-6, 7)
    ]
    torch.testing.assert_close(curves.mean, torch.tensor(expected).expand(2, -1))


def test_a_method_that_looks_at_content_has_a_spread() -> None:
    curves = lag_curves("shaw:clip=2", reach=4, draws=500, seed=1)
    assert curves.spread is not None
    # Beyond the clip the end rows of the table repeat, so the curve is flat there.
    torch.testing.assert_close(curves.mean[:, 0], curves.mean[:, 2])
    torch.testing.assert_close(curves.spread[:, -1], curves.spread[:, -3])
    assert float(curves.mean.abs().max()) < float(curves.spread.max())


def test_curves_that_depend_on_content_are_those_of_the_middle_query() -> None:
    curves = lag_curves("shaw:clip=3", n_heads=2, d_head=4, reach=5, draws=1, seed=7)
    torch.manual_seed(7)
    method = build("shaw:clip=3", n_heads=2, d_head=4, max_length=11)
    q, pos = torch.randn(2, 1, 2, 11, 4)[0], torch.arange(11)
    bias = method.score_term(q, pos, pos)
    assert bias is not None
    torch.testing.assert_close(curves.mean, bias.to_dense(pos, pos)[0, :, 5].detach())


def test_the_curve_is_a_row_of_the_matrix() -> None:
    for name in ("tisa", "rope", "sinusoidal", "t5"):
        curves = lag_curves(name, n_heads=2, d_head=4, reach=5)
        torch.manual_seed(0)
        method = build(name, n_heads=2, d_head=4, max_length=11)
        site, matrix = position_matrix(method, n_heads=2, d_head=4, n=11)
        assert site == curves.site
        assert matrix.shape == (2, 11, 11)
        torch.testing.assert_close(matrix[:, 5], curves.mean.expand(2, -1))
    _, causal = position_matrix(build("xpos", n_heads=2, d_head=4), n_heads=2, d_head=4, n=3)
    torch.testing.assert_close(causal.isnan()[0], torch.ones(3, 3).triu(1).bool())


def test_equal_seeds_give_equal_curves_and_the_callers_random_numbers_stay() -> None:
    before = torch.random.get_rng_state()
    first, second = (lag_curves("tisa", reach=8, seed=3) for _ in range(2))
    torch.testing.assert_close(first.mean, second.mean, rtol=0, atol=0)
    torch.testing.assert_close(torch.random.get_rng_state(), before, rtol=0, atol=0)


def test_wrong_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="reach must be at least 1, got 0"):
        lag_curves("tisa", reach=0)
    with pytest.raises(ValueError, match="at least one method, got none"):
        draw_lag_curves([])


def test_the_figure_has_a_panel_for_each_method_with_a_line_for_each_head() -> None:
    figure = draw_lag_curves([lag_curves(name, reach=8) for name in ("tisa", "rope", "nope")])
    panels = [axes for axes in figure.axes if axes.axison]
    assert [panel.get_title(loc="left") for panel in panels] == ["tisa", "rope", "nope"]
    rules = 2  # the lines through zero
    assert [len(panel.lines) - rules for panel in panels] == [4, 1, 1]


def test_only_the_middle_query_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them would be n x n numbers: a band of n lags for each of n queries."""
    method = build("transformer_xl", n_heads=2, d_head=4, d_model=8)
    asked = []

    def score_term(self: type, q: torch.Tensor, *rest: torch.Tensor, content: Content) -> LagBias:
        asked.append((q.shape[2], content.x_q.shape[1]))
        return original(self, q, *rest, content=content)

    original = type(method).score_term
    monkeypatch.setattr(type(method), "score_term", score_term)
    curves = lag_curves("transformer_xl", n_heads=2, d_head=4, reach=300, draws=2)
    assert asked == [(1, 1)]
    assert curves.mean.shape == (2, 601)
