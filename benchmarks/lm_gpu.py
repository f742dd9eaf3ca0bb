"""The comparison of methods on WikiText-2 on one GPU, in as many commands as it takes.

    python benchmarks/lm_gpu.py --data wikitext-2.train.txt --valid wikitext-2.valid.txt \\
        --out out/lm_gpu --at-once 6 --seconds 500 [--unpack state.tar.gz] [--pack state.tar.gz]

A 12-layer model of 27.5 million parameters at n = 512, bfloat16, the same budget for each method,
three seeds: all methods with the first seed, then with the second, then the third, so that what the
time did not suffice for is a seed and not a method; the two whose bias is dense come after all
others. `--at-once` jobs run side by side, each in a process of its own (lm_workers.py): such a
small model leaves a GPU waiting for the host. Their speeds are not those of the methods, which
lm_cost.py measures.

The same command goes on where the last one ended: in the middle of a run on the same machine; on a
fresh one, with the packed state of the last, after the last finished run. It exits with 3 until all
is done. lm_results.py makes tables, figures and pages of it.
"""

import argparse
import dataclasses
import io
import sys
import tarfile
import time
from pathlib import Path
from typing import Any

import torch

from lm_workers import FAILURE, lm_work, share_out
from whence.analysis.language import Job, Language, ranked
from whence.bench.machine import machine
from whence.experiments import LMConfig
from whence.experiments.config import fingerprint
from whence.experiments.folder import EXPERIMENT, TOKENIZER, job_folder, prepared
from whence.experiments.job import RESULT, finished
from whence.experiments.source import Source
from whence.experiments.sweep import RESULTS

METHODS = (  # the best known first, then slow ones, so that none is left alone at the end
    "nope",
    "tisa:kernels=5",
    "rope",
    "transformer_xl",
    "content_band",
    "alibi",
    "t5",
    "shaw:clip=16",
    "learned",
    "sinusoidal",
    "tupe",
    "kerple",
    "tisa2",
    "tisa:kernels=5+rope",
    "xpos",
    "sandwich",
    "forget",
    "fire",
)
DENSE = ("forget", "fire")  # n x n numbers a head: several times as slow as the others
UNFINISHED = 3
KEPT = (EXPERIMENT, TOKENIZER, RESULTS, f"jobs/*/{RESULT}", f"jobs/*/{FAILURE}", "logs/*.txt")


def setting(options: argparse.Namespace) -> LMConfig:
    gpu = torch.cuda.is_available()
    log_every = max(min(options.steps // 4, 20), 1)
    methods = METHODS[:2] if options.tiny else METHODS
    return LMConfig(
        methods=tuple(options.methods.split(";")) if options.methods else methods,
        data=str(options.data),
        valid=str(options.valid),
        tokenizer=None if options.tokenizer is None else str(options.tokenizer),
        seeds=options.seeds,
        train_length=512,
        eval_lengths=tuple(int(n) for n in options.lengths.split(",")),
        eval_tokens=options.eval_tokens,
        vocab_size=16_384,
        n_layers=12,
        n_heads=6,
        d_model=384,
        dropout=options.dropout,
        steps=options.steps,
        batch=options.batch,
        learning_rate=options.learning_rate,
        position_rate=options.position_rate,
        warmup=max(options.steps // 10, 1),
        log_every=log_every,
        save_every=log_every * max(options.steps // log_every, 1),  # at the end, and when late
        bf16=gpu,
        device="cuda" if gpu else "cpu",
    )


def tiny(config: LMConfig) -> LMConfig:
    """A rehearsal of the whole script, on any machine."""
    return dataclasses.replace(
        config,
        train_length=32,
        eval_lengths=(32, 64),
        eval_tokens=256,
        vocab_size=300,
        n_layers=1,
        n_heads=2,
        d_model=32,
        steps=8,
        batch=4,
        warmup=2,
        log_every=2,
        save_every=4,
    )


def unpack(path: Path, out: Path) -> None:
    """Finished runs of an earlier machine; what is here already stays."""
    with tarfile.open(path) as archive:
        for member in archive.getmembers():
            if not (out / member.name).exists():
                archive.extract(member, out, filter="data")


def pack(out: Path, path: Path) -> None:
    """What is finished, as one file; checkpoints are too large to travel.

    So are the pictures of all seeds: of a job that is not of the first one its numbers are kept.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    with tarfile.open(temporary, "w:gz") as archive:
        for pattern in KEPT:
            for found in sorted(out.glob(pattern)):
                content = found.read_bytes()
                if found.name == RESULT:
                    job = Job.from_json(content.decode())
                    content = content if job.seed == 0 else job.lighter().to_json().encode()
                entry = tarfile.TarInfo(str(found.relative_to(out)))
                entry.size = len(content)
                archive.addfile(entry, io.BytesIO(content))
    temporary.replace(path)
    print(f"packed {path.name}: {path.stat().st_size / 1e6:.1f} MB", flush=True)


def run(
    config: LMConfig,
    source: Source,
    out: Path,
    facts: dict[str, object],
    *,
    at_once: int,
    seconds: float,
    grace: float,
) -> bool:
    """All jobs, seed after seed, until all is done (True) or the time is spent."""
    start = time.monotonic()
    jobs = [(method, seed) for seed in range(config.seeds) for method in config.methods]
    jobs.sort(key=lambda job: job[0] in DENSE)
    left = [job for job in jobs if not (job_folder(out, *job) / RESULT).is_file()]

    def say(what: str) -> None:
        print(f"{time.monotonic() - start:4.0f} s  {what}", flush=True)

    say(f"{len(jobs) - len(left)} of {len(jobs)} jobs are done; {at_once} at once")
    given = {
        "config": config.to_json(),
        "out": str(out),
        "deadline": start + seconds,
        "at_once": at_once,
    }
    end = start + seconds + grace
    why = share_out(left, lm_work, given, at_once=at_once, end=end, say=say)
    gathered(config, source, out, facts).save(out / RESULTS)
    for (method, seed), reason in why.items():
        say(f"not done: {method}, seed {seed}: {reason}")
    return not why


def gathered(config: LMConfig, source: Source, out: Path, facts: dict[str, object]) -> Language:
    """All that is finished, method by method; pictures of the first seed of each alone."""
    name = fingerprint(config.fixed(), source.sha256)
    found: list[Job] = []
    for method in config.methods:
        pictures = True
        for seed in range(config.seeds):
            path = job_folder(out, method, seed) / RESULT
            if path.is_file():
                job = finished(path, name, method, seed)
                found.append(job if pictures and not job.stopped else job.lighter())
                pictures = pictures and bool(job.stopped)
    data = {key: str(value) for key, value in source.facts().items()}
    return Language(config.plain(), data, with_commits(found, out / RESULTS, facts), tuple(found))


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


def show(results: Language) -> None:
    """Losses at each length in plain text: a machine with a GPU need not have what pages need."""
    print("method", *results.lengths, "seeds", sep="\t")
    for row in ranked(results):
        cells = ["-" if x is None else f"{x.mean:.3f}" for x in row.scratch]
        seeds = sum(job.method == row.method for job in results.jobs)
        print(row.method, *cells, seeds, sep="\t")
        for text in row.stopped:
            print(f"  {text}")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--valid", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path, help="tokenizer.json of an earlier run")
    parser.add_argument("--out", type=Path, default=Path("out/lm_gpu"))
    parser.add_argument("--methods", help="separated by ';'")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--position-rate", type=float, default=10.0)
    parser.add_argument("--lengths", default="512,1024,2048,4096,8192")
    parser.add_argument("--eval-tokens", type=int, default=131_072)
    parser.add_argument("--at-once", type=int, default=1, help="jobs side by side")
    parser.add_argument("--seconds", type=float, default=500.0, help="then jobs end in order")
    parser.add_argument("--grace", type=float, default=45.0, help="after which they are ended")
    parser.add_argument("--pack", type=Path, help="write the finished runs to this file at the end")
    parser.add_argument("--unpack", type=Path, help="first take over those of this file")
    parser.add_argument("--commit", help="of these sources, where git is not at hand")
    parser.add_argument("--tiny", action="store_true", help="a rehearsal")
    options = parser.parse_args(arguments)
    config = setting(options)
    config = tiny(config) if options.tiny else config
    if options.unpack is not None and options.unpack.is_file():
        unpack(options.unpack, options.out)
    facts = machine("cuda" if torch.cuda.is_available() else "cpu")
    if options.commit:
        facts["commit"] = options.commit
    source = prepared(config, options.out)
    try:
        done = run(
            config,
            source,
            options.out,
            facts,
            at_once=options.at_once,
            seconds=options.seconds,
            grace=options.grace,
        )
    finally:
        if options.pack is not None:
            pack(options.out, options.pack)
    show(Language.load(options.out / RESULTS))
    return 0 if done else UNFINISHED


if __name__ == "__main__":
    sys.exit(main())
