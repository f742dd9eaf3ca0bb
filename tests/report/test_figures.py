"""Figures and the page: drawn from results alone, readable, whole, and alive in a real browser."""

import itertools
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure
from PIL import Image
from scipy import stats

from inspections import inspection, series, table, without_table
from whence.analysis.comparison import compare, correlate, read_scores, step_of
from whence.analysis.results import Inspection
from whence.report import (
    draw_components,
    draw_fits,
    draw_head_curves,
    draw_head_matrices,
    draw_heat_maps,
    draw_profiles,
    draw_scores,
    draw_steps,
    draw_windows,
    save_figure,
    telling,
)
from whence.report.folder import file_name
from whence.report.style import SERIES, inner_limits, labels

BASE = inspection()
FIGURES: dict[str, Callable[[], Figure]] = {
    "one heat map": lambda: draw_heat_maps([BASE]),
    "heat maps side by side": lambda: draw_heat_maps(
        [inspection("v1", r2=0.4), inspection("v2"), without_table()]
    ),
    "windows": lambda: draw_windows([BASE, inspection("other")]),
    "curves": lambda: draw_head_curves(BASE.heads, name="a"),
    "stated curves": lambda: draw_head_curves(
        without_table(relative=True).relative, name="a", stated=True
    ),
    "matrices": lambda: draw_head_matrices(BASE.heads, name="a"),
    "profiles": lambda: draw_profiles(BASE.profiles[:5], name="a"),
    "fits": lambda: draw_fits(BASE.fits, BASE.heads, name="a"),
    "components": lambda: draw_components(table(), name="a"),
    "steps": lambda: draw_steps(series()),
    "scores": lambda: draw_scores(series()),
}


@pytest.mark.parametrize("name", FIGURES)
def test_every_figure_is_a_picture_of_its_own_size_with_a_heading(
    name: str, tmp_path: Path
) -> None:
    figure = FIGURES[name]()
    assert figure.texts[0].get_text()
    path = save_figure(figure, tmp_path / "a.png", dpi=50)
    with Image.open(path) as picture:
        picture.load()
        assert picture.width >= 250
        assert len(picture.convert("RGB").getcolors(1 << 24) or ()) > 8


@pytest.mark.parametrize("kind", ["svg", "pdf"])
def test_a_figure_is_saved_in_print_formats_and_equal_figures_make_equal_files(
    kind: str, tmp_path: Path
) -> None:
    first = save_figure(draw_windows([BASE]), tmp_path / f"a.{kind}").read_bytes()
    second = save_figure(draw_windows([BASE]), tmp_path / f"b.{kind}").read_bytes()
    assert first == second
    assert first.startswith({"svg": b"<?xml", "pdf": b"%PDF"}[kind])
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"a.{kind}", f"b.{kind}"]


def test_a_figure_in_an_unknown_format_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"Unknown format of a figure 'jpg'.*png"):
        save_figure(draw_windows([BASE]), tmp_path / "a.jpg")


def test_the_heat_map_shows_the_matrix_itself_and_both_measures_with_their_nulls() -> None:
    figure = draw_heat_maps([BASE])
    (image,) = figure.axes[0].images
    assert BASE.table is not None
    np.testing.assert_array_equal(np.asarray(image.get_array()), BASE.table.gram)
    assert figure.axes[0].get_xlabel() == (
        "R² 0.700 (random: 0.400),\noff the diagonal 0.680 (0.010)"
    )


def test_no_caption_of_a_heat_map_is_cut_or_meets_the_next() -> None:
    figure = draw_heat_maps([inspection(f"m/{i}", n_heads=1) for i in range(4)])
    figure.draw_without_rendering()
    boxes = [axes.xaxis.label.get_window_extent() for axes in figure.axes[:4]]
    assert min(box.y0 for box in boxes) >= 0
    assert min(box.x0 for box in boxes) >= 0
    for left, right in itertools.pairwise(boxes):
        assert left.x1 < right.x0


def test_heads_are_drawn_in_another_map_than_inner_products() -> None:
    (map_of_p,) = {
        image.get_cmap().name for axes in draw_heat_maps([BASE]).axes[:1] for image in axes.images
    }
    maps_of_heads = {
        image.get_cmap().name
        for axes in draw_head_matrices(BASE.heads, name="a").axes
        for image in axes.images
    }
    assert (map_of_p, maps_of_heads) == ("inferno", {"viridis"})


def test_series_differ_in_more_than_colour() -> None:
    for part in (0, 1):
        assert len({entry[part] for entry in SERIES}) == len(SERIES)


def test_a_drawn_fit_is_the_sum_of_gaussians_with_its_level() -> None:
    axes = draw_fits(BASE.fits, BASE.heads, name="a").axes[4]  # head 4: its second fit is exact
    curve, fit = (line.get_ydata() for line in axes.lines)
    np.testing.assert_allclose(fit, curve, atol=1e-6)


def test_limits_come_from_the_inner_lags() -> None:
    lag = np.arange(-100, 101).astype(np.float32)
    curve = np.where(np.abs(lag) == 100, 50.0, np.cos(lag)).astype(np.float32)
    low, high = inner_limits(lag, curve)
    assert -1.5 < low < -0.9
    assert 0.9 < high < 1.5


def test_figures_of_nothing_say_what_they_need() -> None:
    with pytest.raises(ValueError, match="a model with a position table, got none"):
        draw_heat_maps([without_table()])
    with pytest.raises(ValueError, match="one head or more"):
        draw_head_curves([], name="a")
    with pytest.raises(ValueError, match="needs scores"):
        draw_scores(compare([BASE, inspection("b")]))


def test_labels_tell_models_apart_and_stay_short() -> None:
    assert labels(["org/a", "b"]) == ["a", "b"]
    assert labels(["x/a/checkpoint-5", "x/b/checkpoint-5"]) == ["a/checkpoint-5", "b/checkpoint-5"]
    assert len(labels(["a" * 99])[0]) <= 30
    assert file_name("org/name") == "org--name"
    assert file_name("/home/me/../runs/a/checkpoint-5/") == "runs--a--checkpoint-5"


def test_the_telling_numbers_are_the_results_own() -> None:
    told = [(number.value, number.what) for number in telling(BASE)]
    assert told[0] == ("0.700", "Toeplitzness of P, 0..63")
    assert told[1] == ("0.680", "the same without the main diagonal")
    assert told[4] == ("8 of 12", "heads of layer 0 sense position")
    assert [number.value for number in telling(without_table())] == ["20%"]


@pytest.mark.parametrize("found", [BASE, without_table(), without_table(relative=True)])
def test_every_telling_number_has_a_null_or_a_meaning_beside_it(found: Inspection) -> None:
    assert all(number.against for number in telling(found))


def test_the_numbers_say_how_many_heads_would_take_more_gaussians() -> None:
    assert telling(BASE)[-1].against == "R² of the curve 0.990; medians of 12 heads; " + (
        "12 at the ceiling of 2"
    )


def test_a_series_is_in_the_order_of_its_steps() -> None:
    assert [point.step for point in series().points] == [200, 500, 900, 1000]
    assert step_of("albert-base-v2") is None
    assert step_of("step_1/global_step12") == 12
    unordered = compare([inspection("b"), inspection("a")])
    assert [point.model for point in unordered.points] == ["b", "a"]


@pytest.mark.parametrize("seed", range(3))
def test_correlations_and_their_intervals_equal_scipys(seed: int) -> None:
    x, y = np.random.default_rng(seed).normal(size=(2, 12)).round(1)
    y = y + x
    ours, theirs = correlate("m", "Pearson", x, y), stats.pearsonr(x, y)
    interval = theirs.confidence_interval(0.95)
    np.testing.assert_allclose(
        [ours.value, ours.low, ours.high], [theirs.statistic, interval.low, interval.high]
    )
    ranks = correlate("m", "Spearman", x, y)
    np.testing.assert_allclose(ranks.value, stats.spearmanr(x, y).statistic)
    assert ranks.low < ranks.value < ranks.high


def test_three_models_say_nothing_and_equal_scores_are_refused() -> None:
    three = correlate("m", "Pearson", np.array([1.0, 2, 3]), np.array([1.0, 2, 4]))
    assert (three.low, three.high) == (-1.0, 1.0)
    perfect = correlate("m", "Pearson", np.arange(5.0), 2 * np.arange(5.0))
    assert (perfect.value, perfect.low, perfect.high) == (1.0, 1.0, 1.0)
    for sign in (1, -1):
        ranks = correlate("m", "Spearman", np.arange(4.0), sign * np.arange(4.0) ** 3)
        inner, outer = sorted((sign * ranks.low, sign * ranks.high))
        assert (sign * ranks.value, outer) == (1.0, 1.0)
        assert -0.8 < inner < -0.6  # four models in order are little evidence
    with pytest.raises(ValueError, match="same value of the scores, 1"):
        correlate("m", "Pearson", np.arange(3.0), np.ones(3))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name,score\na,1\n", "no column 'model', only name, score"),
        ("model,score\na,high\n", "line 2: the score of 'a' must be a number, got 'high'"),
        ("model,score\na,nan\n", "not finite"),
        ("", "no column 'model', only nothing"),
    ],
)
def test_a_bad_csv_says_where_and_why(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "scores.csv"
    path.write_text(text)
    with pytest.raises(ValueError, match=re.escape(message)):
        read_scores(path)


def test_a_model_without_a_score_or_a_table_is_named() -> None:
    with pytest.raises(ValueError, match="Unknown model 'synthetic/base'"):
        compare([BASE, inspection("b")], {"b": 1.0})
    with pytest.raises(ValueError, match="synthetic/rope has no position table"):
        compare([BASE, without_table()])
    with pytest.raises(ValueError, match="two models or more, got 1"):
        compare([BASE])
