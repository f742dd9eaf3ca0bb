"""Marks the checkpoints of a run that are whole, and finds the newest one that still is.

A run may be killed while it writes a checkpoint, and a disk may damage one later. The mark is the
last file of a checkpoint, written when all others are on the disk; it holds their SHA-256.
"""

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path

from whence.files import sync_tree, write_json

PREFIX, MARK = "checkpoint-", "whole"


def sync_checkpoint(folder: Path, step: int) -> None:
    """Wait until what this process has written of a checkpoint is on the disk."""
    sync_tree(folder / f"{PREFIX}{step}")


def mark_whole(folder: Path, step: int) -> None:
    """Mark the checkpoint of this step as whole, after its last file is on the disk."""
    checkpoint = folder / f"{PREFIX}{step}"
    write_json(checkpoint / MARK, _sums(checkpoint))


def last_whole(
    folder: Path, *, damaged: Callable[[str], None] = lambda why: None
) -> tuple[int, Path] | None:
    """The newest whole checkpoint with its step; damaged("...") is told what is passed over."""
    for step, checkpoint in sorted(_marked(folder), reverse=True):
        why = _damage(checkpoint)
        if not why:
            return step, checkpoint
        damaged(f"{checkpoint} is damaged: {why}")
    return None


def drop_broken(folder: Path, *, keep: Path | None) -> None:
    """Remove the checkpoints that are not whole: all that are newer than the one to keep."""
    for path in folder.glob(f"{PREFIX}*"):
        older = keep is not None and _step(path) <= _step(keep)
        if not older or not (path / MARK).is_file():
            shutil.rmtree(path, ignore_errors=True)


def _marked(folder: Path) -> list[tuple[int, Path]]:
    return [(_step(path.parent), path.parent) for path in folder.glob(f"{PREFIX}*/{MARK}")]


def _step(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix(PREFIX))


def _damage(checkpoint: Path) -> str:
    """What is wrong with a marked checkpoint, or nothing. Early versions wrote empty marks."""
    try:
        text = (checkpoint / MARK).read_text(encoding="utf-8")
        wanted = json.loads(text) if text else {}
        found = _sums(checkpoint)
    except (OSError, ValueError) as error:
        return f"{MARK} cannot be read ({error})"
    if not isinstance(wanted, dict):
        return f"{MARK} is not a list of files"
    wrong = [name for name, sha256 in wanted.items() if found.get(name) != sha256]
    if not wrong:
        return ""
    return f"{wrong[0]} is {'not what was written' if wrong[0] in found else 'missing'}"


def _sums(checkpoint: Path) -> dict[str, str]:
    """The SHA-256 of every file but the mark."""
    sums = {}
    for path in sorted(path for path in checkpoint.rglob("*") if path.is_file()):
        if path.name != MARK:
            with path.open("rb") as file:
                name = path.relative_to(checkpoint).as_posix()
                sums[name] = hashlib.file_digest(file, "sha256").hexdigest()
    return sums
