"""`whence glue` as a sweep: each task in each form with each number of kernels and each seed."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from whence.analysis.glue_results import Glue, GlueJob
from whence.checks import require
from whence.experiments.config import fingerprint
from whence.experiments.folder import RESULT, where_run
from whence.experiments.glue.config import DISTILLED, GlueConfig
from whence.experiments.glue.data import prepared
from whence.experiments.glue.job import Run, run_glue_job, runs
from whence.experiments.glue.start import start_folder
from whence.experiments.job import finished
from whence.experiments.processes import named_device
from whence.experiments.progress import Say, silent
from whence.experiments.sweep import Sweep, run_sweep

RESULTS = "glue.json"


class GlueSweep(Sweep[Run, GlueJob]):
    """All jobs of a comparison."""

    result = GlueJob
    results_file = RESULTS

    def __init__(self, config: GlueConfig, out: Path) -> None:
        super().__init__(config, out)
        self.data = prepared(config, out)
        self.device = named_device(config.device)
        self.fingerprint = fingerprint(config.fixed(), self.data.model_sha256)
        sizes = {name: len(task.train) for name, task in self.data.tasks.items()}
        self.runs = runs(config, sizes)

    def waves(self) -> Iterator[list[Run]]:
        """One list: no job needs another."""
        yield self.runs

    def n_jobs(self) -> int:
        """How many jobs there are."""
        return len(self.runs)

    def job_name(self, job: Run) -> str:
        """Of its task, form, kernels and seed."""
        return job.name

    def title(self, job: Run) -> str:
        """The same in words."""
        return f"{job.task} ({job.form}) S={job.kernels}, seed {job.seed}"

    def run(
        self, job: Run, folder: Path, *, say: Say, deadline: float | None, side_by_side: int
    ) -> GlueJob | None:
        """Fine-tune and score."""
        fitted = self.config.start == DISTILLED and job.kernels > 0
        return run_glue_job(
            self.config,
            job,
            self.data.tasks[job.task],
            folder,
            pad=self.data.pad,
            device=self.device,
            fingerprint=self.fingerprint,
            data_sha256=self.data.rows_sha256[job.task],
            say=say,
            deadline=deadline,
            side_by_side=side_by_side,
            begin=start_folder(self.out, form=job.form, kernels=job.kernels) if fitted else None,
        )

    def accept(self, job: Run, result: GlueJob) -> None:
        """Refuse a result of other rows."""
        require(
            result.data_sha256 == self.data.rows_sha256[job.task],
            f"{self.folder(job)} has a result of other rows of {job.task}. Give another --out.",
        )

    def gathered(self, machine: dict[str, Any]) -> Glue:
        """All that is finished; the curves and predictions of the first seeds are kept."""
        jobs = []
        for job in self.runs:
            if self.is_done(job):
                path = self.folder(job) / RESULT
                found = finished(path, GlueJob, self.fingerprint, job)
                jobs.append(found if job.seed == 0 else found.lighter())
        results = Glue(self.config.plain(), self.data.facts(), {}, tuple(jobs))
        where = where_run(machine, self.out / RESULTS, results, _finished)
        return replace(results, machine=where)


def _finished(results: Glue) -> set[Run]:
    return {Run(job.task, job.form, job.kernels, job.seed) for job in results.jobs}


def run_glue(
    config: GlueConfig,
    out: Path,
    *,
    machine: dict[str, Any] | None = None,
    say: Say = silent,
    deadline: float | None = None,
    ray: str | None = None,
    workers: int = 1,
) -> Glue:
    """Run what is not yet in `out`, and write all results there as glue.json.

    `deadline`, `ray` and `workers` are those of `run_sweep`.
    """
    found: Glue = run_sweep(
        GlueSweep,
        config,
        out,
        machine=machine,
        say=say,
        deadline=deadline,
        ray=ray,
        workers=workers,
    )
    return found
