"""Launches on a second stream, beside what the current one does: each fills the other's gaps."""

import functools
from types import TracebackType

import torch
from torch import Tensor


class Beside:
    """What is launched within runs on a second stream; `join` makes the current one wait for it.

    On a CPU, where Triton's interpreter runs, it does nothing.
    """

    def __init__(self, device: torch.device) -> None:
        self._side = _second(device) if device.type == "cuda" else None

    def __enter__(self) -> "Beside":
        if self._side is not None:
            self._main = torch.cuda.current_stream(self._side.device)
            self._side.wait_stream(self._main)
            self._within = torch.cuda.stream(self._side)
            self._within.__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._side is not None:
            self._within.__exit__(kind, error, trace)

    def join(self, *made: Tensor | None) -> None:
        """From here on the current stream may use what was made within."""
        if self._side is None:
            return
        self._main.wait_stream(self._side)
        for x in made:
            if x is not None:
                x.record_stream(self._main)  # its memory is not given away before that is done


@functools.cache
def _second(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
