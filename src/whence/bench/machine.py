"""Where something was measured: processor, GPU, driver, versions and commit."""

import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch


def machine(device: str = "cpu") -> dict[str, Any]:
    """What a reader must know to hold another measurement against this one."""
    found: dict[str, Any] = {
        "cpu": _processor(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "commit": commit(),
    }
    if device == "cuda":
        import triton

        major, minor = torch.cuda.get_device_capability()
        cudnn = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
        found |= {
            "gpu": torch.cuda.get_device_name(),
            "compute_capability": f"{major}.{minor}",
            "driver": _said("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
            "cuda": torch.version.cuda,
            "cudnn": cudnn,
            "triton": triton.__version__,
        }
    return found


def commit(source: Path | None = None) -> str | None:
    """Of the sources that run, with -dirty where they differ from it; None where git says none.

    Installed sources may lie in a folder of somebody's own repository, which does not track them.
    """
    source = source or Path(__file__).resolve()
    here = ("git", "-C", str(source.parent))
    if _said(*here, "ls-files", "--error-unmatch", source.name) is None:
        return None
    return _said(*here, "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*")


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    model = next((line.split(":")[1] for line in lines if line.startswith("model name")), "")
    return model.strip() or platform.processor()


def _said(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    lines = done.stdout.strip().splitlines()
    return lines[0] if done.returncode == 0 and lines else None
