"""One method with one seed: trained, tested and written, once."""

import errno
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from whence.analysis.lm_results import Job, LengthLoss, Trace
from whence.analysis.results import Toeplitzness
from whence.checks import require
from whence.experiments.config import LMConfig
from whence.experiments.lock import only_one
from whence.experiments.source import Source
from whence.experiments.training import Trained, device_of, meet, new_model, processes, train

RESULT, MODEL = "result.json", "model"
LITTLE = 1 << 20  # bytes free, below which a failed write is put down to a full disk

Say = Callable[[str, float], None]


def run_job(
    config: LMConfig,
    method: str,
    seed: int,
    source: Source,
    folder: Path,
    *,
    learning_rate: float,
    fingerprint: str,
    say: Say = lambda what, share: None,
    deadline: float | None = None,
    side_by_side: int = 1,
) -> Job:
    """The result in `folder` if it is there, else trained for, from the last checkpoint on.

    Of several processes the first one tests and writes; the others wait for its file. Another run
    of the same job is waited for.
    """
    path = folder / RESULT
    if not path.is_file():
        with full_disk_named(folder), only_one(folder, say=say, deadline=deadline):
            if not path.is_file():
                _run(
                    config,
                    method,
                    seed,
                    source,
                    folder,
                    learning_rate=learning_rate,
                    fingerprint=fingerprint,
                    say=say,
                    deadline=deadline,
                    side_by_side=side_by_side,
                )
    job = finished(path, fingerprint, method, seed, learning_rate)
    require(
        not config.keep_models or bool(job.stopped) or (folder / MODEL).is_dir(),
        f"{folder} is of a finished job whose model was not kept. Leave --keep-models out, or "
        "delete the folder to train it again.",
    )
    _tidy(folder, job)  # a kill may have come after the result
    return job


def _run(
    config: LMConfig,
    method: str,
    seed: int,
    source: Source,
    folder: Path,
    *,
    learning_rate: float,
    fingerprint: str,
    say: Say,
    deadline: float | None,
    side_by_side: int,
) -> None:
    trained = train(
        config,
        method,
        seed,
        source,
        folder,
        learning_rate=learning_rate,
        say=lambda what, share: say(what, 0.85 * share),
        deadline=deadline,
        side_by_side=side_by_side,
    )
    if processes()[0] == 0:
        job = _judged(
            config,
            method,
            seed,
            source,
            trained,
            fingerprint,
            learning_rate=learning_rate,
            say=lambda what, share: say(what, 0.85 + 0.15 * share),
        )
        if config.keep_models and not trained.stopped:
            trained.model.save_pretrained(folder / MODEL)
        job.save(folder / RESULT)
    meet()


def _tidy(folder: Path, job: Job) -> None:
    """Checkpoints are for going on; those of a run that broke down are for looking at."""
    if not job.stopped and processes()[0] == 0:
        shutil.rmtree(folder / "checkpoints", ignore_errors=True)


def finished(path: Path, fingerprint: str, method: str, seed: int, learning_rate: float) -> Job:
    """The result of a job that was run before, of this experiment."""
    job = Job.load(path)
    require(
        (job.fingerprint, job.method, job.seed, job.learning_rate)
        == (fingerprint, method, seed, learning_rate),
        f"{path} is a result of another experiment. Give another --out, or delete it.",
    )
    return job


@contextmanager
def full_disk_named(folder: Path) -> Iterator[None]:
    """What writers of weights raise on a full disk, each in its own way, as one OSError."""
    try:
        yield
    except Exception as error:
        at = next((part for part in (folder, *folder.parents) if part.exists()), folder)
        said = "No space left" in str(error) or getattr(error, "errno", None) == errno.ENOSPC
        words = ("writ", "unexpected pos", "inline_container")  # of torch.save among others
        writing = isinstance(error, OSError) or any(word in str(error).lower() for word in words)
        if said or (writing and shutil.disk_usage(at).free < LITTLE):
            raise OSError(errno.ENOSPC, "No space left on device", str(folder)) from error
        raise


def _judged(
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
    from whence.experiments import lag_views
    from whence.experiments.evaluation import losses, tuning_loss
    from whence.experiments.monitor import learned_table

    model, log, device = trained.model, trained.log, device_of(config)
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
