"""`whence demo`: a picture of what every method tells attention about position."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from whence.analysis import LagCurves, lag_curves
from whence.cli.errors import one_line_errors, with_extra
from whence.methods import METHODS


def demo(
    out: Annotated[Path, typer.Option(help="The folder for the picture; made if missing.")] = Path(
        "out"
    ),
) -> None:
    """Draw the lag curves of every method, as initialised, into OUT/lag_curves.png."""
    with one_line_errors():
        from whence.report import draw_lag_curves, save_png  # matplotlib is an extra

        out.mkdir(
            parents=True, exist_ok=True
        )  # before the work, so that a bad folder shows at once
        path = save_png(draw_lag_curves(_curves()), out / "lag_curves.png")
    typer.echo(f"wrote {path}")


def _curves() -> list[LagCurves]:
    """Of every method that this environment can build; the others are named on stderr."""
    curves = []
    for name in METHODS:
        try:
            curves.append(lag_curves(name))
        except ImportError as error:
            print(f"whence: left out {name}: {with_extra(error)}", file=sys.stderr)
    return curves
