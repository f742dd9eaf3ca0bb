"""Table 3 from jobs: medians, deltas, paired tests, and what is won back of a loss."""

from itertools import product

import numpy as np
import pytest
from scipy.stats import norm, ttest_ind, ttest_rel

from whence.analysis.glue_results import (
    Glue,
    GlueJob,
    mean_difference,
    mean_won_back,
    table,
    won_back,
)
from whence.analysis.slides_glue import TABLE_3, is_of_the_slides

EMPTY = np.zeros(0, np.float32)


def job(task: str, form: str, kernels: int, seed: int, score: float | None) -> GlueJob:
    return GlueJob(
        task=task,
        form=form,
        kernels=kernels,
        seed=seed,
        fingerprint="f",
        data_sha256="d",
        stopped="" if score is not None else "loss is nan by step 3",
        score=None if score is None else float(score),
        scores=(),
        steps=EMPTY,
        train_loss=EMPTY,
        seconds=1.0,
        parameters=10,
        positional=3 * kernels,
        curves=(),
    )


def results(scores: dict[tuple[str, int], list[float | None]], task: str = "rte") -> Glue:
    """Scores by form and kernels, a number a seed."""
    kernels = sorted({s for _, s in scores})
    forms = sorted({form for form, _ in scores})
    config = {"model": "x", "tasks": [task], "forms": forms, "kernels": kernels}
    jobs = [job(task, *key, seed, x) for key, row in scores.items() for seed, x in enumerate(row)]
    return Glue(config, {}, {}, tuple(jobs))


def test_a_row_has_medians_the_best_delta_and_the_error_reduction_of_the_slides() -> None:
    found = results({("a", 0): [70, 72, 80], ("a", 1): [71, 73, 60], ("a", 3): [69, 79, 90]})
    (row,) = table(found)
    assert row.baseline is not None
    assert row.baseline.median == 72
    assert row.baseline.spread == pytest.approx(np.std([70, 72, 80], ddof=1))
    assert [cell.median for cell in row.cells if cell is not None] == [71, 79]
    assert row.delta == 7
    assert row.reduction == pytest.approx(7 / 28)


def test_the_test_pairs_seeds_and_is_students() -> None:
    base, ours = [70.0, 72.0, 80.0, 61.0], [71.0, 74.0, 80.5, 64.0]
    (row,) = table(results({("b", 0): base, ("b", 5): ours}))
    (found,) = row.differences
    wanted = ttest_rel(ours, base)
    assert found is not None
    assert found.mean == pytest.approx(1.625)
    assert found.p == pytest.approx(wanted.pvalue)
    assert (found.low, found.high) == pytest.approx(tuple(wanted.confidence_interval(0.95)))
    assert (found.better, found.n) == (4, 4)


def test_a_job_without_a_score_is_left_out_with_its_pair() -> None:
    (row,) = table(results({("a", 0): [70, None, 80], ("a", 1): [71, 73, None]}))
    (found,) = row.differences
    assert found is not None
    assert (found.mean, found.n, found.p) == (1, 1, None)


def test_differences_that_are_all_the_same_have_no_p() -> None:
    (row,) = table(results({("a", 0): [70, 72], ("a", 1): [70, 72]}))
    assert row.differences[0] is not None
    assert row.differences[0].p is None
    (empty,) = table(results({("a", 0): [None], ("a", 1): [None]}))
    assert (empty.baseline, empty.delta, empty.differences) == (None, None, (None,))


def test_what_is_won_back_is_a_share_of_what_deleting_the_table_loses() -> None:
    scores = {("a", 0): [80.0, 82.0], ("b", 0): [70.0, 72.0], ("b", 5): [75.0, 75.0]}
    found = won_back(results(scores | {("a", 5): [81.0, 82.0]}))
    assert [(one.task, one.kernels) for one in found] == [("rte", 5)]
    assert (found[0].lost, found[0].won, found[0].share) == (10, 4, pytest.approx(0.4))
    assert (found[0].low, found[0].high) == (pytest.approx(0.3), pytest.approx(0.5))


def of_tasks(*parts: Glue) -> Glue:
    """Results of one task each, as one."""
    tasks = [task for part in parts for task in part.tasks]
    jobs = tuple(job for part in parts for job in part.jobs)
    return Glue(parts[0].config | {"tasks": tasks}, {}, {}, jobs)


def test_the_mean_over_tasks_weighs_tasks_alike_and_has_welchs_test() -> None:
    """The mean of two tasks is 0 exactly where the first is minus the second, which is Welch's."""
    first, second = [3.0, 1.5, 4.0, 2.5], [-1.0, -2.0, -0.5]
    zeros = [0.0] * 4
    found = mean_difference(
        of_tasks(
            results({("b", 0): zeros, ("b", 1): first}, "rte"),
            results({("b", 0): zeros[:3], ("b", 1): second}, "cola"),
        ),
        "b",
        1,
    )
    assert found is not None
    wanted = ttest_ind(first, [-x for x in second], equal_var=False)
    assert found.mean == pytest.approx((np.mean(first) + np.mean(second)) / 2)
    assert found.p == pytest.approx(wanted.pvalue)
    bounds = wanted.confidence_interval(0.95)
    assert (found.low, found.high) == pytest.approx((bounds.low / 2, bounds.high / 2))
    assert (found.better, found.n) == (4, 7)


def test_a_task_without_pairs_is_left_out_of_the_mean() -> None:
    scored = results({("b", 0): [1.0, 2.0], ("b", 1): [2.0, 4.0]}, "rte")
    bare = results({("b", 0): [1.0], ("b", 1): [None]}, "cola")
    found = mean_difference(of_tasks(scored, bare), "b", 1)
    assert found is not None
    assert (found.mean, found.n) == (1.5, 2)
    assert mean_difference(bare, "b", 1) is None
    assert mean_won_back(scored, 1) is None  # one form alone


def test_what_all_tasks_win_back_is_a_share_of_what_all_of_them_lose() -> None:
    draw = np.random.default_rng(1).normal

    def part(task: str, lost: float, won: float) -> Glue:
        kept, noise = 80 + draw(size=40), draw(size=(2, 40))
        scores = {("a", 0): kept, ("b", 0): kept - lost + noise[0]}
        scores |= {("a", 1): kept, ("b", 1): scores["b", 0] + won + noise[1]}
        return results({key: list(row) for key, row in scores.items()}, task)

    parts = part("rte", 10.0, 2.0), part("cola", 2.0, 1.0)
    found = mean_won_back(of_tasks(*parts), 1)
    alone = [won_back(one)[0] for one in parts]
    assert found is not None
    assert found.share is not None
    assert found.share == pytest.approx(sum(x.won for x in alone) / sum(x.lost for x in alone))
    assert found.low is not None
    assert found.high is not None
    # The delta method, of independent losses and gains of two tasks.
    per_task = 1 / 40 + found.share**2 / 40
    half = norm.ppf(0.975) * np.sqrt(2 * per_task) / (2 * found.lost)
    assert found.high - found.low == pytest.approx(2 * half, rel=0.35)
    assert (found.task, found.n) == ("", 80)


@pytest.mark.parametrize("lost", [0.0, -3.0])
def test_where_nothing_is_lost_there_is_no_share(lost: float) -> None:
    scores = {("a", 0): [70.0], ("b", 0): [70.0 - lost], ("a", 1): [70.0], ("b", 1): [71.0]}
    assert won_back(results(scores))[0].share is None


def test_a_share_has_no_interval_where_a_seed_loses_nothing() -> None:
    """Resampled, that seed alone would be divided by."""
    scores = {("a", 0): [80.0, 82.0, 84.0], ("b", 0): [75.0, 77.0, 84.0]}
    scores |= {("a", 1): [80.0, 82.0, 84.0], ("b", 1): [76.0, 78.0, 85.0]}
    (found,) = won_back(results({key: list(row) for key, row in scores.items()}))
    assert found.share == pytest.approx(0.3)
    assert (found.low, found.high) == (None, None)


def test_one_form_alone_wins_nothing_back() -> None:
    assert won_back(results({("b", 0): [70.0], ("b", 1): [71.0]})) == ()


@pytest.mark.parametrize(("form", "task"), list(product("ab", TABLE_3["a"])))
def test_the_slides_deltas_are_those_of_their_own_scores(form: str, task: str) -> None:
    if (form, task) == ("b", "cola"):
        assert task not in TABLE_3[form]  # the slides have no such row
        return
    baseline, *scores, delta, share = TABLE_3[form][task]
    assert max(scores) - baseline == pytest.approx(delta, abs=0.1001)
    assert 100 * delta / (100 - baseline) == pytest.approx(share, abs=1.0)


def test_the_model_of_the_slides_is_known_by_the_last_part_of_its_name() -> None:
    assert is_of_the_slides("albert/albert-base-v2")
    assert is_of_the_slides("models/albert-base-v2/")
    assert not is_of_the_slides("albert-large-v2")
