"""Beam search against one written from its definition, and whatever stands around a sentence."""

from typing import Any

import pytest
import torch

from whence.experiments.translation.batches import rows_of
from whence.experiments.translation.bpe import END_ID, PAD_ID
from whence.experiments.translation.decoding import by_length, translated
from whence.models import WhenceForConditionalGeneration, WhenceSeq2SeqConfig

MORE = 4


def toy(position: str, decoder: str | None = None) -> Any:
    """A model whose next token is far from even."""
    torch.manual_seed(3)
    config = WhenceSeq2SeqConfig(
        position=position,
        decoder_position=decoder,
        vocab_size=11,
        hidden_size=16,
        num_attention_heads=2,
        num_hidden_layers=1,
        max_position_embeddings=64,
        scale_embeddings=True,
        initializer_range=0.4,
        head_bias=True,
    )
    model = WhenceForConditionalGeneration(config).eval()
    with torch.no_grad():
        model.lm_head.bias[END_ID] = 1.5  # so that translations end
    return model


def sources(n: int) -> list[list[int]]:
    draw = torch.Generator().manual_seed(5)
    lengths = torch.randint(1, 9, (n,), generator=draw).tolist()
    return [[*torch.randint(2, 11, (x,), generator=draw).tolist(), END_ID] for x in lengths]


@torch.no_grad()
def searched(model: Any, source: list[int], *, beams: int, penalty: float) -> list[int]:
    """The best translation, without a cache.

    A hypothesis of n tokens with a sum of log-probabilities of s has the score s / n**penalty. In
    each step all running ones are extended by every token. Of the best 2 x beams of them those that
    end are finished if they are among the best `beams`, and the first `beams` that do not end run
    on. It is over when `beams` are finished and no running one is better at its present length.
    """
    limit = len(source) + MORE
    running: list[tuple[float, list[int]]] = [(0.0, [])]
    finished: list[tuple[float, list[int]]] = []
    for n in range(1, limit + 1):
        ids = torch.tensor([[PAD_ID, *tokens] for _, tokens in running])
        sources = torch.tensor([source] * len(running))
        logits = model(sources, decoder_input_ids=ids, use_cache=False).logits[:, -1]
        longer = []
        for (total, tokens), chances in zip(
            running, logits.log_softmax(dim=-1).tolist(), strict=True
        ):
            allowed = [END_ID] if n == limit else range(PAD_ID + 1, len(chances))
            longer += [(total + chances[token], [*tokens, token]) for token in allowed]
        best = sorted(longer, reverse=True)[: 2 * beams]
        finished += [(s / n**penalty, x) for s, x in best[:beams] if x[-1] == END_ID]
        finished = sorted(finished, reverse=True)[:beams]
        running = [(s, x) for s, x in best if x[-1] != END_ID][:beams]
        best_running = running[0][0] / n**penalty if running else -torch.inf
        if len(finished) == beams and best_running <= finished[-1][0]:
            break
    return finished[0][1][:-1]


@pytest.mark.parametrize(
    ("position", "beams", "penalty"), [("shaw:clip=2", 4, 0.6), ("sinusoidal", 3, 1.2)]
)
def test_beam_search_finds_what_a_search_by_definition_finds(
    position: str, beams: int, penalty: float
) -> None:
    model, rows = toy(position), sources(12)
    found = translated(model, rows_of(rows), beams=beams, length_penalty=penalty, more_tokens=MORE)
    assert found == [searched(model, row, beams=beams, penalty=penalty) for row in rows]
    at_limit = [len(x) == len(row) + MORE - 1 for x, row in zip(found, rows, strict=True)]
    assert not all(at_limit)  # some end by themselves, and some have to
    assert any(at_limit)


@pytest.mark.parametrize(("position", "decoder"), [("tisa", None), ("t5", "rope")])
def test_a_translation_does_not_depend_on_the_rows_around_it(
    position: str, decoder: str | None
) -> None:
    model, rows = toy(position, decoder), sources(7)
    options: dict[str, Any] = {"beams": 4, "length_penalty": 0.6, "more_tokens": MORE}
    together = translated(model, rows_of(rows), **options)
    alone = [translated(model, rows_of([row]), **options)[0] for row in rows]
    longer = translated(model, rows_of([*rows[::-1], [2] * 20 + [END_ID]]), **options)
    assert together == alone == longer[:-1][::-1]


def test_batches_are_by_length_and_hold_every_row_once() -> None:
    lengths = torch.tensor([5, 1, 9, 3, 3, 30, 2])
    found = [rows.tolist() for rows in by_length(lengths, rows=3, tokens=18)]
    assert found == [[1, 6, 3], [4, 0], [2], [5]]  # 3 rows, 18 tokens, and one that is longer
