"""The time of a step on its device, as it is called and, on a GPU, replayed from a CUDA graph."""

import statistics
import time
from collections.abc import Callable, Sequence

import torch

from whence.bench import wall_time

Step = Callable[[], object]
CACHE = 1 << 28  # bytes written between two steps, so that none finds its inputs in the GPU's cache


def quantiles(milliseconds: Sequence[float]) -> dict[str, float | int]:
    """Median, 20 and 80 % quantiles, and of how many."""
    values = list(milliseconds)
    cuts = statistics.quantiles(values, n=5, method="inclusive") if len(values) > 1 else values
    return {
        "median": statistics.median(values),
        "q20": cuts[0],
        "q80": cuts[-1],
        "repeats": len(values),
    }


def repeats(one: float, seconds: float, least: int, most: int) -> int:
    """How often a step of `one` second is run in about `seconds`."""
    return max(least, min(most, int(seconds / max(one, 1e-6))))


def timed(
    step: Step, device: str, *, seconds: float = 0.2, least: int = 5, most: int = 100
) -> dict[str, float | int]:
    """Milliseconds of a step, warm; one that takes `seconds` and more is run `least` times."""
    if device == "cuda":
        return quantiles(_on_gpu(step, seconds, least, most))
    step()
    start = time.perf_counter()
    wall_time.sample(step)  # with what surrounds a step, which may take longer than the step
    count = repeats(time.perf_counter() - start, seconds, least, most)
    samples = wall_time.take_turns({"": step}, count)[""]
    return quantiles([sample.wall * 1e3 for sample in samples])


def timed_from_graph(
    step: Step, *, seconds: float = 0.1, least: int = 5, most: int = 100
) -> dict[str, float | int]:
    """Milliseconds of the same kernels without the host: captured once, replayed."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = step()  # its memory belongs to the graph
    found = quantiles(_on_gpu(graph.replay, seconds, least, most))
    del kept
    graph.reset()
    return found


def _on_gpu(step: Step, seconds: float, least: int, most: int) -> list[float]:
    for _ in range(2):
        step()
    torch.cuda.synchronize()
    start = time.perf_counter()
    step()
    torch.cuda.synchronize()
    count = repeats(time.perf_counter() - start, seconds, least, most)
    cache = torch.empty(CACHE, dtype=torch.int8, device="cuda")
    marks = [(_mark(), _mark()) for _ in range(count)]
    for begin, end in marks:
        cache.zero_()
        begin.record()
        step()
        end.record()
    torch.cuda.synchronize()
    return [begin.elapsed_time(end) for begin, end in marks]


def _mark() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
