"""Translating rows of tokens by beam search through `generate`, cached and in large batches.

A translation's score is the sum of its tokens' log-probabilities, END among them, over their
number to the power of the length penalty, as `generate` has it.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList

from whence.experiments.training import quiet
from whence.experiments.translation.batches import Rows, batch, width_of
from whence.experiments.translation.bpe import END_ID, PAD_ID
from whence.experiments.translation.loss import smoothed_loss

ROWS = 512  # of a batch, at most
TOKENS = 32_768  # of a batch of sources, at most
USUAL_BEAMS = 4  # with which a batch may be that large


class EndAtLimit(LogitsProcessor):  # type: ignore[misc]
    """Each row ends by a limit of its own, so that no translation depends on the rows around it.

    Padding is no word, and is never chosen.
    """

    def __init__(self, limit: Tensor) -> None:
        self.limit = limit  # tokens with END, of each row of the batch, beams counted

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Leave no token but END to a row that is at its limit."""
        late = input_ids.shape[1] >= self.limit  # the first token is no part of the translation
        token = torch.arange(scores.shape[1], device=scores.device)
        barred = (late[:, None] & (token != END_ID)) | (token == PAD_ID)
        return scores.masked_fill(barred, -torch.inf)


@torch.inference_mode()
def translated(
    model: Any, source: Rows, *, beams: int, length_penalty: float, more_tokens: int
) -> list[list[int]]:
    """The tokens of the best translation of each row; rows of like length run together.

    A translation has at most `more_tokens` tokens more than its source.
    """
    model.eval()
    device = next(model.parameters()).device
    source = source.to(device)
    found: dict[int, list[int]] = {}
    fewer = max(USUAL_BEAMS, beams)  # more beams take fewer rows at a time, in as much memory
    sizes = {"rows": max(1, ROWS * USUAL_BEAMS // fewer), "tokens": TOKENS * USUAL_BEAMS // fewer}
    for rows in by_length(source.lengths.cpu(), **sizes):
        lengths = source.lengths[rows.to(device)]
        ids, there = source.padded(rows.to(device), width_of(int(lengths.max())))
        limit = lengths + more_tokens
        ends = LogitsProcessorList([EndAtLimit(limit.repeat_interleave(beams))])
        with quiet():  # the library warns of lengths beyond those of training
            out = model.generate(
                ids,
                attention_mask=there.long(),
                num_beams=beams,
                length_penalty=length_penalty,
                early_stopping=False,
                do_sample=False,
                use_cache=not model.get_decoder_stack().position.whole.grows,
                max_new_tokens=int(limit.max()),
                logits_processor=ends,
            )
        found |= zip(rows.tolist(), out.tolist(), strict=True)
    return [_tokens(found[index]) for index in range(len(source))]


def by_length(lengths: Tensor, *, rows: int = ROWS, tokens: int = TOKENS) -> Iterator[Tensor]:
    """The numbers of all rows in batches, short rows first."""
    order = lengths.argsort(stable=True)
    start = 0
    while start < len(order):
        stop = start + 1
        while (
            stop < len(order)
            and stop - start < rows
            and (stop + 1 - start) * int(lengths[order[stop]]) <= tokens
        ):
            stop += 1
        yield order[start:stop]
        start = stop


@torch.inference_mode()
def mean_loss(model: Any, source: Rows, target: Rows) -> float:
    """-log p of the target's tokens, without smoothing: nats a token."""
    model.eval()
    device = next(model.parameters()).device
    source, target = source.to(device), target.to(device)
    longest = torch.maximum(source.lengths, target.lengths).cpu()
    total = 0.0
    for rows in by_length(longest, tokens=TOKENS // 4):
        given = batch(source, target, rows.to(device), width_of(int(longest[rows].max())))
        labels = given.pop("labels")
        total += float(smoothed_loss(model(**given, use_cache=False).logits, labels, 0.0))
    return total / len(target.ids)


def _tokens(row: list[int]) -> list[int]:
    """What stands between the first token and END."""
    return row[1 : row.index(END_ID)]
