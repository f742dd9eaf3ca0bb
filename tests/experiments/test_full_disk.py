"""A full disk is one kind of error, whoever meets it."""

import errno
import os
import threading
from pathlib import Path

import pytest

from whence.experiments.full_disk import full_disk_named


def full() -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def broken() -> None:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def test_a_thread_that_meets_a_full_disk_leaves_no_traceback_and_other_errors_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[int] = []
    monkeypatch.setattr(threading, "excepthook", lambda args: shown.append(args.exc_value.errno))
    before = threading.excepthook
    with full_disk_named(tmp_path):
        for work in (full, broken):
            thread = threading.Thread(target=work)
            thread.start()
            thread.join()
    assert shown == [errno.EIO]
    assert threading.excepthook is before


def test_the_folder_is_named_and_other_errors_stay_what_they_are(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No space left") as found, full_disk_named(tmp_path / "out"):
        full()
    assert found.value.filename == str(tmp_path / "out")
    with pytest.raises(OSError, match="Input/output error"), full_disk_named(tmp_path):
        broken()
    with pytest.raises(RuntimeError, match="writing failed"), full_disk_named(tmp_path):
        raise RuntimeError("writing failed")  # there is room on this disk
