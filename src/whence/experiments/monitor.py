"""The Trainer callback that records speed, memory and Toeplitzness, and stops on NaN or timeout."""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from transformers import TrainerCallback

from whence.analysis.results import Toeplitzness
from whence.analysis.toeplitz import FEWEST_ROWS, random_table, toeplitzness
from whence.experiments.checkpoints import mark_whole
from whence.experiments.memory import forget_peak, peak_bytes

Say = Callable[[str, float], None]


class TrainingMonitor(TrainerCallback):  # type: ignore[misc]
    """Adds speed, memory and Toeplitzness to each entry of the log, which checkpoints keep.

    A loss or gradient that is not finite ends training before anything is saved, so that the last
    checkpoint is a good one. A checkpoint is marked as whole after its last file.
    """

    def __init__(
        self,
        *,
        folder: Path,
        length: int,
        tokens_a_step: int,
        say: Say,
        deadline: float | None,
        main: bool,
        side_by_side: int,
        saves_the_last: bool,
    ) -> None:
        self.folder, self.length, self.tokens_a_step = folder, length, tokens_a_step
        self.say, self.deadline, self.main = say, deadline, main
        self.side_by_side, self.saves_the_last = side_by_side, saves_the_last
        self.bad: str = ""
        self.out_of_time = False
        self._start, self._first, self._warm = 0.0, 0, False

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Start the clock, and record the Toeplitzness of a new run before its first step."""
        forget_peak(args.device)
        self._start, self._first = time.perf_counter(), state.global_step
        if state.global_step == 0:
            traced = self._traced(kwargs["model"])
            if traced is not None:
                state.log_history.append({"step": 0, "toeplitz": traced})

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Report progress, log the last step, and stop at a log entry once the time is up."""
        self.say("training", state.global_step / state.max_steps)
        late = self.deadline is not None and time.monotonic() > self.deadline
        step = state.global_step
        if step >= state.max_steps:  # the last step is logged, whether a log is due or not
            control.should_log = True
            control.should_save = self.saves_the_last
        if late and step % state.logging_steps == 0 and step < state.max_steps:
            self.out_of_time = True
            control.should_save = control.should_training_stop = True

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Complete the entry, which Trainer has just appended to the history."""
        entry = state.log_history[-1]
        if "loss" not in entry:
            return
        now = time.perf_counter()
        if self._warm:  # the first interval of a process includes its start-up
            seconds = now - self._start
            entry["tokens_a_second"] = (
                (state.global_step - self._first) * self.tokens_a_step / seconds
            )
        entry["side_by_side"] = self.side_by_side
        entry["peak_bytes"] = peak_bytes(args.device)
        traced = self._traced(kwargs["model"])
        if traced is not None:
            entry["toeplitz"] = traced
        for name in ("loss", "grad_norm"):
            if not math.isfinite(entry.get(name, 0.0)):
                what = name.replace("_norm", "ient")
                self.bad = f"{what} is {entry[name]} by step {entry['step']}"
                control.should_save = False
                control.should_training_stop = True
                break
        self._start, self._first, self._warm = time.perf_counter(), state.global_step, True

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Mark the checkpoint as whole once every process has written its part."""
        if torch.distributed.is_initialized():
            torch.distributed.barrier()
        if self.main:
            mark_whole(self.folder, state.global_step)
        self._start, self._first = time.perf_counter(), state.global_step

    def _traced(self, model: Any) -> dict[str, Any] | None:
        with whole_weights(model):
            table = learned_table(model, self.length) if self.main else None
        if table is None or not np.isfinite(table).all():
            return None
        found = toeplitz_of(table)
        return {name: getattr(found, name) for name in found.__dataclass_fields__}


@contextmanager
def whole_weights(model: Any) -> Iterator[None]:
    """Gather the weights of which a process holds a part under FSDP, and release them again."""
    if not hasattr(model, "unshard"):
        yield
        return
    model.unshard()
    try:
        yield
    finally:
        model.reshard()


def learned_table(model: Any, length: int) -> Float[np.ndarray, "n d"] | None:
    """The vectors that a model has learned to add at each position, or None if it learns none."""
    whole = model.model.stack.position.whole
    device = next(model.parameters()).device
    with torch.enable_grad():
        term = whole.input_term(torch.arange(length, device=device))
    if term is None or not term.requires_grad or length < FEWEST_ROWS:
        return None
    table: Float[np.ndarray, "n d"] = term.detach().double().cpu().numpy()
    return table


def toeplitz_of(table: Float[np.ndarray, "n d"]) -> Toeplitzness:
    """Toeplitzness of P = E E^T over all rows, and that of one random table of the same norms."""
    null = random_table(table, np.random.default_rng(0))
    return toeplitzness(table @ table.T, [null @ null.T], 0, len(table))
