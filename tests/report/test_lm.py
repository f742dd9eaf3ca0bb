"""What `whence lm` reports: the ranking, the tables in three forms, the page."""

import numpy as np
import pytest
import torch

from lm_jobs import job, results
from whence.analysis.lm_results import ranked
from whence.report.lm_page import make_lm_page
from whence.report.lm_table import formatted, winners


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
    markdown = formatted(found, "markdown").splitlines()
    assert markdown[2].startswith("| `a_1` | **2.100 ± 0.141** | – | 100 |")  # noqa: RUF001
    assert "| `b` | 2.500 ± 0.707 | 4.500 ± 0.707 |" in markdown[3]  # alone, so not the best
    latex = formatted(found, "latex")
    assert r"\texttt{a\_1} & \textbf{2.100 $\pm$ 0.141} & --" in latex
    assert latex.count(r"\\") == 4
    with pytest.raises(ValueError, match="Unknown format 'word'"):
        formatted(found, "word")


def test_a_table_of_unequal_numbers_of_seeds_says_so() -> None:
    a, b = (job("a", seed, {16: 2.0, 32: 2.0}) for seed in (0, 1))
    c = job("c", 0, {16: 2.0, 32: 2.0})
    assert "standard deviation over 2 seeds" in formatted(results(a, b), "markdown")
    uneven = formatted(results(a, b, c), "markdown")
    assert "standard deviation over 1 to 2 seeds" in uneven
    assert "| loss at 32 | seeds |" in uneven
    assert "| `a` | **2.000 ± 0.000** | **2.000 ± 0.000** | 2 |" in uneven
    assert "| `c` | **2.000** | **2.000** | 1 |" in uneven
    assert "| seeds |" not in formatted(results(a, b), "markdown")


def test_a_task_shows_the_share_that_is_right() -> None:
    found = results(job("a", 0, {16: 2.0, 32: 3.0}), task="back", distance=8)
    table = formatted(found, "markdown")
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


def test_the_winners_are_the_best_at_both_ends_and_the_one_that_loses_least() -> None:
    found = results(
        job("near", 0, {16: 1.0, 32: 9.0}),
        job("far", 0, {16: 3.0, 32: 2.5}),
        job("table", 0, {16: 2.0, 32: None}),
    )
    assert winners(found) == [
        ("near", "is best at 16 tokens", "1.000 nats, the last of 3 3.000"),
        ("far", "is best at 32 tokens", "2.500 nats, the last of 2 9.000"),
        ("far", "goes best from 16 to 32", "-0.500 nats, the last of 2 +8.000"),
    ]
