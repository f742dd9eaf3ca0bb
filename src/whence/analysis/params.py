"""Positional parameters of a whole model: formula, count and share, for every method (Table 2)."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from whence.analysis.json_result import Result
from whence.checks import at_least
from whence.method import PositionMethod
from whence.methods import METHODS, Sum, build
from whence.methods.registry import named
from whence.methods.spec import check_sizes

VOCABULARY = 30_522  # BERT's


@dataclass(frozen=True, eq=False)
class Shape(Result):
    """A Transformer encoder; the defaults are BERT-base."""

    n_layers: int = 12
    n_heads: int = 12
    d_head: int = 64
    length: int = 512

    def __post_init__(self) -> None:
        at_least(1, layers=self.n_layers, heads=self.n_heads, d_head=self.d_head)
        at_least(1, length=self.length)
        check_sizes(vars(self))

    def without_position(self) -> int:
        """The parameters of a BERT of this shape less its table of positions."""
        d = self.n_heads * self.d_head
        embeddings = (VOCABULARY + 2 + 2) * d  # words, two segments, a norm
        layer = 4 * (d + 1) * d + (d + 1) * 4 * d + (4 * d + 1) * d + 4 * d
        pooler = (d + 1) * d
        return embeddings + self.n_layers * layer + pooler


@dataclass(frozen=True, eq=False)
class Parameters(Result):
    """What position costs in one model; `count` is None where `needs` says what is missing."""

    method: str
    formula: str  # of the whole model, in the names of the method's options and of the shape
    count: int | None
    share: float | None  # of all parameters of a BERT of this shape with this method
    grows: bool | None  # with the length
    needs: str = ""


@dataclass(frozen=True, eq=False)
class ParametersTable(Result):
    """A row for each method, for one shape."""

    shape: Shape
    rows: tuple[Parameters, ...]


def parameters_table(
    specs: Iterable[str] | None = None, *, shape: Shape | None = None
) -> ParametersTable:
    """Every method of METHODS, or those given, for a model of this shape.

    A layer has its own parameters unless the method is shared by layers, holds those of all layers
    itself, or enters at the input only: those count once.

        >>> table = parameters_table(["tisa"])
        >>> table.rows[0].formula, table.rows[0].count
        ('n_layers * (3 * n_heads * kernels)', 2160)
    """
    shape = Shape() if shape is None else shape
    specs = METHODS if specs is None else specs
    return ParametersTable(shape, tuple(parameters(spec, shape) for spec in specs))


def parameters(spec: str, shape: Shape) -> Parameters:
    """The row of one method, counted on the meta device: a huge table costs nothing here."""
    other = shape.length // 2 or 2  # not twice the length, which may be more than a method takes
    try:
        count, at_other = (_count(spec, shape, length) for length in (shape.length, other))
    except ImportError as error:
        return Parameters(spec, _formula(spec), None, None, None, str(error))
    except (RuntimeError, OverflowError, TypeError) as error:  # torch counts in 64 bits
        if isinstance(error, TypeError) and "overflow" not in str(error).lower():
            raise
        raise ValueError(
            f"{spec} would have a tensor of more than 2^63 bytes in a model of {shape.n_layers} "
            f"layers of {shape.n_heads} heads of {shape.d_head} and length {shape.length}. Take a "
            "smaller one, or --methods without it."
        ) from None
    share = count / (shape.without_position() + count)
    return Parameters(spec, _formula(spec), count, share, at_other != count)


def _count(spec: str, shape: Shape, length: int) -> int:
    with torch.device("meta"):
        method = build(
            spec,
            n_heads=shape.n_heads,
            d_head=shape.d_head,
            max_length=length,
            n_layers=shape.n_layers,
        )
    parts = method.parts if isinstance(method, Sum) else [method]
    return sum(
        part.n_parameters() * (1 if _once(type(part)) else shape.n_layers)
        for part in parts
        if isinstance(part, PositionMethod)
    )


def _formula(spec: str) -> str:
    formulas = []
    for _, cls, _ in named(spec):
        plain = _once(cls) or cls.formula == "0"
        formulas.append(cls.formula if plain else f"n_layers * ({cls.formula})")
    return " + ".join(formulas)


def _once(cls: type[PositionMethod]) -> bool:
    return cls.shared_by_layers or cls.sites() == ("input",)
