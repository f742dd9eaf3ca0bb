"""Unlabelled text in a model's own tokens: a sequence a line, some held out from every fit."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from whence.analysis.tokenized_text import plain_token_ids, python_help_text, special_tokens_around
from whence.checks import require
from whence.distill.original import Original

FEWEST = 4  # tokens of a sequence, special ones included: a shorter one has hardly a lag
FIT_TOKENS = 4096
HELD_OUT_TOKENS = 2048
RANDOM = 128  # sequences for a model without a tokenizer


@dataclass(frozen=True, eq=False)
class Sequences:
    """Token ids, of which each sequence is a vector; all are in random order."""

    fit: tuple[Tensor, ...]  # the first of `train`, as many as a fit needs
    train: tuple[Tensor, ...]
    held_out: tuple[Tensor, ...]
    special: tuple[int, ...]  # tokens that are no words: [CLS], [SEP]
    source: str

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return max(len(ids) for ids in (*self.train, *self.held_out))


def read_sequences(
    original: Original, text: str | None, *, source: str, length: int, most: int, seed: int
) -> Sequences:
    """Lines of a text (None: a built-in one), cut at `length` tokens; about `most` of them.

    A tenth is held out, at most HELD_OUT_TOKENS. A model without a tokenizer gets random tokens.
    """
    generator = torch.Generator().manual_seed(seed)
    tokenizer = original.tokenizer
    special: tuple[int, ...] = ()
    if tokenizer is None:
        require(
            text is None,
            f"{original.checkpoint.name} has no tokenizer, so it cannot read {source}. Add its "
            "tokenizer's files, or leave the text out to distill on random tokens.",
        )
        found, source = _random(original, length, generator), "random tokens"
    else:
        lines = [line for line in _lines(text) if line.strip()]
        require(bool(lines), f"{source} is empty: give a text with a sentence a line.")
        order = torch.randperm(len(lines), generator=generator).tolist()
        found = _cut(original, [lines[i] for i in order], length, most)
        special = tuple(int(i) for i in tokenizer.all_special_ids)
    require(
        len(found) >= 2,
        f"{source} gives {len(found)} sequences of at least {FEWEST} tokens, and two are the "
        "fewest: one to fit to and one to measure on. Give a longer text.",
    )
    kept = max(1, min(len(found) // 10, len(_first(found, HELD_OUT_TOKENS))))
    train = found[kept:]
    return Sequences(
        tuple(_first(train, FIT_TOKENS)), tuple(train), tuple(found[:kept]), special, source
    )


def _lines(text: str | None) -> list[str]:
    """A sequence each; of the built-in text its paragraphs, which are broken into lines."""
    if text is not None:
        return text.splitlines()
    return [" ".join(part.split()) for part in python_help_text().split("\n\n")]


def _cut(original: Original, lines: Sequence[str], length: int, most: int) -> list[Tensor]:
    tokenizer = original.tokenizer
    before, after = special_tokens_around(tokenizer)
    room = length - len(before) - len(after)
    require(room > 0, f"length must leave room for words, got {length} tokens.")
    found: list[Tensor] = []
    for line in lines:
        ids = plain_token_ids(tokenizer, line)
        for start in range(0, len(ids), room):
            piece = [*before, *ids[start : start + room], *after]
            if len(piece) >= FEWEST:
                found.append(torch.tensor(piece))
        if len(found) >= most:
            break
    return found


def _random(original: Original, length: int, generator: torch.Generator) -> list[Tensor]:
    """Lengths of all sizes, and equal chances for all tokens but padding."""
    words = original.model.get_input_embeddings()
    assert isinstance(words, torch.nn.Embedding)
    shortest = min(2 * FEWEST, length)
    lengths = torch.randint(shortest, length + 1, (RANDOM,), generator=generator).tolist()
    pad = original.model.config.pad_token_id
    found = []
    for n in lengths:
        ids = torch.randint(words.num_embeddings, (n,), generator=generator)
        if pad is not None:
            ids = ids.masked_fill(ids == pad, pad + 1 if pad == 0 else pad - 1)
        found.append(ids)
    return found


def _first(sequences: Sequence[Tensor], tokens: int) -> list[Tensor]:
    """The first ones, up to so many tokens; one at least."""
    chosen: list[Tensor] = []
    n = 0
    for ids in sequences:
        n += len(ids)
        if chosen and n > tokens:
            break
        chosen.append(ids)
    return chosen
