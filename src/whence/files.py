"""Files and folders that appear whole: written under a temporary name, then renamed into place.

A reader sees the old content or the new one, never a part. On any error the old content stays and
the temporary file is removed. Data is synced to the disk before the rename, and the directory
after it, so that this also holds for a machine that loses power.
"""

import contextlib
import errno
import json
import os
import secrets
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

# O_EXCL refuses a name that exists, also a symbolic link that somebody planted there.
_CREATE = os.O_CREAT | os.O_EXCL | os.O_RDWR | getattr(os, "O_NOFOLLOW", 0)
_LOG = os.O_CREAT | os.O_TRUNC | os.O_WRONLY | getattr(os, "O_NOFOLLOW", 0)
_BINARY = getattr(os, "O_BINARY", 0)
_CANNOT_SYNC = {errno.EINVAL, errno.ENOTSUP, errno.EACCES, errno.EPERM}


@contextmanager
def replace_file(path: Path) -> Iterator[BinaryIO]:
    """Open a new file that takes the place of `path` when the block ends without an error.

    The parent directory is made if it is missing. A replaced file passes its mode on; a new file
    gets the mode that the umask leaves.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.parent / f".{path.name[:40]}.{secrets.token_hex(8)}.tmp"
    mode = _mode(path)
    # Until it has the mode of the old file, nobody may read the new one who cannot read the old.
    handle = os.open(temporary, _CREATE | _BINARY, 0o666 if mode is None else mode & 0o600)
    try:
        with os.fdopen(handle, "w+b") as file:
            yield file
            file.flush()
            if mode is not None:
                temporary.chmod(mode)
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _sync_directory(path.parent)


def from_home(name: str | Path) -> Path:
    """A path in which ~ is the home folder; where there is no such user, ~user is a name."""
    return Path(os.path.expanduser(name))  # Path.expanduser raises there


def write_bytes(path: Path, content: bytes) -> Path:
    """Write a file whole, and return its path."""
    with replace_file(path) as file:
        file.write(content)
    return path


def write_text(path: Path, text: str) -> Path:
    """Write a text as UTF-8, with its line ends as they are."""
    return write_bytes(path, text.encode())


def write_json(path: Path, data: Any) -> Path:
    """Write JSON with one space of indentation and a newline at the end."""
    return write_text(path, json.dumps(data, indent=1) + "\n")


def open_log(path: Path) -> int:
    """Begin a log file anew, for what a process prints as it goes: the file descriptor.

    It is the one kind of file that is read before it is whole. A symbolic link is not followed.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    return os.open(path, _LOG, 0o666)


def check_folder(folder: Path) -> None:
    """Raise before any work if results could not be written there; make nothing yet."""
    for part in (folder, *folder.parents):
        if part.exists():
            if not part.is_dir():
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(part))
            if not os.access(part, os.W_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(part))
            return


@contextmanager
def replace_folder(folder: Path) -> Iterator[Path]:
    """Yield an empty folder that takes the place of `folder` when the block ends without an error.

    What `folder` held before is then removed. A folder cannot be renamed onto one that holds files,
    so between two renames there is no folder of that name; the old one comes back if the second
    rename fails.
    """
    workspace = _workspace(folder)
    new, old = workspace / "new", workspace / "old"
    new.mkdir()
    try:
        yield new
        sync_tree(new)
        if folder.exists():
            new.chmod(stat.S_IMODE(folder.stat().st_mode))
            folder.rename(old)
        try:
            new.rename(folder)
        except BaseException:
            if old.exists():
                old.rename(folder)
            raise
        _sync_directory(folder.parent)
        shutil.rmtree(old, ignore_errors=True)
    finally:
        shutil.rmtree(new, ignore_errors=True)
        with contextlib.suppress(OSError):  # not empty if the old folder could not be put back
            workspace.rmdir()


@contextmanager
def add_to_folder(folder: Path) -> Iterator[Path]:
    """Yield an empty folder whose files are moved into `folder` when the block ends without error.

    Each file replaces the one of its name; all other files of `folder` stay.
    """
    workspace = _workspace(folder)
    try:
        yield workspace
        sync_tree(workspace)
        for path in sorted(part for part in workspace.rglob("*") if part.is_file()):
            target = folder / path.relative_to(workspace)
            target.parent.mkdir(parents=True, exist_ok=True)
            mode = _mode(target)
            if mode is not None:
                path.chmod(mode)
            path.replace(target)
            _sync_directory(target.parent)
    finally:
        shutil.rmtree(workspace, ignore_errors=True)


def _workspace(folder: Path) -> Path:
    """Make a private folder of an unpredictable name on the same file system as `folder`."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    return Path(tempfile.mkdtemp(prefix=f".{folder.name[:40]}-", dir=folder.parent))


def _mode(path: Path) -> int | None:
    """Return the permissions of a regular file; None where there is no such file."""
    try:
        found = path.lstat().st_mode
    except FileNotFoundError:
        return None
    return stat.S_IMODE(found) if stat.S_ISREG(found) else None


def sync_tree(folder: Path) -> None:
    """Wait until all files of a folder, and their names, are on the disk."""
    for path in folder.rglob("*"):
        if path.is_dir():
            _sync_directory(path)
        elif path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
    _sync_directory(folder)


def _sync_directory(folder: Path) -> None:
    """Make a rename durable, where the system can sync a directory at all."""
    if os.name != "posix":
        return
    try:
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
    except OSError as error:
        if error.errno not in _CANNOT_SYNC:
            raise
