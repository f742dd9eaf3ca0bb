"""The catalogue: every method with its formula, its options, its parameters and its paper."""

import inspect
import sys
import types
from dataclasses import dataclass
from typing import Any, Literal, Union, get_args, get_origin

import torch

from whence.method import PositionMethod
from whence.methods import CONTEXT, METHODS, build
from whence.methods.registry import named, plugins
from whence.methods.spec import options_of

KINDS = {int: "whole number", float: "number", bool: "true|false", str: "text"}


@dataclass(frozen=True)
class Option:
    """An option as a text gives it: "tisa:kernels=5"."""

    name: str
    kind: str
    default: str


@dataclass(frozen=True)
class Entry:
    """One method as the tables show it.

    `parameters` is None if an extra is missing, which `needs` then names.

    >>> rope = next(entry for entry in catalogue() if entry.name == "rope")
    >>> rope.sites, rope.parameters
    (('heads',), 0)
    """

    name: str
    summary: str
    description: str  # the formula of the method first, then conventions and surprises
    sites: tuple[str, ...]
    options: tuple[Option, ...]
    given: tuple[str, ...]  # what the model fills in; an option of the same name wins over it
    formula: str  # of the number of parameters
    parameters: int | None
    causal_only: bool
    paper: str
    needs: str = ""


def catalogue(*, n_heads: int = 12, d_head: int = 64, length: int = 512) -> tuple[Entry, ...]:
    """An entry for each of METHODS and of installed packages, with the parameters of one layer.

    The count comes from modules on the meta device: a fixed n x n matrix costs nothing here.

        >>> next(entry for entry in catalogue() if entry.name == "tisa").parameters
        180
    """
    return tuple(
        entry(name, n_heads=n_heads, d_head=d_head, length=length)
        for name in (*METHODS, *plugins())
    )


def entry(spec: str, *, n_heads: int = 12, d_head: int = 64, length: int = 512) -> Entry:
    """The entry of one method, for which options may be given: they change its parameters.

    >>> entry("TISA:kernels=1").options[0]
    Option(name='kernels', kind='whole number', default='5')
    """
    parts = named(spec)
    if len(parts) > 1:
        raise ValueError(f"{spec!r} is a sum: ask for one method at a time.")
    ((name, cls, _),) = parts
    needs, parameters = "", None
    try:
        with torch.device("meta"):
            method = build(spec, n_heads=n_heads, d_head=d_head, max_length=length)
        parameters = method.n_parameters()
    except ImportError as error:
        needs = str(error)
    return Entry(
        name,
        summary=summary(cls),
        description=description(cls),
        sites=cls.sites(),
        options=options(cls),
        given=tuple(key for key in options_of(cls) if key in CONTEXT),
        formula=cls.formula,
        parameters=parameters,
        causal_only=cls.causal_only,
        paper=cls.paper,
        needs=needs,
    )


def options(cls: type[PositionMethod]) -> tuple[Option, ...]:
    """The options that a text may give, without what the model fills in."""
    return tuple(_option(p) for key, p in options_of(cls).items() if key not in CONTEXT)


def summary(cls: type[PositionMethod]) -> str:
    """The first line of the method's file."""
    return (sys.modules[cls.__module__].__doc__ or "").strip().partition("\n")[0]


def description(cls: type[PositionMethod]) -> str:
    """The docstring without its examples, which are for Python."""
    paragraphs = (inspect.getdoc(cls) or "").split("\n\n")
    return "\n\n".join(text for text in paragraphs if not text.lstrip().startswith(">>>"))


def _option(parameter: inspect.Parameter) -> Option:
    default = parameter.default
    shown = "" if default is parameter.empty else str(default)
    if default is None or isinstance(default, bool):
        shown = shown.lower()
    return Option(parameter.name, _kind(parameter.annotation), shown)


def _kind(annotation: Any) -> str:
    if get_origin(annotation) in (Union, types.UnionType):
        kinds = (_kind(part) for part in get_args(annotation) if part is not type(None))
        return " or ".join([*kinds, *(["none"] if type(None) in get_args(annotation) else [])])
    if get_origin(annotation) is Literal:
        return "|".join(map(str, get_args(annotation)))
    return KINDS.get(annotation, "not in a text")
