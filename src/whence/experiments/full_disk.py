"""A full disk as one kind of error, whichever library meets it."""

import errno
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

LITTLE = 1 << 20  # bytes free, below which a failed write is put down to a full disk


@contextmanager
def full_disk_named(folder: Path) -> Iterator[None]:
    """What writers of weights raise on a full disk, each in its own way, as one OSError.

    A thread that meets the full disk, as TensorBoard's writer does, ends without a traceback.
    """
    others = threading.excepthook

    def hook(args: threading.ExceptHookArgs) -> None:
        if getattr(args.exc_value, "errno", None) != errno.ENOSPC:
            others(args)

    threading.excepthook = hook
    try:
        yield
    except Exception as error:
        at = next((part for part in (folder, *folder.parents) if part.exists()), folder)
        said = "No space left" in str(error) or getattr(error, "errno", None) == errno.ENOSPC
        words = ("writ", "unexpected pos", "inline_container")  # of torch.save among others
        writing = isinstance(error, OSError) or any(word in str(error).lower() for word in words)
        if said or (writing and shutil.disk_usage(at).free < LITTLE):
            raise OSError(errno.ENOSPC, "No space left on device", str(folder)) from error
        raise
    finally:
        threading.excepthook = others
