"""The most memory that training used: the GPU's allocations, or the process on a CPU."""

import gc
from pathlib import Path

import torch

PEAK, RESET = "VmHWM:", "5"  # of /proc/self: the high-water mark, and the word that sets it back


def forget_peak(device: torch.device) -> None:
    """Begin anew; where the system cannot, the peak of earlier work stays in."""
    gc.collect()  # a finished run's model and optimizer are in cycles
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        return
    try:
        Path("/proc/self/clear_refs").write_text(RESET)
    except OSError:
        return


def peak_bytes(device: torch.device) -> int | None:
    """Since `forget_peak`, or None on a system that does not tell."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    found = next((line for line in lines if line.startswith(PEAK)), None)
    return None if found is None else int(found.split()[1]) * 1024
