"""GLUE from the hub: the same rows as from files, without a network."""

from pathlib import Path
from typing import Any

import pytest

from glue_files import write_glue
from whence.experiments.glue import hub
from whence.experiments.glue.rows import read_task
from whence.experiments.glue.tasks import TASKS

datasets = pytest.importorskip("datasets", reason="needs datasets: pip install 'whence[hf]'")


def as_on_the_hub(name: str, folder: Path) -> Any:
    """The rows of a task in files, as nyu-mll/glue has them, with a test split without labels."""
    task = TASKS[name]
    rows = read_task(task, folder)

    def split(part: Any) -> Any:
        columns: dict[str, Any] = {task.hub_columns[0]: list(part.first)}
        if part.second is not None:
            columns[task.hub_columns[1]] = list(part.second)
        labels = [int(x) for x in part.labels] if task.labels else list(part.labels)
        return datasets.Dataset.from_dict(columns | {"label": labels})

    parts = {"train": rows.train, **dict(zip(task.hub_dev, rows.dev.values(), strict=True))}
    return datasets.DatasetDict({name: split(part) for name, part in parts.items()})


@pytest.mark.parametrize("name", ["sst2", "mnli", "stsb", "mrpc"])
def test_rows_of_the_hub_are_those_of_the_files(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_glue(tmp_path, name)
    asked: list[str] = []

    def load(where: str) -> Any:
        asked.append(where)
        return as_on_the_hub(name, folder)

    monkeypatch.setattr(hub, "load_splits", load)
    found = hub.hub_task(TASKS[name], "hub:nyu-mll/glue")
    assert asked == [f"hub:nyu-mll/glue:{name}"]
    assert found.sha256 == read_task(TASKS[name], folder).sha256


def test_a_label_of_the_hub_that_is_hidden_is_an_error_with_its_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    splits = as_on_the_hub("rte", write_glue(tmp_path, "rte"))
    splits["validation"] = splits["validation"].map(lambda row: {"label": -1})
    monkeypatch.setattr(hub, "load_splits", lambda where: splits)
    with pytest.raises(ValueError, match="validation, row 0: the label -1 is unknown"):
        hub.hub_task(TASKS["rte"], "hub:nyu-mll/glue")
    del splits["validation"]
    with pytest.raises(ValueError, match="has no split validation, it has train"):
        hub.hub_task(TASKS["rte"], "hub:nyu-mll/glue")
