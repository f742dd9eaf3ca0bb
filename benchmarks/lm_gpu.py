"""Comparisons of methods on one GPU: a plan of experiments, in as many commands as it takes.

    python benchmarks/lm_gpu.py --plan benchmarks/lm_plan.toml --out out/lm_gpu --at-once 8 \\
        --seconds 500 [--unpack state.tar.gz] [--pack state.tar.gz] [--commit TEXT]

All experiments share one queue of `--at-once` processes (lm_workers.py), so that the GPU has work
until the last of them: a small model leaves a GPU waiting for the host. First come all methods at
all learning rates with seed 0, in the order of the plan. When a method has tried all its rates, its
other seeds follow at the best of them. Speeds of jobs side by side are not those of the methods,
which lm_cost.py measures.

The same command goes on where the last one ended: in the middle of a run on the same machine; on a
fresh one, with the packed state of the last, after the last finished run. It exits with 3 until all
is done. Each experiment has a folder with lm.json, of which lm_results.py makes tables and figures.
"""

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from lm_plan import Plan, PlannedJob, import_plugins, read_plan
from lm_state import pack, unpack
from lm_workers import lm_work
from whence.analysis.lm_results import Job, Language, ranked
from whence.analysis.tokenized_text import python_help_text
from whence.bench.machine import machine
from whence.checks import require
from whence.experiments import LMConfig, save_corpus
from whence.experiments.config import fingerprint
from whence.experiments.folder import RESULT
from whence.experiments.job_queue import share_out
from whence.experiments.lm.data import prepared
from whence.experiments.lm.results import RESULTS, Run, gathered, later_runs, n_runs, run_folder
from whence.experiments.lm.source import Source
from whence.experiments.lm.tokens import encoded, read_texts, tokenizer_for

UNFINISHED = 3


def rehearsal(plan: Plan, folder: Path) -> Plan:
    """The first two experiments and methods of a plan, so small that any machine runs them."""
    folder.mkdir(parents=True, exist_ok=True)
    text = folder / "text.txt"
    text.write_text(python_help_text()[:30_000], encoding="utf-8")
    texts = read_texts(str(text), None)
    stored = tokenizer_for(texts, cache=None, given=None, vocab_size=300)
    corpus = save_corpus(encoded(texts, stored), stored.tokenizer, folder / "corpus.safetensors")
    gpu = torch.cuda.is_available()
    small = {
        name: replace(
            config,
            methods=config.methods[:2],
            data=str(corpus),
            valid=None,
            tokenizer=None,
            task="text",
            vocab_size=None,
            seeds=2,
            learning_rates=(1e-3, 3e-3),
            tuning_tokens=128,
            train_length=32,
            eval_lengths=(32, 64),
            eval_tokens=256,
            n_layers=1,
            n_heads=2,
            d_model=32,
            steps=8,
            batch=4,
            accumulate=1,
            warmup=2,
            log_every=2,
            save_every=10,
            bf16=gpu,
            device="cuda" if gpu else "cpu",
        )
        for name, config in list(plan.experiments.items())[:2]
    }
    return Plan(plan.plugins, small)


def run(
    plan: Plan,
    sources: dict[str, Source],
    out: Path,
    *,
    plugin_folder: Path,
    at_once: int,
    seconds: float,
    grace: float,
    start: float,
    say: Callable[[str], None],
) -> bool:
    """All jobs of all experiments, until all is done (True) or the time is spent."""
    configs = plan.experiments
    names = {name: fingerprint(configs[name].fixed(), sources[name].sha256) for name in configs}
    order = [
        PlannedJob(name, method, 0, rate)
        for name, config in configs.items()
        for method in config.methods
        for rate in config.learning_rates
    ]
    first = len(order)
    order += [  # at any rate, as it is not known yet which
        PlannedJob(name, method, seed, 0.0)
        for name, config in configs.items()
        for seed in range(1, config.seeds)
        for method in config.methods
    ]
    places = {job: place for place, job in enumerate(order)}

    def place(job: PlannedJob) -> int:
        return places[job if job.seed == 0 else job._replace(learning_rate=0.0)]

    def is_left(job: PlannedJob) -> bool:
        folder = run_folder(configs[job.experiment], out / job.experiment, Run(*job[1:]))
        return not (folder / RESULT).is_file()

    def follow(job: PlannedJob) -> list[PlannedJob]:
        name, method = job.experiment, job.method
        config, seeds = configs[name], range(1, configs[name].seeds)
        runs = later_runs(config, method, out / name, name=names[name], seeds=seeds)
        return [one for one in (PlannedJob(name, *run) for run in runs) if is_left(one)]

    known = [job for job in order[:first] if is_left(job)]
    known += [
        job
        for name, config in configs.items()
        for m in config.methods
        for job in follow(PlannedJob(name, m, 0, 0.0))
    ]
    total = sum(n_runs(config) for config in configs.values())
    say(f"{total} jobs in {len(configs)} experiments, {len(known)} can begin; {at_once} at once")
    given = {
        "configs": {name: config.to_json() for name, config in configs.items()},
        "plugins": plan.plugins,
        "plugin_folder": str(plugin_folder),
        "out": str(out),
        "deadline": start + seconds,
        "at_once": at_once,
    }
    why = share_out(
        known,
        lm_work,
        given,
        place=place,
        follow=follow,
        at_once=at_once,
        until=start + seconds,
        end=start + seconds + grace,
        say=say,
    )
    for job, reason in why.items():
        say(f"not done: {job}: {reason}")
    return not why


def with_commits(jobs: list[Job], path: Path, facts: dict[str, object]) -> dict[str, Any]:
    """Where the jobs ran; `commits` says which ran at which, if not all ran at one.

    What the last results had ran there, all else here: an unpacked state may be of other sources.
    """
    names = [f"{job.method}.{job.seed}" for job in jobs]
    last = Language.load(path) if path.is_file() else None
    if last is None or not last.jobs:
        return dict(facts)
    alone = {str(last.machine["commit"]): [f"{job.method}.{job.seed}" for job in last.jobs]}
    commits: dict[str, list[str]] = {**last.machine.get("commits", alone)}
    had = {name for some in commits.values() for name in some}
    new = [name for name in names if name not in had]
    if not new:
        return last.machine
    here = str(facts["commit"])
    commits[here] = [*commits.get(here, []), *new]
    return {**facts, "commits": commits} if len(commits) > 1 else dict(facts)


def save_results(
    config: LMConfig, source: Source, folder: Path, facts: dict[str, object]
) -> Language:
    """All that is finished of an experiment, as its lm.json."""
    found = gathered(config, source, folder, {})
    where = with_commits(list(found.jobs), folder / RESULTS, facts)
    found = replace(found, machine=where)
    found.save(folder / RESULTS)
    return found


def show(name: str, results: Language) -> None:
    """Losses at each length in plain text: a machine with a GPU need not have what pages need."""
    print(f"\n{name}")
    print("method", "rate", *results.lengths, "seeds", sep="\t")
    for row in ranked(results):
        cells = ["-" if x is None else f"{x.mean:.3f}" for x in row.scratch]
        seeds = sum(job.method == row.method for job in results.jobs)
        print(row.method, f"{row.learning_rate:g}", *cells, seeds, sep="\t")
        for text in row.stopped:
            print(f"  {text}")
    for method in results.config["methods"]:
        losses = [x for x in results.tuning if x.method == method]
        if losses and method not in results.methods:
            n = len(results.config["learning_rates"])
            print(f"{method}\t{len(losses)} of {n} rates tried")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--plan", type=Path, default=Path(__file__).with_name("lm_plan.toml"))
    parser.add_argument("--only", help="experiments of the plan, separated by commas")
    parser.add_argument("--out", type=Path, default=Path("out/lm_gpu"))
    parser.add_argument("--at-once", type=int, default=8, help="jobs side by side")
    parser.add_argument("--seconds", type=float, default=500.0, help="then jobs end in order")
    parser.add_argument("--grace", type=float, default=45.0, help="after which they are ended")
    parser.add_argument("--pack", type=Path, help="write the finished runs to this file at the end")
    parser.add_argument("--unpack", type=Path, help="first take over those of this file")
    parser.add_argument("--commit", help="of these sources, where git is not at hand")
    parser.add_argument("--tiny", action="store_true", help="a rehearsal")
    options = parser.parse_args(arguments)
    start = time.monotonic()

    def say(what: str) -> None:
        print(f"{time.monotonic() - start:4.0f} s  {what}", flush=True)

    plan, plugin_folder = read_plan(options.plan), options.plan.resolve().parent
    whole = plan  # is packed, whichever part runs
    if options.only is not None:
        names = options.only.split(",")
        wrong = [name for name in names if name not in plan.experiments]
        require(not wrong, f"{options.plan} has no experiment {', '.join(wrong)}.")
        plan = replace(plan, experiments={name: plan.experiments[name] for name in names})
    if options.tiny:
        plan = whole = rehearsal(plan, options.out / "data")
    import_plugins(plan.plugins, plugin_folder)
    if options.unpack is not None and options.unpack.is_file():
        unpack(options.unpack, options.out)
    facts = machine("cuda" if torch.cuda.is_available() else "cpu")
    if options.commit:
        facts["commit"] = options.commit
    experiments = plan.experiments
    sources = {name: prepared(config, options.out / name) for name, config in experiments.items()}
    try:
        done = run(
            plan,
            sources,
            options.out,
            plugin_folder=plugin_folder,
            at_once=options.at_once,
            seconds=options.seconds,
            grace=options.grace,
            start=start,
            say=say,
        )
    finally:
        found = {
            name: save_results(config, sources[name], options.out / name, facts)
            for name, config in experiments.items()
        }
        if options.pack is not None:
            pack(whole, options.out, options.pack)
    for name, results in found.items():
        show(name, results)
    return 0 if done else UNFINISHED


if __name__ == "__main__":
    sys.exit(main())
