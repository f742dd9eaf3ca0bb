"""What `whence distill` did and how close it came, as frozen results."""

from dataclasses import dataclass

from whence.analysis.json_result import Array, Result
from whence.analysis.results import HeadFits


@dataclass(frozen=True, eq=False)
class HeadCurve(Result):
    """What a head lacks without the table, by lag: the difference of logits that TISA is to add."""

    layer: int
    head: int
    lag: Array  # [l] lag = key - query, those that the text has
    curve: Array  # [l] in logits, up to a constant
    weight: Array  # [l] how much the original's attention depends on it; sums to 1


@dataclass(frozen=True, eq=False)
class Closeness(Result):
    """Hidden states against the original's on text that nothing was fitted to.

    Entry 0 of `cosine` and `error` is what goes into the first layer, entry l what comes out of
    layer l - 1. The error is the root of the squared difference over the original's square.
    """

    cosine: tuple[float, ...]
    error: tuple[float, ...]
    pooled: float  # cosine of the mean over a sequence's tokens


@dataclass(frozen=True, eq=False)
class Stage(Result):
    """A model on the way from the original to the distilled one."""

    name: str  # one of STAGES
    closeness: Closeness
    score: float | None  # on the task, if one was given


STAGES = {
    "original": "the original",
    "deleted": "table deleted",
    "rows": "deleted, mean rows kept",
    "fitted": "TISA fitted",
    "tuned": "TISA tuned",
}


@dataclass(frozen=True, eq=False)
class TextFacts(Result):
    """The text that was read."""

    source: str
    fitted: int  # sequences that kernels were fitted to, and their tokens
    fitted_tokens: int
    tuned: int  # sequences there were to tune on
    held_out: int  # sequences that closeness was measured on, and their tokens
    held_out_tokens: int
    longest: int  # tokens


@dataclass(frozen=True, eq=False)
class Distillation(Result):
    """The results of `distill`, as in distill.json beside the new model.

    >>> from pathlib import Path
    >>> found = Distillation.load(Path("out/distill.json"))  # of whence distill MODEL --out out
    >>> found.position, found.stage("fitted").name
    ('tisa:kernels=1', 'fitted')
    """

    model: str
    family: str
    sha256: str  # of the original's weights
    position: str  # the method in place of the table, as `build` reads it
    n_parameters: int  # that it brought
    n_positions: int  # rows of the table
    options: dict[str, str | int | float | bool | None]
    text: TextFacts
    stages: tuple[Stage, ...]
    task: str | None  # what `score` is
    curves: tuple[HeadCurve, ...]
    fits: tuple[HeadFits, ...]
    notes: tuple[str, ...]
    seconds: dict[str, float]
    versions: dict[str, str]

    def stage(self, name: str) -> Stage:
        """The stage of that name."""
        return next(stage for stage in self.stages if stage.name == name)
