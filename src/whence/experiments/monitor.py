"""The Trainer callback that records speed and memory, and stops on NaN or when time is up."""

import math
import time
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from whence.experiments.checkpoints import mark_whole, sync_checkpoint
from whence.experiments.memory import forget_peak, peak_bytes
from whence.experiments.processes import meet
from whence.experiments.progress import Say
from whence.experiments.training import Measure


class TrainingMonitor(TrainerCallback):  # type: ignore[misc]
    """Adds speed, memory and measure(model) to each entry of the log, which checkpoints keep.

    A loss or gradient that is not finite ends training before anything is saved, so that the last
    checkpoint is a good one. A checkpoint is marked as whole after its last file is on the disk.
    """

    def __init__(
        self,
        *,
        folder: Path,
        tokens_a_step: int | None,
        measure: Measure,
        say: Say,
        deadline: float | None,
        main: bool,
        side_by_side: int,
        saves_the_last: bool,
    ) -> None:
        self.folder, self.tokens_a_step, self.measure = folder, tokens_a_step, measure
        self.say, self.deadline, self.main = say, deadline, main
        self.side_by_side, self.saves_the_last = side_by_side, saves_the_last
        self.bad: str = ""
        self.out_of_time = self.begun = False
        self._start, self._first, self._warm = 0.0, 0, False
        self._loss = ""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Start the clock, and measure the model of a new run before its first step."""
        forget_peak(args.device)
        self._start, self._first = time.perf_counter(), state.global_step
        if state.global_step == 0:
            measured = self.measure(kwargs["model"])
            if measured:
                state.log_history.append({"step": 0, **measured})

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """All that is read from a checkpoint has been read."""
        self.begun = True

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Report progress, log the last step, and stop at a log entry once the time is up."""
        self.say(f"training{self._loss}", state.global_step / state.max_steps)
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
        if self._warm and self.tokens_a_step is not None:  # the first interval has the start-up
            seconds = now - self._start
            entry["tokens_a_second"] = (
                (state.global_step - self._first) * self.tokens_a_step / seconds
            )
        entry["side_by_side"] = self.side_by_side
        entry["peak_bytes"] = peak_bytes(args.device)
        entry |= self.measure(kwargs["model"])
        self._loss = f" (step {entry['step']}, loss {entry['loss']:.3f})"
        for name in ("loss", "grad_norm"):
            if not math.isfinite(entry.get(name, 0.0)):
                what = name.replace("_norm", "ient")
                self.bad = f"{what} is {entry[name]} by step {entry['step']}"
                control.should_save = False
                control.should_training_stop = True
                break
        self._start, self._first, self._warm = time.perf_counter(), state.global_step, True

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Mark the checkpoint as whole once what every process has written is on the disk."""
        sync_checkpoint(self.folder, state.global_step)
        meet()
        if self.main:
            mark_whole(self.folder, state.global_step)
        self._start, self._first = time.perf_counter(), state.global_step
