"""`--methods a,b`: a list of methods, checked as a whole before any work begins."""

import torch

from whence.checks import require
from whence.methods import METHODS, build


def read_specs(text: str | None) -> tuple[str, ...]:
    """The methods in a list, or all; a piece that is an option belongs to the method before it.

    >>> read_specs("shaw:clip=8,values=false,tisa")
    ('shaw:clip=8,values=false', 'tisa')
    """
    if text is None:
        return tuple(METHODS)
    specs: list[str] = []
    for piece in (piece.strip() for piece in text.split(",")):
        if specs and "=" in piece and ":" not in piece:
            specs[-1] += f",{piece}"
        else:
            specs.append(piece)
    require(len(set(specs)) == len(specs), f"a method is listed twice in {text!r}.")
    for spec in specs:
        try:
            with torch.device("meta"):
                build(spec, n_heads=4, d_head=16)
        except ImportError:
            pass  # known, but its extra is missing: the command itself says so
    return tuple(specs)
