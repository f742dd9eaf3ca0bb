"""A folder that one process works in at a time; the system opens it again when that one dies."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from whence.experiments.processes import meet, processes
from whence.experiments.progress import OutOfTimeError, Say, silent

LOCK = ".lock"  # its file stays, empty


@contextmanager
def only_one(folder: Path, *, say: Say = silent, deadline: float | None = None) -> Iterator[None]:
    """Wait until no other run is in `folder`. Of the processes of one run the first one waits.

    Two runs in one folder of checkpoints would each go on from what the other wrote.
    """
    from filelock import FileLock, Timeout  # torch needs it too

    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / LOCK)
    if processes()[0] == 0:
        try:
            lock.acquire(timeout=0)
        except Timeout:
            say("waiting for another process that is at it", 0.0)
            left = -1.0 if deadline is None else max(deadline - time.monotonic(), 0.0)
            try:
                lock.acquire(timeout=left)
            except Timeout:
                raise OutOfTimeError(f"another process works in {folder}") from None
    meet()
    try:
        yield
    finally:
        lock.release()
