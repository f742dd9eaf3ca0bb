"""Three ways to compute Shaw's attention, keys and values: time and memory against the length.

    python benchmarks/shaw_algorithms.py --device cuda     into results/gpu/shaw_algorithms.json
    python benchmarks/shaw_algorithms.py --device cpu      the same on a CPU, shorter
    python benchmarks/shaw_algorithms.py --figure-only     the figure again, from the JSON

They are the equations as they read ([b, h, n, n, d]), the article's algorithm ([n, n, d], batch and
heads folded) and `whence`, with attention without any position as the limit. Each is checked before
it is timed, in forward alone and with all gradients. The heads are those of the paper's base model.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from whence.bench import CONTENDERS, Session
from whence.bench.plan import Plan

ROOT = Path(__file__).resolve().parent.parent
NAME = "shaw_algorithms"
METHOD = "shaw:clip=16"
ORDER = ("whence:auto", "naive", "article", "plain")  # of the legend and the table
FOLDERS = {"cuda": "gpu", "cpu": "cpu"}
SIZES = {  # tokens of a batch, at least one sequence, and the lengths
    "cuda": (4096, (128, 256, 512, 1024, 2048, 4096, 8192)),
    "cpu": (512, (64, 128, 256, 512)),
}


def plan(device: str, tokens: int, lengths: Sequence[int]) -> Plan:
    return Plan(
        device,
        methods=(METHOD,),
        peers=ORDER[1:],
        modes=("forward", "both"),
        lengths=tuple(lengths),
        n_heads=8,
        tokens=tokens,
        dtype="bfloat16" if device == "cuda" else "float32",
    )


def measure(path: Path, chosen: Plan, seconds: float, commit: str | None) -> None:
    """Every point, written as it comes; what there is no time for is missing."""
    session = Session(
        path,
        device=chosen.device,
        config=asdict(chosen),
        seconds=seconds,
        graphs_up_to=0,
        say=lambda text: print(text, flush=True),
    )
    session.machine["commit"] = commit or session.machine["commit"]
    for point in chosen.points():
        if session.measure(point) is None:
            print(f"stopped at {point}: {session.stopped}", flush=True)
            break
    print(f"wrote {session.save()} in {session.results()['seconds']:.0f} s")


def draw(path: Path) -> Path:
    """The figure of a JSON file, beside it; a machine that only measures needs no matplotlib."""
    from whence.report.figure_files import save_png
    from whence.report.speed import draw_modes

    titles = {name: CONTENDERS[name].title for name in ORDER}
    results = json.loads(path.read_text(encoding="utf-8"))
    figure = draw_modes(results, "Three ways to compute Shaw's attention", titles)
    return save_png(figure, path.with_suffix(".png"), dpi=160)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    here = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=here, choices=FOLDERS)
    parser.add_argument("--tokens", type=int, help="of a batch; at least one sequence")
    parser.add_argument("--lengths", help="such as 64,128")
    parser.add_argument("--seconds", type=float, default=300.0, help="after which it ends")
    parser.add_argument("--commit", help="of the sources, where git cannot tell")
    parser.add_argument("--out", type=Path, default=ROOT / "results", help="of cpu and gpu")
    parser.add_argument("--no-figure", action="store_true", help="measure, and draw nothing")
    parser.add_argument("--figure-only", action="store_true", help="draw from the JSON again")
    options = parser.parse_args(arguments)
    path = options.out / FOLDERS[options.device] / f"{NAME}.json"
    if options.figure_only and not path.is_file():
        print(f"there is no {path}: leave --figure-only out to measure.", file=sys.stderr)
        return 2
    if not options.figure_only:
        if options.device == "cuda" and not torch.cuda.is_available():
            print("there is no NVIDIA GPU here: give --device cpu.", file=sys.stderr)
            return 2
        tokens, lengths = SIZES[options.device]
        if options.lengths:
            lengths = tuple(int(n) for n in options.lengths.split(","))
        chosen = plan(options.device, options.tokens or tokens, lengths)
        measure(path, chosen, options.seconds, options.commit)
    if not options.no_figure:
        print(f"wrote {draw(path)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
