"""A folder that one process works in at a time; the system opens it again when that one dies."""

import contextlib
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from whence.experiments.processes import meet, processes
from whence.experiments.progress import OutOfTimeError, Say, silent

if TYPE_CHECKING:
    from filelock import FileLock

LOCK = ".lock"  # its file stays, empty


@contextmanager
def only_one(folder: Path, *, say: Say = silent, deadline: float | None = None) -> Iterator[None]:
    """Wait until no other run is in `folder`. Of the processes of one run the first one waits.

    Two runs in one folder of checkpoints would each go on from what the other wrote. A folder that
    is made here goes again if the block ends with an error and has left nothing in it.
    """
    from filelock import FileLock, Timeout  # torch needs it too

    made = [part for part in (folder, *folder.parents) if not part.exists()]
    lock, first = FileLock(folder / LOCK), processes()[0] == 0
    if first:
        try:
            _acquire(lock, folder, 0.0)
        except Timeout:
            say("waiting for another process that is at it", 0.0)
            left = -1.0 if deadline is None else max(deadline - time.monotonic(), 0.0)
            try:
                _acquire(lock, folder, left)
            except Timeout:
                raise OutOfTimeError(f"another process works in {folder}") from None
    meet()
    try:
        yield
    except BaseException:
        if first:
            _remove_if_unused(folder, made)
        raise
    finally:
        lock.release()


def _acquire(lock: "FileLock", folder: Path, timeout: float) -> None:
    """Take the lock in a folder that another process may remove while it is waited for."""
    while True:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lock.acquire(timeout=timeout)
        except (FileNotFoundError, FileExistsError):
            # It, or a folder above it, went in between, unless something else is in its place.
            if not Path(folder.anchor).exists() or (
                os.path.lexists(folder) and not folder.is_dir()
            ):
                raise
            continue
        return


def _remove_if_unused(folder: Path, made: list[Path]) -> None:
    """Remove a lone lock, and the folders that were made for it.

    It is held: filelock sees that a file is gone, and a process that waits for it begins anew.
    """
    with contextlib.suppress(OSError):
        if [path.name for path in folder.iterdir()] == [LOCK]:
            (folder / LOCK).unlink()
        for part in made:
            part.rmdir()
