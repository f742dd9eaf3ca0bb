"""Moves the mean rows of a position table, which tell no position, into the word embeddings."""

import torch
from torch import Tensor

from whence.checks import one_of, require
from whence.distill.original import Original
from whence.distill.sequences import Sequences

ROWS = ("special", "mean", "none")


def move_rows(original: Original, model: torch.nn.Module, text: Sequences, *, rows: str) -> None:
    """Add to each word embedding of `model` the mean row of the places where the text has it.

    "mean" takes one mean for all words. "special" takes a mean of its own for every special token,
    which for [CLS], always first, is the table's first row, and one for all others. "none" adds
    nothing. A vector that is the same wherever a token stands tells nothing about its position, but
    the layers have learned to expect it, and LayerNorm sees how long it is.
    """
    one_of("rows", rows, ROWS)
    if rows == "none":
        return
    base = original.model.base_model
    first = original.parts.first_position()
    table: Tensor = base.get_submodule(original.parts.stack.table).weight.detach()
    words: Tensor = model.base_model.get_input_embeddings().weight  # type: ignore[operator, union-attr]
    require(
        table.shape[1] == words.shape[1],
        f"the words of {original.checkpoint.name} have {words.shape[1]} dimensions and its "
        f"positions {table.shape[1]}, so no row can be added to a word. Take rows='none' "
        "(--rows none).",
    )
    own = text.special if rows == "special" else ()
    places: dict[int | None, Tensor] = {}
    for ids in text.train:
        for token in (*own, None):
            here = ids == token if token is not None else ~torch.isin(ids, torch.tensor(own))
            counts = places.setdefault(token, torch.zeros(len(table) - first))
            counts[: len(ids)] += here
    with torch.no_grad():
        mean = _mean(table[first:], places.pop(None))
        words += mean
        for token, counts in places.items():
            if counts.sum() > 0:
                words[token] += _mean(table[first:], counts) - mean


def _mean(table: Tensor, counts: Tensor) -> Tensor:
    weight = (counts.double() / counts.sum()).to(table.device)
    return (weight @ table.double()).to(table.dtype)
