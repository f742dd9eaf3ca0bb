"""A comparison small enough to test: two layers of width 32, some dozens of steps, real text."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from whence.analysis.lm_results import Job, Language
from whence.analysis.tokenized_text import python_help_text
from whence.experiments import LMConfig

TINY: dict[str, Any] = {
    "train_length": 16,
    "eval_lengths": (16, 32),
    "eval_tokens": 256,
    "vocab_size": 300,
    "n_layers": 2,
    "n_heads": 2,
    "d_model": 32,
    "steps": 12,
    "batch": 4,
    "warmup": 2,
    "log_every": 2,
    "save_every": 4,
    "device": "cpu",
}


def text_file(folder: Path, characters: int = 20_000) -> Path:
    """A stretch of Python's help."""
    path = folder / "text.txt"
    path.write_text(python_help_text()[:characters], encoding="utf-8")
    return path


def tiny(data: Path | None = None, methods: tuple[str, ...] = ("tisa",), **more: Any) -> LMConfig:
    """The small setting, changed where asked."""
    given = {**TINY, "methods": methods, **more}
    return LMConfig(data=None if data is None else str(data), **given)


# Options of the command that are not called as the field of the configuration is.
OPTIONS = {"learning_rates": "learning_rate", "n_layers": "layers", "n_heads": "heads"}


def flags(config: LMConfig) -> list[str]:
    """The same as options of the command."""
    found = []
    for name, value in asdict(config).items():
        if value is None or value is False:
            continue
        text = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
        option = OPTIONS.get(name, name).replace("_", "-")
        found += [f"--{option}", *([] if value is True else [text])]
    return found


def assert_same_numbers(ours: Job, theirs: Job) -> None:
    """All that a job found but its speed and memory, bit for bit."""
    assert (ours.method, ours.seed, ours.stopped) == (theirs.method, theirs.seed, theirs.stopped)
    exact: dict[str, Any] = {"rtol": 0, "atol": 0, "equal_nan": True}
    for name in ("steps", "train_loss"):
        a, b = (torch.from_numpy(getattr(job, name)) for job in (ours, theirs))
        torch.testing.assert_close(a, b, **exact)
    for a, b in zip(ours.losses, theirs.losses, strict=True):
        assert (a.length, a.how, a.tokens, a.why_not) == (b.length, b.how, b.tokens, b.why_not)
        assert (a.loss, a.accuracy) == (b.loss, b.accuracy)
        torch.testing.assert_close(
            torch.from_numpy(a.by_position), torch.from_numpy(b.by_position), **exact
        )
    for x, y in zip(ours.toeplitz, theirs.toeplitz, strict=True):
        assert (x.step, x.table.r2) == (y.step, y.table.r2)
    for field in ("stated", "attention"):
        for v, w in zip(getattr(ours, field), getattr(theirs, field), strict=True):
            for when in ("before", "after"):
                a, b = (torch.from_numpy(getattr(view, when)) for view in (v, w))
                torch.testing.assert_close(a, b, **exact)


def same(ours: Language, theirs: Language) -> None:
    """The numbers of every job, bit for bit."""
    for a, b in zip(ours.jobs, theirs.jobs, strict=True):
        assert_same_numbers(a, b)
