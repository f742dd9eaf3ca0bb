"""Methods times seeds into one folder: one after another, side by side, or on a Ray cluster."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from whence.analysis.language import Job, Language
from whence.checks import at_least, require
from whence.experiments.config import LMConfig, fingerprint
from whence.experiments.folder import job_folder, prepared
from whence.experiments.job import RESULT, finished, full_disk_named, run_job
from whence.experiments.source import Source
from whence.experiments.training import OutOfTimeError, processes

RESULTS = "lm.json"

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
    """Run what is not yet in `out`, and write all results there as lm.json.

    `deadline` (of time.monotonic) ends a run in order: what is done is written, and OutOfTimeError
    is raised. `ray` is the address of a cluster, or "local" for one on this machine; it must see
    the folder. `side_by_side` is how many jobs share the device while this runs, counting ours:
    the tables then show no speed of those that run now. Results that are there keep their own.
    """
    at_least(1, side_by_side=side_by_side)
    require(
        deadline is None or (processes()[1] == 1 and ray is None),
        "a time limit is for one process: leave out torchrun and --ray, or the limit.",
    )
    source = prepared(config, out)
    jobs = [(method, seed) for method in config.methods for seed in range(config.seeds)]
    if ray is not None:
        from whence.experiments.on_ray import run_on_ray

        found = run_on_ray(config, jobs, out, address=ray, say=say, side_by_side=side_by_side)
    else:
        found = _one_by_one(config, jobs, source, out, say, deadline, side_by_side)
    facts = {key: str(value) for key, value in source.facts().items()}
    where = _machine(out / RESULTS, found, machine or {})
    results = Language(config.plain(), facts, where, tuple(_light(found)))
    if processes()[0] == 0:
        with full_disk_named(out):
            results.save(out / RESULTS)
    if len(found) < len(jobs):
        raise OutOfTimeError(f"{len(found)} of {len(jobs)} jobs are done")
    return results


def run_one(
    config: LMConfig,
    method: str,
    seed: int,
    out: Path,
    *,
    source: Source | None = None,
    say: Say = lambda what, share: None,
    deadline: float | None = None,
    side_by_side: int = 1,
) -> Job:
    """One job of the experiment in `out`: its result, read if it is there, else run for.

    Any number of processes may work in one folder at a time, on any jobs: one that another process
    is at is waited for. No lm.json is written; `run_lm` does, once all is done. `source` is what
    `prepared(config, out)` gave, where a process runs several jobs; `deadline` and `side_by_side`
    are those of `run_lm`.
    """
    at_least(1, side_by_side=side_by_side)
    at_least(0, seed=seed)
    source = prepared(config, out) if source is None else source
    return run_job(
        config,
        method,
        seed,
        source,
        job_folder(out, method, seed),
        fingerprint=fingerprint(config.fixed(), source.sha256),
        say=say,
        deadline=deadline,
        side_by_side=side_by_side,
    )


def _one_by_one(
    config: LMConfig,
    jobs: list[tuple[str, int]],
    source: Source,
    out: Path,
    say: Say,
    deadline: float | None,
    side_by_side: int,
) -> list[Job]:
    found: list[Job] = []
    for place, (method, seed) in enumerate(jobs):

        def report(what: str, share: float, place: int = place, label: str = method) -> None:
            of = f", seed {jobs[place][1]}" if config.seeds > 1 else ""
            say(f"{label}{of}: {what}", (place + share) / len(jobs))

        try:
            job = run_one(
                config,
                method,
                seed,
                out,
                source=source,
                say=report,
                deadline=deadline,
                side_by_side=side_by_side,
            )
        except OutOfTimeError:
            name = fingerprint(config.fixed(), source.sha256)
            for rest in jobs[place:]:
                path = job_folder(out, *rest) / RESULT
                found += [finished(path, name, *rest)] if path.is_file() else []
            break
        found.append(job)
    return found


def _machine(path: Path, jobs: list[Job], here: dict[str, Any]) -> dict[str, Any]:
    """Where the jobs ran: here, unless lm.json has had them all, so that none ran now."""
    if not path.is_file():
        return here
    there = Language.load(path)
    had = {(job.method, job.seed) for job in there.jobs}
    ran = any((job.method, job.seed) not in had for job in jobs)
    return here if ran or not there.machine else there.machine


def _light(jobs: list[Job]) -> list[Job]:
    """The pictures of a method's first seed are kept, those of the others stay in their folders."""
    seen: set[str] = set()
    light = []
    for job in jobs:
        whole = job.method not in seen and not job.stopped
        light.append(job if whole else job.lighter())
        if whole:
            seen.add(job.method)
    return light
