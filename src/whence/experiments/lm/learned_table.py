"""The table of vectors that a model learns to add at each position, and its Toeplitzness."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from jaxtyping import Float

from whence.analysis.results import Toeplitzness
from whence.analysis.toeplitz import FEWEST_ROWS, random_table, toeplitzness
from whence.experiments.processes import processes


def measured_table(model: Any, length: int) -> dict[str, Any]:
    """Toeplitzness for a log entry; nothing where no finite table is learned.

    All processes call it, as under FSDP all hold parts of the weights; the first one measures.
    """
    with whole_weights(model):
        table = learned_table(model, length) if processes()[0] == 0 else None
    if table is None or not np.isfinite(table).all():
        return {}
    return {"toeplitz": asdict(toeplitz_of(table))}


@contextmanager
def whole_weights(model: Any) -> Iterator[None]:
    """Gather the weights of which a process holds a part under FSDP, and release them again."""
    if not hasattr(model, "unshard"):
        yield
        return
    model.unshard()
    try:
        yield
    finally:
        model.reshard()


def learned_table(model: Any, length: int) -> Float[np.ndarray, "n d"] | None:
    """The vectors that a model has learned to add at each position, or None if it learns none."""
    whole = model.model.stack.position.whole
    device = next(model.parameters()).device
    with torch.enable_grad():
        term = whole.input_term(torch.arange(length, device=device))
    if term is None or not term.requires_grad or length < FEWEST_ROWS:
        return None
    table: Float[np.ndarray, "n d"] = term.detach().double().cpu().numpy()
    return table


def toeplitz_of(table: Float[np.ndarray, "n d"]) -> Toeplitzness:
    """Toeplitzness of P = E E^T over all rows, and that of one random table of the same norms."""
    null = random_table(table, np.random.default_rng(0))
    return toeplitzness(table @ table.T, [null @ null.T], 0, len(table))
