"""Whether the parts of a result fit together, so that all of it can be drawn.

Every part has the right types, and is whole in itself, when it is made (analysis). What only a page
needs is checked here: an array has something to draw, and a setting is given.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from whence.analysis.criteria import CriteriaReport
from whence.analysis.glue_results import FORMS, Glue, GlueJob, SplitScores
from whence.analysis.json_result import Result
from whence.analysis.lm_results import Job, LagView, Language, LengthLoss
from whence.analysis.results import (
    Component,
    Fit,
    HeadReport,
    LagProfile,
    TableReport,
)
from whence.analysis.translation_results import TestScores, Translation, TranslationJob
from whence.checks import require
from whence.methods.registry import named

LARGEST = 2**53  # whole numbers beyond it are none as floats
# The axes of each array. Within one result a letter is one size; "?" says that it may be empty.
AXES: dict[type, dict[str, str]] = {
    TableReport: {"gram": "n n", "explained": "d"},
    Component: {"values": "n", "frequency": "f", "power": "f"},
    HeadReport: {"matrix": "m m", "lag": "l", "curve": "l", "spread": "l"},
    LagProfile: {"lag": "l", "mean": "l", "low": "l", "high": "l"},
    LagView: {"lag": "l", "before": "h l", "after": "h l"},
    LengthLoss: {"position": "p?", "by_position": "p?"},
    GlueJob: {"steps": "t?", "train_loss": "t?"},
    SplitScores: {"predictions": "r?"},
    TranslationJob: {"steps": "t?", "train_loss": "t?"},
    TestScores: {"statistics": "r? ten?"},
    Job: {"steps": "t?", "train_loss": "t?", "gram_before": "n n", "gram_after": "n n"},
}
NUMBERS = ("train_length", "n_layers", "n_heads", "d_model", "steps", "batch")
WORDS = ("task", "objective")


def check_parts(result: Result) -> None:
    """Raise where a part of a result does not fit the others."""
    for part in _parts(result):
        name = type(part).__name__
        _check_arrays(part, name)
        for field in dataclasses.fields(part):
            value = getattr(part, field.name)
            if isinstance(value, int):
                _check_size(value, f"{name}.{field.name}")
        for kind, rule in RULES.items():
            if isinstance(part, kind):
                rule(part)


def _parts(value: Any) -> Iterator[Result]:
    """The result itself and all results inside of it."""
    if isinstance(value, Result):
        yield value
        for field in dataclasses.fields(value):
            yield from _parts(getattr(value, field.name))
    elif isinstance(value, tuple):
        for item in value:
            yield from _parts(item)


def _check_size(value: int, name: str) -> None:
    require(abs(value) <= LARGEST, f"{name} is a number of {len(str(abs(value)))} digits.")


def _check_arrays(part: Result, name: str) -> None:
    sizes: dict[str, int] = {}
    for field, axes in AXES.get(type(part), {}).items():
        array = getattr(part, field)
        if array is None:
            continue
        letters = axes.split()
        what = f"{name}.{field}"
        require(
            array.ndim == len(letters),
            f"{what} must have {len(letters)} axes, got shape {array.shape}.",
        )
        for letter, size in zip(letters, array.shape, strict=True):
            require(size > 0 or letter.endswith("?"), f"{what} is empty: shape {array.shape}.")
            expected = sizes.setdefault(letter, size)
            require(
                size == expected,
                f"{what} has {size} entries along an axis where {name} has {expected} elsewhere.",
            )
        require(array.size == 0 or bool(np.isfinite(array).any()), f"{what} has no finite number.")


def _fit(part: Fit) -> None:
    require(min(part.sharpness, default=0.0) >= 0, "a Fit has a negative sharpness.")


def _criteria(part: CriteriaReport) -> None:
    for row in part.rows:
        require(
            len(row.criteria) == len(part.rules),
            f"{row.method!r} has {len(row.criteria)} criteria of {len(part.rules)} rules.",
        )


def _language(part: Language) -> None:
    config = part.config
    for key in NUMBERS:
        value: Any = config.get(key)
        require(
            isinstance(value, int) and not isinstance(value, bool) and value > 0,
            f"config.{key} must be a whole number above 0, got {value!r}.",
        )
        _check_size(value, f"config.{key}")
    for key in WORDS:
        value = config.get(key)
        require(isinstance(value, str), f"config.{key} must be a word, got {value!r}.")
    lengths: Any = config.get("eval_lengths")
    require(
        isinstance(lengths, (list, tuple))
        and all(isinstance(n, int) and 0 < n <= LARGEST for n in lengths),
        f"config.eval_lengths must be a list of whole numbers above 0, got {lengths!r}.",
    )
    require(
        config["train_length"] in lengths,
        f"config.train_length, {config['train_length']}, is not among config.eval_lengths, "
        f"{lengths}.",
    )
    rates = config.get("learning_rates", ())
    require(
        isinstance(rates, (list, tuple)) and all(isinstance(x, (int, float)) for x in rates),
        f"config.learning_rates must be a list of numbers, got {rates!r}.",
    )
    tokens = part.data.get("train_tokens", 0)
    require(str(tokens).isdecimal(), f"data.train_tokens must be a whole number, got {tokens!r}.")
    _check_seeds(part)


def _check_seeds(part: Language) -> None:
    """What is averaged over seeds, or stacked over layers, has one size."""
    bins: dict[tuple[str, int, str], int] = {}
    for job in part.jobs:
        require(
            len({len(view.lag) for view in job.attention}) <= 1,
            f"layers of {job.method!r} have attention at different numbers of lags.",
        )
        for loss in job.losses:
            key = (job.method, loss.length, loss.how)
            require(
                bins.setdefault(key, len(loss.by_position)) == len(loss.by_position),
                f"seeds of {job.method!r} have losses at different numbers of positions.",
            )


def _glue(part: Glue) -> None:
    lists: dict[str, Callable[[Any], bool]] = {
        "tasks": lambda task: isinstance(task, str),
        "forms": lambda form: isinstance(form, str) and form in FORMS,
        "kernels": lambda s: isinstance(s, int) and not isinstance(s, bool) and 0 <= s <= LARGEST,
    }
    for key, is_valid in lists.items():
        value: Any = part.config.get(key)
        require(
            isinstance(value, (list, tuple)) and len(value) > 0 and all(map(is_valid, value)),
            f"config.{key} must be a list as whence glue writes it, got {value!r}.",
        )
        require(len(set(value)) == len(value), f"config.{key} names one of them twice: {value!r}.")
    for key in ("model", "position"):
        value = part.config.get(key)
        require(isinstance(value, str), f"config.{key} must be a word, got {value!r}.")


def _translation(part: Translation) -> None:
    lists: dict[str, Callable[[Any], bool]] = {
        "positions": lambda x: isinstance(x, str) and x != "",
        "tests": lambda x: isinstance(x, str),
        "test_joined": lambda x: isinstance(x, int) and 1 < x <= LARGEST,
    }
    for key, is_valid in lists.items():
        value: Any = part.config.get(key)
        require(
            isinstance(value, (list, tuple)) and all(map(is_valid, value)),
            f"config.{key} must be a list as whence translate writes it, got {value!r}.",
        )
        require(len(set(value)) == len(value), f"config.{key} names one of them twice: {value!r}.")
    for key in ("source", "target"):
        value = part.config.get(key)
        require(isinstance(value, str), f"config.{key} must be a word, got {value!r}.")
    require(len(part.config["positions"]) > 0, "config.positions is empty.")
    for position in part.config["positions"]:
        for method in position.split("/"):
            named(method)
    longest: Any = part.data.get("longest_row")
    require(
        isinstance(longest, int) and 0 < longest <= LARGEST,
        f"data.longest_row must be a whole number above 0, got {longest!r}.",
    )


RULES: dict[type, Callable[[Any], None]] = {
    Fit: _fit,
    CriteriaReport: _criteria,
    Language: _language,
    Glue: _glue,
    Translation: _translation,
}
