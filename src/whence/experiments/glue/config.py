"""The frozen configuration of a GLUE comparison: tasks, forms, kernels and how to fine-tune."""

import inspect
from dataclasses import dataclass, field
from typing import Any

from whence.analysis.glue_results import DROPPED, FORMS, KEPT
from whence.checks import at_least, one_of, require, unknown
from whence.experiments.config import ExperimentConfig
from whence.experiments.glue.tasks import TASKS, task_named
from whence.hf.rates import POSITION_RATE
from whence.kernels.attend import BACKENDS
from whence.methods import METHODS

HUB = "hub:nyu-mll/glue"
DISTILLED = "distilled"
STARTS = ("zero", "local", "released", DISTILLED)
DEVICES = ("auto", "cpu", "cuda")


@dataclass(frozen=True, eq=False)
class GlueConfig(ExperimentConfig):
    """One comparison: every task in every form with every number of kernels and every seed.

    `kernels` 0 is the baseline, without the method. `exceptions` holds numbers that a task has of
    its own: {"sst2": {"epochs": 1, "batch": 64, "seeds": 3}}. `position_rate` is the learning rate
    of the method's own parameters: beside pretrained weights, which move little, they have far to
    go in a few hundred steps. `start` "distilled" begins with kernels fitted to the model's own
    position embeddings, in form (a) at amplitude 0.
    """

    free = ("model", "data", "tasks", "forms", "kernels", "seeds", "device", "save_every")

    model: str
    tasks: tuple[str, ...] = tuple(TASKS)
    data: str = HUB  # or a folder in the official layout
    position: str = "tisa"
    kernels: tuple[int, ...] = (0, 1, 3, 5)
    forms: tuple[str, ...] = (KEPT,)
    start: str = "zero"
    share: bool = False  # one set of kernels for all layers
    seeds: int = 5
    epochs: float = 3.0
    batch: int = 32
    exceptions: dict[str, dict[str, float]] = field(default_factory=dict)
    learning_rate: float = 5e-5
    position_rate: float = POSITION_RATE
    warmup: float = 0.06  # share of the steps
    weight_decay: float = 0.01
    max_length: int = 128
    bf16: bool = False
    tf32: bool = False
    backend: str = "original"  # of attach: how attention with the method is run
    device: str = "auto"
    save_every: int = 0  # steps between checkpoints; 0 is none

    def __post_init__(self) -> None:
        self.check_numbers()
        for name in self.tasks:
            task_named(name)
        for form in self.forms:
            one_of("form", form, FORMS)
        one_of("start", self.start, STARTS)
        one_of("device", self.device, DEVICES)
        one_of("backend", self.backend, ("original", "auto", *BACKENDS))
        for what in ("tasks", "kernels", "forms"):
            given = getattr(self, what)
            require(len(given) > 0, f"name one or more {what}, got none.")
            require(len(set(given)) == len(given), f"name each of the {what} once, got {given}.")
        at_least(0, kernels=min(self.kernels), save_every=self.save_every)
        require(0 in self.kernels, "kernels must hold 0, the baseline that all are compared to.")
        self._check_position()
        at_least(8, max_length=self.max_length)
        for name in ("learning_rate", "position_rate"):
            rate = getattr(self, name)
            require(rate > 0, f"{name} must be above 0, got {rate}.")
        require(
            0 <= self.warmup <= 1, f"warmup is a share of the steps, 0 to 1, got {self.warmup}."
        )
        require(self.weight_decay >= 0, f"weight_decay must be 0 or more, got {self.weight_decay}.")
        require(not (self.bf16 and self.tf32), "take one of bf16 and tf32.")
        for task, numbers in self.exceptions.items():
            task_named(task)
            for name in numbers:
                allowed = ("seeds", "epochs", "batch")
                require(name in allowed, unknown(f"exception of {task}", name, allowed))
        for task in (*self.tasks, *self.exceptions):
            for name, number in (("seeds", self.n_seeds(task)), ("batch", self.n_batch(task))):
                require(number >= 1, f"{name} must be 1 or more, got {number} for {task}.")
            epochs = self.n_epochs(task)
            require(epochs > 0, f"epochs must be above 0, got {epochs} for {task}.")

    def _check_position(self) -> None:
        require(self.position in METHODS, unknown("method", self.position, METHODS))
        takes = inspect.signature(METHODS[self.position]).parameters
        require(
            "kernels" in takes and "start" in takes,
            f"--position takes a method with kernels, such as tisa, got {self.position!r}.",
        )
        require(
            self.start != DISTILLED or self.position == "tisa",
            f"start {DISTILLED!r} fits the kernels of tisa, got {self.position!r}.",
        )
        require(
            self.start != DISTILLED or not (self.share or self.backend != "original"),
            f"start {DISTILLED!r} gives each layer kernels of its own, and runs them by the "
            "backend 'original': leave out share and backend.",
        )

    def n_seeds(self, task: str) -> int:
        """Seeds of a task."""
        return int(self._of(task, "seeds"))

    def n_epochs(self, task: str) -> float:
        """Passes over the training rows of a task."""
        return float(self._of(task, "epochs"))

    def n_batch(self, task: str) -> int:
        """Rows a step, over all processes."""
        return int(self._of(task, "batch"))

    def _of(self, task: str, name: str) -> Any:
        return self.exceptions.get(task, {}).get(name, getattr(self, name))

    def method(self, kernels: int) -> str:
        """The text of the method with so many kernels, as `attach` takes it."""
        start = "zero" if self.start == DISTILLED else self.start
        return f"{self.position}:kernels={kernels},start={start}"

    def keeps_positions(self, form: str) -> bool:
        """Whether the model's own position embeddings stay."""
        return form != DROPPED

    def fixed(self) -> dict[str, Any]:
        """More seeds of one task are more jobs, as more seeds of all are."""
        found = super().fixed()
        own = {
            task: {name: float(number) for name, number in numbers.items() if name not in self.free}
            for task, numbers in self.exceptions.items()
        }
        return found | {"exceptions": {task: numbers for task, numbers in own.items() if numbers}}
