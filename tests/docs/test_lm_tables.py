"""The tables of docs/lm_results.md: of the committed results, and of results made by hand."""

import json
from functools import cache
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import pytest

from make_tables import TABLES
from markdown_cells import cell
from tables import choosing, lm
from tables.results_folder import ResultsFolder
from whence.analysis.lm_results import EMPTY, SCRATCH, SLIDING, Job, Language, LengthLoss

ROOT = Path(__file__).parents[2]
STORED = ResultsFolder(ROOT)
OURS = {name: make for name, make in TABLES.items() if make.__module__ == lm.__name__}
STUDENT = 4.302653  # the 97.5 % point with two degrees of freedom


@cache
def raw(name: str) -> Any:
    return json.loads(STORED.path(f"lm/{name}/lm.json").read_text(encoding="utf-8"))


def losses(name: str, method: str, length: int, how: str = SCRATCH) -> list[float]:
    """By seed."""
    found = {
        job["seed"]: loss["loss"]
        for job in raw(name)["jobs"]
        for loss in job["losses"]
        if (job["method"], loss["length"], loss["how"]) == (method, length, how)
    }
    return [found[seed] for seed in sorted(found)]


def tuned(name: str, method: str) -> dict[float, float]:
    """By learning rate."""
    return {x["learning_rate"]: x["loss"] for x in raw(name)["tuning"] if x["method"] == method}


@pytest.mark.parametrize("name", OURS)
def test_a_table_says_where_its_results_are_not_there(name: str, tmp_path: Path) -> None:
    missing = OURS[name](ResultsFolder(tmp_path))
    assert missing == f"Not measured yet: `{lm.COMMAND}`.\n"
    assert "Not measured" not in OURS[name](STORED)


def test_losses_are_means_and_deviations_over_seeds_with_the_smallest_in_bold() -> None:
    table = lm.lm_losses(STORED)
    rope = losses("python", "rope", 8192)
    assert len(rope) == 3
    text = f"{fmean(rope):.3f} ± {stdev(rope):.3f}"
    assert cell(table, "Python source, 8,192", "`rope`") == text
    methods = raw("wikitext")["config"]["methods"]
    best = min(methods, key=lambda method: fmean(losses("wikitext", method, 512)))
    text = f"{fmean(losses('wikitext', best, 512)):.3f}"
    assert cell(table, "WikiText-2, 512", f"`{best}`").startswith(f"**{text} ± ")
    assert cell(table, "WikiText-2, 8,192", "`learned`") == "\u2013"  # it knows 512 positions
    assert cell(table, "Python source, masked, 512", "`nope`") == ""  # not run


def test_the_table_for_choosing_has_the_losses_of_the_long_one_and_the_cost_of_a_step() -> None:
    short, long = choosing.choosing(STORED), lm.lm_losses(STORED)
    for method in ("tisa", "t5", "rope"):
        for column in ("Python source, 512", "WikiText-2, 8,192"):
            mean = float(cell(long, column, f"`{method}`").strip("*").split()[0])
            assert float(cell(short, column, f"`{method}`")) == pytest.approx(mean, abs=0.0051)
    (record,) = (
        record
        for record in STORED.json("gpu/model_cost.json")["records"]
        if (record["method"], record["mode"], record["n"]) == ("t5", "called", 512)
    )
    assert cell(short, "a training step", "`t5`") == f"{record['cost']:+.1%}"
    assert cell(short, "numbers a layer", "`tisa`") == "180"  # 3 * 12 * 5
    assert cell(short, "Python source, 8,192", "`learned`") == ""


def test_paired_differences_are_those_of_equal_seeds() -> None:
    pairs = zip(losses("wikitext", "t5", 512), losses("wikitext", "rope", 512), strict=True)
    found = [ours - theirs for ours, theirs in pairs]
    half = STUDENT * stdev(found) / 3**0.5
    text = f"{fmean(found):+.3f} ± {half:.3f} ({min(found):+.3f} to {max(found):+.3f})"
    assert cell(lm.lm_paired(STORED), "WikiText-2", "`t5`") == text


def test_how_far_a_loss_moves_is_that_of_the_longest_less_that_of_the_trained_length() -> None:
    near, far = (fmean(losses("python", "alibi", n, SLIDING)) for n in (512, 8192))
    table = lm.lm_far(STORED)
    assert cell(table, "Python source, sliding", "`alibi`") == f"{far - near:+.3f}"
    assert "`learned`" not in table


def test_longer_runs_stand_beside_seed_0_of_the_shorter() -> None:
    table = lm.lm_long(STORED)
    for name, steps in (("wikitext", "400"), ("wikitext_long", "800")):
        tisa, rope = losses(name, "tisa", 512)[0], losses(name, "rope", 512)[0]
        assert cell(table, "loss at 512", "WikiText-2", "`tisa`", steps) == f"{tisa:.3f}"
        lead = cell(table, "RoPE less TISA at 512", "WikiText-2", "`rope`", steps)
        assert lead == f"{rope - tisa:+.3f}"


def test_the_ablation_shows_tuning_losses_of_each_start_and_units(tmp_path: Path) -> None:
    table = lm.lm_ablation(STORED)
    for method, (name, start, units) in lm.VARIANTS.items():
        loss = tuned("python_ablation", method)[1.5e-3]
        assert cell(table, "Python source, rate 0.0015", name, start, units) == f"{loss:.3f}"
    assert set(raw("python_ablation")["config"]["methods"]) == set(lm.VARIANTS)
    path = ResultsFolder(tmp_path).path("lm/python_ablation")
    path.parent.mkdir(parents=True)
    path.symlink_to(STORED.path("lm/python_ablation"))
    assert "WikiText-2" not in lm.lm_ablation(ResultsFolder(tmp_path))  # columns that there are


def test_the_rate_in_bold_is_that_of_the_reported_runs() -> None:
    table = lm.lm_rates(STORED)
    chosen = {job["method"]: job["learning_rate"] for job in raw("python_masked")["jobs"]}
    for method, rate in chosen.items():
        for other, loss in tuned("python_masked", method).items():
            text = f"**{loss:.3f}**" if other == rate else f"{loss:.3f}"
            assert cell(table, f"Python source, masked, {other:g}", f"`{method}`") == text


def test_toeplitzness_is_shown_beside_that_of_a_random_table() -> None:
    traces = {trace["step"]: trace["table"] for trace in raw("toeplitz")["jobs"][0]["toeplitz"]}
    table = lm.lm_toeplitz(STORED)
    line = next(line for line in table.splitlines() if line.startswith("| 5,000 |"))
    names = ("r2_off_diagonal", "null_r2_off_diagonal", "r2", "null_r2")
    assert line == f"| 5,000 | {' | '.join(f'{traces[5000][name]:.3f}' for name in names)} |"


def test_the_setting_names_sizes_corpora_machine_and_commit() -> None:
    text = lm.lm_setting(STORED)
    for name in lm.MAIN:
        found = raw(name)
        assert f"{int(found['data']['train_tokens']):,} training tokens" in text
        assert f" {found['config']['steps']:,} steps" in text
        assert found["data"]["sha256"][:12] in text
        assert found["machine"] == raw("python")["machine"]  # of one of them is told
    job, machine = raw("python")["jobs"][0], raw("python")["machine"]
    assert f"{(job['parameters'] - job['positional']) / 1e6:.1f} million parameters" in text
    assert f"{machine['gpu']}, torch {machine['torch']}" in text
    assert f"commit {machine['commit']};" in text


def made(method: str, seed: int, loss: float) -> Job:
    at = LengthLoss(8, SCRATCH, loss, None, 1, EMPTY, EMPTY)
    return Job(
        method, seed, "", "", (at,), EMPTY, EMPTY, None, 1, None, 9, 0, (), None, None, (), ()
    )


def test_an_interval_is_students_over_the_differences_of_equal_seeds(tmp_path: Path) -> None:
    """0.1, 0.2 and 0.6: mean 0.3, deviation sqrt(0.07), half of the interval 4.303 of its third."""
    rope = [made("rope", seed, loss) for seed, loss in enumerate((1.0, 2.0, 4.0))]
    worse = [made("worse", seed, loss) for seed, loss in ((2, 4.6), (0, 1.1), (1, 2.2))]
    same = [made("same", job.seed, job.losses[0].loss or 0.0) for job in rope]
    config = {"train_length": 8, "eval_lengths": [8]}
    for name in lm.MAIN:
        jobs = (*worse, *rope, *same) if name == "python" else (*same, *rope)
        Language(config, {}, {}, jobs).save(ResultsFolder(tmp_path).path(f"lm/{name}/lm.json"))
    table = lm.lm_paired(ResultsFolder(tmp_path))
    assert cell(table, "Python source", "`worse`") == "+0.300 ± 0.657 (+0.100 to +0.600)"
    assert cell(table, "WikiText-2", "`worse`") == ""  # not run
    assert cell(table, "WikiText-2", "`same`") == "+0.000 ± 0.000 (+0.000 to +0.000)"
    order = [line.split("`")[1] for line in table.splitlines() if line.startswith("| `")]
    assert order == ["same", "worse"]  # the best first, and RoPE, which all are less, not at all
