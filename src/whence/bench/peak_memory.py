"""The peak memory of one step: on a GPU by its allocator, on a CPU in a process of its own.

Not `ru_maxrss`: it starts at the resident size of the process that did the fork, and cannot be set
back after imports. Linux keeps a high-water mark that can be (VmHWM, through clear_refs).
malloc is told to give every block of 64 KiB or more straight back to the system, so that what an
earlier, freed block left in the heap hides nothing, and what counts is what is alive at one time.
"""

import ctypes
import gc
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch

from whence.bench.point import Point

MALLOC = {
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "MALLOC_TRIM_THRESHOLD_": "65536",
    "MALLOC_MMAP_MAX_": "1000000",
    "MALLOC_ARENA_MAX": "1",
}
PROC = Path("/proc")
TINY = 64  # tokens of the warm-up: libraries are loaded and threads started, little is allocated


def resident(field: str = "VmRSS") -> int:
    """Bytes of this process in memory now, or at the most ("VmHWM")."""
    return _counted(PROC / "self" / "status", field)


def _counted(path: Path, field: str) -> int:
    """Bytes that Linux says a field has."""
    lines = path.read_text().splitlines() if path.is_file() else []
    for line in lines:
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise ValueError(f"{path} has no {field}; memory can be measured on Linux alone.")


def peak_here(step: Callable[[], object]) -> int:
    """Bytes that a step takes at its peak beyond what stands ready, measured in this process."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    (PROC / "self" / "clear_refs").write_text("5")
    before = resident()
    step()
    return resident("VmHWM") - before


def peak_on_gpu(step: Callable[[], object]) -> int:
    """The same on the GPU, where the allocator counts; a first run brings what stays for good."""
    step()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def peak_of(point: Point, threads: int) -> int | None:
    """Of a point on the CPU, in a fresh process; None where the system killed it."""
    return peak_in_fresh_process(
        ["-m", "whence.bench.fresh_process", json.dumps({"threads": threads, **asdict(point)})]
    )


def peak_in_fresh_process(command: list[str]) -> int | None:
    """What a command that ends in `peak_here` prints; None where the system killed it."""
    done = subprocess.run(
        [sys.executable, *command], env=os.environ | MALLOC, capture_output=True, text=True
    )
    if done.returncode < 0:
        return None
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise RuntimeError(f"{reason} (in a fresh process)\n{' '.join(command)}\n{done.stderr}")
    return int(done.stdout.split()[-1])


def available() -> int:
    """Bytes that the machine can still give."""
    return _counted(PROC / "meminfo", "MemAvailable")


def available_on_gpu() -> int:
    """Bytes that the GPU can still give, those that the allocator keeps for reuse included."""
    free: int = torch.cuda.mem_get_info()[0]
    return free + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
