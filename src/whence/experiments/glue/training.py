"""Fine-tuning with `transformers.Trainer`, without the waits for a GPU that short jobs feel."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PrinterCallback, TrainerCallback, TrainingArguments

from whence.analysis.profile import quiet
from whence.experiments.glue.config import GlueConfig
from whence.experiments.glue.encoded import Encoded, Padded
from whence.experiments.trainer import PositionTrainer
from whence.experiments.training import OutOfTimeError, processes
from whence.hf.attaching import Attached

LOGS = 10  # looks at the loss in a job: each makes the host wait for the GPU

Say = Callable[[str, float], None]


@dataclass(frozen=True, eq=False)
class FineTuned:
    """How a job went: its training curve, and why it ended early if it did."""

    log: list[dict[str, Any]]
    stopped: str


class FineTuner(PositionTrainer):
    """A method's own parameters have a learning rate of their own, with the same schedule."""

    def __init__(self, *args: Any, method: Attached | None, position_rate: float, **options: Any):
        self.method, self.position_rate = method, position_rate
        super().__init__(*args, **options)

    def create_optimizer(self, model: Any = None) -> Any:
        """The library's, with the method's parameters moved to a group of their own."""
        fresh = self.optimizer is None
        optimizer = super().create_optimizer(model)
        if not fresh or self.method is None:
            return optimizer
        own = [p for p in self.method.model.base_model.whence.parameters() if p.requires_grad]
        ids = {id(parameter) for parameter in own}
        for group in optimizer.param_groups:
            group["params"] = [p for p in group["params"] if id(p) not in ids]
        if own:
            optimizer.add_param_group(
                {"params": own, "lr": self.position_rate, "weight_decay": 0.0}
            )
        return optimizer

    def floating_point_ops(self, inputs: Any) -> int:
        """None are counted: counting walks through all parameters at every step."""
        return 0


class Watch(TrainerCallback):  # type: ignore[misc]
    """Reports progress, ends training on a loss that is not finite, or when the time is up."""

    def __init__(self, say: Say, deadline: float | None) -> None:
        self.say, self.deadline = say, deadline
        self.bad, self.out_of_time = "", False

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """After each step."""
        self.say("training", state.global_step / state.max_steps)
        if self.deadline is not None and time.monotonic() > self.deadline:
            self.out_of_time = control.should_training_stop = True

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Look at the mean loss since the log before."""
        entry = state.log_history[-1]
        if not math.isfinite(entry.get("loss", 0.0)):
            self.bad = f"loss is {entry['loss']} by step {entry['step']}"
            control.should_training_stop = True


def fine_tune(
    config: GlueConfig,
    task: str,
    model: Any,
    method: Attached | None,
    rows: Encoded,
    collate: Padded,
    folder: Path,
    *,
    seed: int,
    device: torch.device,
    say: Say,
    deadline: float | None,
) -> FineTuned:
    """Train `model` in place on the rows of a task, in an order that the seed gives."""
    world = processes()[1]
    watch = Watch(say, deadline)
    trainer = FineTuner(
        model,
        _arguments(config, task, len(rows), folder, seed=seed, device=device, world=world),
        train_dataset=rows,
        data_collator=collate,
        callbacks=[watch],
        method=method,
        position_rate=config.position_rate,
    )
    trainer.remove_callback(PrinterCallback)
    with quiet():
        trainer.train()
    if watch.out_of_time and not watch.bad:
        raise OutOfTimeError(f"step {trainer.state.global_step} of {trainer.state.max_steps}")
    return FineTuned(list(trainer.state.log_history), watch.bad)


def n_steps(config: GlueConfig, task: str, n_rows: int) -> int:
    """Steps of a job."""
    a_pass = math.ceil(n_rows / config.n_batch(task))
    return max(math.ceil(a_pass * config.n_epochs(task)), 1)


def _arguments(
    config: GlueConfig,
    task: str,
    n_rows: int,
    folder: Path,
    *,
    seed: int,
    device: torch.device,
    world: int,
) -> TrainingArguments:
    gpu = device.type == "cuda"
    steps = n_steps(config, task, n_rows)
    return TrainingArguments(
        str(folder / "checkpoints"),
        max_steps=steps,
        per_device_train_batch_size=config.n_batch(task) // world,
        learning_rate=config.learning_rate,
        lr_scheduler_type="linear",
        warmup_steps=round(config.warmup * steps),
        weight_decay=config.weight_decay,
        optim="adamw_torch_fused" if gpu else "adamw_torch",
        bf16=config.bf16,
        tf32=True if config.tf32 and gpu else None,
        seed=seed,
        data_seed=seed,
        remove_unused_columns=False,
        dataloader_pin_memory=gpu,
        accelerator_config={"non_blocking": gpu},  # the host need not wait for a batch
        use_cpu=not gpu,
        ddp_backend="gloo" if world > 1 and not gpu else None,
        logging_steps=max(steps // LOGS, 1),
        logging_nan_inf_filter=False,  # it looks at every loss; Watch looks at those of the log
        save_strategy="no",
        disable_tqdm=True,
        report_to="none",
    )
