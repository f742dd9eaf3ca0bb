"""The dev sets of a task, run through a fine-tuned model and scored by the task's metrics."""

from statistics import fmean
from typing import Any

import numpy as np
import torch
from torch import Tensor

from whence.analysis.glue_results import SplitScores
from whence.experiments.glue.encoded import Encoded, Padded
from whence.experiments.glue.tasks import Task

TOKENS = 16_384  # of a batch


@torch.no_grad()
def scored(
    task: Task, model: Any, dev: dict[str, Encoded], collate: Padded, *, bf16: bool
) -> tuple[SplitScores, ...]:
    """Every dev set of the task."""
    model.eval()
    found = []
    for split, rows in dev.items():
        said = predictions(model, rows, collate, bf16=bf16)
        values = said.argmax(dim=1).float() if task.labels else said[:, 0]
        metrics = task.metrics(values.tolist(), rows.labels.tolist())
        found.append(SplitScores(split, metrics, values.numpy().astype(np.float32)))
    return tuple(found)


def score(scores: tuple[SplitScores, ...]) -> float:
    """The mean of all metrics of all dev sets, as GLUE's own average takes it."""
    return fmean(value for part in scores for value in part.metrics.values())


def predictions(model: Any, rows: Encoded, collate: Padded, *, bf16: bool) -> Tensor:
    """The outputs of all rows [rows, outputs], on the CPU; rows of like length run together."""
    device = next(model.parameters()).device
    order = rows.lengths.argsort().tolist()
    parts, start = [], 0
    while start < len(order):
        longest = int(rows.lengths[order[start]])
        stop = start + 1
        while stop < len(order):
            longest = int(rows.lengths[order[stop]])
            if (stop + 1 - start) * longest > TOKENS:
                break
            stop += 1
        batch = collate([rows[index] for index in order[start:stop]])
        given = {key: value.to(device) for key, value in batch.items() if key != "labels"}
        with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
            parts.append(model(**given).logits.float())
        start = stop
    found = torch.cat(parts).cpu()
    return found[torch.tensor(order).argsort()]
