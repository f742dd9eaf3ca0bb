"""The model of a job as it begins: pretrained, with a new head, and the method in its form."""

from pathlib import Path
from typing import Any

import torch

import whence.hf
from whence.analysis.checkpoint import open_checkpoint
from whence.analysis.profile import quiet
from whence.checks import require
from whence.experiments.glue.config import GlueConfig
from whence.experiments.glue.tasks import Task
from whence.families import ATTACHABLE
from whence.hf.attaching import attach


def new_model(
    config: GlueConfig, task: Task, *, form: str, kernels: int, seed: int, start: Path | None = None
) -> Any:
    """A classifier with its method attached, if it has one; the same head for the same seed.

    `start` is the folder of a model that has its method, in place of the configuration's.
    """
    from transformers import AutoModelForSequenceClassification, set_seed

    options: dict[str, Any] = {
        "num_labels": task.n_outputs,
        "problem_type": "single_label_classification" if task.labels else "regression",
        "dtype": torch.float32,
        "use_safetensors": True,
        "attn_implementation": "sdpa",
    }
    set_seed(seed)
    auto = AutoModelForSequenceClassification
    try:
        with quiet():
            if start is not None:
                return whence.hf.from_pretrained(start, auto, **options)
            model = auto.from_pretrained(str(model_folder(config.model)), **options)
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{config.model} cannot be loaded by transformers: {reason}") from error
    keeps = config.keeps_positions(form)
    if kernels:
        attach(
            model,
            config.method(kernels),
            keep_positions=keeps,
            share=config.share,
            backend=config.backend,
        )
    elif not keeps:
        attach(model, "nope", keep_positions=False)
    return model


def model_folder(name: str) -> Path:
    """Where the model lies; one without a position table that could be left out is refused."""
    checkpoint = open_checkpoint(name)
    kind = str(checkpoint.config.get("model_type"))
    known = sorted(set(ATTACHABLE) - {"vit"})
    require(
        kind in known,
        f"{name} is of the type {kind!r}, and GLUE needs a model of text with position embeddings: "
        f"{', '.join(known)}.",
    )
    return checkpoint.folder


def tokenizer_for(name: str) -> Any:
    """The tokenizer of a model."""
    from transformers import AutoConfig

    from whence.analysis.tokenized_text import tokenizer_of

    folder = str(model_folder(name))
    with quiet():
        found = tokenizer_of(folder, int(AutoConfig.from_pretrained(folder).vocab_size))
    require(
        found is not None and found.pad_token_id is not None,
        f"{name} has no tokenizer with a padding token, so it cannot read sentences. Add its "
        "tokenizer's files to the folder.",
    )
    return found
