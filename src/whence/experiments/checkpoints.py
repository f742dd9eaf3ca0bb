"""Which checkpoints of a run are whole: a kill may come while one is being written."""

import shutil
from pathlib import Path

PREFIX, MARK = "checkpoint-", "whole"


def mark_whole(folder: Path, step: int) -> None:
    """Say that the checkpoint of this step is written; called after its last file."""
    (folder / f"{PREFIX}{step}" / MARK).touch()


def last_whole(folder: Path) -> tuple[int, Path] | None:
    """The newest whole checkpoint with its step."""
    found = [(int(path.parent.name.removeprefix(PREFIX)), path.parent) for path in _marks(folder)]
    return max(found, default=None)


def drop_broken(folder: Path) -> None:
    """Remove what a kill left half-written, and all that is newer than the last whole one."""
    whole = {path.parent for path in _marks(folder)}
    for path in folder.glob(f"{PREFIX}*"):
        if path not in whole:
            shutil.rmtree(path, ignore_errors=True)


def _marks(folder: Path) -> list[Path]:
    return list(folder.glob(f"{PREFIX}*/{MARK}"))
