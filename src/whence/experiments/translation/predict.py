"""A trained model translates sentences of one's own."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from whence.checks import at_least, at_most, finite, require
from whence.experiments.config import LARGEST, LARGEST_OF
from whence.experiments.folder import JOBS
from whence.experiments.training import quiet
from whence.experiments.translation.batches import rows_of
from whence.experiments.translation.bpe import Bpe
from whence.experiments.translation.data import TOKENIZER, read_bpe
from whence.experiments.translation.decoding import translated
from whence.experiments.translation.job import MODEL


def trained_model(folder: Path, device: torch.device) -> tuple[Any, Bpe]:
    """The model in a folder: of a job, of its `model` folder, or of an experiment with one job."""
    from whence.models import WhenceForConditionalGeneration

    require(folder.is_dir(), f"there is no folder {folder}.")
    known = [folder, folder / MODEL, *sorted(folder.glob(f"{JOBS}/*/{MODEL}"))]
    found = [
        path for path in known if (path / TOKENIZER).is_file() and (path / "config.json").is_file()
    ]
    require(
        len(found) > 0,
        f"{folder} has no trained model. whence translate keeps those of its jobs in "
        f"OUT/{JOBS}/*/{MODEL}, unless it is given --no-keep-models.",
    )
    require(
        len(found) == 1 or found[0] in known[:2],
        f"{folder} has {len(found)} models. Name one of them, such as {found[0]}.",
    )
    bpe = read_bpe(found[0])
    try:
        with quiet():
            model = WhenceForConditionalGeneration.from_pretrained(found[0], use_safetensors=True)
        require(
            model.config.vocab_size >= bpe.vocab_size,
            f"it has {model.config.vocab_size} tokens and its tokenizer {bpe.vocab_size}",
        )
    except (OSError, RuntimeError, ValueError, SafetensorError) as error:
        first = next(iter(str(error).splitlines()), "").rstrip(".")
        raise ValueError(
            f"the model in {found[0]} cannot be read: {first}. Delete its job's folder and run "
            "whence translate again."
        ) from error
    return model.to(device).eval(), bpe


def predicted(
    model: Any,
    bpe: Bpe,
    sentences: Sequence[str],
    *,
    beams: int = 4,
    length_penalty: float = 0.6,
    more_tokens: int = 50,
) -> list[str]:
    """The translation of each sentence, in one line; one of no words is empty."""
    at_least(1, beams=beams, more_tokens=more_tokens)
    at_most(min(LARGEST_OF["beams"], bpe.vocab_size), beams=beams)
    at_most(LARGEST, more_tokens=more_tokens)
    finite(length_penalty=length_penalty)
    require(length_penalty >= 0, f"length_penalty must be 0 or more, got {length_penalty}.")
    for text in sentences:
        require(_is_unicode(text), f"this sentence is not UTF-8: {text!r}.")
    given = [place for place, text in enumerate(sentences) if text.strip()]
    found = [""] * len(sentences)
    if given:
        source = rows_of(bpe.encode([sentences[place].strip() for place in given]))
        tokens = translated(
            model, source, beams=beams, length_penalty=length_penalty, more_tokens=more_tokens
        )
        for place, text in zip(given, bpe.decode(tokens), strict=True):
            found[place] = " ".join(text.splitlines())
    return found


def _is_unicode(text: str) -> bool:
    """Whether a text is one: bytes of the command line that are not UTF-8 become surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
