"""The model to distill: loaded whole, and refused where it has no table that could be dropped."""

from dataclasses import dataclass
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

from whence.analysis.checkpoint import Checkpoint, open_checkpoint
from whence.analysis.profile import quiet
from whence.analysis.tokenized_text import tokenizer_of
from whence.checks import require
from whence.families import ATTACHABLE
from whence.hf.model_parts import ModelParts, parts_of


@dataclass(frozen=True, eq=False)
class Original:
    """A model with a position table, in evaluation mode, and its tokenizer if it has one."""

    checkpoint: Checkpoint
    model: PreTrainedModel
    tokenizer: Any

    @property
    def parts(self) -> ModelParts:
        """The model's modules, by the names in its family's row."""
        return parts_of(self.model.base_model)

    @property
    def n_positions(self) -> int:
        """Rows of the table that are positions."""
        return self.parts.max_length()


def load_original(name: str) -> Original:
    """The model of a folder or a name on the hub, in float32, from safetensors alone.

    It has eager attention: the logits that kernels are fitted to are what goes into its softmax.
    """
    checkpoint = open_checkpoint(name)
    kind = str(checkpoint.config.get("model_type"))
    require(
        not kind.startswith("whence-"),
        f"{name} has a method of whence attached already, so there is no table of its own to "
        "distill. Give the model that it was made from.",
    )
    require(
        kind in ATTACHABLE and kind != "vit",
        f"{name} is of the type {kind!r}, which has no position table that distill can drop. "
        f"It takes {', '.join(sorted(set(ATTACHABLE) - {'vit'}))}.",
    )
    model = _loaded(name, checkpoint)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    words: Any = model.get_input_embeddings()
    with quiet():
        tokenizer = tokenizer_of(str(checkpoint.folder), words.num_embeddings)
    return Original(checkpoint, model.to(device).eval(), tokenizer)


def _loaded(name: str, checkpoint: Checkpoint) -> Any:
    """In the class that it was saved in, heads and all."""
    names = checkpoint.config.get("architectures") or []
    own = names[0] if len(names) == 1 and hasattr(transformers, names[0]) else "AutoModel"
    cls: Any = getattr(transformers, own)
    try:
        with quiet(), torch.random.fork_rng(devices=[]):  # an absent pooler gets random numbers
            model, report = cls.from_pretrained(
                str(checkpoint.folder),
                attn_implementation="eager",
                dtype=torch.float32,
                use_safetensors=True,
                output_loading_info=True,
            )
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{name} cannot be loaded by transformers: {reason}") from error
    missing = sorted(key for key in report["missing_keys"] if "pooler" not in key)
    require(
        not missing,
        f"{name} has no weights for {', '.join(missing[:3])}: that part would be random. Give a "
        "checkpoint that has them.",
    )
    return model
