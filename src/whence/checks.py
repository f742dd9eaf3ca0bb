"""Refusing bad input in one sentence: the value, the rule and the way out."""

import difflib
import os
from collections.abc import Callable, Iterable

import torch

LARGEST_FLOAT = torch.finfo(torch.float32).max


def require(condition: bool, message: str | Callable[[], str]) -> None:
    """Raise ValueError(message) unless the condition holds.

    A message with sizes of an input is given as a function: torch.compile fixes every number that
    is put into a text, and would compile again for each length.
    """
    if not condition:
        raise ValueError(message if isinstance(message, str) else message())


def whole(**named: int) -> None:
    """Each named number must be a whole number; torch.export gives symbolic ones."""
    for name, value in named.items():
        if type(value) is int:  # the most frequent, and the fastest to see
            continue
        if isinstance(value, bool) or not isinstance(value, int | torch.SymInt):
            raise TypeError(f"{name} must be a whole number, got {value!r}.")


def at_least(minimum: int, **named: int) -> None:
    """Each named whole number must be at least `minimum`."""
    whole(**named)
    for name, value in named.items():
        if value < minimum:  # not `require`, whose message torch.compile would fix
            raise ValueError(f"{name} must be at least {minimum}, got {value}.")


def at_most(maximum: int, **named: int | float) -> None:
    """Each named number must be at most `maximum`."""
    for name, value in named.items():
        require(value <= maximum, f"{name} must be at most {maximum:,}, got {value}.")


def fits_memory(what: str, count: int, *, bytes_each: int) -> None:
    """Raise where this machine could not hold so many numbers: the system would kill us."""
    if not hasattr(os, "sysconf"):  # Windows, where an allocation fails at once
        return
    needed, there = bytes_each * count, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if needed > there:
        raise MemoryError(
            f"{what} has {count:,} parameters, for which {needed / 1e9:,.0f} GB are needed and "
            f"{there / 1e9:,.0f} GB there."
        )


def finite(**named: float | None) -> None:
    """Each named number that is given must be finite in float32, in which methods compute."""
    for name, value in named.items():
        fits = value is None or abs(value) <= LARGEST_FLOAT  # False for NaN
        require(fits, f"{name} must be a finite number of at most 3.4e38, got {value}.")


def broadcasts(size: int, to: int) -> bool:
    """Whether an axis has size 1 or `to`.

    `size in (1, to)` says the same, but is False under torch.compile where a size is symbolic.
    """
    return size == 1 or size == to


def not_nested(way_out: str, **named: torch.Tensor) -> None:
    """Each named tensor must be an ordinary one: a nested tensor has no length that can be used."""
    for name, x in named.items():
        if x.is_nested:
            raise TypeError(f"{name} is a nested tensor, which has no one length. {way_out}")


def is_symbolic(*sizes: int) -> bool:
    """Whether a compiler or torch.export holds one of these sizes open; False outside of them."""
    if not torch.compiler.is_compiling():
        return False
    from torch.fx.experimental.symbolic_shapes import has_static_value  # costly to import

    return not all(has_static_value(size) for size in sizes)


def is_exported(*sizes: int) -> bool:
    """Whether torch.export holds one of these sizes open: a comparison would limit its range."""
    # In a graph of torch.compile, too, is_exporting() is True before PyTorch 2.13.
    flag: bool | None = getattr(torch.compiler, "_is_exporting_flag", None)
    return (torch.compiler.is_exporting() if flag is None else flag) and is_symbolic(*sizes)


def smaller(a: int, b: int) -> int:
    """min(a, b), which is a guard where a compiler holds one of the two open."""
    if not is_symbolic(a, b):
        return min(a, b)
    found: int = torch.sym_min(a, b)  # type: ignore[no-untyped-call]
    return found


def larger(a: int, b: int) -> int:
    """max(a, b), which is a guard where a compiler holds one of the two open."""
    if not is_symbolic(a, b):
        return max(a, b)
    found: int = torch.sym_max(a, b)  # type: ignore[no-untyped-call]
    return found


def surely_equal(a: int, b: int) -> bool:
    """a == b, without a guard: False where a compiler holds a size open and cannot tell."""
    if not torch.compiler.is_compiling():
        return a == b
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return bool(statically_known_true(a == b))


def one_of(name: str, value: str, allowed: Iterable[str]) -> None:
    """A named choice must be one of the allowed ones; the message suggests the nearest."""
    allowed = tuple(allowed)
    require(value in allowed, unknown(name, value, allowed))


def unknown(kind: str, name: str, known: Iterable[str]) -> str:
    """The message for a name that is not known, with the nearest one that is."""
    known = sorted(known)
    near = difflib.get_close_matches(str(name), known, n=1, cutoff=0.5)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return f"Unknown {kind} {name!r}.{hint} Known: {', '.join(known) or 'none'}."
