"""Methods times seeds into one folder, one after another or on a Ray cluster."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from whence.analysis.language import Job, Language
from whence.analysis.stored import Result
from whence.checks import require
from whence.experiments.config import LMConfig, fingerprint
from whence.experiments.job import RESULT, full_disk_named, run_job
from whence.experiments.source import Source
from whence.experiments.training import OutOfTimeError, processes

EXPERIMENT, RESULTS, TOKENIZER = "experiment.json", "lm.json", "tokenizer.json"

Say = Callable[[str, float], None]


@dataclass(frozen=True, eq=False)
class Experiment(Result):
    """What a folder is for: what all of its jobs have in common."""

    fixed: dict[str, Any]
    data_sha256: str


def run_lm(
    config: LMConfig,
    out: Path,
    *,
    machine: dict[str, Any] | None = None,
    say: Say = lambda what, share: None,
    deadline: float | None = None,
    ray: str | None = None,
) -> Language:
    """Run what is not yet in `out`, and write all results there as lm.json.

    `deadline` (of time.monotonic) ends a run in order: what is done is written, and OutOfTimeError
    is raised. `ray` is the address of a cluster, or "local" for one on this machine; it must see
    the folder.
    """
    require(
        deadline is None or (processes()[1] == 1 and ray is None),
        "a time limit is for one process: leave out torchrun and --ray, or the limit.",
    )
    source = prepared(config, out)
    jobs = [(method, seed) for method in config.methods for seed in range(config.seeds)]
    name = fingerprint(config.fixed(), source.sha256)
    if ray is not None:
        from whence.experiments.on_ray import run_on_ray

        found = run_on_ray(config, jobs, out, fingerprint=name, address=ray, say=say)
    else:
        found = _one_by_one(config, jobs, source, out, name, say, deadline)
    facts = {key: str(value) for key, value in source.facts().items()}
    results = Language(config.plain(), facts, machine or {}, tuple(_light(found)))
    if processes()[0] == 0:
        with full_disk_named(out):
            results.save(out / RESULTS)
    if len(found) < len(jobs):
        raise OutOfTimeError(f"{len(found)} of {len(jobs)} jobs are done")
    return results


def prepared(config: LMConfig, out: Path) -> Source:
    """The data, and the folder made ready for it; of several processes the first one writes."""
    from whence.experiments.tasks import Task
    from whence.experiments.text import Text
    from whence.experiments.tokens import read_corpus, read_texts

    if config.task != "text":
        task = Task(
            config.task,
            distance=config.distance,
            train_length=config.train_length,
            eval_tokens=config.eval_tokens,
        )
        _claim(out, config, task.sha256)
        return task
    assert config.data is not None
    texts = read_texts(Path(config.data), None if config.valid is None else Path(config.valid))
    _check(out, config, texts.sha256)
    cache = out / TOKENIZER
    given = None if config.tokenizer is None else Path(config.tokenizer)
    with _first_process_first(config), full_disk_named(out):
        corpus = read_corpus(texts, cache=cache, given=given, vocab_size=config.vocab_size)
    source = Text(
        corpus,
        train_length=config.train_length,
        longest=max(config.eval_lengths),
        masked=config.objective == "masked",
        eval_tokens=config.eval_tokens,
    )
    _claim(out, config, texts.sha256)
    return source


def job_folder(out: Path, method: str, seed: int) -> Path:
    """Of one job; the name says which."""
    return out / "jobs" / f"{re.sub(r'[^A-Za-z0-9.]+', '-', method)}.seed-{seed}"


def _one_by_one(
    config: LMConfig,
    jobs: list[tuple[str, int]],
    source: Source,
    out: Path,
    name: str,
    say: Say,
    deadline: float | None,
) -> list[Job]:
    found: list[Job] = []
    for place, (method, seed) in enumerate(jobs):

        def report(what: str, share: float, place: int = place, label: str = method) -> None:
            of = f", seed {jobs[place][1]}" if config.seeds > 1 else ""
            say(f"{label}{of}: {what}", (place + share) / len(jobs))

        folder = job_folder(out, method, seed)
        try:
            job = run_job(
                config,
                method,
                seed,
                source,
                folder,
                fingerprint=name,
                say=report,
                deadline=deadline,
            )
        except OutOfTimeError:
            done = [folder / RESULT for folder in (job_folder(out, *job) for job in jobs[place:])]
            found += [Job.load(path) for path in done if path.is_file()]
            break
        found.append(job)
    return found


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


def _check(out: Path, config: LMConfig, sha256: str) -> None:
    """Refuse a folder of another experiment, or of something else, before anything is written."""
    path = out / EXPERIMENT
    if not path.is_file():
        strange = [x.name for x in out.iterdir()] if out.is_dir() else []
        strange = [x for x in strange if not x.startswith(".") and x != TOKENIZER]
        require(
            not strange,
            f"{out} holds {', '.join(sorted(strange)[:3])} and no {EXPERIMENT}, so it is not of "
            "whence lm. Give an empty folder as --out.",
        )
        return
    there = Experiment.load(path)
    ours = config.fixed()
    differ = [
        f"{key} is {there.fixed.get(key)} there and {value} here"
        for key, value in ours.items()
        if there.fixed.get(key) != value
    ]
    if there.data_sha256 != sha256 and there.fixed.get("task") == ours["task"]:
        differ.append(f"its data has SHA-256 {there.data_sha256[:12]}, this data {sha256[:12]}")
    require(
        not differ,
        f"{out} holds another experiment: {'; '.join(differ)}. Give another --out.",
    )


def _claim(out: Path, config: LMConfig, sha256: str) -> None:
    """Say what the folder is for, before the first job."""
    _check(out, config, sha256)
    if processes()[0] == 0 and not (out / EXPERIMENT).is_file():
        with full_disk_named(out):
            Experiment(config.fixed(), sha256).save(out / EXPERIMENT)


def _first_process_first(config: LMConfig) -> Any:
    from contextlib import nullcontext

    if processes()[1] == 1:
        return nullcontext()
    from accelerate import PartialState

    from whence.experiments.training import device_of

    cpu = device_of(config).type == "cpu"
    state = PartialState(cpu=True, backend="gloo") if cpu else PartialState()
    return state.main_process_first()
