"""The language model with one method, and its training."""

import os
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from whence.checks import require
from whence.experiments.lm.config import LMConfig
from whence.experiments.lm.learned_table import measured_table
from whence.experiments.lm.source import Examples, Source
from whence.experiments.processes import check_gpus, named_device, processes
from whence.experiments.progress import Say
from whence.experiments.training import Trained, fit, shared_arguments
from whence.methods.registry import import_modules


def new_model(config: LMConfig, method: str, seed: int, vocab_size: int) -> Any:
    """The model as it begins: the same weights for the same seed, but for the method's own."""
    from transformers import set_seed

    from whence.models import WhenceConfig, WhenceForCausalLM, WhenceForMaskedLM

    import_modules(method)  # a method of the user's own, in a worker process too
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
    return fit(
        partial(new_model, config, method, seed, source.vocab_size),
        _arguments(config, seed, folder, learning_rate),
        Examples(source, seed=seed, n=config.steps * config.batch),
        folder,
        collate=stacked,
        title=f"{method}, seed {seed}",
        say=say,
        deadline=deadline,
        side_by_side=side_by_side,
        tokens_a_step=config.batch * config.train_length,
        measure=partial(measured_table, length=config.train_length),
    )


def stacked(examples: list[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """A batch of sequences of one length."""
    return {key: torch.stack([one[key] for one in examples]) for key in examples[0]}


def check_runnable(config: LMConfig) -> None:
    """Refuse what would fail in a job, before a folder is claimed: processes, devices, methods."""
    device, world = named_device(config.device), processes()[1]
    check_gpus(device)
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


def _arguments(config: LMConfig, seed: int, folder: Path, learning_rate: float) -> Any:
    from transformers import TrainingArguments

    parts = processes()[1] * config.accumulate
    return TrainingArguments(
        **shared_arguments(folder, named_device(config.device)),
        max_steps=config.steps,
        per_device_train_batch_size=config.batch // parts,
        gradient_accumulation_steps=config.accumulate,
        learning_rate=learning_rate,
        lr_scheduler_type="cosine",
        warmup_steps=config.warmup,
        weight_decay=config.weight_decay,
        adam_beta2=0.95,
        bf16=config.bf16,
        torch_compile=config.compile,
        seed=seed,
        train_sampling_strategy="sequential",  # the order is the data set's own
        fsdp=config.fsdp or None,
        logging_steps=config.log_every,
        save_steps=config.save_every,
    )
