"""Results of a language-modelling comparison with known numbers, made without training."""

from pathlib import Path
from typing import Any

import numpy as np

from lm_settings import tiny
from whence.analysis.lm_results import EMPTY, SCRATCH, Job, LagView, Language, LengthLoss


def job(method: str, seed: int, losses: dict[int, float | None], **more: Any) -> Job:
    """One run of a method, with these losses at these lengths."""
    lag = np.arange(-3, 1, dtype=np.float32)
    view = LagView(0, "weight", lag, np.full((2, 4), 0.1, np.float32), np.eye(2, 4, dtype="f4"))
    found = tuple(
        LengthLoss(
            n,
            SCRATCH,
            x,
            None if x is None else 0.5,
            10,
            EMPTY,
            EMPTY,
            "" if x is not None else f"{method} <ends>",
        )
        for n, x in losses.items()
    )
    given: dict[str, Any] = {
        "stopped": "",
        "steps": np.arange(2, dtype=np.float32),
        "train_loss": np.ones(2, np.float32),
        "tokens_a_second": 100.0 + seed,
        "side_by_side": 1,
        "peak_bytes": 5_000_000 + seed,
        "parameters": 10,
        "positional": 3,
        "toeplitz": (),
        "gram_before": None,
        "gram_after": None,
        "stated": (view,),
        "attention": (view,),
    }
    return Job(method=method, seed=seed, fingerprint="f", losses=found, **{**given, **more})


def results(*jobs: Job, **config: Any) -> Language:
    """A comparison of these runs."""
    plain = tiny(Path("text.txt"), tuple(dict.fromkeys(one.method for one in jobs))).plain()
    return Language({**plain, **config}, {"train_tokens": "1234"}, {"gpu": "none"}, jobs)
