"""Models that differ in their position and train in turns: what a step costs over a baseline.

A `Study` says which models. All models of a mode and length are in memory and take turns of 8
steps, so that a drift of the clock is a drift of all. A turn is timed as a whole, as people train:
the host may be ahead of the GPU. The cost is the median of a method's turns over that of the
baseline's turns, less 1.

Modes are "called", "compiled" (torch.compile) and "reduce-overhead" (torch.compile with CUDA
graphs). Compiling takes most of the time. With `--prepare`, first a process for each method and
length compiles and runs two steps, side by side, into the disk caches of Inductor and Triton. A
method that fails has its reason in the results, and the others go on.
"""

import argparse
import gc
import os
import re
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.multiprocessing as mp

from lm_clock import forget, seconds_a_step
from whence.bench.machine import machine
from whence.bench.session import first_line
from whence.files import write_json

ROOT = Path(__file__).resolve().parent.parent
CALLED, GRAPHED = "called", "reduce-overhead"
COMPILERS = {"compiled": None, GRAPHED: GRAPHED}  # the mode of torch.compile
ROUNDS, TURN = 5, 8  # turns of each method, and steps of a turn
FIRST = 4  # steps before the first turn: CUDA graphs are recorded in the second and third
PREPARING = 0.6  # the most of all seconds that the processes which compile may take
TRIES, PAUSE = 30, 2.0  # of a process that compiles and finds the GPU's memory full
SPENT = "not measured, the time was spent"
Record = dict[str, Any]


class Trained:
    """A model that gives a loss of its batch, and its optimizer; it can be run in every mode."""

    def __init__(self, model: Any, batch: dict[str, Any], device: str) -> None:
        self.model, self.batch, self.device = model.to(device).train(), batch, device
        fused = {"fused": True} if device == "cuda" else {}
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, **fused)
        self._compiled: dict[str, Any] = {}

    def step(self, mode: str) -> None:
        """Forward, backward, update."""
        run = self.model
        if mode != CALLED:
            if mode not in self._compiled:
                made = torch.compile(self.model, mode=COMPILERS[mode], dynamic=False)
                self._compiled[mode] = made
            run = self._compiled[mode]
        if mode == GRAPHED:
            torch.compiler.cudagraph_mark_step_begin()  # the last step's tensors may go
        with torch.autocast(self.device, torch.bfloat16):
            loss = run(**self.batch).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def turn(self, mode: str, steps: int) -> float:
        """Milliseconds a step."""
        return 1e3 * seconds_a_step(lambda: self.step(mode), self.device, steps)


@dataclass(frozen=True)
class Study:
    """What is compared: `build` makes the model of a method for a length, of a size's numbers."""

    name: str  # of the file of results
    build: Callable[[str, int, Any, str], Trained]  # method, length, size, device; at module level
    size: Any  # a dataclass of whole numbers, each an option
    lengths: str
    methods: str
    baseline: str
    limit_of: Callable[[str, int, str], float | None]  # the most that it may cost: by mode, too


def prepare_one(
    build: Callable[..., Trained], method: str, n: int, modes: list[str], size: Any, device: str
) -> None:
    """Two steps in every mode, in a process of its own that ends with them.

    Compiling needs little of the GPU's memory and a step much, so the processes seldom meet in it;
    one that finds it full waits and tries again.
    """
    torch.set_num_threads(1)
    start, said = time.monotonic(), "ready"
    for attempt in range(TRIES):
        try:
            trained = build(method, n, size, device)
            for mode in modes:
                for _ in range(2):
                    trained.step(mode)
                    forget(device)
            break
        except Exception as error:
            said = first_line(error)
            full = "out of memory" in str(error).lower() or "ALLOC_FAILED" in str(error)
            if not full or attempt == TRIES - 1:
                break
            said = "ready after waiting for memory"
        trained = None  # type: ignore[assignment]
        forget(device)
        time.sleep(PAUSE)
    print(f"prepare: n = {n}, {method}: {said}, {time.monotonic() - start:.0f} s", flush=True)


def prepare(
    build: Callable[..., Trained],
    jobs: list[tuple[str, int]],
    modes: list[str],
    size: Any,
    device: str,
    processes: int,
    end: float,
) -> None:
    """Fill the compilers' caches, so many processes at once; those that are not ready are ended."""
    # As many processes as cores: workers of Inductor's own would only take their turns.
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    context = mp.get_context("spawn")
    waiting, running = list(jobs), []
    while (waiting or running) and time.monotonic() < end:
        running = [process for process in running if process.is_alive()]
        while waiting and len(running) < processes:
            job = (build, *waiting.pop(0), modes, size, device)
            running.append(context.Process(target=prepare_one, args=job, daemon=True))
            running[-1].start()
        time.sleep(0.2)
    for process in running:
        process.terminate()
        process.join()
    del os.environ["TORCHINDUCTOR_COMPILE_THREADS"]


def measure(
    study: Study, n: int, mode: str, methods: list[str], size: Any, device: str, end: float
) -> list[Record]:
    """A record for each method, in one mode and at one length: its turns, or why it has none."""
    torch._dynamo.reset()
    forget(device)
    records: dict[str, Record] = {m: {"method": m, "n": n, "mode": mode} for m in methods}
    models: dict[str, Trained] = {}
    for method, record in records.items():
        if time.monotonic() > end:
            record["skipped"] = SPENT
            continue
        try:
            models[method] = study.build(method, n, size, device)
        except Exception as error:
            record["skipped"] = first_line(error)
    take_turns(mode, records, models, end)
    judge(records, study)
    return list(records.values())


def take_turns(
    mode: str, records: dict[str, Record], models: dict[str, Trained], end: float
) -> None:
    """Fill the records; a model that fails says why and leaves the turns."""
    ready: list[str] = []
    for method, model in models.items():
        record, start = records[method], time.monotonic()
        if start > end:
            record["skipped"] = SPENT
            continue
        try:
            model.turn(mode, FIRST)
            record["first_seconds"] = round(time.monotonic() - start, 1)
            record["turns"] = []
            ready.append(method)
        except Exception as error:
            record["skipped"] = first_line(error)
            model.optimizer.zero_grad(set_to_none=True)
    gc.collect()
    for shift in range(ROUNDS):
        place = shift % max(1, len(ready))  # each follows each
        for method in ready[place:] + ready[:place]:
            if "skipped" in records[method]:
                continue
            try:
                models[method].turn(mode, 1)  # the step after another model's does not count
                records[method]["turns"].append(models[method].turn(mode, TURN))
            except Exception as error:
                records[method]["skipped"] = first_line(error)


def judge(records: dict[str, Record], study: Study) -> None:
    """Add median, spread, steps a second, the cost over the baseline's time and the verdict."""
    for record in records.values():
        turns = record.get("turns")
        measured = turns and "skipped" not in record
        record["ms"] = (
            {"median": median(turns), "least": min(turns), "most": max(turns)} if measured else None
        )
        record["steps_a_second"] = 1e3 / record["ms"]["median"] if measured else None
    base = records[study.baseline]["ms"] if study.baseline in records else None
    for method, record in records.items():
        limit = study.limit_of(method, record["n"], record["mode"])
        compared = base and record["ms"] and method != study.baseline
        cost = record["ms"]["median"] / base["median"] - 1 if compared else None
        held = None if cost is None or limit is None else cost <= limit
        record |= {"cost": cost, "limit": limit, "held": held}
        record.setdefault("skipped", None)


def line(record: Record) -> str:
    """A record as the table prints it, with its bar and verdict last."""
    what = f"n = {record['n']:5,} {record['mode']:15} {record['method']:16}"
    if record["ms"] is None:
        return f"{what} {record['skipped']}"
    ms = record["ms"]
    text = f"{what} {ms['median']:7.2f} ms ({ms['least']:.2f} to {ms['most']:.2f})"
    if record["cost"] is None:
        return text
    verdict = {True: "pass", False: "MISS", None: "-"}[record["held"]]
    limit = "" if record["limit"] is None else f" (at most {record['limit']:.0%})"
    return f"{text} {record['cost']:+6.1%}{limit} {verdict}"


def split_methods(text: str) -> list[str]:
    """Methods at the commas that do not begin another option of the same one."""
    return re.split(r",(?!\w+=)", text)


def main(study: Study, description: str, arguments: Sequence[str] | None = None) -> int:
    """The command line of a study."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--lengths", default=study.lengths)
    parser.add_argument("--methods", default=study.methods)
    parser.add_argument("--modes", default="called,compiled", help="and reduce-overhead")
    parser.add_argument("--prepare", action="store_true", help="fill the compilers' caches first")
    parser.add_argument("--processes", type=int, default=14, help="that --prepare runs at once")
    parser.add_argument("--seconds", type=float, default=540.0, help="after which it ends")
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "gpu", help="folder")
    parser.add_argument("--commit", help="of the sources, where git cannot tell")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    for name, value in asdict(study.size).items():
        parser.add_argument(f"--{name}", type=int, default=value)
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        print("an NVIDIA GPU is needed, or --device cpu.", file=sys.stderr)
        return 2
    lengths = [int(n) for n in options.lengths.split(",")]
    methods, modes = split_methods(options.methods), options.modes.split(",")
    unknown = set(modes) - {CALLED, *COMPILERS}
    if unknown:
        parser.error(f"modes are called, {', '.join(COMPILERS)}; got {', '.join(sorted(unknown))}")
    size = type(study.size)(**{name: getattr(options, name) for name in asdict(study.size)})
    # The models of all methods share their code, of which the compiler keeps 8 versions by default.
    torch._dynamo.config.recompile_limit = 64
    where = machine(options.device)
    where["commit"] = options.commit or where["commit"]
    start = time.monotonic()
    config = {**asdict(size), "rounds": ROUNDS, "turn": TURN, "dtype": "bfloat16"}
    results = {"config": config, "machine": where, "prepare_seconds": 0.0, "seconds": 0.0}
    records: list[Record] = []
    results["records"] = records
    if options.prepare:
        jobs = [(method, n) for n in lengths for method in methods]
        end = start + PREPARING * options.seconds
        prepare(study.build, jobs, modes, size, options.device, options.processes, end)
        results["prepare_seconds"] = round(time.monotonic() - start, 1)
        print(f"prepared in {results['prepare_seconds']:.0f} s", flush=True)
    path = options.out / f"{study.name}.json"
    for mode in modes:
        for n in lengths:
            end = start + options.seconds
            records += measure(study, n, mode, methods, size, options.device, end)
            results["seconds"] = round(time.monotonic() - start, 1)
            write_json(path, results)
            for record in records[-len(methods) :]:
                first = record.get("first_seconds")
                print(line(record), "" if first is None else f"first steps {first} s", flush=True)
    held = [record["held"] for record in records]
    print(f"in {results['seconds']:.0f} s; wrote {path}")
    print(f"{held.count(True)} held, {held.count(False)} missed")
    return 0
