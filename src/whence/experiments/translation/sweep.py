"""`whence translate` as a sweep: each position with each learning rate and each seed."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from whence.analysis.translation_results import Difference, Translation, TranslationJob
from whence.checks import require
from whence.experiments.config import fingerprint
from whence.experiments.folder import RESULT, where_run
from whence.experiments.job import finished
from whence.experiments.processes import named_device
from whence.experiments.progress import Say, silent
from whence.experiments.sweep import Sweep, run_sweep
from whence.experiments.translation.bootstrap import compared, drawn_bleu
from whence.experiments.translation.config import TranslationConfig
from whence.experiments.translation.data import prepared
from whence.experiments.translation.job import MODEL, Run, run_translation_job, runs

RESULTS = "translation.json"


class TranslationSweep(Sweep[Run, TranslationJob]):
    """All jobs of a comparison."""

    result = TranslationJob
    results_file = RESULTS

    def __init__(self, config: TranslationConfig, out: Path) -> None:
        super().__init__(config, out)
        self.data = prepared(config, out)
        self.device = named_device(config.device)
        self.fingerprint = fingerprint(config.fixed(), self.data.sha256)
        self.runs = runs(config)

    def waves(self) -> Iterator[list[Run]]:
        """One list: no job needs another."""
        yield self.runs

    def n_jobs(self) -> int:
        """How many jobs there are."""
        return len(self.runs)

    def job_name(self, job: Run) -> str:
        """Of its position, rate and seed."""
        return job.name

    def title(self, job: Run) -> str:
        """The position, and rate and seed where there are several."""
        rate = f", rate {job.learning_rate:g}" if len(self.config.learning_rates) > 1 else ""
        seed = f", seed {job.seed}" if self.config.seeds > 1 else ""
        return f"{job.position}{rate}{seed}"

    def run(
        self, job: Run, folder: Path, *, say: Say, deadline: float | None, side_by_side: int
    ) -> TranslationJob | None:
        """Train and translate."""
        return run_translation_job(
            self.config,
            job,
            self.data,
            folder,
            device=self.device,
            fingerprint=self.fingerprint,
            say=say,
            deadline=deadline,
            side_by_side=side_by_side,
        )

    def accept(self, job: Run, result: TranslationJob) -> None:
        """A model that was not kept cannot be asked for later."""
        folder = self.folder(job)
        require(
            not self.config.keep_models or bool(result.stopped) or (folder / MODEL).is_dir(),
            f"{folder} is of a finished job whose model was not kept. Give --no-keep-models, or "
            "delete the folder to train it again.",
        )

    def keeps_checkpoints(self, result: TranslationJob) -> bool:
        """Those of a run that broke down are for looking at."""
        return bool(result.stopped)

    def gathered(self, machine: dict[str, Any]) -> Translation:
        """All that is finished, and the differences from the first position."""
        jobs = tuple(
            finished(self.folder(job) / RESULT, TranslationJob, self.fingerprint, job)
            for job in self.runs
            if self.is_done(job)
        )
        whole = Translation(self.config.plain(), self.data.facts(), {}, jobs, ())
        return replace(
            whole,
            machine=where_run(machine, self.out / RESULTS, whole, _finished),
            jobs=tuple(job.lighter() for job in jobs),
            differences=tuple(differences(whole)),
        )


def _finished(results: Translation) -> set[Run]:
    return {Run(job.position, job.seed, job.learning_rate) for job in results.jobs}


def differences(results: Translation) -> Iterator[Difference]:
    """Of each position from the first one, on every test, over the seeds that both have."""
    first = results.config["positions"][0]
    if first not in results.positions:
        return
    drawn = {position: _drawn(results, position) for position in results.positions}
    for position in results.positions:
        for test, joined in _tests(results) if position != first else ():
            mine, base = (
                {
                    seed: found[test, joined]
                    for seed, found in drawn[x].items()
                    if (test, joined) in found
                }
                for x in (position, first)
            )
            shared = sorted(set(mine) & set(base))
            if shared:
                found = compared([mine[s] for s in shared], [base[s] for s in shared])
                yield Difference(position, test, joined, *found, len(shared))


def _tests(results: Translation) -> list[tuple[str, int]]:
    return [(test, joined) for test in results.tests for joined in results.joined]


def _drawn(results: Translation, position: str) -> dict[int, dict[tuple[str, int], Any]]:
    """BLEU of drawn sentences of each seed and test."""
    wanted = _tests(results)
    return {
        job.seed: {
            (part.test, part.joined): drawn_bleu(part.statistics)
            for part in job.scores
            if (part.test, part.joined) in wanted and part.bleu is not None
        }
        for job in results.chosen(position)
    }


def run_translation(
    config: TranslationConfig,
    out: Path,
    *,
    machine: dict[str, Any] | None = None,
    say: Say = silent,
    deadline: float | None = None,
    ray: str | None = None,
    workers: int = 1,
    side_by_side: int = 1,
) -> Translation:
    """Run what is not yet in `out`, and write all results there as translation.json.

    `deadline`, `ray`, `workers` and `side_by_side` are those of `run_sweep`.
    """
    found: Translation = run_sweep(
        TranslationSweep,
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
