"""The comparison of methods on WikiText-2 on one GPU, in as many commands as it takes.

    python benchmarks/lm_gpu.py --data wikitext-2.train.txt --valid wikitext-2.valid.txt \\
        --out out/lm_gpu --seconds 500 [--unpack state.tar.gz] [--pack state.tar.gz] [--commit ID]

A 12-layer model of 30 million parameters at n = 512, bfloat16, the same budget for each method,
three seeds: all methods with the first seed, then with the second, then the third, so that what the
time did not suffice for is a seed and not a method. The same command goes on where the last one
ended: in the middle of a run on the same machine; on a fresh one, with the packed state of the
last, after the last finished run. It exits with 3 until all is done. `whence report OUT` then draws
the page, where plotly is installed.
"""

import argparse
import dataclasses
import sys
import tarfile
import time
from pathlib import Path

import torch

from whence.analysis.language import Language, ranked
from whence.bench.machine import machine
from whence.experiments import LMConfig, run_lm
from whence.experiments.training import OutOfTimeError

METHODS = (  # the best known first, the slowest last
    "nope",
    "tisa:kernels=5",
    "rope",
    "alibi",
    "t5",
    "shaw:clip=16",
    "learned",
    "sinusoidal",
    "kerple",
    "tisa2",
    "xpos",
    "sandwich",
    "tupe",
    "transformer_xl",
    "content_band",
    "forget",
    "tisa:kernels=5+rope",
    "fire",
)
UNFINISHED = 3
KEPT = ("experiment.json", "tokenizer.json", "lm.json", "jobs/*/result.json")


def setting(options: argparse.Namespace) -> LMConfig:
    gpu = torch.cuda.is_available()
    return LMConfig(
        methods=tuple(options.methods.split(";")) if options.methods else METHODS,
        data=str(options.data),
        valid=str(options.valid),
        seeds=options.seeds,
        train_length=512,
        eval_lengths=(512, 1024, 2048, 4096, 8192),
        eval_tokens=131_072,
        vocab_size=16_384,
        n_layers=12,
        n_heads=6,
        d_model=384,
        dropout=0.1,
        steps=options.steps,
        batch=64,
        learning_rate=1e-3,
        warmup=max(options.steps // 10, 1),
        log_every=20,
        save_every=200,
        bf16=gpu,
        device="cuda" if gpu else "cpu",
    )


def tiny(config: LMConfig) -> LMConfig:
    """A rehearsal of the whole script, on any machine."""
    return dataclasses.replace(
        config,
        methods=config.methods[:2],
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
    """What is finished, as one file; checkpoints are too large to travel."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    with tarfile.open(temporary, "w:gz") as archive:
        for pattern in KEPT:
            for found in sorted(out.glob(pattern)):
                archive.add(found, arcname=str(found.relative_to(out)))
    temporary.replace(path)


def run(config: LMConfig, out: Path, facts: dict[str, object], seconds: float) -> bool:
    """Seed after seed until all is done (True) or the time is spent."""
    deadline = time.monotonic() + seconds
    last = ""

    def say(what: str, share: float) -> None:
        nonlocal last
        if what != last:
            print(f"{time.strftime('%H:%M:%S')} {what}", flush=True)
            last = what

    for seeds in range(1, config.seeds + 1):
        try:
            part = dataclasses.replace(config, seeds=seeds)
            run_lm(part, out, machine=facts, say=say, deadline=deadline)
        except OutOfTimeError as error:
            print(f"the time is spent: with {seeds} seeds, {error}", flush=True)
            return False
    return True


def show(results: Language) -> None:
    """Losses at each length in plain text: a machine with a GPU need not have what pages need."""
    print("method", *results.lengths, "tokens/s", sep="\t")
    for row in ranked(results):
        cells = ["-" if x is None else f"{x.mean:.3f} ({x.n})" for x in row.scratch]
        print(row.method, *cells, f"{row.tokens_a_second or 0:,.0f}", sep="\t")
        for text in row.stopped:
            print(f"  {text}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--valid", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=Path("out/lm_gpu"))
    parser.add_argument("--methods", help="separated by ';'")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--seconds", type=float, default=500.0)
    parser.add_argument("--pack", type=Path, help="write the finished runs to this file at the end")
    parser.add_argument("--unpack", type=Path, help="first take over those of this file")
    parser.add_argument("--commit", help="of these sources, where git is not at hand")
    parser.add_argument("--tiny", action="store_true", help="a rehearsal")
    options = parser.parse_args()
    config = setting(options)
    config = tiny(config) if options.tiny else config
    if options.unpack is not None and options.unpack.is_file():
        unpack(options.unpack, options.out)
    facts = machine("cuda" if torch.cuda.is_available() else "cpu")
    if options.commit:
        facts["commit"] = options.commit
    try:
        done = run(config, options.out, facts, options.seconds)
    finally:
        if options.pack is not None:
            pack(options.out, options.pack)
    if (options.out / "lm.json").is_file():
        show(Language.load(options.out / "lm.json"))
    sys.exit(0 if done else UNFINISHED)


if __name__ == "__main__":
    main()
