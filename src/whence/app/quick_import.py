"""Importing Gradio in half of the time that it takes by itself, and without telemetry."""

import inspect
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def quickly() -> Iterator[None]:
    """Within it, `import gradio` writes no type stubs.

    When it is imported, Gradio parses the source of each of its components and writes a .pyi file
    for editors beside it. That takes half of all the time. It leaves out a component whose file
    cannot be told.
    """
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"
    found = inspect.getfile

    def getfile(thing: Any) -> str:
        if isinstance(thing, type) and thing.__module__.startswith("gradio."):
            raise OSError("left out, to start sooner")
        return found(thing)

    inspect.getfile = getfile  # type: ignore[assignment]
    try:
        yield
    finally:
        inspect.getfile = found
