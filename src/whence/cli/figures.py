"""The option --figures, by which commands that draw are told the format of their figures."""

from collections.abc import Iterable
from typing import Annotated

import typer

from whence.checks import one_of

FORMATS = ("png", "svg", "pdf")
FiguresOption = Annotated[
    list[str], typer.Option("--figures", metavar="|".join(FORMATS), help="Format of the figures.")
]


def check_figures(formats: Iterable[str]) -> None:
    """Refuse a format that figures do not have."""
    for name in formats:
        one_of("format of the figures", name, FORMATS)
