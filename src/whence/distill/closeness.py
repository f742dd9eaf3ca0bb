"""How close two models are on a text: their hidden states, layer by layer."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from whence.distill.results import Closeness


def closeness(original: Any, student: Any, sequences: Sequence[Tensor]) -> Closeness:
    """The means over all tokens of the sequences, special ones too."""
    sums: list[Tensor] = []
    pooled, tokens = 0.0, 0
    for ids in sequences:
        wanted, found = hidden_states(original, ids), hidden_states(student, ids)
        cosine = nn.functional.cosine_similarity(wanted, found, dim=-1).sum(dim=1)
        apart, size = (wanted - found).square().sum(dim=(1, 2)), wanted.square().sum(dim=(1, 2))
        sums.append(torch.stack([cosine, apart, size]))
        means = wanted[-1].mean(dim=0), found[-1].mean(dim=0)
        pooled += float(nn.functional.cosine_similarity(*means, dim=0))
        tokens += len(ids)
    cosine, apart, size = torch.stack(sums).sum(dim=0)
    return Closeness(
        tuple((cosine / tokens).tolist()),
        tuple((apart / size).sqrt().tolist()),
        pooled / len(sequences),
    )


def hidden_states(model: Any, ids: Tensor) -> Tensor:
    """[layers + 1, n, d] of one sequence, in float64."""
    base = model.base_model
    row = ids[None].to(next(base.parameters()).device)
    with torch.inference_mode():
        out = base(input_ids=row, attention_mask=torch.ones_like(row), output_hidden_states=True)
    return torch.stack([state[0] for state in out.hidden_states]).double().cpu()
