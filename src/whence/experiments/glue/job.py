"""One job: a task in one form with S kernels and one seed, fine-tuned and scored."""

import copy
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from whence.analysis.glue_results import GlueJob
from whence.analysis.json_result import Array
from whence.analysis.lag_curves import curves_of
from whence.analysis.lm_results import LagView
from whence.experiments.glue.config import GlueConfig
from whence.experiments.glue.encoded import EncodedTask, Padded
from whence.experiments.glue.model import new_model
from whence.experiments.glue.scoring import score, scored
from whence.experiments.glue.tasks import task_named
from whence.experiments.glue.training import fine_tune
from whence.experiments.processes import processes
from whence.experiments.progress import Say
from whence.hf.attaching import attached
from whence.methods.tisa import Tisa

REACH = 32  # lags to each side of the curves that are kept
TRAINING = 0.95  # share of a job's time, about; the rest is scoring


class Run(NamedTuple):
    """Which job."""

    task: str
    form: str
    kernels: int
    seed: int

    @property
    def name(self) -> str:
        """Of its folder."""
        return f"{self.task}.form-{self.form}.kernels-{self.kernels}.seed-{self.seed}"


def runs(config: GlueConfig, sizes: dict[str, int]) -> list[Run]:
    """All jobs. A seed of all comes before the next, so that a run that is ended early has rows.

    Within a seed tasks of many steps come first: jobs that run side by side then end together.
    """
    tasks = sorted(config.tasks, key=lambda task: -sizes[task] * config.n_epochs(task))
    return [
        Run(task, form, kernels, seed)
        for seed in range(max(map(config.n_seeds, tasks)))
        for task in tasks
        if seed < config.n_seeds(task)
        for form in config.forms
        for kernels in config.kernels
    ]


def run_glue_job(
    config: GlueConfig,
    run: Run,
    data: EncodedTask,
    folder: Path,
    *,
    pad: int,
    device: torch.device,
    fingerprint: str,
    data_sha256: str,
    say: Say,
    deadline: float | None,
    side_by_side: int,
    begin: Path | None = None,
) -> GlueJob | None:
    """The result of a job; of several processes the first one has it, the others None.

    `begin` is the folder of a model with fitted kernels, from which it starts.
    """
    start = time.perf_counter()
    task = task_named(run.task)
    model = new_model(config, task, form=run.form, kernels=run.kernels, seed=run.seed, start=begin)
    before = _stated(model, config)
    collate = Padded(pad, regression=not task.labels)
    with _fitted_places(model) if begin is not None else nullcontext():
        trained = fine_tune(
            config,
            run.task,
            model,
            data.train,
            collate,
            folder,
            seed=run.seed,
            device=device,
            title=run.name,
            say=lambda what, share: say(what, TRAINING * share),
            deadline=deadline,
            side_by_side=side_by_side,
        )
    if processes()[0] > 0:
        return None
    model = trained.model
    say("scoring", TRAINING)
    scores = () if trained.stopped else scored(task, model, data.dev, collate, bf16=config.bf16)
    logged = [entry for entry in trained.log if "loss" in entry]
    handle = attached(model)
    return GlueJob(
        **run._asdict(),
        fingerprint=fingerprint,
        data_sha256=data_sha256,
        stopped=trained.stopped,
        score=score(scores) if scores else None,
        scores=scores,
        steps=np.asarray([entry["step"] for entry in logged], np.float32),
        train_loss=np.asarray([entry["loss"] for entry in logged], np.float32),
        seconds=time.perf_counter() - start,
        parameters=sum(p.numel() for p in model.parameters()),
        positional=0 if handle is None else handle.n_parameters(),
        curves=_views(before, _stated(model, config)),
    )


def _fitted_places(model: Any) -> AbstractContextManager[None]:
    """Kernels that a fit put many widths away are not thrown about while their widths learn."""
    from whence.distill.tuning import widths_leave_offsets

    handle = attached(model)
    assert handle is not None
    return widths_leave_offsets([m for m in handle.methods if isinstance(m, Tisa)])


def _stated(model: Any, config: GlueConfig) -> list[tuple[Array, Array]]:
    """The lags and curves [h, lag] of each layer, one alone where all share their kernels."""
    handle = attached(model)
    if handle is None or handle.n_parameters() == 0:
        return []
    methods: list[Any] = list(dict.fromkeys(m for m in handle.methods if m is not None))
    shape: Any = handle.model.config
    found = []
    for method in methods:
        curves = curves_of(
            copy.deepcopy(method).cpu(),
            name=config.position,
            n_heads=shape.num_attention_heads,
            d_head=shape.hidden_size // shape.num_attention_heads,
            reach=REACH,
        )
        found.append((curves.lag.float().numpy(), curves.mean.numpy()))
    return found


def _views(
    before: list[tuple[Array, Array]], after: list[tuple[Array, Array]]
) -> tuple[LagView, ...]:
    return tuple(
        LagView(layer, "the term added to the logit", lag, first, last)
        for layer, ((lag, first), (_, last)) in enumerate(zip(before, after, strict=True))
    )
