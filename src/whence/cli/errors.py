"""What goes wrong at the command line is one line on stderr and an exit code, never a traceback."""

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata

WRONG_USE, FAILED = 2, 1


@contextmanager
def one_line_errors() -> Iterator[None]:
    """A ValueError is wrong use (2); a missing extra, file or network is a failure (1)."""
    try:
        yield
    except ValueError as error:
        _stop(str(error), WRONG_USE)
    except ImportError as error:
        _stop(with_extra(error), FAILED)
    except ConnectionError as error:
        _stop(str(error), FAILED)
    except OSError as error:
        where = error.filename or "the output"  # a full disk names no file
        _stop(f"cannot write {where}: {error.strerror or error}.", FAILED)


def with_extra(error: ImportError) -> str:
    """The message of an ImportError, with the extra that would have brought the module."""
    module = (error.name or "").partition(".")[0]
    extra = extra_of(module)
    if extra is None or "whence[" in str(error):
        return str(error)
    return f"this needs {module}, which is not installed: pip install 'whence[{extra}]'"


def extra_of(module: str) -> str | None:
    """The smallest extra of whence that brings a package of this name, as its metadata has it."""
    packages: dict[str, list[str]] = {}
    for requirement in metadata.requires("whence") or ():
        package, _, condition = requirement.partition(";")
        if "extra ==" in condition:
            extra = condition.partition("extra ==")[2].strip(" '\"")
            packages.setdefault(extra, []).append(re.split(r"[^\w.-]", package)[0])
    return min(
        (extra for extra, names in packages.items() if module in names),
        key=lambda extra: len(packages[extra]),
        default=None,
    )


def _stop(message: str, code: int) -> None:
    print("whence: " + " ".join(message.split()), file=sys.stderr)
    raise SystemExit(code)
