"""Where the time of a training step goes: the host's, the GPU's, and that of each kernel.

    python benchmarks/model_profile.py [--lengths 512,2048] [--methods ...] [--out FOLDER]

The models are those of model_cost.py. Each method and length has a process of its own. They compile
side by side and wait; then one at a time runs its turns while all others are idle. Printed for each
mode: milliseconds a step, as people train, and without Python's garbage collection; the host's
milliseconds, which are those until a single step is launched; the GPU's, which are the sum of all
kernels; how many launches there are; and the kernels that take most of the time. With `--stacks N`
the host's time by Python function, too.
"""

import argparse
import cProfile
import gc
import io
import pstats
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.multiprocessing as mp
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from lm_clock import forget, waited
from model_cost import STUDY, Size, language_model
from training_turns import Trained, patiently, split_methods
from whence.bench.session import first_line
from whence.files import write_json

TURNS, TURN = 3, 8  # turns of a mode, and steps of a turn
PROFILED = 3  # steps
NAME = 110  # characters of a kernel's name
Record = dict[str, Any]


def host_seconds(step: Callable[[], None], device: str, steps: int = TURN) -> float:
    """The median time until a step is launched, when the GPU has nothing else to do."""
    found = []
    for _ in range(steps):
        start = waited(device)
        step()
        found.append(time.perf_counter() - start)
    waited(device)
    return median(found)


def kernels_of(step: Callable[[], None], device: str) -> list[tuple[str, int, float]]:
    """(name, launches a step, milliseconds a step) of every kernel, the most costly first."""
    activities = [ProfilerActivity.CUDA if device == "cuda" else ProfilerActivity.CPU]
    wanted = DeviceType.CUDA if device == "cuda" else DeviceType.CPU
    with profile(activities=activities) as found:
        for _ in range(PROFILED):
            step()
        waited(device)
    counts: dict[str, int] = defaultdict(int)
    times: dict[str, float] = defaultdict(float)
    for event in found.events():
        if event.device_type == wanted:
            counts[event.name] += 1
            times[event.name] += event.time_range.elapsed_us() / 1e3
    names = sorted(times, key=lambda name: -times[name])
    return [(name, round(counts[name] / PROFILED), times[name] / PROFILED) for name in names]


def functions_of(step: Callable[[], None], count: int) -> str:
    """The Python functions that take most of the host's time."""
    recorder = cProfile.Profile()
    recorder.enable()
    for _ in range(PROFILED):
        step()
    recorder.disable()
    text = io.StringIO()
    pstats.Stats(recorder, stream=text).sort_stats("tottime").print_stats(count)
    return text.getvalue()


def measure(trained: Trained, mode: str, device: str, stacks: int) -> Record:
    """Everything that is printed of one mode."""

    def step() -> None:
        trained.step(mode)

    step()
    turns = [trained.turn(mode, TURN) for _ in range(TURNS)]
    gc.collect()
    gc.freeze()
    gc.disable()
    uncollected = [trained.turn(mode, TURN) for _ in range(TURNS)]
    gc.enable()
    host = 1e3 * host_seconds(step, device)
    kernels = kernels_of(step, device)
    return {
        "turns": turns,
        "turns_without_gc": uncollected,
        "host_ms": host,
        "gpu_ms": sum(ms for _, _, ms in kernels),
        "launches": sum(count for _, count, _ in kernels),
        "kernels": kernels,
        "functions": functions_of(step, stacks) if stacks else "",
    }


def work(
    method: str, n: int, modes: list[str], size: Size, device: str, stacks: int, pipe: Any
) -> None:
    """Compile, say so, wait for the turn, measure, send the records."""
    torch.set_num_threads(1)
    torch._dynamo.config.recompile_limit = 64

    def ready() -> Trained:
        made = language_model(method, n, size, device)
        for mode in modes:
            made.first(mode)
        return made

    try:
        trained = patiently(ready, device)
    except Exception as error:
        pipe.send(first_line(error))
        return
    forget(device)
    pipe.send(None)
    pipe.recv()
    pipe.send({mode: measure(trained, mode, device, stacks) for mode in modes})


def told(method: str, n: int, mode: str, found: Record, top: int) -> str:
    turns, uncollected = (
        ", ".join(f"{x:.2f}" for x in found[name]) for name in ("turns", "turns_without_gc")
    )
    lines = [
        f"== n = {n:,} {mode} {method}: {median(found['turns']):.2f} ms a step ({turns}; without "
        f"garbage collection {uncollected}), host {found['host_ms']:.2f}, "
        f"GPU {found['gpu_ms']:.2f} in {found['launches']} launches"
    ]
    for name, count, ms in found["kernels"][:top]:
        lines.append(f"  {ms:7.3f} ms {count:5d} x  {name[:NAME]}")
    return "\n".join(lines) + ("\n" + found["functions"] if found["functions"] else "")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", default="512,2048")
    parser.add_argument("--methods", default=STUDY.methods)
    parser.add_argument("--modes", default="called,compiled", help="and reduce-overhead")
    parser.add_argument("--top", type=int, default=12, help="kernels to print")
    parser.add_argument("--stacks", type=int, default=0, help="Python functions to print")
    parser.add_argument("--out", type=Path, help="folder for model_profile.json")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    for name in Size.__dataclass_fields__:
        parser.add_argument(f"--{name}", type=int, default=getattr(Size, name))
    options = parser.parse_args(arguments)
    size = Size(**{name: getattr(options, name) for name in Size.__dataclass_fields__})
    lengths, modes = [int(n) for n in options.lengths.split(",")], options.modes.split(",")
    context, start = mp.get_context("spawn"), time.monotonic()
    running = []
    for n in lengths:
        for method in split_methods(options.methods):
            pipe, other = context.Pipe()
            job = (method, n, modes, size, options.device, options.stacks, other)
            process = context.Process(target=work, args=job, daemon=True)
            process.start()
            other.close()
            running.append((method, n, process, pipe))
    results: list[Record] = []
    said = {(method, n): received(pipe) for method, n, _, pipe in running}
    print(f"compiled after {time.monotonic() - start:.0f} s", flush=True)
    for method, n, process, pipe in running:
        found = said[method, n]
        if found is None:
            pipe.send("go")
            found = received(pipe)
        process.join()
        if isinstance(found, str):
            print(f"== n = {n:,} {method}: {found}", flush=True)
            continue
        for mode, record in found.items():
            results.append({"method": method, "n": n, "mode": mode, **record})
            print(told(method, n, mode, record, options.top), flush=True)
        if options.out is not None:
            write_json(options.out / "model_profile.json", {"records": results})
    print(f"in {time.monotonic() - start:.0f} s")
    return 0


def received(pipe: Any) -> Any:
    """What a process sends, or that it died."""
    try:
        return pipe.recv()
    except EOFError:
        return "its process died"


if __name__ == "__main__":
    sys.exit(main())
