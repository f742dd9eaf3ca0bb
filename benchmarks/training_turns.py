"""Models that differ in their position and train in turns: what a step costs over a baseline.

A `Study` says which models. All models of a mode and length are in memory and take turns of 8
steps, so that a drift of the clock is a drift of all. A turn is timed as a whole, as people train:
the host may be ahead of the GPU. The cost is the median of a method's turns over that of the
baseline's turns, less 1.

Modes are "called", "compiled" (torch.compile) and "reduce-overhead" (torch.compile with CUDA
graphs). Compiling takes most of the time. With `--apart` every model is in a process of its own:
they compile side by side and keep what they have compiled, and then one at a time has its turn,
while all others are idle and hold no memory but their weights. A method that fails has its reason
in the results, and the others go on.
"""

import argparse
import contextlib
import functools
import gc
import os
import re
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import torch
import torch.multiprocessing as mp

from lm_clock import forget, seconds_a_step
from whence.bench.machine import machine
from whence.bench.session import first_line
from whence.files import write_json

ROOT = Path(__file__).resolve().parent.parent
CALLED, GRAPHED = "called", "reduce-overhead"
COMPILERS = {"compiled": None, GRAPHED: GRAPHED}  # the mode of torch.compile
ROUNDS, TURN = 5, 8  # turns of each method by default, and steps of a turn
FIRST = 4  # steps before the first turn: CUDA graphs are recorded in the second and third
UNTIMED = 2  # steps of a turn that do not count
PREPARING = 0.6  # the most of all seconds that compiling side by side may take
TRIES, PAUSE = 30, 2.0  # of a process that compiles and finds the GPU's memory full
SPENT = "not measured, the time was spent"
Record = dict[str, Any]
Made = TypeVar("Made")


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

    def first(self, mode: str) -> float:
        """Seconds of the first steps, which compile."""
        return FIRST * seconds_a_step(lambda: self.step(mode), self.device, FIRST)

    def turn(self, mode: str, steps: int) -> float:
        """Milliseconds a step."""
        return 1e3 * seconds_a_step(lambda: self.step(mode), self.device, steps)

    def timed(self, mode: str) -> float:
        """The same of one turn; the steps after another model's do not count."""
        self.turn(mode, UNTIMED)
        return self.turn(mode, TURN)


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


def serve(
    build: Callable[..., Trained],
    method: str,
    n: int,
    modes: list[str],
    size: Any,
    device: str,
    pipe: Any,
) -> None:
    """A process: the first steps of every mode, and then a turn of each mode that is asked for."""
    torch.set_num_threads(1)
    torch._dynamo.config.recompile_limit = 64
    try:
        trained = patiently(lambda: build(method, n, size, device), device)
    except Exception as error:
        pipe.send(dict.fromkeys(modes, first_line(error)))
        return
    first: dict[str, float | str] = {}
    for mode in modes:
        try:
            first[mode] = patiently(functools.partial(trained.first, mode), device)
        except Exception as error:
            first[mode] = first_line(error)
        trained.optimizer.zero_grad(set_to_none=True)
        forget(device)
    pipe.send(first)
    while (mode := pipe.recv()) is not None:
        try:
            pipe.send(trained.timed(mode))
        except Exception as error:
            pipe.send(first_line(error))
        forget(device)


def patiently(make: Callable[[], Made], device: str) -> Made:
    """make(), again after a while if others have taken the GPU's memory."""
    for _ in range(TRIES):
        try:
            return make()
        except Exception as error:
            if not ("out of memory" in str(error).lower() or "ALLOC_FAILED" in str(error)):
                raise
        forget(device)
        time.sleep(PAUSE)
    return make()


class Apart:
    """A model in a process of its own."""

    def __init__(self, *job: Any) -> None:
        context = mp.get_context("spawn")
        self._pipe, other = context.Pipe()
        self._process = context.Process(target=serve, args=(*job, other), daemon=True)
        self._process.start()
        other.close()
        self._first: dict[str, float | str] | None = None

    def is_ready(self) -> bool:
        """Whether its first steps are done, or it has ended."""
        if self._first is None and self._pipe.poll():
            self._first = self._received()
        return self._first is not None

    def first(self, mode: str) -> float:
        """Seconds of the first steps."""
        found = (self._first or {}).get(mode, SPENT)
        if isinstance(found, str):
            raise RuntimeError(found)
        return found

    def timed(self, mode: str) -> float:
        """Milliseconds a step of one turn."""
        self._pipe.send(mode)
        found = self._received()
        if not isinstance(found, float):
            raise RuntimeError(found if isinstance(found, str) else "its process died")
        return found

    def ask_to_end(self) -> None:
        """Let the process end in order if it waits for its turn."""
        if self._first:
            with contextlib.suppress(OSError):  # it has ended already
                self._pipe.send(None)

    def end(self) -> None:
        """End the process, which is given a moment if it was asked before."""
        if self._first:
            self._process.join(PAUSE)
        self._process.terminate()
        self._process.join()

    def _received(self) -> Any:
        try:
            return self._pipe.recv()
        except EOFError:
            return {}


def set_apart(jobs: list[tuple[Any, ...]], processes: int, end: float) -> list[Apart]:
    """A process for each job, of which so many compile at once, until all are ready or `end`."""
    # As many processes as cores: workers of Inductor's own would only take their turns.
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    models: list[Apart] = []
    while time.monotonic() < end:
        busy = sum(not model.is_ready() for model in models)
        if not busy and len(models) == len(jobs):
            break
        while busy < processes and len(models) < len(jobs):
            models.append(Apart(*jobs[len(models)]))
            busy += 1
        time.sleep(0.1)
    for model in models:
        if not model.is_ready():
            model.end()
    return models


def measure(
    study: Study,
    n: int,
    mode: str,
    models: dict[str, Trained | Apart | str],
    end: float,
    rounds: int,
) -> list[Record]:
    """A record for each method, in one mode and at one length: its turns, or why it has none."""
    records: dict[str, Record] = {m: {"method": m, "n": n, "mode": mode} for m in models}
    seated: dict[str, Trained | Apart] = {}
    for method, model in models.items():
        if isinstance(model, str):
            records[method]["skipped"] = model
        else:
            seated[method] = model
    take_turns(mode, records, seated, end, rounds)
    judge(records, study)
    return list(records.values())


def take_turns(
    mode: str,
    records: dict[str, Record],
    models: dict[str, Trained | Apart],
    end: float,
    rounds: int,
) -> None:
    """Fill the records; a model that fails says why and leaves the turns."""
    ready: list[str] = []
    for method, model in models.items():
        record = records[method]
        if time.monotonic() > end:
            record["skipped"] = SPENT
            continue
        try:
            record["first_seconds"] = round(model.first(mode), 1)
            record["turns"] = []
            ready.append(method)
        except Exception as error:
            record["skipped"] = first_line(error)
    gc.collect()
    for shift in range(rounds):
        place = shift % max(1, len(ready))  # each follows each
        for method in ready[place:] + ready[:place]:
            if "skipped" in records[method] or time.monotonic() > end:
                continue
            try:
                records[method]["turns"].append(models[method].timed(mode))
            except Exception as error:
                records[method]["skipped"] = first_line(error)
    for method in ready:
        if not records[method]["turns"]:
            records[method].setdefault("skipped", SPENT)


def built(
    study: Study, n: int, methods: list[str], size: Any, device: str, end: float
) -> dict[str, Trained | Apart | str]:
    """The models of one length in this process, or why there is none."""
    torch._dynamo.reset()
    forget(device)
    models: dict[str, Trained | Apart | str] = {}
    for method in methods:
        models[method] = SPENT
        if time.monotonic() < end:
            try:
                models[method] = study.build(method, n, size, device)
            except Exception as error:
                models[method] = first_line(error)
    return models


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
    parser.add_argument("--apart", action="store_true", help="each model in its own process")
    parser.add_argument("--processes", type=int, default=14, help="of these that compile at once")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="turns of each model")
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
    if options.rounds < 1:
        parser.error(f"--rounds is a number of turns, at least 1; got {options.rounds}")
    size = type(study.size)(**{name: getattr(options, name) for name in asdict(study.size)})
    # The models of all methods share their code, of which the compiler keeps 8 versions by default.
    torch._dynamo.config.recompile_limit = 64
    where = machine(options.device)
    where["commit"] = options.commit or where["commit"]
    start = time.monotonic()
    config = {**asdict(size), "rounds": options.rounds, "turn": TURN, "dtype": "bfloat16"}
    results = {"config": config, "machine": where, "prepare_seconds": 0.0, "seconds": 0.0}
    records: list[Record] = []
    results["records"] = records
    end = start + options.seconds
    apart: dict[tuple[str, int], Apart] = {}
    if options.apart:
        pairs = [(method, n) for n in lengths for method in methods]
        jobs = [(study.build, *pair, modes, size, options.device) for pair in pairs]
        models = set_apart(jobs, options.processes, start + PREPARING * options.seconds)
        apart = dict(zip(pairs, models, strict=False))
        results["prepare_seconds"] = round(time.monotonic() - start, 1)
        print(f"compiled in {results['prepare_seconds']:.0f} s", flush=True)
    path = options.out / f"{study.name}.json"
    for mode in modes:
        for n in lengths:
            if options.apart:
                seats = {method: apart.get((method, n), SPENT) for method in methods}
            else:
                seats = built(study, n, methods, size, options.device, end)
            records += measure(study, n, mode, seats, end, options.rounds)
            results["seconds"] = round(time.monotonic() - start, 1)
            write_json(path, results)
            for record in records[-len(methods) :]:
                first = record.get("first_seconds")
                print(line(record), "" if first is None else f"first steps {first} s", flush=True)
    for model in apart.values():  # all at once: one after the other takes seconds each
        model.ask_to_end()
    for model in apart.values():
        model.end()
    held = [record["held"] for record in records]
    print(f"in {results['seconds']:.0f} s; wrote {path}")
    print(f"{held.count(True)} held, {held.count(False)} missed")
    return 0
