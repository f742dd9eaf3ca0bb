"""The data of a GLUE experiment: read, put into the model's tokens, and its folder claimed."""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from whence.analysis.checkpoint import open_checkpoint
from whence.checks import require
from whence.experiments.folder import Experiment, check_claim, claim
from whence.experiments.full_disk import full_disk_named
from whence.experiments.glue.config import DISTILLED, GlueConfig
from whence.experiments.glue.encoded import EncodedTask, encoded_task
from whence.experiments.glue.hub import hub_task, is_hub
from whence.experiments.glue.model import new_model, tokenizer_for
from whence.experiments.glue.rows import TaskRows, read_task
from whence.experiments.glue.start import fit_starts
from whence.experiments.glue.tasks import Task, task_named
from whence.experiments.lock import only_one
from whence.experiments.processes import check_gpus, join_processes, meet, named_device, processes

TOKENS = "tokens"  # the folder of the rows in tokens
COMMAND = "whence glue"


@dataclass(frozen=True, eq=False)
class GlueData:
    """All tasks in tokens, the padding token, and what identifies model and rows."""

    tasks: dict[str, EncodedTask]
    pad: int
    model_sha256: str
    rows_sha256: dict[str, str]  # of each task
    left_out: dict[str, int]  # official training and dev rows that break off in the middle

    def facts(self) -> dict[str, Any]:
        """For the results."""
        return {
            "model_sha256": self.model_sha256,
            "tasks": {
                name: {
                    "train": len(task.train),
                    "dev": sum(map(len, task.dev.values())),
                    "left_out": self.left_out[name],
                    "sha256": self.rows_sha256[name],
                }
                for name, task in self.tasks.items()
            },
        }


def prepared(config: GlueConfig, out: Path) -> GlueData:
    """The data, and the folder made ready for it; of several processes the first one writes."""
    device, world = named_device(config.device), processes()[1]
    check_gpus(device)
    join_processes(device)
    for task in config.tasks:
        require(
            config.n_batch(task) % world == 0,
            f"batch must be a multiple of the processes, got {config.n_batch(task)} for {world}.",
        )
    sha256 = open_checkpoint(config.model).sha256()
    ours = Experiment(config.fixed(), sha256)
    check_claim(out, ours, command=COMMAND)
    rows = {name: read_rows(task_named(name), config.data) for name in config.tasks}
    tokenizer = tokenizer_for(config.model)
    check_model(config)
    claim(out, ours, command=COMMAND)
    with full_disk_named(out), only_one(out):
        if processes()[0] > 0:
            meet()  # the first process has written
        tasks = {
            name: _in_tokens(config, part, tokenizer, sha256, out) for name, part in rows.items()
        }
        if processes()[0] == 0:
            if config.start == DISTILLED:
                fit_starts(config, rows.values(), out)
            meet()
    return GlueData(
        tasks,
        int(tokenizer.pad_token_id),
        sha256,
        {name: part.sha256 for name, part in rows.items()},
        {name: _left_out(part) for name, part in rows.items()},
    )


def read_rows(task: Task, data: str) -> TaskRows:
    """From the hub, or from a folder in the official layout."""
    return hub_task(task, data) if is_hub(data) else read_task(task, Path(data))


def check_model(config: GlueConfig) -> None:
    """Refuse, before a folder is claimed, a model that cannot take the method in every form."""
    for form in config.forms:
        new_model(config, task_named("cola"), form=form, kernels=max(config.kernels), seed=0)


def _in_tokens(
    config: GlueConfig, rows: TaskRows, tokenizer: Any, model_sha256: str, out: Path
) -> EncodedTask:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    parts = (rows.sha256, model_sha256, config.max_length, backend and backend.to_str())
    name = hashlib.sha256(repr(parts).encode()).hexdigest()
    path = out / TOKENS / f"{rows.task.name}.safetensors"
    return encoded_task(rows, tokenizer, length=config.max_length, path=path, name=name)


def _left_out(rows: TaskRows) -> int:
    return rows.train.left_out + sum(part.left_out for part in rows.dev.values())
