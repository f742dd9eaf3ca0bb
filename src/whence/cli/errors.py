"""What goes wrong at the command line is one line on stderr and an exit code, never a traceback."""

import re
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

import whence
from whence.extras import extra_of, install

WRONG_USE, FAILED = 2, 1
# How torch says that memory cannot be had, or that its size is beyond an index.
NO_MEMORY = re.compile(
    r"(?i)allocate memory|out of memory|not enough memory|size calculation overflow|"
    r"multiplication overflow|overflow when unpacking"
)


@contextmanager
def one_line_errors(*extras: str) -> Iterator[None]:
    """A ValueError and sizes that no memory has are wrong use (2).

    A missing extra, a network that cannot be reached and a file that cannot be written are
    failures (1). `extras` are those that a command cannot do without: if a package of one is
    missing, all are named at once, so that nobody is sent to install them one after another.
    """
    try:
        yield
    except ValueError as error:
        stop(str(error), WRONG_USE)
    except ImportError as error:
        stop(with_extra(error, *extras), FAILED)
    except ConnectionError as error:
        stop(str(error), FAILED)
    except FileNotFoundError as error:
        stop(f"there is no file or folder {error.filename}.", WRONG_USE)
    except IsADirectoryError as error:
        stop(f"{error.filename} is a folder, and a file is needed.", WRONG_USE)
    except OSError as error:
        where = error.filename or "the output"  # a full disk names no file
        stop(f"cannot write {where}: {error.strerror or error}.", FAILED)
    except RecursionError:
        stop("what was given is nested too deeply to be read.", WRONG_USE)
    except OverflowError as error:
        stop(f"a number is too large ({error}): take smaller sizes.", WRONG_USE)
    except MemoryError as error:
        _stop_for_memory(error)
    except RuntimeError as error:  # torch has no class of its own for memory on a CPU
        if not NO_MEMORY.search(str(error)):
            raise
        _stop_for_memory(error)


@contextmanager
def last_resort() -> Iterator[None]:
    """What no command foresaw is a mistake of ours: one line too, with the place to look at."""
    try:
        yield
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        kind, text = type(error).__name__, str(error).partition("\n")[0]
        place = f"{Path(frame.filename).name}, line {frame.lineno}"
        version = whence.__version__
        stop(f"this is a mistake in whence {version}: {kind} ({place}): {text}", FAILED)


def with_extra(error: ImportError, *extras: str) -> str:
    """The message of an ImportError, with the extra that brings the module, and these extras.

    A message that contains `install(extra)` keeps its words, and names these extras too.
    """
    module = (error.name or "").partition(".")[0]
    extra = extra_of(module)
    if extra is None:
        return str(error)
    every = install(*sorted({extra, *extras}))
    if "whence[" in str(error):
        return str(error).replace(install(extra), every)
    return f"this needs {module}, which is not installed: {every}"


def stop(message: str, code: int) -> NoReturn:
    """Say it in one line on stderr, and exit."""
    print("whence: " + " ".join(message.split()), file=sys.stderr)
    raise SystemExit(code)


def _stop_for_memory(error: Exception) -> NoReturn:
    said = re.sub(r"^\[enforce fail at [^]]*\]", "", str(error).partition("\n")[0]).strip()
    stop(f"there is not enough memory for this: take smaller sizes. {said}".strip(), WRONG_USE)
