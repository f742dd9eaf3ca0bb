"""Marks the checkpoints of a run that are whole: a run may be killed while it writes one."""

import shutil
from pathlib import Path

PREFIX, MARK = "checkpoint-", "whole"


def mark_whole(folder: Path, step: int) -> None:
    """Mark the checkpoint of this step as whole, after its last file is written."""
    (folder / f"{PREFIX}{step}" / MARK).touch()


def last_whole(folder: Path) -> tuple[int, Path] | None:
    """The newest whole checkpoint with its step."""
    found = [(int(path.parent.name.removeprefix(PREFIX)), path.parent) for path in _marks(folder)]
    return max(found, default=None)


def drop_broken(folder: Path) -> None:
    """Remove the checkpoints that were not written to their end."""
    whole = {path.parent for path in _marks(folder)}
    for path in folder.glob(f"{PREFIX}*"):
        if path not in whole:
            shutil.rmtree(path, ignore_errors=True)


def _marks(folder: Path) -> list[Path]:
    return list(folder.glob(f"{PREFIX}*/{MARK}"))
