"""Writes the folder of a distilled model: whole or not at all."""

import shutil
from pathlib import Path

from transformers import PreTrainedModel
from transformers.tokenization_utils_base import VERY_LARGE_INTEGER

from whence.analysis.profile import quiet
from whence.checks import require
from whence.distill.original import Original
from whence.distill.results import Distillation
from whence.files import replace_folder

RESULT = "distill.json"
# Files in which sentence-transformers keeps how to pool the model's outputs.
POOLING_FILES = ("modules.json", "sentence_bert_config.json", "config_sentence_transformers.json")


def check_out(out: Path, *, force: bool) -> None:
    """Refuse, before any work, a folder that holds something that `distill` did not write.

    With `force` a folder is replaced if `distill` wrote it, which its distill.json shows.
    """
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    require(out.is_dir(), f"{out} is a file: give a folder.")
    require(force, f"{out} exists already. Give another folder, or --force to replace it.")
    require(
        (out / RESULT).is_file(),
        f"{out} has no {RESULT}, so distill did not write it and does not replace it. Give "
        "another folder, or remove it by hand.",
    )


def write_model_folder(
    model: PreTrainedModel, original: Original, result: Distillation, out: Path, *, force: bool
) -> None:
    """Write model, tokenizer and result, and the original's pooling files if it has some."""
    with replace_folder(out) as new:
        with quiet():
            model.cpu().save_pretrained(new)
        if original.tokenizer is not None:
            if not result.options["keep_table"]:  # its limit was the table's
                original.tokenizer.model_max_length = VERY_LARGE_INTEGER
            original.tokenizer.save_pretrained(new)
        folder = original.checkpoint.folder
        for path in (*(folder / name for name in POOLING_FILES), *folder.glob("[0-9]_*/*")):
            if path.is_file():
                target = new / path.relative_to(folder)
                target.parent.mkdir(exist_ok=True)
                shutil.copyfile(path, target)
        result.save(new / RESULT)
        check_out(out, force=force)  # another process may have written there meanwhile
