"""What is found out about a trained language model."""

from statistics import median
from typing import Any

import numpy as np

from whence.analysis.lm_results import Job, LengthLoss, Trace
from whence.analysis.results import Toeplitzness
from whence.experiments.lm.config import LMConfig
from whence.experiments.lm.source import Source
from whence.experiments.lm.training import new_model
from whence.experiments.processes import named_device
from whence.experiments.progress import Say
from whence.experiments.training import Trained


def judged(
    config: LMConfig,
    method: str,
    seed: int,
    source: Source,
    trained: Trained,
    fingerprint: str,
    *,
    learning_rate: float,
    say: Say,
) -> Job:
    """The result of a run: losses at every length, and what its heads do at each lag."""
    from whence.experiments.lm import lag_views
    from whence.experiments.lm.evaluation import losses, tuning_loss
    from whence.experiments.lm.learned_table import learned_table

    model, log, device = trained.model, trained.log, named_device(config.device)
    logged = [entry for entry in log if "loss" in entry]
    peaks = [entry["peak_bytes"] for entry in logged if entry.get("peak_bytes") is not None]
    speeds = [entry["tokens_a_second"] for entry in logged if "tokens_a_second" in entry]
    tested: tuple[LengthLoss, ...] = ()
    views: dict[str, Any] = {"stated": (), "attention": ()}
    grams: list[Any] = [None, None]
    tuned: float | None = None
    if not trained.stopped:
        tested = losses(model, source, config, device, say=say)
        if config.tunes and seed == 0:
            tuned = tuning_loss(model, source, config, device)
        first = new_model(config, method, seed, source.vocab_size)
        model = model.float()
        views = {"attention": lag_views.attention(first, model, source, device)}
        first, model = first.cpu(), model.cpu()
        views["stated"] = lag_views.stated(first, model, config.train_length)
        tables = [learned_table(one, config.train_length) for one in (first, model)]
        grams = [None if t is None else (t @ t.T).astype(np.float32) for t in tables]
    return Job(
        method=method,
        seed=seed,
        fingerprint=fingerprint,
        stopped=trained.stopped,
        losses=tested,
        steps=np.asarray([entry["step"] for entry in logged], np.float32),
        train_loss=np.asarray([entry["loss"] for entry in logged], np.float32),
        tokens_a_second=median(speeds) if speeds else None,
        side_by_side=max((entry.get("side_by_side", 1) for entry in logged), default=1),
        peak_bytes=max(peaks) if peaks else None,
        parameters=sum(p.numel() for p in model.parameters()),
        positional=sum(p.numel() for p in model.model.stack.position.parameters()),
        toeplitz=tuple(
            Trace(entry["step"], Toeplitzness(**entry["toeplitz"]))
            for entry in log
            if "toeplitz" in entry
        ),
        gram_before=grams[0],
        gram_after=grams[1],
        learning_rate=learning_rate,
        tuning_loss=tuned,
        **views,
    )
