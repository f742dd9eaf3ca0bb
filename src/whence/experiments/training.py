"""One run under `transformers.Trainer`: begun, or gone on with from its last whole checkpoint."""

import importlib.util
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from whence.checks import require
from whence.experiments.checkpoints import drop_broken, last_whole
from whence.experiments.folder import CHECKPOINTS
from whence.experiments.processes import processes
from whence.experiments.progress import DamagedCheckpointWarning, OutOfTimeError, Say, silent

SHARDED = "pytorch_model_fsdp"  # accelerate's name in a checkpoint under FSDP

Measure = Callable[[Any], dict[str, Any]]  # of a model; what it finds is added to a log entry


@dataclass(frozen=True, eq=False)
class Trained:
    """A model at the end of its run, and the log of all of it, whichever process wrote it."""

    model: Any
    log: list[dict[str, Any]]
    stopped: str  # "" or why training ended early


def nothing(model: Any) -> dict[str, Any]:
    """Measure nothing of a model."""
    return {}


def shared_arguments(folder: Path, device: torch.device) -> dict[str, Any]:
    """The TrainingArguments of every job in a folder on a device; the rest is the experiment's."""
    gpu = device.type == "cuda"
    return {
        "output_dir": str(folder / CHECKPOINTS),
        "optim": "adamw_torch_fused" if gpu else "adamw_torch",
        "remove_unused_columns": False,
        "dataloader_pin_memory": gpu,
        "use_cpu": not gpu,
        "ddp_backend": "gloo" if processes()[1] > 1 and not gpu else None,
        "logging_nan_inf_filter": False,  # it waits for every loss; those of the log are looked at
        "save_total_limit": 2,  # the newest is marked as whole after the oldest has gone
        "disable_tqdm": True,
        "report_to": "none",
    }


def fit(
    new_model: Callable[[], Any],
    arguments: Any,
    examples: Any,
    folder: Path,
    *,
    collate: Callable[[list[Any]], dict[str, Any]],
    title: str,
    say: Say = silent,
    deadline: float | None = None,
    side_by_side: int = 1,
    tokens_a_step: int | None = None,
    measure: Measure = nothing,
    make_trainer: Callable[..., Any] | None = None,
    reload: Callable[[Path], Any] | None = None,
) -> Trained:
    """Train a new model in `folder`, whose checkpoints are the `output_dir` of the arguments.

    `arguments` are transformers' TrainingArguments with `max_steps`, `logging_steps` and
    `save_steps`; a run that is shorter than `save_steps` writes a checkpoint when the time is
    spent, and else none. `measure` is asked at each log. `title` names the run in messages.
    `make_trainer` is called in place of PositionTrainer, and is to give one. `reload` gives the
    model of a checkpoint, where its class' own from_pretrained would not.
    """
    from transformers import PrinterCallback
    from transformers.trainer_callback import TrainerState

    from whence.experiments.monitor import TrainingMonitor
    from whence.experiments.trainer import PositionTrainer

    rank = processes()[0]
    model = new_model()
    checkpoints = folder / CHECKPOINTS
    last = _last_checkpoint(checkpoints)
    if last is not None and last[0] >= arguments.max_steps:  # killed between training and result
        try:
            state = TrainerState.load_from_json(str(last[1] / "trainer_state.json"))
            with quiet():
                model = (reload or type(model).from_pretrained)(last[1])
        except Exception as error:
            raise _unreadable(last[1], error) from error
        return Trained(model, list(state.log_history), "")
    if last is not None:
        _same_kind(last[1], fsdp=bool(arguments.fsdp))
    if rank == 0:
        drop_broken(checkpoints, keep=None if last is None else last[1])
    monitor = TrainingMonitor(
        folder=checkpoints,
        tokens_a_step=tokens_a_step,
        measure=measure,
        say=say,
        deadline=deadline,
        main=rank == 0,
        side_by_side=side_by_side,
        saves_the_last=arguments.save_steps <= arguments.max_steps,
    )
    begun = 0 if last is None else last[0]
    say(f"going on from step {begun}" if begun else "starting", begun / arguments.max_steps)
    callbacks = [monitor, *(_tensorboard(folder, begun) if rank == 0 else ())]
    trainer = (make_trainer or PositionTrainer)(
        model,
        arguments,
        train_dataset=examples,
        data_collator=collate,
        callbacks=callbacks,
    )
    trainer.remove_callback(PrinterCallback)  # it prints every log; the monitor reports progress
    with quiet():
        try:
            trainer.train(resume_from_checkpoint=None if last is None else str(last[1]))
        except Exception as error:
            if last is None or monitor.begun:
                raise
            raise _unreadable(last[1], error) from error
    if monitor.out_of_time and not monitor.bad:
        raise OutOfTimeError(f"{title}: step {trainer.state.global_step}")
    stopped = monitor.bad
    if stopped:
        kept = last_whole(checkpoints)
        where = "no checkpoint was saved before" if kept is None else f"{kept[1].name} is kept"
        stopped = f"{stopped}; {where}"
    return Trained(_whole(trainer, model), list(trainer.state.log_history), stopped)


def _last_checkpoint(checkpoints: Path) -> tuple[int, Path] | None:
    """The newest one that is whole; of damaged ones the first process warns."""
    damage: list[str] = []
    last = last_whole(checkpoints, damaged=damage.append)
    if processes()[0] == 0:
        way = "training begins anew" if last is None else f"going on from {last[1].name}"
        for why in damage:
            warnings.warn(f"{why}; {way}", DamagedCheckpointWarning, stacklevel=3)
    return last


def _unreadable(checkpoint: Path, error: Exception) -> ValueError:
    """For a checkpoint that is as it was written, or whose mark does not say what was."""
    return ValueError(
        f"{checkpoint} cannot be read ({error}): delete it to go on from the one before it."
    )


def _whole(trainer: Any, model: Any) -> Any:
    """The trained model; under FSDP gathered from all processes into the first one's."""
    if not trainer.is_fsdp_enabled:
        return trainer.model
    state = trainer.accelerator.get_state_dict(trainer.model)
    whole = type(model)(model.config)
    if processes()[0] == 0:
        whole.load_state_dict(state)
    return whole


def _same_kind(checkpoint: Path, *, fsdp: bool) -> None:
    """FSDP writes checkpoints of its own, which nothing else can go on from."""
    sharded = any(checkpoint.glob(f"{SHARDED}*"))
    was, wants = ("with", "without") if sharded else ("without", "with")
    require(
        sharded == fsdp,
        f"{checkpoint} was written {was} --fsdp, and this run is {wants} it. Go on as it began, or "
        f"delete {checkpoint.parent} to begin anew.",
    )


def _tensorboard(folder: Path, begun: int) -> list[Any]:
    """Logs for TensorBoard where it is installed: `tensorboard --logdir OUT/tensorboard`.

    Steps that a killed run logged after its last checkpoint come again, and go from its log.
    """
    if importlib.util.find_spec("tensorboard") is None:
        return []
    from torch.utils.tensorboard import SummaryWriter
    from transformers.integrations import TensorBoardCallback

    where = folder.parent.parent / "tensorboard" / folder.name
    writer = SummaryWriter(str(where), purge_step=begun + 1 if begun else None)
    return [TensorBoardCallback(writer)]


@contextmanager
def quiet() -> Iterator[None]:
    """Without the library's bars and remarks; its settings are the caller's again afterwards."""
    from transformers.utils import logging

    shown, level = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if shown:
            logging.enable_progress_bar()
