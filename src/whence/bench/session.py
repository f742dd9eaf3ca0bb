"""Measuring points one after another: exactness first, then memory, then time; all is kept."""

import gc
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from whence.bench import peak_memory, timing
from whence.bench.contenders import CONTENDERS, Contender
from whence.bench.exactness import Check, small
from whence.bench.machine import machine
from whence.bench.point import Point
from whence.bench.problem import Attention, Problem
from whence.checks import one_of
from whence.files import write_json

ROOM = 0.9  # share of the free memory that a step may be expected to take
Record = dict[str, Any]


class Session:
    """Measures points and writes their records to `path` after each one.

    A record has the fields of its point and

        ms           median, q20, q80 and repeats, in milliseconds, as called
        graph_ms     the same from a CUDA graph, without the host; for n up to `graphs_up_to`, and
                     not in mode forward
        extra_bytes  the most memory beyond the inputs
        error        the worst error, relative to what is allowed (`whence.bench.exactness`): the
                     error of same-dtype PyTorch, or rounding in float64; beyond 2 nothing is timed
        variant      which of a contender's variants was the fastest
        notes        what else happened, such as a variant or a capture that failed, by name
        skipped      why there are no figures; None where there are

        >>> from whence.bench import Point
        >>> point = Point("eager", "alibi", 512, dtype="float32", device="cpu")
        >>> session = Session(Path("speed.json"), device="cpu", seconds=0.0)
        >>> session.measure(point) is None  # no time is left; without a limit it returns a record
        True
    """

    def __init__(
        self,
        path: Path,
        *,
        device: str,
        config: dict[str, Any] | None = None,
        seconds: float | None = None,
        graphs_up_to: int = 4096,
        effort: float = 0.2,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.path, self.graphs_up_to, self.effort, self.say = path, graphs_up_to, effort, say
        self.records: dict[Point, Record] = {}
        self.more: dict[str, Any] = {}  # what the owner adds to the results, such as bars
        self.stopped: str | None = None
        self.config, self.machine = config or {}, machine(device)
        self._start, self._seconds = time.monotonic(), seconds
        self._problem: Problem | None = None
        self._check: Check | None = None

    @property
    def left(self) -> float:
        """Seconds until the time given is spent."""
        if self._seconds is None:
            return float("inf")
        return self._seconds - (time.monotonic() - self._start)

    def measure(self, point: Point) -> Record | None:
        """The record of a point, measured if it was not yet; None if the time is spent."""
        if point not in self.records:
            if self.left <= 0:
                self.stopped = self.stopped or f"the {self._seconds:g} seconds given were spent"
                self.save()
                return None
            self.records[point] = self._measured(point)
            self.say(_line(self.records[point]))
            self.save()
        return self.records[point]

    def results(self) -> dict[str, Any]:
        """All that was measured, where and how."""
        return {
            "config": self.config,
            "machine": self.machine,
            "seconds": round(time.monotonic() - self._start, 1),
            "stopped": self.stopped,
            "records": list(self.records.values()),
            **self.more,
        }

    def save(self) -> Path:
        """Write what there is."""
        return write_json(self.path, self.results())

    def _measured(self, point: Point) -> Record:
        record: Record = {
            **asdict(point),
            "ms": None,
            "graph_ms": None,
            "extra_bytes": None,
            "error": None,
            "variant": None,
            "notes": {},
            "skipped": None,
        }
        try:
            self._fill(record, point)
        except torch.OutOfMemoryError:
            record["skipped"] = "ran out of memory"
        except Exception as error:  # a contender that cannot run is a result too
            record["skipped"] = first_line(error)
        if record["skipped"] is not None:
            record |= dict.fromkeys(("ms", "graph_ms", "extra_bytes"))
        if point.device == "cuda":
            gc.collect()
            torch.cuda.empty_cache()
        return record

    def _fill(self, record: Record, point: Point) -> None:
        one_of("contender", point.contender, CONTENDERS)
        contender = CONTENDERS[point.contender]
        record["skipped"] = refused(contender, point)
        if record["skipped"] is not None:
            return
        problem, check = self._prepared(point, contender)
        name, attention = self._fastest(contender, problem, check, record)
        if attention is None:
            return
        record["variant"] = name or None

        def step() -> object:
            return problem.run(attention)

        record["extra_bytes"] = self._peak(point, step)
        if record["extra_bytes"] is None:
            record["skipped"] = "ran out of memory"
            return
        if point.device == "cuda":
            torch.cuda.empty_cache()  # the check left memory in pieces; a graph takes new memory
        record["ms"] = timing.timed(step, point.device, seconds=self.effort)
        if point.device == "cuda" and point.mode != "forward" and point.n <= self.graphs_up_to:
            try:
                record["graph_ms"] = timing.timed_from_graph(step, seconds=self.effort)
            except Exception as error:
                record["notes"]["graph"] = first_line(error)

    def _fastest(
        self, contender: Contender, problem: Problem, check: Check, record: Record
    ) -> tuple[str, Attention | None]:
        """The fastest variant that is exact; where there is none the record says why."""
        times: dict[str, float] = {}
        attentions = contender.attentions()
        for name, attention in attentions.items():
            if times and self.left <= 0:
                break
            try:
                verdict = check(attention)
                if not verdict.exact:
                    raise ValueError(f"not exact: {verdict}, 2 is allowed")
                record["error"] = max(verdict.ratio, record["error"] or 0.0)
                if len(attentions) == 1:
                    return name, attention
                quick = timing.timed(
                    lambda attention=attention: problem.run(attention),  # type: ignore[misc]
                    problem.point.device,
                    seconds=0.05,
                    least=3,
                )
                times[name] = quick["median"]
            except Exception as error:
                if len(attentions) == 1:
                    raise
                record["notes"][name] = first_line(error)
        if not times:
            record["skipped"] = "; ".join(f"{k}: {v}" for k, v in record["notes"].items())
            return "", None
        best = min(times, key=lambda name: times[name])
        return best, attentions[best]

    def _prepared(self, point: Point, contender: Contender) -> tuple[Problem, Check]:
        """The problem and the truth about it, kept for the contenders that follow."""
        if self._problem is None or self._problem.point != point.problem:
            self._problem = self._check = None  # first free the last ones' memory
            self._problem = Problem(point.problem)
        if contender.formula:
            return self._problem, Check(Problem(small(point)))
        if self._check is None:
            self._check = Check(self._problem)
        return self._problem, self._check

    def _peak(self, point: Point, step: Callable[[], object]) -> int | None:
        if point.device == "cuda":
            return peak_memory.peak_on_gpu(step)
        return peak_memory.peak_of(point, torch.get_num_threads())


def refused(contender: Contender, point: Point) -> str | None:
    """Why a contender is not even tried, or None."""
    if point.device not in contender.devices:
        return f"does not run on {point.device}"
    if point.mode not in contender.modes:
        return f"is not measured in mode {point.mode}"
    gpu = point.device == "cuda"
    room = peak_memory.available_on_gpu() if gpu else peak_memory.available()
    need = contender.needs(point)
    if need > ROOM * room:
        return f"needs about {need / 1e9:.0f} GB, {room / 1e9:.0f} are free"
    return None


def first_line(error: BaseException) -> str:
    """What went wrong, in one line."""
    lines = str(error).strip().splitlines()
    text = lines[0][:300] if lines else ""
    plain = type(error) in (ValueError, RuntimeError) and text
    return text if plain else f"{type(error).__name__}: {text}".rstrip(": ")


def _line(record: Record) -> str:
    point = Point(**{name: record[name] for name in Point.__dataclass_fields__})
    if record["skipped"] is not None:
        return f"{point}: {record['skipped']}"
    graph = record["graph_ms"]
    replayed = "" if graph is None else f", {graph['median']:.3f} from a graph"
    return (
        f"{point}: {record['ms']['median']:.3f} ms{replayed}, "
        f"{record['extra_bytes'] / 1e6:,.0f} MB, error {record['error']:.2f}x"
    )
