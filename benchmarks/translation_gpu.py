"""Several translation experiments side by side on one GPU, in as many commands as it takes.

    python benchmarks/translation_gpu.py --data multi30k --out out/translation --seconds 500 \\
        results/translation/en-de.toml:8 results/translation/en-fr.toml:6 \\
        [--pack state.tgz] [--unpack state.tgz] [--commit TEXT]

Each configuration goes to a folder of its own with as many worker processes as stand after the
colon, all at once: choose the numbers so that they end together. The same command goes on where the
last one ended; on a fresh machine with the packed state of the last one, after the last finished
job. It exits with 3 until all is done. What still runs shortly after the time is ended, and what is
finished is packed in any case.

    python benchmarks/translation_gpu.py --gather --data multi30k --unpack state.tgz --out FOLDER \\
        results/translation/en-de.toml:1 results/translation/en-fr.toml:1

makes FOLDER/en-de/translation.json and so on of a packed state, on any machine, without training.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from typing import Any

from whence.analysis.translation_results import TranslationJob
from whence.experiments.config import read_options, typed_config
from whence.experiments.progress import JobsFailedError, OutOfTimeError
from whence.experiments.translation.config import TranslationConfig
from whence.files import write_json

UNFINISHED = 3
MACHINE = "machine.json"
KEPT = ("experiment.json", "tokenizer.json", "jobs/*/*.json", "jobs/*/*.txt", "logs/*.txt")
GRACE = 20.0  # seconds after the time, or after the last result, that processes have to end


def read_config(path: Path, options: argparse.Namespace) -> TranslationConfig:
    flags = {"data": str(options.data), "device": options.device, "keep_models": False}
    if options.tiny:
        flags |= {"n_layers": 1, "d_model": 32, "d_ff": 32, "steps": 20, "average": 2, "warmup": 5}
        flags |= {"average_every": 2, "tokens": 512, "bf16": False, "vocab_size": 600}
    return typed_config(TranslationConfig, read_options(path, flags), where=str(path))


def n_jobs(config: TranslationConfig) -> int:
    return sum(config.n_seeds(x) * len(config.rates(x)) for x in config.positions)


def run_one(options: argparse.Namespace) -> int:
    """The jobs of one configuration, in this process and its workers."""
    from whence.bench.machine import machine
    from whence.experiments.processes import named_device
    from whence.experiments.translation.sweep import run_translation

    path, workers = split(options.configs[0])
    start, name = time.monotonic(), path.stem
    config = read_config(path, options)
    facts = machine(named_device(config.device).type)
    if options.commit:
        facts["commit"] = options.commit
    write_json(options.out / name / f".{MACHINE}", facts)

    def say(what: str, share: float) -> None:
        print(f"{time.monotonic() - start:4.0f} s {name} {share:4.0%} {what}", flush=True)

    quiet = say if workers > 1 else lambda what, share: None
    try:
        run_translation(
            config,
            options.out / name,
            machine=facts,
            say=quiet,
            deadline=start + options.seconds,
            workers=workers,
            side_by_side=options.at_once,
        )
    except (OutOfTimeError, JobsFailedError) as error:
        print(f"{name}: {error}", flush=True)
        return UNFINISHED
    return 0


def split(text: str) -> tuple[Path, int]:
    """A configuration and its workers, from PATH:NUMBER."""
    path, _, number = text.rpartition(":")
    return Path(path), int(number)


def finished(folder: Path) -> list[TranslationJob]:
    return [TranslationJob.load(path) for path in sorted(folder.glob("jobs/*/result.json"))]


def show(name: str, jobs: list[TranslationJob]) -> None:
    """BLEU of each job in plain text: a machine with a GPU need not have what pages need."""
    heads = list(dict.fromkeys((part.test, part.joined) for job in jobs for part in job.scores))
    columns = [f"{test}x{joined}" for test, joined in heads]
    print(f"\n{name}: {len(jobs)} jobs")
    print("position", "rate", *columns, "valid loss", "s", "steps/s", sep="\t")
    for job in sorted(jobs, key=lambda job: (job.position, job.learning_rate, job.seed)):
        cells = [job.bleu(*head) for head in heads]
        print(
            f"{job.position}.{job.seed}",
            f"{job.learning_rate:g}",
            *("-" if x is None else f"{x:.1f}" for x in cells),
            job.stopped or f"{job.valid_loss:.3f}",
            f"{job.seconds:.0f}",
            f"{job.steps_a_second or 0:.1f}",
            sep="\t",
        )


def run_all(options: argparse.Namespace, expected: int) -> None:
    """A process for each configuration, all ended shortly after the time or the last result."""
    end = time.monotonic() + options.seconds + GRACE
    at_once = sum(split(text)[1] for text in options.configs)
    given = [arg for arg in sys.argv[1:] if arg not in options.configs]
    own = ("--one", "--at-once", str(at_once))
    started = [
        subprocess.Popen([sys.executable, __file__, text, *given, *own], start_new_session=True)
        for text in options.configs
    ]
    while any(process.poll() is None for process in started) and time.monotonic() < end:
        time.sleep(0.5)
        names = [split(text)[0].stem for text in options.configs]
        done = sum(len(list(options.out.glob(f"{name}/jobs/*/result.json"))) for name in names)
        if done >= expected:
            end = min(end, time.monotonic() + GRACE)
            expected = done + 1  # the time is counted once
    for process in started:
        if process.poll() is None:
            print(f"ended: {process.args[2]}", flush=True)
            os.killpg(process.pid, signal.SIGKILL)  # with its workers


def pack(options: argparse.Namespace, names: list[str]) -> None:
    with tarfile.open(options.pack, "w:gz") as archive:
        for name in names:
            for pattern in KEPT:
                for path in sorted((options.out / name).glob(pattern)):
                    archive.add(path, str(path.relative_to(options.out)))
            facts = options.out / name / f".{MACHINE}"
            if facts.is_file():
                archive.add(facts, str(facts.relative_to(options.out)))
    print(f"packed {options.pack.name}: {options.pack.stat().st_size / 1e6:.1f} MB", flush=True)


def gather(path: Path, options: argparse.Namespace) -> None:
    """Write translation.json of what is finished."""
    from whence.experiments.translation.sweep import TranslationSweep

    out = options.out / path.stem
    facts: dict[str, Any] = json.loads((out / f".{MACHINE}").read_text())
    sweep = TranslationSweep(read_config(path, options), out)
    sweep.gathered(facts).save(out / sweep.results_file)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("configs", nargs="+", metavar="TOML:WORKERS")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=Path("out/translation"))
    parser.add_argument("--seconds", type=float, default=500.0, help="then jobs end in order")
    parser.add_argument("--pack", type=Path, help="write what is finished to this file at the end")
    parser.add_argument("--unpack", type=Path, help="first take over what this file has")
    parser.add_argument("--commit", help="of these sources, where git is not at hand")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--tiny", action="store_true", help="a rehearsal")
    parser.add_argument("--gather", action="store_true", help="train nothing")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--at-once", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        return run_one(options)
    if options.unpack is not None and options.unpack.is_file():
        with tarfile.open(options.unpack) as archive:
            archive.extractall(options.out, filter="data")
    paths = [split(text)[0] for text in options.configs]
    wanted = sum(n_jobs(read_config(path, options)) for path in paths)
    if options.gather:
        for path in paths:
            gather(path, options)
    else:
        run_all(options, wanted)
    names = [path.stem for path in paths]
    if options.pack is not None:
        pack(options, names)
    found = {name: finished(options.out / name) for name in names}
    for name, jobs in found.items():
        show(name, jobs)
    done = sum(map(len, found.values()))
    print(f"\n{done} of {wanted} jobs" + ("" if done == wanted else ": UNFINISHED"))
    return 0 if done == wanted else UNFINISHED


if __name__ == "__main__":
    sys.exit(main())
