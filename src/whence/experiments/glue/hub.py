"""GLUE from the Hugging Face hub, through `datasets`."""

import math
from typing import Any

from whence.checks import require
from whence.experiments.glue.rows import FEWEST, Rows, TaskRows, check_score
from whence.experiments.glue.tasks import Task
from whence.experiments.hub import PREFIX, load_splits


def is_hub(data: str) -> bool:
    """Whether the data is a name on the hub, not a folder."""
    return data.startswith(PREFIX)


def hub_task(task: Task, data: str) -> TaskRows:
    """The splits of a task; labels have the same numbers there as in `tasks.py`."""
    name = f"{data}:{task.name}"
    splits = load_splits(name)
    wanted = ("train", *task.hub_dev)
    missing = [split for split in wanted if split not in splits]
    require(not missing, f"{name} has no split {', '.join(missing)}, it has {', '.join(splits)}.")
    train = _rows(task, splits["train"], f"{name}, train")
    dev = {
        title: _rows(task, splits[split], f"{name}, {split}")
        for split, (_, title) in zip(task.hub_dev, task.dev, strict=True)
    }
    require(
        all(len(part) >= FEWEST for part in dev.values()) and len(train) > 0,
        f"{name} has a split without rows.",
    )
    return TaskRows(task, train, dev)


def _rows(task: Task, rows: Any, where: str) -> Rows:
    for column in (*task.hub_columns, "label"):
        require(
            column in rows.column_names,
            f"{where}: no column {column!r}, there are {', '.join(rows.column_names)}.",
        )
    texts = [tuple(str(text) for text in rows[column]) for column in task.hub_columns]
    labels = tuple(float(label) for label in rows["label"])
    for number, label in enumerate(labels):
        if task.labels:
            known = math.isfinite(label) and label in range(len(task.labels))
            require(known, f"{where}, row {number}: the label {label:g} is unknown.")
        else:
            check_score(label, f"{where}, row {number}")
    return Rows(texts[0], texts[1] if len(texts) > 1 else None, labels)
