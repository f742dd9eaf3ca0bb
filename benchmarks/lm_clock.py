"""What training steps cost: a contender alone, several in turns, and what the GPU had to do."""

import gc
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from lm_contender import GRAPHED, Contender, random_ids, taken_apart
from whence.bench.session import first_line

TURN = 4  # steps
ENOUGH = 40  # turns of one contender
SLOW = 2.0  # seconds of a step, from which on two of them are enough
PROFILED = 2  # steps
SHORT = 512  # tokens of the one sequence by which the host is measured

Record = dict[str, Any]
Shape = dict[str, int]


def waited(device: str) -> float:
    """The time, once all that was launched is done."""
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def seconds_a_step(step: Callable[[], None], device: str, steps: int = TURN) -> float:
    start = waited(device)
    for _ in range(steps):
        step()
    return (waited(device) - start) / steps


def forget(device: str) -> None:
    """Memory of models that are gone."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def summed_up(values: list[float], tokens: int) -> Record:
    """Milliseconds a step, and tokens a second of the median step."""
    low, middle, high = (float(x) for x in np.quantile(values, (0.2, 0.5, 0.8)))
    return {
        "ms": {"q20": 1e3 * low, "median": 1e3 * middle, "q80": 1e3 * high, "turns": len(values)},
        "tokens_a_second": tokens / middle,
    }


def on_the_gpu(step: Callable[[], None], device: str) -> Record:
    """`gpu_ms`, the time of all kernels of a step, and `launches`, how many there are.

    Where gpu_ms is near the time of a step the GPU is the limit, far below it the host is. Copies
    and fills of memory count as kernels.
    """
    if device != "cuda":
        return {"gpu_ms": None, "launches": None}
    step()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        for _ in range(PROFILED):
            step()
        torch.cuda.synchronize()
    kernels = [
        event
        for event in found.key_averages()
        if event.device_type == DeviceType.CUDA and not event.is_user_annotation
    ]
    return {
        "gpu_ms": sum(event.self_device_time_total for event in kernels) / 1e3 / PROFILED,
        "launches": round(sum(event.count for event in kernels) / PROFILED),
    }


def profiled(made: Callable[[], Contender], n: int, tokens: int) -> Record:
    """`on_the_gpu` of the contender that is made, or why that is not known.

    A process that has profiled once launches more slowly ever after: to be called when all whose
    launches count are timed.
    """
    try:
        contender = made()
        ids = random_ids(n, tokens, contender.device)
        return on_the_gpu(lambda: contender.step(ids), contender.device)
    except Exception as error:
        return {"gpu_ms": None, "launches": None, "unprofiled": first_line(error)}


def in_turns(
    names: list[str], shape: Shape, n: int, tokens: int, device: str, seconds: float
) -> tuple[list[Record], dict[str, Contender]]:
    """A record a contender, measured turn by turn, and those that are still there.

    One that fails says why and stops no other.
    """
    forget(device)
    ids = random_ids(n, tokens, device)
    ready: dict[str, Contender] = {}
    records: dict[str, Record] = {}
    times: dict[str, list[float]] = {}
    for name in names:
        mode = taken_apart(name)[1]
        records[name] = {"contender": name, "n": n, "tokens": ids.numel(), "mode": mode}
        try:
            contender = Contender(name, shape, n, device)
            # CUDA graphs are recorded in the second step, and replayed from the third on
            first = 5 if mode == GRAPHED else 3
            seconds_a_step(lambda c=contender: c.step(ids), device, first)
            ready[name], times[name] = contender, []
        except Exception as error:
            records[name]["skipped"] = first_line(error)
    end, rounds = time.monotonic() + seconds, 0
    while ready and rounds < ENOUGH and (time.monotonic() < end or rounds < 3):
        order = list(ready.items())
        shift = rounds % len(order)  # each follows each
        for name, contender in order[shift:] + order[:shift]:
            try:
                times[name].append(seconds_a_step(lambda c=contender: c.step(ids), device))
            except Exception as error:
                records[name]["skipped"] = first_line(error)
                del ready[name]
        rounds += 1
    for name in ready:
        records[name] |= summed_up(times[name], ids.numel())
    return list(records.values()), ready


def alone(
    name: str,
    shape: Shape,
    n: int,
    tokens: int,
    device: str,
    seconds: float,
    *,
    host: bool = False,
) -> Record:
    """One contender with the device for itself, with fewer sequences where memory ends.

    With `host`, host_ms is a step of one short sequence, where the GPU has next to nothing to do:
    what the host needs to launch it.
    """
    record: Record = {"contender": name, "n": n, "mode": taken_apart(name)[1]}
    while True:
        forget(device)
        try:
            return record | _alone(name, shape, n, tokens, device, seconds, host)
        except torch.OutOfMemoryError:
            if tokens <= n:
                return record | {"skipped": f"out of memory with one sequence of {n:,}"}
            tokens = max(tokens // 2, n)
        except Exception as error:
            return record | {"skipped": first_line(error)}


def _alone(
    name: str, shape: Shape, n: int, tokens: int, device: str, seconds: float, host: bool
) -> Record:
    ids = random_ids(n, tokens, device)
    contender = Contender(name, shape, n, device)

    def step() -> None:
        contender.step(ids)

    seconds_a_step(step, device, 2)  # compiles
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    once = seconds_a_step(step, device, 1)
    turn = TURN if once < SLOW / TURN else 1
    values = [once] if once > SLOW else []
    end = time.monotonic() + seconds
    while time.monotonic() < end or len(values) < 2:
        values.append(seconds_a_step(step, device, turn))
    found = {"tokens": ids.numel(), **contender.counts(), **summed_up(values, ids.numel())}
    found["peak_bytes"] = torch.cuda.max_memory_allocated() if device == "cuda" else None
    if host:
        short = ids[:1, :SHORT].contiguous()
        seconds_a_step(lambda: contender.step(short), device, 2)
        found["host_ms"] = 1e3 * seconds_a_step(lambda: contender.step(short), device)
    return found
