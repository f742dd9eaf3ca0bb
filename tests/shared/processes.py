"""Python processes for tests, forked from one that has imported everything and computed nothing.

To import transformers anew takes seconds, which most tests of processes are not about.
"""

import multiprocessing
import os
import runpy
import socket
import sys
import tempfile
import warnings
from pathlib import Path
from typing import NamedTuple

import torch

FORKS = "forkserver" in multiprocessing.get_all_start_methods()
CONTEXT = multiprocessing.get_context("forkserver" if FORKS else "spawn")
LONGEST = 150  # seconds
if FORKS:
    CONTEXT.set_forkserver_preload(
        [
            "matplotlib.pyplot",
            "torch.distributed.fsdp",
            "torch.distributed.tensor.parallel",
            "transformers.models.bert.modeling_bert",
            "transformers.trainer",
            "whence.cli.root",
            "whence.experiments.lm",
            "whence.experiments.monitor",
            "whence.experiments.workers",
            "whence.hf",
            "whence.models",
        ]
    )


class Done(NamedTuple):
    """How a process ended and what it said."""

    returncode: int | None
    stdout: str
    stderr: str


def run(*command: str, folder: Path, refused: type[Warning] | None = None) -> Done:
    """`python *command` in a folder; warnings are ignored, or errors where they are refused."""
    return _ended([{}], command, folder, refused)[0]


def run_two(*command: str, folder: Path, **env: str) -> list[Done]:
    """`python *command` as two processes that know of each other, as of torchrun."""
    ranks = [{"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2"} | env for rank in "01"]
    return _ended(ranks, command, folder, None)


def free_port() -> str:
    """For processes to meet at."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return str(taken.getsockname()[1])


def _ended(
    envs: list[dict[str, str]],
    command: tuple[str, ...],
    folder: Path,
    refused: type[Warning] | None,
) -> list[Done]:
    threads = torch.get_num_threads()  # their number changes the order of sums
    with tempfile.TemporaryDirectory() as aside:
        said = [[Path(aside, f"{i}.{name}") for name in ("out", "err")] for i in range(len(envs))]
        processes = [
            CONTEXT.Process(target=_run, args=(command, folder, paths, env, refused, threads))
            for env, paths in zip(envs, said, strict=True)
        ]
        for process in processes:
            process.start()
        try:
            for process in processes:
                process.join(LONGEST)
        finally:
            for process in processes:
                process.kill()
                process.join()
        return [
            Done(process.exitcode, *(path.read_text(encoding="utf-8") for path in paths))
            for process, paths in zip(processes, said, strict=True)
        ]


def _run(
    command: tuple[str, ...],
    folder: Path,
    said: list[Path],
    env: dict[str, str],
    refused: type[Warning] | None,
    threads: int,
) -> None:
    for path, stream in zip(said, (sys.stdout, sys.stderr), strict=True):
        with path.open("w") as file:
            os.dup2(file.fileno(), stream.fileno())
    torch.set_num_threads(threads)
    warnings.simplefilter("ignore")
    if refused is not None:
        warnings.simplefilter("error", refused)
    os.environ |= env
    os.chdir(folder)
    name, *rest = command
    if name == "-m":
        sys.argv = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif name == "-c":
        sys.argv = [name, *rest[1:]]
        exec(rest[0], {"__name__": "__main__"})
    else:
        sys.argv = [name, *rest]
        sys.path.insert(0, str(Path(name).resolve().parent))
        runpy.run_path(name, run_name="__main__")
