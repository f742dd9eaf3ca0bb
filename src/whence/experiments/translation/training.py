"""Training of one translation model under `transformers.Trainer`."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import TrainingArguments

from whence.experiments.processes import processes
from whence.experiments.progress import Say
from whence.experiments.trainer import PositionTrainer
from whence.experiments.training import Trained, fit, shared_arguments
from whence.experiments.translation.averaging import WeightAverage
from whence.experiments.translation.batches import Rows, TokenBatches, only
from whence.experiments.translation.config import TranslationConfig
from whence.experiments.translation.loss import smoothed_loss

LOGS = 20  # looks at the loss in a job: each makes the host wait for the GPU


class TranslationTrainer(PositionTrainer):
    """Cross-entropy with label smoothing, summed over a step and divided by its tokens."""

    def __init__(
        self,
        model: Any,
        arguments: Any,
        *,
        smoothing: float,
        average: WeightAverage,
        callbacks: list[Any],
        **options: Any,
    ) -> None:
        def loss(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
            mean: Tensor = smoothed_loss(outputs["logits"], labels, smoothing) / num_items_in_batch
            return mean

        # The average comes first: its file is a part of the checkpoint that the others mark.
        super().__init__(
            model, arguments, compute_loss_func=loss, callbacks=[average, *callbacks], **options
        )

    def floating_point_ops(self, inputs: Any) -> int:
        """None are counted: counting walks through all parameters at every step."""
        return 0


def train(
    config: TranslationConfig,
    model: Any,
    source: Rows,
    target: Rows,
    folder: Path,
    *,
    learning_rate: float,
    seed: int,
    device: torch.device,
    title: str,
    say: Say,
    deadline: float | None,
    side_by_side: int,
) -> Trained:
    """Train `model` on the rows; the model that comes back has the mean of its last weights."""
    world = processes()[1]
    n = config.steps * config.accumulate * world
    average = WeightAverage(number=config.average, every=config.average_every, steps=config.steps)

    def make_trainer(*arguments: Any, **options: Any) -> TranslationTrainer:
        return TranslationTrainer(
            *arguments, smoothing=config.label_smoothing, average=average, **options
        )

    def reload(checkpoint: Path) -> Any:
        average.load(checkpoint, device)
        return type(model).from_pretrained(checkpoint).to(device)

    trained = fit(
        lambda: model,
        _arguments(config, folder, learning_rate=learning_rate, seed=seed, device=device),
        TokenBatches(source.to(device), target.to(device), tokens=config.tokens, seed=seed, n=n),
        folder,
        collate=only,
        title=title,
        say=say,
        deadline=deadline,
        side_by_side=side_by_side,
        tokens_a_step=config.tokens * config.accumulate * world,
        make_trainer=make_trainer,
        reload=reload,
    )
    if not trained.stopped:
        average.put_into(trained.model)
    return trained


def _arguments(
    config: TranslationConfig,
    folder: Path,
    *,
    learning_rate: float,
    seed: int,
    device: torch.device,
) -> TrainingArguments:
    every = max(config.steps // LOGS, 1)
    # A checkpoint comes at a log, so that a loss is looked at before it. Without any, the last step
    # of all stays ahead.
    wanted = config.save_every
    save = every * max(round(wanted / every), 1) if wanted else config.steps + 1
    shared = shared_arguments(folder, device)
    shared["dataloader_pin_memory"] = False  # batches are on the device already
    return TrainingArguments(
        **shared,
        max_steps=config.steps,
        per_device_train_batch_size=1,  # an item is a batch
        gradient_accumulation_steps=config.accumulate,
        learning_rate=learning_rate,
        lr_scheduler_type="inverse_sqrt",
        warmup_steps=config.warmup,
        weight_decay=config.weight_decay,
        adam_beta1=0.9,
        adam_beta2=0.98,
        adam_epsilon=1e-9,
        max_grad_norm=config.clip_gradient,
        bf16=config.bf16,
        tf32=True if config.tf32 and device.type == "cuda" else None,
        seed=seed,
        train_sampling_strategy="sequential",  # the order is the data set's own
        logging_steps=every,
        save_steps=save,
    )
