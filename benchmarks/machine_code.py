"""Whether a change leaves the machine code of the fused kernels as it was measured; without a GPU.

    python benchmarks/machine_code.py --out before.json            # in one checkout
    python benchmarks/machine_code.py --against before.json        # in another one

Kernels are compiled for an H200 and not run. A launch is its kernel, the hash of its PTX (without
the lines of the source that it names), its grid, warps and shared memory. Two sets of calls are
compared: one layer of each method of model_cost.py, and random calls of gpu_exactness.py in half
precision, or with --float32 in float32. Where all launches of a call are the same, its time and its
errors as measured with one checkout hold for the other, with the same versions of PyTorch and
Triton.
"""

import argparse
import hashlib
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import gpu_exactness
from whence import build
from whence.files import write_json
from whence.kernels.fused.plan import PLANS
from whence.nn import positioned_attention

TESTS = Path(__file__).resolve().parent.parent / "tests" / "shared"
METHODS = ("tisa:kernels=5", "t5", "alibi", "shaw:clip=16", "rope")
LENGTHS, TOKENS = (128, 512, 2048), 16_384
# Where a line of the PTX came from, in the source: files, lines, marks for a debugger, comments.
ORIGIN = re.compile(r"\.loc.*|\.file.*|//.*|\$L__(tmp\d+|func\w+):|\.section\s+\.debug[\s\S]*")


def code_of(ptx: str) -> str:
    """The hash of a kernel's instructions."""
    return hashlib.sha256(" ".join(ORIGIN.sub(" ", ptx).split()).encode()).hexdigest()[:16]


def layers() -> Iterator[str]:
    """Forward and backward of one layer of each method at each length; yields each one's name."""
    for spec in METHODS:
        for n in LENGTHS:
            method = build(spec, n_heads=12, d_head=64, max_length=max(LENGTHS))
            shape = (TOKENS // n, n, 12, 64)
            q, k, v = (torch.zeros(shape, dtype=torch.bfloat16).transpose(1, 2) for _ in range(3))
            given = [x.requires_grad_() for x in (q, k, v)]
            positioned_attention(method, *given, causal=True, backend="fused").sum().backward()
            yield f"{spec}, {n} tokens"


def random_calls(count: int, seed: int, *, float32: bool = False) -> Iterator[str]:
    """Random calls of one precision, each of another kind; yields each one's seed."""
    kinds = range(seed * 1_000_000, (seed + 1) * 1_000_000, gpu_exactness.SHARED)
    chosen = (x for x in kinds if (gpu_exactness.call_of(x)["dtype"] == "float32") == float32)
    for number, _ in zip(chosen, range(count), strict=False):
        call = gpu_exactness.call_of(number)
        gpu_exactness.set_mode(call["mode"])
        gpu_exactness.Drawn(call, 0, "cpu").run("fused")
        yield f"random call {number}"


def launches(count: int, seed: int, *, float32: bool = False) -> dict[str, list[Any]]:
    """The launches of every call, by its name."""
    sys.path.insert(0, str(TESTS))
    from simulated_gpu import simulated_gpu

    found: dict[str, list[Any]] = {}
    started: list[Any] = []

    def noted(compiled: Any, grid: tuple[int, int, int], given: Any) -> None:
        made = compiled.metadata
        code = code_of(compiled.asm["ptx"])
        started.append([made.name, code, list(grid), made.num_warps, made.shared])

    with simulated_gpu(launch=noted):
        for calls in (layers(), random_calls(count, seed, float32=float32)):
            for name in calls:
                found[name], started = started, []
                PLANS.forget()
                print(f"{name}: {len(found[name])} launches", flush=True)
    return found


def differences(before: dict[str, list[Any]], now: dict[str, list[Any]]) -> list[str]:
    """A line for each call whose launches are not the same, with the kernels that differ."""
    lines = []
    for name in sorted({*before, *now}):
        a, b = before.get(name), now.get(name)
        if a is None or b is None:
            lines.append(f"{name}: only {'now' if a is None else 'before'}")
        elif len(a) != len(b):
            lines.append(f"{name}: {len(a)} launches before, {len(b)} now")
        elif a != b:
            kernels = dict.fromkeys(y[0] for x, y in zip(a, b, strict=True) if x != y)
            lines.append(f"{name}: {', '.join(kernels)}")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--calls", type=int, default=60, help="random calls, each of its own kind")
    parser.add_argument("--seed", type=int, default=91)
    parser.add_argument("--float32", action="store_true", help="random calls in float32")
    parser.add_argument("--out", type=Path, help="write the launches into this file")
    parser.add_argument("--against", type=Path, help="compare with what another checkout wrote")
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = launches(options.calls, options.seed, float32=options.float32)
    if options.out:
        write_json(options.out, found)
    if options.against:
        lines = differences(json.loads(options.against.read_text()), found)
        print("\n".join(lines))
        count = sum(map(len, found.values()))
        print(f"{len(found)} calls, {count} launches: {len(lines)} calls differ")
        sys.exit(bool(lines))


if __name__ == "__main__":
    main()
