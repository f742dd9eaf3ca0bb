"""The frozen configuration of a translation experiment: languages, positions, how to train."""

import math
from dataclasses import dataclass, field

from whence.checks import at_least, fits_memory, one_of, require, unknown
from whence.experiments.config import ExperimentConfig
from whence.methods.registry import import_modules, named

DEVICES = ("auto", "cpu", "cuda")
BETWEEN = "/"  # the encoder's method and the decoder's, where they differ
CLIP, PARTS = "clip", "parts"
# The paper's Tables 2 and 3, and what its text says of the decoder and of absolute positions.
SWEEPS = {
    CLIP: tuple(f"shaw:clip={k}" for k in (0, 1, 2, 4, 16, 64, 256)),
    PARTS: (
        "shaw:clip=16",
        "shaw:clip=16,values=false",
        "shaw:clip=16,keys=false",
        "nope",
        "shaw:clip=16/nope",
        "shaw:clip=16/sinusoidal",
        "sinusoidal+shaw:clip=16",
    ),
}


@dataclass(frozen=True, eq=False)
class TranslationConfig(ExperimentConfig):
    """One comparison: every position with every learning rate and every seed.

    A position is a method for encoder and decoder, or two of them, "shaw:clip=16/sinusoidal". All
    are compared to the first. `exceptions` holds what a position has of its own:
    {"shaw:clip=0": {"seeds": 1, "learning_rate": 1e-3}}. Of several learning rates the one with the
    best BLEU on the validation text is a position's; all others are left out of the tables.

    `tokens` is the size of a batch, on each side and with its padding; a step takes `accumulate` of
    them, times the processes. `joined` adds so many copies of the training text in which sentences
    are joined, by chance, to rows of at most `max_length` tokens.

        >>> config = TranslationConfig(data="multi30k", source="en", target="de")
        >>> config.n_seeds("sinusoidal"), config.rates("tisa")
        (1, (0.002,))
    """

    free = (
        "data",
        "positions",
        "seeds",
        "exceptions",
        "learning_rates",
        "device",
        "save_every",
        "keep_models",
    )

    data: str  # a folder with train.en, train.de and so on, or hub:NAME
    source: str
    target: str
    positions: tuple[str, ...] = ("sinusoidal", "shaw:clip=16")
    train: str = "train"  # splits, by the names of their files
    valid: str = "val"
    tests: tuple[str, ...] = ("test",)
    test_joined: tuple[int, ...] = ()  # as many test sentences in a row: longer than any trained on
    seeds: int = 1
    exceptions: dict[str, dict[str, float]] = field(default_factory=dict)
    vocab_size: int = 8000
    max_length: int = 100  # tokens of a side; longer pairs are left out of training
    joined: int = 0
    n_layers: int = 4
    n_heads: int = 4
    d_model: int = 256
    d_ff: int = 1024
    norm_first: bool = True
    dropout: float = 0.3
    attention_dropout: float = 0.0
    label_smoothing: float = 0.1
    tokens: int = 4096
    accumulate: int = 1
    steps: int = 3000
    learning_rates: tuple[float, ...] = (2e-3,)
    warmup: int = 1000
    weight_decay: float = 0.0
    clip_gradient: float = 1.0
    average: int = 10  # weights whose mean is tested
    average_every: int = 50  # steps between them, up to the last
    beams: int = 4
    length_penalty: float = 0.6
    more_tokens: int = 50  # that a translation may have beyond its source
    bf16: bool = False
    tf32: bool = False
    backend: str = "auto"
    device: str = "auto"
    save_every: int = 0  # steps between checkpoints; 0 is none
    keep_models: bool = True

    def __post_init__(self) -> None:
        self.check_numbers()
        one_of("device", self.device, DEVICES)
        require(
            self.source != self.target,
            f"source and target must be two languages, got {self.source!r} twice.",
        )
        self._check_names()
        at_least(
            1,
            seeds=self.seeds,
            vocab_size=self.vocab_size,
            n_layers=self.n_layers,
            n_heads=self.n_heads,
            d_model=self.d_model,
            d_ff=self.d_ff,
            accumulate=self.accumulate,
            steps=self.steps,
            average=self.average,
            average_every=self.average_every,
            beams=self.beams,
            more_tokens=self.more_tokens,
        )
        at_least(0, warmup=self.warmup, joined=self.joined, save_every=self.save_every)
        at_least(2, max_length=self.max_length, **{"test_joined": min(self.test_joined, default=2)})
        require(
            self.tokens >= self.max_length,
            f"tokens must hold one row of max_length = {self.max_length}, got {self.tokens}.",
        )
        require(
            self.beams <= self.vocab_size,
            f"beams must be at most vocab_size = {self.vocab_size}, got {self.beams}.",
        )
        require(
            (self.average - 1) * self.average_every < self.steps,
            f"average x average_every must fit into the steps, got {self.average} x "
            f"{self.average_every} of {self.steps}.",
        )
        require(
            self.d_model % self.n_heads == 0,
            f"d_model must be a multiple of n_heads, got {self.d_model} and {self.n_heads}.",
        )
        a_layer = 12 * self.d_model**2 + 4 * self.d_model * self.d_ff  # of both sides
        weights = self.n_layers * a_layer + self.vocab_size * self.d_model
        fits_memory("the model", weights, bytes_each=4)
        for name in ("dropout", "attention_dropout", "label_smoothing"):
            share = getattr(self, name)
            require(0 <= share < 1, f"{name} must be in [0, 1), got {share}.")
        for name in ("weight_decay", "clip_gradient", "length_penalty"):
            value = getattr(self, name)
            require(0 <= value < math.inf, f"{name} must be 0 or more, got {value}.")
        require(not (self.bf16 and self.tf32), "take one of bf16 and tf32.")
        self._check_exceptions()

    def _check_names(self) -> None:
        for what in ("positions", "learning_rates", "tests", "test_joined"):
            given = getattr(self, what)
            require(what[:4] == "test" or len(given) > 0, f"name one or more {what}, got none.")
            require(len(set(given)) == len(given), f"name each of the {what} once, got {given}.")
        for position in self.positions:
            for part in both_sides(position):
                import_modules(part)
                named(part)

    def _check_exceptions(self) -> None:
        for position, numbers in self.exceptions.items():
            require(position in self.positions, unknown("position", position, self.positions))
            for name in numbers:
                allowed = ("seeds", "learning_rate")
                require(name in allowed, unknown(f"exception of {position}", name, allowed))
        for position in self.positions:
            n = self.n_seeds(position)
            require(n >= 1, f"seeds must be 1 or more, got {n} for {position}.")
            for rate in self.rates(position):
                require(
                    0 < rate < math.inf,
                    f"learning rates must be above 0, got {rate} for {position}.",
                )

    def n_seeds(self, position: str) -> int:
        """Seeds of a position."""
        return int(self.exceptions.get(position, {}).get("seeds", self.seeds))

    def rates(self, position: str) -> tuple[float, ...]:
        """Learning rates that a position tries."""
        own = self.exceptions.get(position, {}).get("learning_rate")
        return self.learning_rates if own is None else (float(own),)

    @property
    def translates_valid(self) -> bool:
        """Whether the validation text is translated: to choose a rate, or for want of a test."""
        return not self.tests or any(len(self.rates(x)) > 1 for x in self.positions)


def both_sides(position: str) -> tuple[str, str]:
    """The encoder's method and the decoder's.

    >>> both_sides("tisa"), both_sides("shaw:clip=16/nope")
    (('tisa', 'tisa'), ('shaw:clip=16', 'nope'))
    """
    parts = [part.strip() for part in position.split(BETWEEN)]
    require(
        len(parts) <= 2 and all(parts),
        f"a position is a method, or one for the encoder and one for the decoder, "
        f"shaw:clip=16/sinusoidal, got {position!r}.",
    )
    return parts[0], parts[-1]
