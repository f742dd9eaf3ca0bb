"""The loss of a trained model at every length, from scratch and sliding, and by position."""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from whence.analysis.lm_results import EMPTY, SCRATCH, SLIDING, LengthLoss
from whence.experiments.lm.config import LMConfig
from whence.experiments.lm.source import IGNORED, Scored, Source
from whence.experiments.progress import Say

BINS, FEWEST = 24, 128  # stretches of positions, and scored tokens in each
OUT_OF_MEMORY = "out of memory"
ROWS_OF_LOGITS = 4096  # tokens whose logits are in memory at a time


@torch.no_grad()
def losses(
    model: Any, source: Source, config: LMConfig, device: torch.device, *, say: Say
) -> tuple[LengthLoss, ...]:
    """At each length, both ways where the data has both."""
    model = model.to(device).eval()
    found = []
    lengths = sorted(set(config.eval_lengths))
    tokens = _at_a_time(config)
    for place, length in enumerate(lengths):
        say(f"testing at length {length}", place / len(lengths))
        for how in (SCRATCH, SLIDING):
            batches = source.scored(length, sliding=how == SLIDING, tokens=tokens)
            if batches is not None:
                found.append(_at_length(model, batches, length, how, config, device))
    return tuple(found)


@torch.no_grad()
def tuning_loss(model: Any, source: Source, config: LMConfig, device: torch.device) -> float | None:
    """From scratch at the length of training, on data that is not reported; None if not finite.

    Memory that is not there is an error and no loss: it must not decide which rate is best.
    """
    batches = source.tuning(tokens=_at_a_time(config))
    model = model.to(device).eval()
    found = _at_length(model, batches, config.train_length, SCRATCH, config, device)
    if found.why_not.startswith(OUT_OF_MEMORY):
        raise torch.OutOfMemoryError(found.why_not)
    return found.loss


def _at_a_time(config: LMConfig) -> int:
    """Tokens of a batch: as many as training has, which fits into memory."""
    return max(config.batch // config.accumulate * config.train_length, 1)


def _at_length(
    model: Any,
    batches: Iterator[Scored],
    length: int,
    how: str,
    config: LMConfig,
    device: torch.device,
) -> LengthLoss:
    limit = model.model.stack.position.max_length()
    if limit is not None and length > limit:
        return _none(length, how, f"{config_name(model)} knows {limit} positions")
    # loss, hits and tokens by position; kept on the device, which then has no reason to wait
    sums = torch.zeros(3, length, dtype=torch.float64, device=device)
    try:
        for batch in batches:
            sums += _by_position(model, batch, config, device)
    except torch.OutOfMemoryError:
        return _none(length, how, f"{OUT_OF_MEMORY} at length {length}")
    loss, hits, count = sums.cpu().numpy()
    total = count.sum()
    mean = float(loss.sum() / total)
    if not math.isfinite(mean):  # it would have no place in a ranking
        return _none(length, how, f"the loss of {config_name(model)} at length {length} is {mean}")
    place, curve = _binned(loss, count) if how == SCRATCH else (EMPTY, EMPTY)
    return LengthLoss(length, how, mean, float(hits.sum() / total), int(total), place, curve)


def config_name(model: Any) -> str:
    """The method of a model, as it was named."""
    return str(model.config.position)


def _none(length: int, how: str, why: str) -> LengthLoss:
    return LengthLoss(length, how, None, None, 0, EMPTY, EMPTY, why)


def _by_position(
    model: Any, batch: Scored, config: LMConfig, device: torch.device
) -> Float[Tensor, "3 n"]:
    """Sums over the rows of a batch; logits are made for some rows at a time."""
    ids, targets = batch.ids.to(device), batch.targets.to(device)
    with torch.autocast(device.type, torch.bfloat16, enabled=config.bf16):
        inner = {"use_cache": False} if config.objective == "causal" else {}
        hidden = model.model(input_ids=ids, **inner).last_hidden_state
        head = getattr(model, "head", None)
        hidden = hidden if head is None else head(hidden)
        flat, wanted = hidden.flatten(0, 1), targets.flatten()
        parts = []
        for start in range(0, len(flat), ROWS_OF_LOGITS):
            stop = start + ROWS_OF_LOGITS
            parts.append(_of_rows(model.lm_head(flat[start:stop]).float(), wanted[start:stop]))
    loss, hits = (torch.cat(column).view_as(targets) for column in zip(*parts, strict=True))
    count = targets != IGNORED
    return torch.stack([x.double().sum(dim=0) for x in (loss, hits, count)])


def _of_rows(
    logits: Float[Tensor, "rows v"], targets: Tensor
) -> tuple[Float[Tensor, " rows"], Tensor]:
    loss = F.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="none")
    return loss, logits.argmax(dim=-1) == targets


def _binned(loss: Any, count: Any) -> tuple[Any, Any]:
    """Mean loss in stretches that grow with the position, each of FEWEST scored tokens or more."""
    n = len(loss)
    edges = np.unique(np.geomspace(1, n + 1, BINS + 1).round().astype(int)) - 1
    fewest = min(FEWEST, count.sum() / 8)
    place, curve, start = [], [], 0
    for stop in edges[1:]:
        tokens = count[start:stop]
        if tokens.sum() >= fewest or (stop == n and tokens.sum() > 0):
            place.append((np.arange(start, stop) * tokens).sum() / tokens.sum())
            curve.append(loss[start:stop].sum() / tokens.sum())
            start = stop
    return np.asarray(place, np.float32), np.asarray(curve, np.float32)
