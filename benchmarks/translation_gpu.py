"""Several translation experiments side by side on one GPU, in as many commands as it takes.

    python benchmarks/translation_gpu.py --data multi30k --out out/translation --seconds 500 \\
        results/translation/en-de.toml:8 results/translation/en-fr.toml:6 \\
        [--pack state.tgz] [--unpack state.tgz] [--commit TEXT]

Each configuration goes to a folder of its own with as many worker processes as stand after the
colon, all at once: choose the numbers so that they end together. The same command goes on where the
last one ended; on a fresh machine with the packed state of the last one, after the last finished
job. It exits with 3 until all is done.
"""

import argparse
import subprocess
import sys
import tarfile
import time
from pathlib import Path

from whence.analysis.translation_results import Translation
from whence.experiments.config import read_options, typed_config
from whence.experiments.progress import JobsFailedError, OutOfTimeError

UNFINISHED = 3
KEPT = ("experiment.json", "tokenizer.json", "translation.json", "jobs/*/*.json", "jobs/*/*.txt")


def run_one(options: argparse.Namespace) -> int:
    """The jobs of one configuration, in this process and its workers."""
    from whence.bench.machine import machine
    from whence.experiments.processes import named_device
    from whence.experiments.translation.config import TranslationConfig
    from whence.experiments.translation.sweep import run_translation

    path, workers = split(options.configs[0])
    start, name = time.monotonic(), path.stem
    flags = {"data": str(options.data), "device": options.device, "keep_models": False}
    if options.tiny:
        flags |= {"n_layers": 1, "d_model": 32, "d_ff": 32, "steps": 20, "average": 2, "warmup": 5}
        flags |= {"average_every": 2, "tokens": 512, "bf16": False, "vocab_size": 600}
    config = typed_config(TranslationConfig, read_options(path, flags), where=str(path))
    facts = machine(named_device(config.device).type)
    if options.commit:
        facts["commit"] = options.commit

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


def show(name: str, results: Translation) -> None:
    """BLEU of each position in plain text: a machine with a GPU need not have what pages need."""
    heads = [(test, joined) for test in ("valid", *results.tests) for joined in results.joined]
    heads = [head for head in heads if any(job.bleu(*head) is not None for job in results.jobs)]
    print(f"\n{name}: {len(results.jobs)} jobs")
    print(
        "position", "rate", *(f"{t}x{j}" for t, j in heads), "valid loss", "s", "steps/s", sep="\t"
    )
    for job in sorted(results.jobs, key=lambda job: (job.position, job.learning_rate, job.seed)):
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
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--at-once", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        return run_one(options)
    if options.unpack is not None and options.unpack.is_file():
        with tarfile.open(options.unpack) as archive:
            archive.extractall(options.out, filter="data")
    at_once = sum(split(text)[1] for text in options.configs)
    given = [arg for arg in sys.argv[1:] if arg not in options.configs]
    started = [
        subprocess.Popen(
            [sys.executable, __file__, text, *given, "--one", "--at-once", str(at_once)]
        )
        for text in options.configs
    ]
    codes = [process.wait() for process in started]
    names = [split(text)[0].stem for text in options.configs]
    if options.pack is not None:
        with tarfile.open(options.pack, "w:gz") as archive:
            for name in names:
                for pattern in (*KEPT, "logs/*.txt"):
                    for path in sorted((options.out / name).glob(pattern)):
                        archive.add(path, str(path.relative_to(options.out)))
        print(f"packed {options.pack.name}: {options.pack.stat().st_size / 1e6:.1f} MB")
    for name in names:
        if (options.out / name / "translation.json").is_file():
            show(name, Translation.load(options.out / name / "translation.json"))
    print("all done" if not any(codes) else "UNFINISHED")
    return UNFINISHED if any(codes) else 0


if __name__ == "__main__":
    sys.exit(main())
