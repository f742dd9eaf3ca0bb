"""What the command line says to both kinds of process."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Settings:
    """Where models and results may be read from, and the methods of the user's own modules."""

    root: Path
    results: Path
    model: str = ""  # named on the command line, and so allowed wherever it lies
    methods: tuple[str, ...] = ()
