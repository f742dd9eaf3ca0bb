"""`--methods a,b`: a list of methods, checked as a whole before any work begins."""

import sys
from pathlib import Path

import torch

from whence.checks import require
from whence.methods import METHODS, build
from whence.methods.registry import import_modules, named, plugins
from whence.methods.spec import parse


def read_specs(text: str | None, *, n_heads: int = 4, d_head: int = 16) -> tuple[str, ...]:
    """The methods in a list, or all; a piece that is an option belongs to the method before it.

    They are built for heads of this shape, without memory, to find mistakes early.

    >>> read_specs("shaw:clip=8,values=false,TISA")
    ('shaw:clip=8,values=false', 'tisa')
    """
    if text is None:
        return (*METHODS, *plugins())
    pieces: list[str] = []
    for piece in (piece.strip() for piece in text.split(",")):
        if pieces and "=" in piece and ":" not in piece:
            pieces[-1] += f",{piece}"
        else:
            pieces.append(piece)
    specs = [read_spec(piece) for piece in pieces]
    require(len(set(specs)) == len(specs), f"a method is listed twice in {text!r}.")
    for spec in specs:
        try:
            with torch.device("meta"):
                build(spec, n_heads=n_heads, d_head=d_head)
        except ImportError:
            pass  # known, but its extra is missing: the command itself says so
    return tuple(specs)


def read_spec(text: str) -> str:
    """One method as the tables write it; a module of the user's that it names is imported.

    >>> read_spec("TISA : kernels = 3")
    'tisa:kernels=3'
    """
    here, modules = str(Path.cwd()), [name for name, _ in parse(text) if ":" in name]
    if modules and here not in sys.path and "" not in sys.path:
        # An installed command does not look here. Last, so that no file here is taken for an
        # installed module; and it stays, for the processes that this one starts.
        sys.path.append(here)
    import_modules(text)
    return "+".join(_written(part.name, part.options) for part in named(text))


def _written(name: str, options: dict[str, str]) -> str:
    listed = ",".join(f"{key}={value}" for key, value in options.items())
    return f"{name}:{listed}" if listed else name
