"""All of `whence inspect` on a random BERT-base: seconds by part and peak memory, on two threads.

    python benchmarks/inspect_model.py

It writes results/cpu/inspect.json. The bar is 20 s and 2 GB, figures and page included. The model
is saved first and inspected in a process of its own, so that building it counts for nothing. Of
three such runs the one of the median seconds is kept, with the seconds of all: two threads of BLAS
wait for each other by spinning, and take seconds more where another program has one of the cores.
(A file named inspect.py in this folder would hide Python's own module of that name.)
"""

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from whence.files import write_json

THREADS, SECONDS, GIGABYTES, RUNS = 2, 20.0, 2.0, 3
TARGET = Path(__file__).parents[1] / "results" / "cpu" / "inspect.json"


def saved(folder: Path, seed: int = 0) -> None:
    import torch
    from transformers import BertConfig, BertModel

    torch.manual_seed(seed)
    BertModel(BertConfig()).save_pretrained(folder)


def measured(folder: Path) -> dict[str, object]:
    import torch

    torch.set_num_threads(THREADS)
    from whence.analysis.inspect import inspect

    load, used = os.getloadavg()[0], time.process_time()
    start = last = time.perf_counter()
    parts: dict[str, float] = {}
    doing = "opening"

    def progress(what: str, share: float) -> None:
        nonlocal last, doing
        now = time.perf_counter()
        parts[doing] = parts.get(doing, 0.0) + now - last
        last, doing = now, what

    found = inspect(folder, profiles=True, progress=progress)
    progress("loading what draws", 1.0)
    from whence.report.folder import Results, write_folder

    progress("figures and page", 1.0)
    write_folder(folder / "out", Results((found,)), keep=(found,))
    progress("done", 1.0)
    seconds = time.perf_counter() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # in KiB on Linux
    return {
        "model": "BERT-base of random weights, 12 layers of 768, 512 positions",
        "threads": THREADS,
        "cpu": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "load_before": round(load, 1),  # of other programs; above 0 the seconds are too many
        "seconds": round(seconds, 2),
        "processor_seconds": round(time.process_time() - used, 2),
        "seconds_by_part": {what: round(spent, 2) for what, spent in parts.items()},
        "peak_gigabytes": round(peak * 1024 / 1e9, 2),
        "within_the_bar": seconds < SECONDS and peak * 1024 / 1e9 < GIGABYTES,
        "heads": len(found.heads),
        "fits": sum(len(head.fits) for head in found.fits),
        "profiles": len(found.profiles),
        "versions": found.versions,
    }


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    options.add_argument("--folder", type=Path, help="inspect this one and print, no more")
    folder = options.parse_args().folder
    if folder is not None:
        print(json.dumps(measured(folder)))
        return
    with tempfile.TemporaryDirectory() as temporary:
        saved(Path(temporary))
        command = [sys.executable, __file__, "--folder", temporary]
        limits = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), str(THREADS))
        runs = []
        for _ in range(RUNS):
            done = subprocess.run(
                command, check=True, stdout=subprocess.PIPE, text=True, env={**os.environ, **limits}
            )
            runs.append(json.loads(done.stdout.splitlines()[-1]))
    result = sorted(runs, key=lambda run: run["seconds"])[RUNS // 2]
    result["seconds_of_all_runs"] = [run["seconds"] for run in runs]
    TARGET.parent.mkdir(parents=True, exist_ok=True)
    write_json(TARGET, result)
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
