"""All jobs of an experiment into one folder: in turn, side by side, or on a Ray cluster."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from whence.analysis.lm_results import Job, Language
from whence.checks import at_least, require
from whence.experiments.config import LMConfig, fingerprint
from whence.experiments.folder import prepared
from whence.experiments.job import full_disk_named, run_job
from whence.experiments.results import (
    RESULTS,
    Run,
    best_rate,
    gathered,
    n_runs,
    run_folder,
    tried,
    waves,
)
from whence.experiments.source import Source
from whence.experiments.training import OutOfTimeError, processes

Say = Callable[[str, float], None]


def run_lm(
    config: LMConfig,
    out: Path,
    *,
    machine: dict[str, Any] | None = None,
    say: Say = lambda what, share: None,
    deadline: float | None = None,
    ray: str | None = None,
    side_by_side: int = 1,
) -> Language:
    """Run the jobs whose results are not yet in `out`, and write all results there as lm.json.

    `deadline` (of time.monotonic) ends a run in order: what is done is written, and OutOfTimeError
    is raised. `ray` is the address of a cluster, or "local" for one on this machine; it must see
    the folder. `side_by_side` is how many jobs share the device while this runs, counting ours:
    the tables then show no speed of those that run now. Results that are there keep their own.

        >>> small = {"n_layers": 1, "n_heads": 2, "d_model": 16, "train_length": 16, "steps": 2}
        >>> brief = {"batch": 2, "warmup": 1, "eval_lengths": (16,), "eval_tokens": 32}
        >>> config = LMConfig(methods=("tisa",), task="copy", device="cpu", **small, **brief)
        >>> [job.method for job in run_lm(config, Path("copying")).jobs]
        ['tisa']
    """
    at_least(1, side_by_side=side_by_side)
    require(
        deadline is None or (processes()[1] == 1 and ray is None),
        "a time limit is for one process: leave out torchrun and --ray, or the limit.",
    )
    source = prepared(config, out)
    lists = waves(config, out, name=fingerprint(config.fixed(), source.sha256))
    late: OutOfTimeError | None = None
    if ray is not None:
        from whence.experiments.on_ray import run_on_ray

        run_on_ray(config, lists, out, address=ray, say=say, side_by_side=side_by_side)
    else:
        runs = (run for some in lists for run in some)
        try:
            for place, run in enumerate(runs):
                _run(config, run, place, source, out, say, deadline, side_by_side)
        except OutOfTimeError as error:
            late = error
    results = gathered(config, source, out, {})
    results = replace(results, machine=_machine(out / RESULTS, results, machine or {}))
    if processes()[0] == 0:
        with full_disk_named(out):
            results.save(out / RESULTS)
    if late is not None:
        raise OutOfTimeError(f"{_n_done(config, results)} of {n_runs(config)} jobs are done")
    return results


def run_one(
    config: LMConfig,
    method: str,
    seed: int,
    out: Path,
    *,
    learning_rate: float | None = None,
    source: Source | None = None,
    say: Say = lambda what, share: None,
    deadline: float | None = None,
    side_by_side: int = 1,
) -> Job:
    """The result of one job of the experiment in `out`, which is run unless its result is there.

    Any number of processes may work in one folder at a time; a job that another process is running
    is waited for. No lm.json is written: `run_lm` writes it once all jobs are done.
    `learning_rate` is one of the configuration's. Unless given it is the only one, or else the
    method's best, which is known once all of them have been run with seed 0. `source` is what
    `prepared(config, out)` returned, for a process that runs several jobs. `deadline` and
    `side_by_side` are those of `run_lm`.

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
    source = prepared(config, out) if source is None else source
    name = fingerprint(config.fixed(), source.sha256)
    if learning_rate is None:
        learning_rate = best_rate(config, method, tried(config, method, out, name=name))
    if learning_rate is None:
        raise ValueError(
            f"the best learning rate of {method} is known once all of {rates} have been run with "
            "seed 0: name one of them."
        )
    return run_job(
        config,
        method,
        seed,
        source,
        run_folder(config, out, Run(method, seed, learning_rate)),
        learning_rate=learning_rate,
        fingerprint=name,
        say=say,
        deadline=deadline,
        side_by_side=side_by_side,
    )


def _run(
    config: LMConfig,
    run: Run,
    place: int,
    source: Source,
    out: Path,
    say: Say,
    deadline: float | None,
    side_by_side: int,
) -> None:
    """One of the runs in turn, whose progress is said as a part of all."""
    rate = f", rate {run.learning_rate:g}" if config.tunes else ""
    of = f", seed {run.seed}" if config.seeds > 1 else ""

    def report(what: str, share: float) -> None:
        say(f"{run.method}{rate}{of}: {what}", (place + share) / n_runs(config))

    run_one(
        config,
        run.method,
        run.seed,
        out,
        learning_rate=run.learning_rate,
        source=source,
        say=report,
        deadline=deadline,
        side_by_side=side_by_side,
    )


def _n_done(config: LMConfig, results: Language) -> int:
    """How many runs are finished; of several rates that were tried with seed 0, each is one."""
    if not config.tunes:
        return len(results.jobs)
    return len(results.tuning) + sum(job.seed > 0 for job in results.jobs)


def _machine(path: Path, results: Language, here: dict[str, Any]) -> dict[str, Any]:
    """Where the jobs ran: here, unless lm.json has had them all, so that none ran now."""
    if not path.is_file():
        return here
    there = Language.load(path)
    had, have = (
        {(job.method, job.seed) for job in one.jobs}
        | {(tuned.method, tuned.learning_rate) for tuned in one.tuning}
        for one in (there, results)
    )
    return here if have - had or not there.machine else there.machine
