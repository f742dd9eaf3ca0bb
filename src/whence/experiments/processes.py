"""The processes of one run, as torchrun starts them, and the device that they run on."""

import os

import torch

from whence.checks import one_of, require


def processes() -> tuple[int, int]:
    """This process' number and how many there are, as torchrun says it."""
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def join_processes(device: torch.device) -> None:
    """Let the processes of torchrun know each other; one process needs no others."""
    if processes()[1] == 1:
        return
    from accelerate import PartialState

    PartialState(cpu=True, backend="gloo") if device.type == "cpu" else PartialState()


def meet() -> None:
    """Wait for the other processes of this run."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.barrier()


def named_device(name: str) -> torch.device:
    """The device that "cpu", "cuda" or "auto" (a GPU if there is one) means here."""
    one_of("device", name, ("auto", "cpu", "cuda"))
    require(
        name != "cuda" or torch.cuda.is_available(),
        "there is no NVIDIA GPU here: give --device cpu.",
    )
    gpu = name == "cuda" or (name == "auto" and torch.cuda.is_available())
    return torch.device("cuda", torch.cuda.current_device()) if gpu else torch.device("cpu")


def check_gpus(device: torch.device) -> None:
    """Refuse one process that sees several GPUs, of which Trainer would use all at once."""
    require(
        device.type == "cpu" or processes()[1] > 1 or torch.cuda.device_count() == 1,
        "there are several GPUs: start with torchrun, a process a GPU, or choose one with "
        "CUDA_VISIBLE_DEVICES.",
    )
