"""Three processes run the same two jobs in one folder at a time: run by test_sharing.py.

It prints what was done, so that whatever is done twice is seen twice.
"""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import whence.experiments.lm.training
import whence.experiments.monitor
import whence.models  # noqa: F401
from lm_settings import tiny
from whence.experiments import run_lm, run_one
from whence.experiments.lm import sweep, tokens


def child(work: Callable[[], object]) -> int:
    """A fork that does the work; its process id."""
    pid = os.fork()
    if pid:
        return pid
    try:
        work()
    except BaseException as error:
        print(repr(error), file=sys.stderr, flush=True)
        os._exit(1)
    os._exit(0)


def told(module: Any, name: str, what: Callable[..., str]) -> None:
    """Every call of a function is said."""
    inner = getattr(module, name)

    def outer(*args: Any, **kwargs: Any) -> Any:
        os.write(1, f"{what(*args)}\n".encode())
        return inner(*args, **kwargs)

    setattr(module, name, outer)


if __name__ == "__main__":
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    config = tiny(folder / "text.txt", ("tisa", "rope"))
    assert os.waitpid(child(lambda: run_lm(config, folder / "alone")), 0)[1] == 0
    told(sweep, "train", lambda config, method, *rest: str(method))
    told(tokens, "_trained", lambda *rest: "tokenizer")

    def both(order: tuple[str, ...]) -> None:
        for method in order:
            run_one(config, method, 0, folder / "shared", side_by_side=3)

    orders = [("tisa", "rope"), ("rope", "tisa"), ("tisa", "rope")]
    children = [child(lambda order=order: both(order)) for order in orders]
    assert [os.waitpid(pid, 0)[1] for pid in children] == [0, 0, 0]
    assert os.waitpid(child(lambda: run_lm(config, folder / "shared")), 0)[1] == 0
