"""Which tiles are the fastest on this GPU: measured once, by hand, and kept in a file."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from whence.files import write_json
from whence.kernels.fused import tiles_file
from whence.kernels.fused.tiles import Tiles, TileSet

SIDES = ((128, 128), (128, 64), (64, 128), (64, 64), (64, 32), (32, 64))
WARPS_AND_STAGES = ((4, 2), (4, 3), (8, 2))
BLOCKS = (32, 64, 128)
# The parts of a set one after another, the forward's time without gradients: (part, mode).
PARTS = (("forward", "forward"), ("by_rows", "both"), ("by_keys", "both"), ("block", "both"))

Timer = Callable[[TileSet, str], float]  # milliseconds of a set in a mode; raises if it cannot run


@dataclass
class Tuned:
    """The best set, its time and that of the set it started from, and what could not run."""

    tiles: TileSet
    ms: float
    ms_before: float
    failed: dict[str, str] = field(default_factory=dict)


def candidates(part: str, start: TileSet) -> list[Any]:
    """What a part may be, the one it has first; eight warps are for large tiles."""
    if part == "block":
        return list(dict.fromkeys([start.block, *BLOCKS]))
    found = [getattr(start, part)]
    for rows, keys in SIDES:
        for warps, stages in WARPS_AND_STAGES:
            if warps == 4 or rows * keys >= 64 * 128:
                found.append(Tiles(rows, keys, warps, stages))
    return list(dict.fromkeys(found))


def count(start: TileSet) -> int:
    """How many measurements `fastest` makes."""
    return sum(len(candidates(part, start)) for part, _ in PARTS) + 1


def fastest(
    start: TileSet, timer: Timer, *, say: Callable[[str], None] = lambda text: None
) -> Tuned:
    """Part by part the fastest candidate, the other parts held; one that cannot run is skipped.

    A candidate must be faster by one part in a hundred to take the place of what there was.
    """
    say("as it is")
    before = timer(start, "both")
    best = Tuned(start, before, before)
    for part, mode in PARTS:
        times: dict[Any, float] = {}
        for candidate in candidates(part, best.tiles):
            tiles = best.tiles._replace(**{part: candidate})
            name = f"{part} {_shown(candidate)}"
            say(name)
            try:
                times[candidate] = timer(tiles, mode)
            except Exception as error:  # out of shared memory, or a compiler's refusal
                best.failed[name] = f"{type(error).__name__}: {str(error).splitlines()[0][:120]}"
        held = getattr(best.tiles, part)
        winner = min(times, key=lambda candidate: times[candidate], default=held)
        if winner != held and times[winner] < 0.99 * times.get(held, float("inf")):
            best.tiles = best.tiles._replace(**{part: winner})
    best.ms = timer(best.tiles, "both")
    if best.ms > before:  # the parts were measured apart: together they may be worse
        best.tiles, best.ms = start, before
    return best


def write(path: Path, gpu: str, found: dict[tuple[str, int], TileSet]) -> Path:
    """Add rows, by dtype and head size, to those that the file has; other GPUs' rows stay."""
    gpus = tiles_file.read_all(path)
    rows = gpus.setdefault(gpu, {})
    for (dtype, size), tiles in found.items():
        parts = {part: list(getattr(tiles, part)) for part in tiles_file.PARTS}
        rows.setdefault(dtype, {})[size] = parts | {"block": tiles.block}
    return write_json(path, {"format": tiles_file.FORMAT, "gpus": gpus})


def on_this_gpu(
    d_head: int, dtype: str, n: int, tokens: int, n_heads: int, *, device: str = "cuda"
) -> Timer:
    """The time of attention with TISA, whose kernels take every path but a tail's.

    Before it is timed, a set must give exact results: a tile that fits may still be compiled wrong.
    """
    from whence.bench import timing
    from whence.bench.contenders import ours
    from whence.bench.exactness import Check
    from whence.bench.point import Point
    from whence.bench.problem import Problem
    from whence.kernels.fused.function import trying

    attention = ours("fused")
    problems = {}
    for mode in ("forward", "both"):
        batch = max(1, tokens // n)
        point = Point("", "tisa", n, mode, d_head, n_heads, batch, dtype, device=device)
        problem = Problem(point)
        problems[mode] = problem, Check(problem)

    def timer(tiles: TileSet, mode: str) -> float:
        problem, check = problems[mode]
        with trying(tiles):
            verdict = check(attention)
            if not verdict.exact:
                raise ValueError(f"not exact: {verdict}")
            return timing.timed(lambda: problem.run(attention), device, seconds=0.05)["median"]

    return timer


def _shown(candidate: Sequence[int] | int) -> str:
    return str(candidate) if isinstance(candidate, int) else "x".join(map(str, candidate))
