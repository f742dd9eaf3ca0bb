"""What `whence lm` reports: the ranking, the tables in three forms, the page."""

import dataclasses

import numpy as np
import pytest
import torch
from scipy import stats

from lm_jobs import job, results
from whence.analysis.lm_results import ranked
from whence.report.lm_page import make_lm_page
from whence.report.lm_report import LM_REPORT
from whence.report.lm_table import rank_table
from whence.report.lm_winners import in_front, tied, winners


def test_methods_are_ranked_by_their_mean_loss_at_the_length_of_training() -> None:
    found = results(
        job("broken", 0, {16: 0.1, 32: 0.1}),
        job("broken", 1, {}, stopped="loss is nan by step 3"),
        job("b", 0, {16: 2.0, 32: 5.0}),
        job("b", 1, {16: 3.0, 32: 4.0}),
        job("a_1", 0, {16: 2.0, 32: None}),
        job("a_1", 1, {16: 2.2, 32: None}),
    )
    rows = ranked(found)
    assert [row.method for row in rows] == ["a_1", "b", "broken"]
    mean = rows[1].scratch[0]
    assert mean is not None
    assert mean.spread is not None
    torch.testing.assert_close(mean.mean, 2.5)
    torch.testing.assert_close(mean.spread, float(np.std([2.0, 3.0], ddof=1)))
    assert rows[0].scratch[1] is None
    assert rows[0].why_not == ("a_1 <ends>",)
    assert rows[2].scratch == (None, None)
    assert rows[2].stopped == ("seed 1: loss is nan by step 3",)
    assert rows[0].tokens_a_second == 100.5
    assert rows[0].peak_bytes == 5_000_001
    markdown = LM_REPORT.formatted(found, "markdown").splitlines()
    assert markdown[2].startswith("| `a_1` | **2.100 ± 0.141** | – | 100 |")  # noqa: RUF001
    assert "| `b` | **2.500 ± 0.707** | 4.500 ± 0.707 |" in markdown[3]  # tied; then alone
    latex = LM_REPORT.formatted(found, "latex")
    assert r"\texttt{a\_1} & \textbf{2.100 $\pm$ 0.141} & --" in latex
    assert latex.count(r"\\") == 4
    with pytest.raises(ValueError, match="Unknown format 'word'"):
        LM_REPORT.formatted(found, "word")


def test_a_table_of_unequal_numbers_of_seeds_says_so() -> None:
    a, b = (job("a", seed, {16: 2.0, 32: 2.0}) for seed in (0, 1))
    c = job("c", 0, {16: 2.0, 32: 2.0})
    assert "standard deviation over 2 seeds" in LM_REPORT.formatted(results(a, b), "markdown")
    uneven = LM_REPORT.formatted(results(a, b, c), "markdown")
    assert "standard deviation over 1 to 2 seeds" in uneven
    assert "| loss at 32 | seeds |" in uneven
    assert "| `a` | **2.000 ± 0.000** | **2.000 ± 0.000** | 2 |" in uneven
    assert "| `c` | **2.000** | **2.000** | 1 |" in uneven
    assert "| seeds |" not in LM_REPORT.formatted(results(a, b), "markdown")


def test_a_task_shows_the_share_that_is_right() -> None:
    found = results(job("a", 0, {16: 2.0, 32: 3.0}), task="back", distance=8)
    table = LM_REPORT.formatted(found, "markdown")
    assert "| right at 16 | right at 32 |" in table
    assert "50.0%" in table
    assert "task back, 8 back" in table
    assert "one seed" in table


def test_the_page_holds_everything_and_asks_for_nothing() -> None:
    found = results(
        job("b", 0, {16: 2.0, 32: None}),
        job("c", 0, {}, stopped="loss is nan by step 3", stated=(), attention=()),
    )
    page = make_lm_page(found)
    assert "b &lt;ends&gt;" in page
    assert "loss is nan by step 3" in page
    for heading in ("Ranking", "Loss and length", "Lag curves", "Where heads look", "Setting"):
        assert f"<h2>{heading}</h2>" in page
    assert "Learned tables" not in page
    assert "default-src &#39;none&#39;" in page
    assert 'src="http' not in page


def test_the_winners_are_in_front_at_both_ends_and_from_one_to_the_other() -> None:
    found = results(
        job("near", 0, {16: 1.0, 32: 9.0}),
        job("far", 0, {16: 3.0, 32: 2.5}),
        job("table", 0, {16: 2.0, 32: None}),
    )
    assert [dataclasses.astuple(card) for card in winners(found)] == [
        (
            "near",
            "has the smallest loss at 16 tokens",
            "1.000 nats; next table, 2.000; one seed: perhaps chance",
        ),
        (
            "far",
            "has the smallest loss at 32 tokens",
            "2.500 nats; next near, 9.000; one seed: perhaps chance",
        ),
        (
            "far",
            "loses least from 16 to 32 tokens",
            "-0.500 nats; next near, +8.000; one seed: perhaps chance",
        ),
    ]


def test_equal_digits_of_one_seed_are_a_tie() -> None:
    found = results(
        job("a", 0, {16: 2.0, 32: 2.0041}),
        job("b", 0, {16: 3.0, 32: 3.0044}),
        job("c", 0, {16: 4.0, 32: 9.0}),
    )
    tie = winners(found)[2]
    assert (tie.name, tie.what) == ("a, b", "are tied in front from 16 to 32 tokens")
    assert tie.against == "+0.004 nats; equal to the last digit shown; next c, +5.000"


def test_a_tie_is_what_differences_of_equal_seeds_do_not_tell_apart() -> None:
    rng = np.random.default_rng(0)
    shared = rng.normal(size=4)  # a seed moves both methods by the same amount
    first = {seed: 2.0 + x for seed, x in enumerate(shared)}
    for gap, noise in ((0.1, 0.01), (0.01, 0.1), (0.0, 0.1), (0.3, 0.3)):
        second = {seed: x + gap + noise * rng.normal() for seed, x in first.items()}
        p = stats.ttest_rel(list(first.values()), list(second.values())).pvalue
        assert tied(first, second) == (p > 0.05)
    assert tied(first, first)
    assert not tied({0: 1.0, 1: 1.0}, {0: 2.0, 1: 2.0})  # a gap without any spread


def test_a_method_whose_seeds_are_far_apart_is_not_tied_past_one_that_is_behind() -> None:
    found = {
        "best": {0: 1.00, 1: 1.01, 2: 1.02},
        "behind": {0: 1.10, 1: 1.11, 2: 1.12},
        "wild": {0: 1.00, 1: 9.00, 2: 1.02},
    }
    assert tied(found["best"], found["wild"])
    assert in_front(found) == ["best"]
    assert in_front({name: found[name] for name in ("best", "wild")}) == ["best", "wild"]


def test_the_caption_says_what_was_tuned_and_how_sure_the_order_is() -> None:
    one = results(job("a", 0, {16: 2.0, 32: 2.0}), learning_rates=[3e-3])
    assert "the learning rate 0.003: nothing was tuned" in rank_table(one).caption
    assert "One seed cannot tell a difference from chance" in rank_table(one).caption
    jobs = [job("a", seed, {16: 2.0, 32: 2.0}) for seed in (0, 1)]
    several = rank_table(results(*jobs, learning_rates=[1e-3, 3e-3])).caption
    assert "the learning rates 0.001, 0.003" in several
    assert "nothing else was tuned" in several
    assert "the 95% interval of the mean difference between runs of the same seed" in several
