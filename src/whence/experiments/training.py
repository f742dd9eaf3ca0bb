"""One run under `transformers.Trainer`: begun, or gone on with from its last whole checkpoint."""

import importlib.util
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from whence.checks import require
from whence.experiments.checkpoints import drop_broken, last_whole
from whence.experiments.config import LMConfig
from whence.experiments.source import Examples, Source

SHARDED = "pytorch_model_fsdp"  # accelerate's name in a checkpoint under FSDP

Say = Callable[[str, float], None]


class OutOfTimeError(Exception):
    """The time given was spent; a checkpoint is saved, and the same command goes on from it."""


@dataclass(frozen=True, eq=False)
class Trained:
    """A model at the end of its run, and the log of all of it, whichever process wrote it."""

    model: Any
    log: list[dict[str, Any]]
    stopped: str


def processes() -> tuple[int, int]:
    """This process' number and how many there are, as torchrun says it."""
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def join_processes(config: LMConfig) -> None:
    """Let the processes of torchrun know each other; one process needs no others."""
    if processes()[1] == 1:
        return
    from accelerate import PartialState

    cpu = device_of(config).type == "cpu"
    PartialState(cpu=True, backend="gloo") if cpu else PartialState()


def meet() -> None:
    """Wait for the other processes of this run."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.barrier()


def device_of(config: LMConfig) -> torch.device:
    """Where to run."""
    require(
        config.device != "cuda" or torch.cuda.is_available(),
        "there is no NVIDIA GPU here: give --device cpu.",
    )
    gpu = config.device == "cuda" or (config.device == "auto" and torch.cuda.is_available())
    return torch.device("cuda", torch.cuda.current_device()) if gpu else torch.device("cpu")


def new_model(config: LMConfig, method: str, seed: int, vocab_size: int) -> Any:
    """The model as it begins: the same weights for the same seed, but for the method's own."""
    from transformers import set_seed

    from whence.models import WhenceConfig, WhenceForCausalLM, WhenceForMaskedLM

    options = WhenceConfig(
        position=method,
        vocab_size=vocab_size,
        hidden_size=config.d_model,
        num_hidden_layers=config.n_layers,
        num_attention_heads=config.n_heads,
        max_position_embeddings=config.train_length,
        embedding_dropout=config.dropout,
        hidden_dropout=config.dropout,
    )
    set_seed(seed)
    causal = config.objective == "causal"
    return (WhenceForCausalLM if causal else WhenceForMaskedLM)(options)


def train(
    config: LMConfig,
    method: str,
    seed: int,
    source: Source,
    folder: Path,
    *,
    learning_rate: float,
    say: Say,
    deadline: float | None = None,
    side_by_side: int = 1,
) -> Trained:
    """Train in `folder`, which keeps the last two checkpoints.

    A run that is shorter than `save_every` writes one when the time is spent, and else none.
    """
    from transformers import PrinterCallback
    from transformers.trainer_callback import TrainerState

    from whence.experiments.monitor import TrainingMonitor
    from whence.experiments.trainer import PositionTrainer

    rank, world = processes()
    model = new_model(config, method, seed, source.vocab_size)
    checkpoints = folder / "checkpoints"
    last = last_whole(checkpoints)
    if last is not None and last[0] >= config.steps:  # killed between training and its result
        state = TrainerState.load_from_json(str(last[1] / "trainer_state.json"))
        with _quiet():
            model = type(model).from_pretrained(last[1])
        return Trained(model, list(state.log_history), "")
    if last is not None:
        _same_kind(last[1], config)
    if rank == 0:
        drop_broken(checkpoints)
    monitor = TrainingMonitor(
        folder=checkpoints,
        length=config.train_length,
        tokens_a_step=config.batch * config.train_length,
        say=say,
        deadline=deadline,
        main=rank == 0,
        side_by_side=side_by_side,
        saves_the_last=config.save_every <= config.steps,
    )
    begun = 0 if last is None else last[0]
    callbacks = [monitor, *(_tensorboard(folder, begun) if rank == 0 else ())]
    trainer = PositionTrainer(
        model,
        _arguments(config, seed, folder, world, learning_rate),
        train_dataset=Examples(source, seed=seed, n=config.steps * config.batch),
        data_collator=stacked,
        callbacks=callbacks,
    )
    trainer.remove_callback(PrinterCallback)  # it prints every log; the monitor reports progress
    with _quiet():
        trainer.train(resume_from_checkpoint=None if last is None else str(last[1]))
    if monitor.out_of_time and not monitor.bad:
        raise OutOfTimeError(f"{method}, seed {seed}: step {trainer.state.global_step}")
    stopped = monitor.bad
    if stopped:
        kept = last_whole(checkpoints)
        where = "no checkpoint was saved before" if kept is None else f"{kept[1].name} is kept"
        stopped = f"{stopped}; {where}"
    return Trained(_whole(trainer, model), list(trainer.state.log_history), stopped)


def _whole(trainer: Any, model: Any) -> Any:
    """The trained model; under FSDP gathered from all processes into the first one's."""
    if not trainer.is_fsdp_enabled:
        return trainer.model
    state = trainer.accelerator.get_state_dict(trainer.model)
    whole = type(model)(model.config)
    if processes()[0] == 0:
        whole.load_state_dict(state)
    return whole


def _same_kind(checkpoint: Path, config: LMConfig) -> None:
    """FSDP writes checkpoints of its own, which nothing else can go on from."""
    sharded = any(checkpoint.glob(f"{SHARDED}*"))
    was, wants = ("with", "without") if sharded else ("without", "with")
    require(
        sharded == config.fsdp,
        f"{checkpoint} was written {was} --fsdp, and this run is {wants} it. Go on as it began, or "
        f"delete {checkpoint.parent} to begin anew.",
    )


def stacked(examples: list[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """A batch of sequences of one length."""
    return {key: torch.stack([one[key] for one in examples]) for key in examples[0]}


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
def _quiet() -> Iterator[None]:
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


def check_runnable(config: LMConfig) -> None:
    """Refuse what would fail in a job, before a folder is claimed: processes, devices, methods."""
    device, world = device_of(config), processes()[1]
    require(
        device.type == "cpu" or world > 1 or torch.cuda.device_count() == 1,
        "there are several GPUs: start with torchrun, a process a GPU, or choose one with "
        "CUDA_VISIBLE_DEVICES.",
    )
    parts = world * config.accumulate
    require(
        config.batch % parts == 0,
        f"batch must be a multiple of processes times accumulate, got {config.batch} for {parts}.",
    )
    if config.fsdp:
        check_fsdp(device)
    small = replace(config, n_layers=min(config.n_layers, 2))
    for method in config.methods:
        new_model(small, method, 0, vocab_size=8)


def check_fsdp(device: torch.device) -> None:
    """Refuse where accelerate would run without FSDP and not say so."""
    require(
        device.type != "cpu",
        "--fsdp is for GPUs: on CPUs accelerate keeps all weights in every process. Leave it out.",
    )
    require(
        "LOCAL_RANK" in os.environ,
        "--fsdp cuts the weights up over processes: start with torchrun --nproc-per-node N -m "
        "whence lm, or leave it out.",
    )


def _arguments(config: LMConfig, seed: int, folder: Path, world: int, learning_rate: float) -> Any:
    from transformers import TrainingArguments

    device, parts = device_of(config), world * config.accumulate
    return TrainingArguments(
        output_dir=str(folder / "checkpoints"),
        max_steps=config.steps,
        per_device_train_batch_size=config.batch // parts,
        gradient_accumulation_steps=config.accumulate,
        learning_rate=learning_rate,
        lr_scheduler_type="cosine",
        warmup_steps=config.warmup,
        weight_decay=config.weight_decay,
        adam_beta2=0.95,
        optim="adamw_torch_fused" if device.type == "cuda" else "adamw_torch",
        bf16=config.bf16,
        torch_compile=config.compile,
        seed=seed,
        train_sampling_strategy="sequential",  # the order is the data set's own
        remove_unused_columns=False,
        dataloader_pin_memory=device.type == "cuda",
        use_cpu=device.type == "cpu",
        fsdp=config.fsdp or None,
        ddp_backend="gloo" if world > 1 and device.type == "cpu" else None,
        logging_steps=config.log_every,
        logging_nan_inf_filter=False,
        save_steps=config.save_every,
        save_total_limit=2,  # the newest is marked as whole after the oldest has gone
        disable_tqdm=True,
        report_to="none",
    )
