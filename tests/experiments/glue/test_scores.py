"""The metrics of GLUE, against numbers that were worked out by hand."""

import pytest

from whence.experiments.glue.tasks import TASKS


@pytest.mark.parametrize(
    ("task", "found", "wanted", "scores"),
    [
        ("sst2", [1, 0, 1, 1], [1, 0, 0, 1], {"accuracy": 75.0}),
        ("mnli", [2, 0, 1], [2, 1, 1], {"accuracy": 200 / 3}),
        # 2 true positives, 1 false positive, 0 false negatives, 1 true negative
        ("mrpc", [1, 0, 1, 1], [1, 0, 0, 1], {"F1": 80.0, "accuracy": 75.0}),
        ("qqp", [0, 0, 0], [1, 0, 0], {"F1": 0.0, "accuracy": 200 / 3}),
        # (2 * 1 - 1 * 0) / sqrt(3 * 2 * 2 * 1)
        ("cola", [1, 0, 1, 1], [1, 0, 0, 1], {"Matthews": 100 * 2 / 12**0.5}),
        ("cola", [1, 1, 1], [1, 0, 1], {"Matthews": 0.0}),
        ("stsb", [1.0, 2.0, 4.0], [0.0, 1.0, 2.0], {"Pearson": 98.198050606, "Spearman": 100.0}),
        ("stsb", [3.0, 3.0, 3.0], [0.0, 1.0, 2.0], {"Pearson": 0.0, "Spearman": 0.0}),
    ],
)
def test_each_task_has_its_official_metrics(
    task: str, found: list[float], wanted: list[float], scores: dict[str, float]
) -> None:
    said, right = ([float(x) for x in values] for values in (found, wanted))
    assert TASKS[task].metrics(said, right) == pytest.approx(scores)
