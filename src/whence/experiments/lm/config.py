"""The frozen configuration of a language-modelling comparison, from TOML and flags."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from whence.checks import at_least, fits_memory, one_of, require
from whence.experiments.config import ExperimentConfig, check_names, read_options, typed_config

OBJECTIVES = ("causal", "masked")
TASKS = ("text", "copy", "reverse", "recall", "back")
DEVICES = ("auto", "cpu", "cuda")
CORPUS = ".safetensors"  # how the name of a tokenized corpus ends
VOCABULARY = 1024  # of the tokenizer that is trained on a text, unless another size is given


@dataclass(frozen=True, eq=False)
class LMConfig(ExperimentConfig):
    """One comparison: every method with every seed, else the same in all.

    `batch` is sequences a step over all processes, cut into `accumulate` passes. A learned table
    has `train_length` positions. `distance` is the k of the task "back".

    With several learning rates, every method tries each of them with seed 0. The rate with the
    smallest loss on the last `tuning_tokens` of the validation text, which are not reported, is the
    method's, and its other seeds run at that rate alone.

        >>> config = LMConfig(methods=("tisa", "rope"), task="copy", learning_rates=(1e-3, 3e-3))
        >>> config.tunes  # more than one rate
        True
    """

    free = (
        "methods",
        "seeds",
        "data",
        "valid",
        "text_column",
        "tokenizer",
        "device",
        "fsdp",
        "keep_models",
    )

    methods: tuple[str, ...]
    data: str | None = None  # a text, a folder, hub:NAME or a tokenized corpus; for the task "text"
    valid: str | None = None  # another; else the data set's own, or the last tenth of `data`
    text_column: str = "text"  # of a data set
    tokenizer: str | None = None  # of an earlier run on the same data; trained unless given
    task: str = "text"
    distance: int = 8
    objective: str = "causal"
    seeds: int = 1
    train_length: int = 128
    eval_lengths: tuple[int, ...] = (128, 256, 512)
    eval_tokens: int = 16_384  # scored at each length, about
    vocab_size: int | None = None  # 1024 for a text; a tokenized corpus has its own
    n_layers: int = 4
    n_heads: int = 4
    d_model: int = 128
    dropout: float = 0.0  # of the embedding and of what is added to the residual
    steps: int = 200
    batch: int = 16
    accumulate: int = 1
    learning_rates: tuple[float, ...] = (1e-3,)
    tuning_tokens: int = 16_384  # by which one of several rates is chosen; whole blocks of them
    warmup: int = 20
    weight_decay: float = 0.1
    log_every: int = 10
    save_every: int = 50
    bf16: bool = False
    compile: bool = False
    device: str = "auto"
    fsdp: bool = False  # parameters, gradients and optimizer cut up over the processes
    keep_models: bool = False

    def __post_init__(self) -> None:
        self.check_numbers()
        one_of("task", self.task, TASKS)
        one_of("objective", self.objective, OBJECTIVES)
        one_of("device", self.device, DEVICES)
        require(len(self.methods) > 0, "a comparison needs one method or more, got none.")
        twice = sorted({name for name in self.methods if self.methods.count(name) > 1})
        require(not twice, f"name each method once, got {', '.join(twice)} several times.")
        at_least(
            1,
            seeds=self.seeds,
            distance=self.distance,
            eval_tokens=self.eval_tokens,
            tuning_tokens=self.tuning_tokens,
            n_layers=self.n_layers,
            n_heads=self.n_heads,
            d_model=self.d_model,
            steps=self.steps,
            batch=self.batch,
            accumulate=self.accumulate,
            log_every=self.log_every,
            save_every=self.save_every,
        )
        at_least(0, warmup=self.warmup)
        if self.vocab_size is not None:
            at_least(1, vocab_size=self.vocab_size)
        at_least(4, train_length=self.train_length, **{"eval_lengths": min(self.eval_lengths)})
        require(
            self.train_length in self.eval_lengths,
            f"eval_lengths must hold train_length = {self.train_length}, by which methods are "
            f"ranked, got {', '.join(map(str, self.eval_lengths))}.",
        )
        require(
            self.save_every % self.log_every == 0,
            "save_every must be a multiple of log_every, so that a loss is looked at before each "
            f"checkpoint, got {self.save_every} and {self.log_every}.",
        )
        require(
            self.batch % self.accumulate == 0,
            f"batch must be a multiple of accumulate, got {self.batch} and {self.accumulate}.",
        )
        require(
            self.d_model % self.n_heads == 0,
            f"d_model must be a multiple of n_heads, got {self.d_model} and {self.n_heads}.",
        )
        require(0 <= self.dropout < 1, f"dropout must be in [0, 1), got {self.dropout}.")
        require(self.weight_decay >= 0, f"weight_decay must be 0 or more, got {self.weight_decay}.")
        weights = self.n_layers * 12 * self.d_model**2 + (self.vocab_size or 0) * self.d_model
        fits_memory("the model", weights, bytes_each=4)
        self._check_rates()
        require(
            self.task != "text" or self.data is not None,
            "there is no text to train on: give data (--data), a text file, hub:NAME or a "
            "tokenized corpus, or a task that makes its own (--task copy).",
        )
        require(
            self.task == "text" or self.data is None,
            f"the task {self.task!r} makes its own data: leave out {self.data!r}, or the task.",
        )
        require(
            self.task == "text" or self.objective == "causal",
            f"the task {self.task!r} is for the causal objective, got {self.objective!r}.",
        )

        require(
            not self.tokenized or (self.valid is None and self.tokenizer is None),
            f"{self.data} is a tokenized corpus, which holds its validation text and its tokenizer:"
            " leave out --valid and --tokenizer.",
        )
        if self.vocab_size is None and not self.tokenized:
            object.__setattr__(self, "vocab_size", VOCABULARY)

    def _check_rates(self) -> None:
        rates = ", ".join(map(str, self.learning_rates))
        require(len(self.learning_rates) > 0, "give one learning rate or more, got none.")
        finite = all(0 < rate < math.inf for rate in self.learning_rates)
        require(finite, f"learning_rates must be above 0 and finite, got {rates}.")
        require(
            len(set(self.learning_rates)) == len(self.learning_rates),
            f"name each learning rate once, got {rates}.",
        )
        require(
            not self.tunes or self.tuning_tokens >= self.train_length,
            f"tuning_tokens must be at least train_length = {self.train_length} to choose among "
            f"several learning rates, got {self.tuning_tokens}.",
        )

    @property
    def tokenized(self) -> bool:
        """Whether the data is a tokenized corpus in a file."""
        return self.data is not None and self.data.endswith(CORPUS)

    @property
    def tunes(self) -> bool:
        """Whether each method chooses among several learning rates."""
        return len(self.learning_rates) > 1

    def fixed(self) -> dict[str, Any]:
        """The vocabulary of a tokenized corpus is its own, not the configuration's."""
        found = super().fixed()
        if self.tokenized:
            del found["vocab_size"]
        return found


def read_config(path: Path | None, flags: dict[str, Any]) -> LMConfig:
    """A TOML file with the fields of LMConfig, over which flags that are not None win."""
    return config_of(read_options(path, flags), where=str(path))


def config_of(found: dict[str, Any], *, where: str) -> LMConfig:
    """The configuration with these fields; `where` names in an error what they were read from.

    Where a length of training is given and none to test at, it is tested at 1, 2 and 4 times it.
    """
    found = dict(found)
    check_names(LMConfig, found, where=where)
    length = found.get("train_length")
    if isinstance(length, int) and "eval_lengths" not in found:
        found["eval_lengths"] = (length, 2 * length, 4 * length)
    require("methods" in found, "name the methods to compare: --methods tisa,rope,alibi.")
    return typed_config(LMConfig, found, where=where)
