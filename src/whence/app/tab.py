"""What the tabs of the page share: how they ask a worker, and how their events are shown."""

from typing import Any

from whence.app.cards import problem
from whence.app.worker import RefusedError, Worker

# All go through Gradio's queue: without it a changed State renders nothing anew.
HIDDEN: dict[str, Any] = {"api_visibility": "private", "show_progress": "hidden"}
SHOWN: dict[str, Any] = {"api_visibility": "private", "show_progress": "full"}
DRAGGED: dict[str, Any] = HIDDEN | {"trigger_mode": "always_last"}


class Tab:
    """A part of the page that asks one worker."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker

    def asked(self, name: str, /, **arguments: Any) -> Any:
        """The answer of the worker, or as HTML why there is none."""
        try:
            return self.worker.call(name, **arguments)
        except RefusedError as error:
            return problem(str(error))
