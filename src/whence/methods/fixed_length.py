"""The check of methods with a parameter for each position: every position must have one."""

from torch import Tensor

from whence.checks import require
from whence.method import span


def within(max_length: int, name: str, *positions: Tensor) -> None:
    """Raise unless all are in 0..max_length - 1; off the CPU only their number is known."""
    for pos in positions:
        _within(max_length, name, *span(pos))


def _within(max_length: int, name: str, first: int, last: int) -> None:
    require(
        first >= 0 and last < max_length,
        lambda: (
            f"{name} knows positions 0..{max_length - 1} (max_length={max_length}), got position "
            f"{first if first < 0 else last}. Build it with a larger max_length, shorten the "
            "input, or take a method without a fixed length, such as 'tisa' or 't5'."
        ),
    )
