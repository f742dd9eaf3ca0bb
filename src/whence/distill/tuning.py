"""Kernels tuned on unlabelled text, so that every layer gives the original's hidden states.

`transformers.Trainer` trains a module that holds both models and gives their distance as its loss.
"""

import random
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from transformers import (
    PreTrainedModel,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from whence.analysis.profile import quiet
from whence.checks import one_of, require
from whence.distill.sequences import Sequences
from whence.hf.attaching import Attached
from whence.methods.tisa import Tisa

TRAIN = ("position", "all")
BATCH = 32
WARMUP = 10  # steps, in which Adam gets to know the sizes of gradients
KERNEL_RATE, OTHER_RATE = 1.5e-3, 3e-5  # learning rates of kernels and of all other weights


def tune(
    original: PreTrainedModel,
    student: Attached,
    text: Sequences,
    *,
    steps: int,
    train: str = "position",
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Train the kernels, or all weights of the student, for so many steps of BATCH sequences.

    Dropout stays off. A kernel that a fit puts many widths away would be thrown about by every
    change of its width, as its offset is held in widths: here they are those of the beginning.
    """
    one_of("train", train, TRAIN)
    model = student.model
    own = [method for method in student.methods if isinstance(method, Tisa)]
    ids = {id(p) for method in own for p in method.parameters()}
    others = [p for p in model.parameters() if p.requires_grad and id(p) not in ids]
    fixed = [p for p in original.parameters() if p.requires_grad]
    fixed += [] if train == "all" else others
    with (
        tempfile.TemporaryDirectory() as folder,
        _same_random(),
        quiet(),
        _frozen(fixed),
        widths_leave_offsets(own),
    ):
        kernels = [p for method in own for p in method.parameters()]
        groups: list[dict[str, Any]] = [{"params": kernels, "lr": KERNEL_RATE}]
        if train == "all":
            groups.append({"params": others, "lr": OTHER_RATE})
        arguments = TrainingArguments(
            folder,
            max_steps=steps,
            per_device_train_batch_size=BATCH,
            warmup_steps=min(WARMUP, steps // 10),
            seed=seed,
            data_seed=seed,
            save_strategy="no",
            logging_strategy="no",
            report_to="none",
            disable_tqdm=True,
            remove_unused_columns=False,
            dataloader_pin_memory=torch.cuda.is_available(),
        )
        trainer = Trainer(
            Apart(original, model),
            arguments,
            data_collator=_Padded(original.config.pad_token_id or 0),
            train_dataset=[{"input_ids": sequence} for sequence in text.train],
            optimizers=(torch.optim.AdamW(groups, weight_decay=0.0), None),
            callbacks=[_Told(progress)],
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    for name, parameter in model.base_model.whence.named_parameters():
        require(
            bool(parameter.isfinite().all()),
            f"tuning diverged: {name} is not finite after {steps} steps. Tune for fewer steps.",
        )


class Apart(nn.Module):
    """The loss: how far a student's hidden states are from the original's, over their size.

    A mean over layers of |student - original|^2 / |original|^2, sums over all tokens of a batch.
    """

    def __init__(self, original: PreTrainedModel, student: PreTrainedModel) -> None:
        super().__init__()
        self.original, self.student = original, student

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> dict[str, Tensor]:
        """Both models on a padded batch."""
        given = {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "output_hidden_states": True,
        }
        with torch.no_grad():
            wanted = self.original.base_model(**given).hidden_states
        found = self.student.base_model(**given).hidden_states
        there = attention_mask[..., None].bool()
        terms = [
            (s - o).where(there, 0).square().sum() / o.where(there, 0).square().sum()
            for s, o in zip(found[1:], wanted[1:], strict=True)
        ]
        return {"loss": torch.stack(terms).mean()}

    def train(self, mode: bool = True) -> "Apart":
        """Nothing: dropout would only blur what the student is to learn."""
        return self


class _Padded:
    """Sequences of a batch made one length, on the right."""

    def __init__(self, pad: int) -> None:
        self.pad = pad

    def __call__(self, rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        ids = [row["input_ids"] for row in rows]
        mask = [torch.ones_like(sequence) for sequence in ids]
        padded = nn.utils.rnn.pad_sequence
        return {
            "input_ids": padded(ids, batch_first=True, padding_value=self.pad),
            "attention_mask": padded(mask, batch_first=True),
        }


class _Told(TrainerCallback):  # type: ignore[misc]
    def __init__(self, progress: Callable[[int, int], None] | None) -> None:
        self.progress = progress

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """After each step."""
        if self.progress is not None:
            self.progress(state.global_step, state.max_steps)


class _InFirstWidths(nn.Module):
    """An offset in widths, from the same in the widths that the kernels had at the beginning."""

    first: Tensor

    def __init__(self, method: Tisa) -> None:
        super().__init__()
        self.method = (method,)  # nn.Module does not look into a tuple: no circle of modules
        self.register_buffer("first", method.deviation.detach().clone(), persistent=False)

    def forward(self, offset: Tensor) -> Tensor:
        """In the widths of now, so that the place in lags stays while a width changes."""
        return offset * self.first / self.method[0].deviation

    def right_inverse(self, offset: Tensor) -> Tensor:
        """At the beginning both are the same."""
        return offset


@contextmanager
def widths_leave_offsets(methods: Sequence[Tisa]) -> Iterator[None]:
    """While it lasts, training a width leaves the kernel's place in lags."""
    for method in methods:
        parametrize.register_parametrization(method, "raw_offset", _InFirstWidths(method))
    try:
        yield
    finally:
        for method in methods:
            parametrize.remove_parametrizations(method, "raw_offset")


@contextmanager
def _frozen(parameters: list[nn.Parameter]) -> Iterator[None]:
    for parameter in parameters:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in parameters:
            parameter.requires_grad_(True)


@contextmanager
def _same_random() -> Iterator[None]:
    """Trainer seeds every random generator of the process: they are put back after."""
    python, arrays = random.getstate(), np.random.get_state()
    with torch.random.fork_rng():
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(arrays)
