"""`whence lm` as a sweep: each method with each seed, on one data set."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from whence.analysis.lm_results import Job, Language
from whence.checks import at_least, require
from whence.experiments.config import fingerprint
from whence.experiments.folder import where_run
from whence.experiments.job import run_job
from whence.experiments.lm.config import LMConfig
from whence.experiments.lm.data import prepared
from whence.experiments.lm.judged import judged
from whence.experiments.lm.results import (
    RESULTS,
    Run,
    best_rate,
    gathered,
    job_name,
    n_runs,
    tried,
    waves,
)
from whence.experiments.lm.source import Source
from whence.experiments.lm.training import train
from whence.experiments.processes import named_device, processes
from whence.experiments.progress import Say, silent
from whence.experiments.sweep import Sweep, run_sweep
from whence.experiments.training import quiet
from whence.files import replace_folder

MODEL = "model"
TRAINING = 0.85  # share of a job's time, about; the rest is testing


class LMSweep(Sweep[Run, Job]):
    """All runs of a comparison; `source` is its data, where that is ready and the folder ours."""

    result = Job
    results_file = RESULTS

    def __init__(self, config: LMConfig, out: Path, source: Source | None = None) -> None:
        super().__init__(config, out)
        self.source = prepared(config, out) if source is None else source
        self.device = named_device(config.device)
        self.fingerprint = fingerprint(config.fixed(), self.source.sha256)

    def waves(self) -> Iterator[list[Run]]:
        """Several learning rates are tried before the other seeds run at the best."""
        return waves(self.config, self.out, name=self.fingerprint)

    def n_jobs(self) -> int:
        """How many runs there are in all."""
        return n_runs(self.config)

    def job_name(self, job: Run) -> str:
        """Of its method, rate and seed."""
        return job_name(self.config, job)

    def title(self, job: Run) -> str:
        """The method, and rate and seed where there are several."""
        rate = f", rate {job.learning_rate:g}" if self.config.tunes else ""
        seed = f", seed {job.seed}" if self.config.seeds > 1 else ""
        return f"{job.method}{rate}{seed}"

    def run(
        self, job: Run, folder: Path, *, say: Say, deadline: float | None, side_by_side: int
    ) -> Job | None:
        """Train and test; the model is kept where that was asked for."""
        trained = train(
            self.config,
            job.method,
            job.seed,
            self.source,
            folder,
            learning_rate=job.learning_rate,
            say=lambda what, share: say(what, TRAINING * share),
            deadline=deadline,
            side_by_side=side_by_side,
        )
        if processes()[0] > 0:
            return None
        found = judged(
            self.config,
            job.method,
            job.seed,
            self.source,
            trained,
            self.fingerprint,
            learning_rate=job.learning_rate,
            say=lambda what, share: say(what, TRAINING + (1 - TRAINING) * share),
        )
        if self.config.keep_models and not trained.stopped:
            with replace_folder(folder / MODEL) as kept, quiet():
                trained.model.save_pretrained(kept)
        return found

    def accept(self, job: Run, result: Job) -> None:
        """A model that was not kept cannot be asked for later."""
        folder = self.folder(job)
        require(
            not self.config.keep_models or bool(result.stopped) or (folder / MODEL).is_dir(),
            f"{folder} is of a finished job whose model was not kept. Leave --keep-models out, or "
            "delete the folder to train it again.",
        )

    def keeps_checkpoints(self, result: Job) -> bool:
        """Those of a run that broke down are for looking at."""
        return bool(result.stopped)

    def gathered(self, machine: dict[str, Any]) -> Language:
        """All that is finished, method by method."""
        results = gathered(self.config, self.source, self.out, {})
        where = where_run(machine, self.out / RESULTS, results, _finished)
        return replace(results, machine=where)


def run_lm(
    config: LMConfig,
    out: Path,
    *,
    machine: dict[str, Any] | None = None,
    say: Say = silent,
    deadline: float | None = None,
    ray: str | None = None,
    workers: int = 1,
    side_by_side: int = 1,
) -> Language:
    """Run what is not yet in `out`, and write all results there as lm.json.

    `deadline` (of time.monotonic) ends a run in order: what is done is written, and OutOfTimeError
    is raised. `ray` is the address of a cluster, or "local" for one on this machine; it must see
    the folder. `workers` processes share the device. `side_by_side` is how many jobs share the
    device while this runs, counting ours: the tables then show no speed of those that run now.
    Results that are there keep their own.

        >>> small = {"n_layers": 1, "n_heads": 2, "d_model": 16, "train_length": 16, "steps": 2}
        >>> brief = {"batch": 2, "warmup": 1, "eval_lengths": (16,), "eval_tokens": 32}
        >>> config = LMConfig(methods=("tisa",), task="copy", device="cpu", **small, **brief)
        >>> [job.method for job in run_lm(config, Path("copying")).jobs]
        ['tisa']
    """
    found: Language = run_sweep(
        LMSweep,
        config,
        out,
        machine=machine,
        say=say,
        deadline=deadline,
        ray=ray,
        workers=workers,
        side_by_side=side_by_side,
    )
    return found


def run_one(
    config: LMConfig,
    method: str,
    seed: int,
    out: Path,
    *,
    learning_rate: float | None = None,
    source: Source | None = None,
    say: Say = silent,
    deadline: float | None = None,
    side_by_side: int = 1,
) -> Job:
    """One job of the experiment in `out`: its result, read if it is there, else run for.

    Any number of processes may work in one folder at a time, on any jobs: one that another process
    is at is waited for. No lm.json is written; `run_lm` does, once all is done. `learning_rate` is
    one of the configuration's; unless given it is the only one, or of several the method's best,
    once all of them have been run with seed 0. `source` is what `prepared(config, out)` gave, where
    a process runs several jobs; `deadline` and `side_by_side` are those of `run_lm`.

        >>> small = {"n_layers": 1, "n_heads": 2, "d_model": 16, "train_length": 16, "steps": 2}
        >>> brief = {"batch": 2, "warmup": 1, "eval_lengths": (16,), "eval_tokens": 32}
        >>> config = LMConfig(methods=("tisa",), task="copy", device="cpu", **small, **brief)
        >>> run_one(config, "tisa", 0, Path("copying")).positional  # the method's parameters
        30
    """
    at_least(1, side_by_side=side_by_side)
    at_least(0, seed=seed)
    rates = ", ".join(map(str, config.learning_rates))
    require(
        learning_rate is None or learning_rate in config.learning_rates,
        f"learning_rate must be one of the experiment's, {rates}, got {learning_rate}.",
    )
    sweep = LMSweep(config, out, source)
    if learning_rate is None:
        done = tried(config, method, out, name=sweep.fingerprint)
        learning_rate = best_rate(config, method, done)
    if learning_rate is None:
        raise ValueError(
            f"the best learning rate of {method} is known once all of {rates} have been run with "
            "seed 0: name one of them."
        )
    job = Run(method, seed, learning_rate)
    return run_job(sweep, job, say=say, deadline=deadline, side_by_side=side_by_side)


def _finished(results: Language) -> set[tuple[str, int | float]]:
    return {(job.method, job.seed) for job in results.jobs} | {
        (tuned.method, tuned.learning_rate) for tuned in results.tuning
    }
