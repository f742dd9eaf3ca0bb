"""What the finished jobs of an experiment come to: each method's learning rate, and lm.json."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from whence.analysis.lm_results import Job, Language, Tuning
from whence.experiments.config import fingerprint
from whence.experiments.folder import JOBS, RESULT, as_file_name
from whence.experiments.job import finished
from whence.experiments.lm.config import LMConfig
from whence.experiments.lm.source import Source

RESULTS = "lm.json"


class Run(NamedTuple):
    """A method to be trained with a seed at a learning rate."""

    method: str
    seed: int
    learning_rate: float


def job_name(config: LMConfig, run: Run) -> str:
    """The name of a job's folder; it holds the learning rate where there are several."""
    at = f".rate-{run.learning_rate}" if config.tunes else ""
    return f"{as_file_name(run.method)}{at}.seed-{run.seed}"


def run_folder(config: LMConfig, out: Path, run: Run) -> Path:
    """Where a job is kept."""
    return out / JOBS / job_name(config, run)


def result_of(config: LMConfig, out: Path, run: Run, *, name: str) -> Job | None:
    """The finished job of a run, or None; `name` is the fingerprint of the experiment."""
    path = run_folder(config, out, run) / RESULT
    return finished(path, Job, name, run) if path.is_file() else None


def best_rate(config: LMConfig, method: str, jobs: Sequence[Job]) -> float | None:
    """The learning rate with the smallest tuning loss among finished jobs of seed 0.

    None while a rate has no finished job. A run that stopped early has no loss and cannot be
    chosen; where all have stopped, it is the first rate, so that the method is shown as stopped.

        >>> one = LMConfig(methods=("tisa",), task="copy", learning_rates=(1e-3,))
        >>> two = LMConfig(methods=("tisa",), task="copy", learning_rates=(1e-3, 3e-3))
        >>> best_rate(one, "tisa", []), best_rate(two, "tisa", [])
        (0.001, None)
    """
    if not config.tunes:
        return config.learning_rates[0]
    mine = (job for job in jobs if (job.method, job.seed) == (method, 0))
    losses = {job.learning_rate: job.tuning_loss for job in mine}
    if any(rate not in losses for rate in config.learning_rates):
        return None
    known = [(loss, rate) for rate, loss in losses.items() if loss is not None]
    return min(known)[1] if known else config.learning_rates[0]


def tried(config: LMConfig, method: str, out: Path, *, name: str) -> list[Job]:
    """The finished jobs of seed 0 of a method, one for each learning rate that is done."""
    runs = (Run(method, 0, rate) for rate in config.learning_rates)
    jobs = (result_of(config, out, run, name=name) for run in runs)
    return [job for job in jobs if job is not None]


def waves(config: LMConfig, out: Path, *, name: str) -> Iterator[list[Run]]:
    """All runs of an experiment, in lists that each need the ones before to be finished.

    With one learning rate there is one list. With several the first holds all rates of all methods
    with seed 0, and the second the other seeds, at the rate that each method has by then.
    """
    if not config.tunes:
        (rate,) = config.learning_rates
        yield [Run(m, seed, rate) for m in config.methods for seed in range(config.seeds)]
        return
    yield [Run(method, 0, rate) for method in config.methods for rate in config.learning_rates]
    others = range(1, config.seeds)
    yield [
        run for m in config.methods for run in later_runs(config, m, out, name=name, seeds=others)
    ]


def later_runs(config: LMConfig, method: str, out: Path, *, name: str, seeds: range) -> list[Run]:
    """The runs of these seeds at the method's best rate; none while that is not known."""
    rate = best_rate(config, method, tried(config, method, out, name=name))
    return [] if rate is None else [Run(method, seed, rate) for seed in seeds]


def n_runs(config: LMConfig) -> int:
    """How many runs an experiment has in all."""
    return len(config.methods) * (len(config.learning_rates) + config.seeds - 1)


def gathered(config: LMConfig, source: Source, out: Path, machine: dict[str, Any]) -> Language:
    """All that is finished in `out`, method by method, each at its chosen learning rate."""
    name = fingerprint(config.fixed(), source.sha256)
    jobs: list[Job] = []
    tuning: list[Tuning] = []
    for method in config.methods:
        if config.tunes:
            done = tried(config, method, out, name=name)
            tuning += [Tuning(method, job.learning_rate, job.tuning_loss) for job in done]
        runs = later_runs(config, method, out, name=name, seeds=range(config.seeds))
        found = (result_of(config, out, run, name=name) for run in runs)
        jobs += [job for job in found if job is not None]
    facts = {key: str(value) for key, value in source.facts().items()}
    return Language(config.plain(), facts, machine, tuple(_light(jobs)), tuple(tuning))


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
