"""What each head of a layer lacks, as a function of lag: logits of the original less a student's.

The difference of logits D on a text is told by a curve and a constant a row, which a softmax does
not see: the f and r that make sum_ij w_ij (D_ij - f(j - i) - r_i)^2 least. The weights w are the
original's attention: to second order the sum is twice the divergence of the two attentions.
Special tokens stand at fixed places, not lags, and are left out.
"""

from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from whence.analysis.profile import Enough, Softmaxes, skewed
from whence.checks import require
from whence.distill.results import HeadCurve

RIDGE = 1e-4  # of the best known lag: a lag that is hardly ever attended to is drawn to the mean
SEEN = 1e-6  # of all weight: a lag with less is not there


def missing_curves(
    original: torch.nn.Module,
    student: torch.nn.Module,
    sequences: Sequence[Tensor],
    *,
    layer: int,
    special: Sequence[int],
) -> list[HeadCurve]:
    """The curves of all heads of a layer of two base models, whose attention is eager."""
    longest = max(len(ids) for ids in sequences)
    sums: _Sums | None = None
    for ids in sequences:
        wanted = logits_of(original, ids, layer=layer)
        found = logits_of(student, ids, layer=layer)
        if sums is None:
            sums = _Sums(len(wanted), longest)
        sums.add(wanted, found, ~torch.isin(ids, torch.tensor(special, dtype=ids.dtype)))
    assert sums is not None
    return [sums.curve(layer, head) for head in range(sums.n_heads)]


def logits_of(stack: torch.nn.Module, ids: Tensor, *, layer: int) -> Float[torch.Tensor, "h n n"]:
    """The input of a layer's softmax for one sequence, in float64; layers beyond are not run."""
    found: list[Tensor] = []
    see = partial(_keep, found, layer)
    row: Any = ids[None].to(next(stack.parameters()).device)
    with torch.inference_mode(), Softmaxes(len(ids), see, layer), suppress(Enough):
        stack(input_ids=row, attention_mask=torch.ones_like(row))
    require(len(found) == 1, f"the model has no softmax of self-attention in layer {layer}.")
    return found[0].clone()


def _keep(found: list[Tensor], layer: int, index: int, logits: Tensor) -> None:
    if index == layer:
        found.append(logits.double().cpu())


class _Sums:
    """The normal equations of f with every r solved for, head by head, over lags -reach..reach."""

    def __init__(self, n_heads: int, longest: int) -> None:
        self.n_heads, self.reach = n_heads, longest - 1
        lags = 2 * longest - 1
        self.system = torch.zeros(n_heads, lags, lags, dtype=torch.float64)
        self.right = torch.zeros(n_heads, lags, dtype=torch.float64)

    def add(self, wanted: Tensor, found: Tensor, word: Tensor) -> None:
        """One sequence."""
        require(
            not bool(wanted.isnan().any()),
            "the original has NaN logits: its weights are damaged or the text overflows them.",
        )
        there = (wanted > torch.finfo(torch.float32).min / 4) & word[:, None] & word
        weight = wanted.softmax(dim=-1).where(there, 0)
        n = wanted.shape[-1]
        here = slice(self.reach - (n - 1), self.reach + n)
        by_lag = skewed(weight)  # [h, row, lag]
        part = skewed((wanted - found).where(there, 0) * weight)
        row = by_lag.sum(dim=-1, keepdim=True).clamp(min=torch.finfo(torch.float64).tiny)
        self.system[:, here, here] += torch.diag_embed(by_lag.sum(dim=1))
        self.system[:, here, here] -= by_lag.transpose(1, 2) @ (by_lag / row)
        mean = part.sum(dim=-1, keepdim=True) / row
        self.right[:, here] += (part - by_lag * mean).sum(dim=1)

    def curve(self, layer: int, head: int) -> HeadCurve:
        """The solution over the lags that the text has; its weighted mean is 0."""
        known = self.system[head].diagonal()
        seen = (known > SEEN * known.sum()).nonzero()[:, 0]
        require(
            len(seen) > 0,
            f"head {head} of layer {layer} attends to nothing but special tokens and itself in "
            "this text, so there is no lag to fit. Give a longer text.",
        )
        known, system = known[seen], self.system[head][seen][:, seen]
        # A constant of all lags is not seen by the system: the ones settle it.
        settled = system + known.max() * (1 / len(seen) + RIDGE * torch.eye(len(seen)))
        curve = torch.linalg.solve(settled, self.right[head][seen])
        weight = known / known.sum()
        return HeadCurve(
            layer=layer,
            head=head,
            lag=(seen - self.reach).numpy().astype(np.float32),
            curve=(curve - weight @ curve).numpy().astype(np.float32),
            weight=weight.numpy().astype(np.float32),
        )
