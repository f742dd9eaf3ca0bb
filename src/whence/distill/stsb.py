"""STS-B: does the cosine of two sentences' embeddings rank pairs as people do?

As sentence-transformers does it: the mean of the last hidden states over a sentence's tokens,
brought to length 1; Spearman's correlation of the cosines with the scores.
"""

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from scipy.stats import spearmanr
from torch import Tensor, nn

from whence.checks import require

COLUMNS = ("sentence1", "sentence2", "score")
BATCH = 64
LENGTH = 128  # tokens; no sentence of STS-B has more


@dataclass(frozen=True, eq=False)
class Pairs:
    """Pairs of sentences with people's scores from 0 to 5."""

    first: tuple[str, ...]
    second: tuple[str, ...]
    score: tuple[float, ...]


def read_pairs(folder: Path, *, split: str = "dev") -> Pairs:
    """A split of GLUE's STS-B, a table with tabs and no quotes."""
    path = folder / f"{split}.tsv"
    require(
        path.is_file(),
        f"there is no {path}: --data names the folder of GLUE's STS-B, which has dev.tsv.",
    )
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))
    require(
        len(rows) > 1 and all(row.get(column) for row in rows for column in COLUMNS),
        f"{path} is not a table of STS-B: every row needs {', '.join(COLUMNS)}.",
    )
    try:
        scores = tuple(float(row["score"]) for row in rows)
    except ValueError as error:
        raise ValueError(f"{path} has a score that is no number: {error}.") from None
    return Pairs(
        tuple(row["sentence1"] for row in rows), tuple(row["sentence2"] for row in rows), scores
    )


def spearman(model: Any, tokenizer: Any, pairs: Pairs, *, length: int = LENGTH) -> float:
    """100 times the rank correlation of cosines and scores; sentences are cut at `length`."""
    found = embedded(model, tokenizer, [*pairs.first, *pairs.second], length=length)
    n = len(pairs.first)
    cosine = (found[:n] * found[n:]).sum(dim=1)
    return 100 * float(spearmanr(cosine.numpy(), pairs.score).statistic)


def embedded(
    model: Any, tokenizer: Any, sentences: Sequence[str], *, length: int = LENGTH
) -> Float[Tensor, "sentence d"]:
    """The embedding of each sentence; those of like length are run together."""
    base = model.base_model
    device = next(base.parameters()).device
    order = sorted(range(len(sentences)), key=lambda place: len(sentences[place]))
    found: dict[int, Tensor] = {}
    for start in range(0, len(order), BATCH):
        places = order[start : start + BATCH]
        given = tokenizer(
            [sentences[place] for place in places],
            padding=True,
            truncation=True,
            max_length=length,
            return_tensors="pt",
        ).to(device)
        with torch.inference_mode():
            states = base(
                input_ids=given["input_ids"], attention_mask=given["attention_mask"]
            ).last_hidden_state
        there = given["attention_mask"][..., None]
        mean = (states * there).sum(dim=1) / there.sum(dim=1)
        unit = nn.functional.normalize(mean, dim=1).cpu()
        found.update(zip(places, unit, strict=True))
    return torch.stack([found[place] for place in range(len(sentences))])
