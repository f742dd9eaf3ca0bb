"""The catalogue: every method with its sites, its parameters and its paper."""

import sys
from dataclasses import dataclass

import torch

from whence.methods import METHODS, build


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
    sites: tuple[str, ...]
    formula: str
    parameters: int | None
    causal_only: bool
    paper: str
    needs: str = ""


def catalogue(*, n_heads: int = 12, d_head: int = 64, length: int = 512) -> tuple[Entry, ...]:
    """An entry for each of METHODS, its parameters counted for one layer of this shape.

    The count comes from modules on the meta device: a fixed n x n matrix costs nothing here.

        >>> next(entry for entry in catalogue() if entry.name == "tisa").parameters
        180
    """
    return tuple(_entry(name, n_heads, d_head, length) for name in METHODS)


def _entry(name: str, n_heads: int, d_head: int, length: int) -> Entry:
    cls, needs, parameters = METHODS[name], "", None
    try:
        with torch.device("meta"):
            method = build(name, n_heads=n_heads, d_head=d_head, max_length=length)
        parameters = method.n_parameters()
    except ImportError as error:
        needs = str(error)
    summary = (sys.modules[cls.__module__].__doc__ or "").strip().partition("\n")[0]
    return Entry(
        name, summary, cls.sites(), cls.formula, parameters, cls.causal_only, cls.paper, needs
    )
