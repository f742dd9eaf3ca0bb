"""Tables of docs/glue.md and docs/translation.md, held against the stored numbers by hand."""

import re
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from make_tables import BLOCK
from markdown_cells import cell
from tables import glue, translation
from tables.results_folder import ResultsFolder
from whence.report.text_table import minus

ROOT = Path(__file__).parents[2]
STORED = ResultsFolder(ROOT)


def scores(file: str, task: str, form: str, kernels: int) -> list[float]:
    """By seed."""
    jobs: list[dict[str, Any]] = STORED.json(file)["jobs"]
    wanted = (task, form, kernels)
    found = {x["seed"]: x["score"] for x in jobs if (x["task"], x["form"], x["kernels"]) == wanted}
    return [found[seed] for seed in sorted(found)]


@pytest.mark.parametrize(("task", "title"), [("cola", "CoLA"), ("mrpc", "MRPC")])
def test_the_share_that_a_fitted_start_wins_back_is_of_what_the_table_was_worth(
    task: str, title: str
) -> None:
    table = glue.glue_fitted(STORED)
    kept, dropped = (fmean(scores(glue.FILE, task, form, 0)) for form in "ab")
    fitted, zero = (scores(file, task, "b", 3) for file in (glue.FITTED, glue.FILE))
    assert cell(table, "lost", title) == f"{kept - dropped:.1f}"
    for column, points in (("fitted", fitted), ("from zero", zero)):
        share = (fmean(points) - dropped) / (kept - dropped)
        assert cell(table, column, title).startswith(minus(f"{share:.0%} ("))
    apart = [a - b for a, b in zip(fitted, zero, strict=True)]
    assert cell(table, "fitted less zero", title) == f"**{fmean(apart):+.1f}**"
    assert cell(table, "seeds better", title) == f"{sum(x > 0 for x in apart)} of {len(apart)}"


def test_the_mean_without_rte_is_all_that_is_won_back_elsewhere_over_all_that_is_lost() -> None:
    tasks = ("sst2", "stsb", "cola", "mrpc")
    lost = sum(
        fmean(scores(glue.FILE, x, "a", 0)) - fmean(scores(glue.FILE, x, "b", 0)) for x in tasks
    )
    won = sum(
        fmean(scores(glue.FITTED, x, "b", 3)) - fmean(scores(glue.FILE, x, "b", 0)) for x in tasks
    )
    found = cell(glue.glue_fitted(STORED), "fitted", "mean without RTE")
    assert found.startswith(f"{won / lost:.0%} (")


def test_pairs_of_positions_are_differences_of_the_stored_scores() -> None:
    found = STORED.json(translation.PAIRS)["pairs"]
    stored = STORED.json("translation/en-fr/translation.json")["jobs"]

    def bleu(position: str) -> list[float]:
        jobs = sorted((x for x in stored if x["position"] == position), key=lambda x: x["seed"])
        parts = (part for job in jobs for part in job["scores"])
        return [part["bleu"] for part in parts if part["test"] == "test_2017_flickr"]

    (one,) = (
        x
        for x in found
        if (x["experiment"], x["test"], x["position"], x["less"])
        == ("en-fr", "test_2017_flickr", "t5", "rope")
    )
    apart = [a - b for a, b in zip(bleu("t5"), bleu("rope"), strict=True)]
    assert one["by_seed"] == pytest.approx(apart)
    assert one["mean"] == pytest.approx(fmean(apart))
    shown = cell(
        translation.translation_pairs(STORED), "en-fr, test_2017_flickr", "`t5` less `rope`"
    )
    assert shown.strip("*").startswith(f"{fmean(apart):+.1f} [")
    assert shown.strip("*").endswith(f"] {sum(x > 0 for x in apart)} of 3")
    assert shown.startswith("**") == (one["p"] < 0.05)


@pytest.mark.parametrize(
    ("page", "figure"),
    [("training_cost", r"\b\d+\.\d%"), ("glue", r"\d+% \(\d+ to \d+%\)")],
)
def test_what_is_said_in_words_stands_in_a_table_of_the_page(page: str, figure: str) -> None:
    text = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")
    text = text.partition("## Every method alone")[0]  # older figures, some of them ratios of cells
    tables = "".join(block[0] for block in BLOCK.finditer(text))
    said = set(re.findall(figure, BLOCK.sub("", text)))
    assert said
    assert said <= set(re.findall(figure, tables))


def test_a_table_whose_results_are_not_there_says_how_to_make_them(tmp_path: Path) -> None:
    empty = ResultsFolder(tmp_path)
    for table in (glue.glue_fitted, translation.translation_pairs):
        assert table(empty).startswith("Not measured yet: `")


def test_speeds_of_jobs_that_shared_the_device_with_fewer_others_say_so() -> None:
    stored = STORED.json("translation/en-de/translation.json")["jobs"]
    numbers = {job["side_by_side"] for job in stored}
    told = f"{min(numbers)} to {max(numbers)} jobs shared the device"
    assert min(numbers) < max(numbers)
    assert told in translation.translation_bleu(STORED)
