"""Fine-tuning of one model on the rows of a task, without the waits that short jobs feel."""

import math
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_model
from transformers import TrainingArguments

from whence.analysis.checkpoint import SAFE
from whence.experiments.glue.config import GlueConfig
from whence.experiments.glue.encoded import Encoded, Padded
from whence.experiments.processes import processes
from whence.experiments.progress import Say
from whence.experiments.trainer import PositionTrainer
from whence.experiments.training import Trained, fit, shared_arguments
from whence.hf.rates import own_parameters

LOGS = 10  # looks at the loss in a job: each makes the host wait for the GPU


class FineTuner(PositionTrainer):
    """A method's own parameters have a learning rate of their own, with the same schedule."""

    def __init__(self, model: Any, arguments: Any, *, position_rate: float, **options: Any) -> None:
        self.position_rate = position_rate
        super().__init__(model, arguments, **options)
        # Classifiers take a mean over their rows, whatever number of items they are given. Trainer
        # would multiply it by the number of processes, and wait for the number at every step.
        self.model_accepts_loss_kwargs = False

    def create_optimizer(self, model: Any = None) -> Any:
        """The library's, with the method's parameters moved to a group of their own."""
        fresh = self.optimizer is None
        optimizer = super().create_optimizer(model)
        own = own_parameters(self.model)
        if not fresh or not own:
            return optimizer
        ids = {id(parameter) for parameter in own}
        for group in optimizer.param_groups:
            group["params"] = [p for p in group["params"] if id(p) not in ids]
        optimizer.add_param_group({"params": own, "lr": self.position_rate, "weight_decay": 0.0})
        return optimizer

    def floating_point_ops(self, inputs: Any) -> int:
        """None are counted: counting walks through all parameters at every step."""
        return 0


def fine_tune(
    config: GlueConfig,
    task: str,
    model: Any,
    rows: Encoded,
    collate: Padded,
    folder: Path,
    *,
    seed: int,
    device: torch.device,
    title: str,
    say: Say,
    deadline: float | None,
    side_by_side: int,
) -> Trained:
    """Train `model` on the rows of a task, in an order that the seed gives."""

    def reload(checkpoint: Path) -> Any:
        load_model(model, checkpoint / SAFE)
        return model.to(device)

    return fit(
        lambda: model,
        _arguments(config, task, len(rows), folder, seed=seed, device=device),
        rows,
        folder,
        collate=collate,
        title=title,
        say=say,
        deadline=deadline,
        side_by_side=side_by_side,
        make_trainer=partial(FineTuner, position_rate=config.position_rate),
        reload=reload,
    )


def n_steps(config: GlueConfig, task: str, n_rows: int) -> int:
    """Steps of a job."""
    a_pass = math.ceil(n_rows / config.n_batch(task))
    return max(math.ceil(a_pass * config.n_epochs(task)), 1)


def _arguments(
    config: GlueConfig, task: str, n_rows: int, folder: Path, *, seed: int, device: torch.device
) -> TrainingArguments:
    gpu, world = device.type == "cuda", processes()[1]
    steps = n_steps(config, task, n_rows)
    every = max(steps // LOGS, 1)
    # A checkpoint comes at a log, so that a loss is looked at before it. Without any, the last step
    # of all stays ahead.
    save = every * max(round(config.save_every / every), 1) if config.save_every else steps + 1
    return TrainingArguments(
        **shared_arguments(folder, device),
        max_steps=steps,
        per_device_train_batch_size=config.n_batch(task) // world,
        learning_rate=config.learning_rate,
        lr_scheduler_type="linear",
        warmup_steps=round(config.warmup * steps),
        weight_decay=config.weight_decay,
        bf16=config.bf16,
        tf32=True if config.tf32 and gpu else None,
        seed=seed,
        data_seed=seed,
        accelerator_config={"non_blocking": gpu},  # the host need not wait for a batch to arrive
        logging_steps=every,
        save_steps=save,
    )
