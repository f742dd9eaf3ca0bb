"""A process that computes for the page: it takes calls by a pipe, one at a time.

What a call refuses or breaks comes back as a message. A process that dies or takes too long is
replaced by a new one with the next call.
"""

import gc
import multiprocessing
import signal
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from whence.app.settings import Settings
from whence.extras import extra_of, install

Progress = Callable[[str, float], None]
LONGEST = 800  # letters of a message


class RefusedError(Exception):
    """What was asked for cannot be had; the text is for the user."""


class _NotBegunError(RefusedError):
    """The process had died before it took the call."""


class Worker:
    """The methods of `Explorer`, called in another process."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._lock = threading.Lock()
        self._process: multiprocessing.process.BaseProcess | None = None
        self._connection: Connection | None = None

    def start(self) -> None:
        """Begin to import; calls may come at once and wait."""
        with self._lock:
            self._ready()

    def call(
        self,
        name: str,
        /,
        *,
        seconds: float = 30.0,
        progress: Progress | None = None,
        **arguments: Any,
    ) -> Any:
        """The result of one method; RefusedError where there is none."""
        with self._lock:
            try:
                return self._ask(name, arguments, seconds, progress)
            except _NotBegunError:  # it died since the last call, and that was not yet seen
                return self._ask(name, arguments, seconds, progress)

    def _ask(
        self, name: str, arguments: dict[str, Any], seconds: float, progress: Progress | None
    ) -> Any:
        connection, begun = self._ready(), False
        try:
            connection.send((name, arguments))
            while True:
                if not connection.poll(seconds):
                    self.stop()
                    raise RefusedError(f"This took longer than {seconds:g} s and was stopped.")
                kind, value = connection.recv()
                if kind == "begun":
                    begun = True
                elif kind == "progress":
                    if progress is not None:
                        progress(*value)
                elif kind == "done":
                    return value
                else:
                    raise RefusedError(value)
        except (EOFError, BrokenPipeError, ConnectionResetError):
            self.stop()
            kind_of_error = RefusedError if begun else _NotBegunError
            raise kind_of_error(
                "The computation ended by itself, perhaps because memory ran out: "
                "try something smaller."
            ) from None

    def stop(self) -> None:
        """End the process, if there is one."""
        if self._process is not None and self._connection is not None:
            self._connection.close()
            self._process.kill()
            self._process.join()
        self._process = self._connection = None

    def _ready(self) -> Connection:
        if self._process is not None and not self._process.is_alive():
            self.stop()
        if self._connection is None:
            context = multiprocessing.get_context("spawn")
            self._connection, other = context.Pipe()
            self._process = context.Process(
                target=serve, args=(other, self.settings), daemon=True, name="whence explore"
            )
            self._process.start()
            other.close()
        return self._connection


def serve(connection: Connection, settings: Settings) -> None:
    """Answer calls until the other side is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the server ends this process
    gc.disable()  # as in the server
    from whence.app.explorer import Explorer

    gc.freeze()
    gc.enable()
    explorer = Explorer(settings, lambda what, share: connection.send(("progress", (what, share))))
    explorer.warm_up()
    while True:
        try:
            name, arguments = connection.recv()
        except EOFError:
            return
        connection.send(("begun", None))
        connection.send(_answer(explorer, name, arguments))


def _answer(explorer: Any, name: str, arguments: dict[str, Any]) -> tuple[str, Any]:
    try:
        return "done", getattr(explorer, name)(**arguments)
    except (ValueError, TypeError, OverflowError) as error:
        return "refused", _one_line(str(error))
    except ImportError as error:
        extra = extra_of((error.name or "").partition(".")[0])
        said = str(error)
        return "refused", said if extra is None else f"This needs {error.name}: {install(extra)}"
    except OSError as error:
        return "refused", f"{error.filename or 'a file'}: {error.strerror or error}."
    except (MemoryError, RecursionError):
        return "refused", "There is not enough memory for this: take smaller sizes."
    except Exception as error:
        return (
            "refused",
            f"This is a mistake in whence: {type(error).__name__}: {_one_line(str(error))}",
        )


def _one_line(text: str) -> str:
    line = " ".join(text.split())
    if len(line) > LONGEST:
        line = f"{line[:LONGEST]} ..."
    return line[:1].upper() + line[1:]
