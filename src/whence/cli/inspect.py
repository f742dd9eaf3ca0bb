"""`whence inspect MODEL...`: what a trained model knows about position."""

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.table import Table

from whence.checks import require
from whence.cli.console import plain_console
from whence.cli.errors import one_line_errors
from whence.cli.figures import FiguresOption, check_figures
from whence.cli.progress import progress_bar

if TYPE_CHECKING:
    from whence.analysis.results import Inspection


def inspect(
    models: Annotated[
        list[str],
        typer.Argument(
            help="Folders, names on the hub, or bare tables (.npy, .safetensors with one tensor), "
            "shown side by side."
        ),
    ],
    layer: Annotated[str, typer.Option(help="The layer whose heads to read, or all.")] = "0",
    biases: Annotated[
        bool, typer.Option(help="With the biases of the projections, or without.")
    ] = False,
    stack: Annotated[
        str | None,
        typer.Option(metavar="encoder|decoder", help="Of a model with both; else the first."),
    ] = None,
    text: Annotated[
        Path | None, typer.Option(help="Measure lag profiles on this text; a sample unless given.")
    ] = None,
    profile: Annotated[
        bool | None,
        typer.Option(
            "--profile/--no-profile",
            help="Run the model to measure its logits by lag; where the weights do not tell "
            "unless given.",
            show_default=False,
        ),
    ] = None,
    fit: Annotated[
        Path | None,
        typer.Option(
            help="Write the TISA fits as a checkpoint: a .safetensors file, or a folder for one "
            "file a model and layer."
        ),
    ] = None,
    no_fit: Annotated[bool, typer.Option("--no-fit", help="Do not fit TISA.")] = False,
    out: Annotated[
        Path, typer.Option(help="The folder for results, figures and page; made if missing.")
    ] = Path("out/inspect"),
    figures: FiguresOption = ["png"],  # noqa: B006  typer copies it
    allow_pickle: Annotated[
        bool, typer.Option("--allow-pickle", help="Also read pickled weights: trust their author.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON instead of tables; arrays stay in OUT.")
    ] = False,
) -> None:
    """Measure what MODELS know about position, and write a page, figures and results into OUT.

    The page shows every result in the folder, those of earlier runs too. All files appear when all
    is done, or none.
    """
    with one_line_errors("plot"):
        require(not (no_fit and fit), "--fit exports what --no-fit leaves out: give one of them.")
        check_figures(figures)
        words = None if text is None else read_text(text)
        with progress_bar() as say:
            from whence.report.folder import (
                Results,
                check_folder,
                check_names,
                read_folder,
                result_name,
                write_folder,
            )

            check_folder(out)
            check_names(models)
            earlier = read_folder(out, but=map(result_name, models))
            found = inspect_all(
                models,
                layer=layer,
                biases=biases,
                stack=stack,
                text=words,
                fit=not no_fit,
                profiles=profile,
                allow_pickle=allow_pickle,
                progress=lambda what, share: say(what, 0.8 * share),
            )
            exports = [] if fit is None else _exports(found, fit)
            results = Results(tuple(found)).with_earlier(earlier)
            page = write_folder(
                out,
                results,
                formats=figures,
                figures_of=found,
                keep=found,
                progress=lambda what, share: say(what, 0.8 + 0.2 * share),
            )
            written = [save() for save in exports]
    if as_json:
        print_json(found, page)
        return
    print_numbers(found)
    for path in written:
        typer.echo(f"wrote {path}")
    others = len(results.inspections) - len(found)
    also = f" (with {others} from earlier runs in this folder)" if others else ""
    typer.echo(f"wrote {page}{also}")


def inspect_all(
    models: Sequence[str],
    *,
    layer: str = "0",
    biases: bool = False,
    stack: str | None = None,
    text: str | None = None,
    fit: bool = True,
    profiles: bool | None = None,
    allow_pickle: bool = False,
    progress: Callable[[str, float], None],
) -> list["Inspection"]:
    """The inspections of all models; one that cannot be read stops all."""
    from whence.analysis.inspect import inspect, inspect_layers

    require(
        layer == "all" or re.fullmatch(r"-?[0-9]{1,9}", layer) is not None,
        f"--layer must be a number or all, got {layer!r}.",
    )
    require(len(set(models)) == len(models), "a model is listed twice.")
    found = []
    for place, model in enumerate(models):

        def say(what: str, share: float, model: str = model, place: int = place) -> None:
            progress(f"{model[-30:]}: {what}", (place + share) / len(models))

        if layer == "all":
            one = inspect_layers(
                model,
                biases=biases,
                stack=stack,
                text=text,
                fit=fit,
                profiles=profiles,
                allow_pickle=allow_pickle,
                progress=say,
            )
        else:
            one = inspect(
                model,
                layer=int(layer),
                biases=biases,
                stack=stack,
                text=text,
                fit=fit,
                profiles=profiles,
                allow_pickle=allow_pickle,
                progress=say,
            )
        found.append(one)
    return found


def read_text(path: Path) -> str:
    """A file that the user named, as text."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}.") from None
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not text in UTF-8.") from None
    require(bool(text.strip()), f"{path} is empty.")
    return text


def print_numbers(found: Sequence["Inspection"], *, most: int | None = None) -> None:
    """The key numbers of each model, the first `most` of them."""
    from whence.report.key_numbers import key_numbers

    console = plain_console()
    for entry in found:
        model = entry.model
        console.print(
            f"{model.name}: {model.family}, position by {model.position}, {model.shape}",
            soft_wrap=True,
        )
        table = Table(box=box.SIMPLE_HEAD, show_header=False, pad_edge=False)
        table.add_column("", justify="right", no_wrap=True, style="bold")
        table.add_column("", no_wrap=True)
        table.add_column("", style="dim")
        for number in key_numbers(entry)[:most]:
            table.add_row(number.value, number.what, number.against)
        if table.row_count:
            console.print(table)
        else:
            console.print("  its weights alone tell nothing; --profile runs it and measures")
        for note in entry.notes if most is None else ():
            console.print(f"note: {note}", soft_wrap=True)


def print_json(found: Sequence["Inspection"], page: Path) -> None:
    """Every number that is not in an array, and where the arrays are."""
    models = [_without_arrays(json.loads(entry.to_json())) for entry in found]
    typer.echo(json.dumps({"page": str(page), "models": models}, indent=1, ensure_ascii=False))


def _without_arrays(value: Any) -> Any:
    if isinstance(value, dict):
        kept = {key: item for key, item in value.items() if not _is_array(item)}
        return {key: _without_arrays(item) for key, item in kept.items()}
    if isinstance(value, list):
        return [_without_arrays(item) for item in value]
    return value


def _is_array(value: Any) -> bool:
    return isinstance(value, dict) and "float32" in value


def _exports(found: Sequence["Inspection"], path: Path) -> list[Callable[[], Path]]:
    """One call for each checkpoint to write; what cannot be written is said before any is."""
    from functools import partial
    from itertools import groupby

    from whence.analysis.fit import export_tisa
    from whence.report.folder import check_folder, file_name

    layers = [
        (entry, layer, list(group))
        for entry in found
        for layer, group in groupby(entry.fits, key=lambda fit: fit.layer)
    ]
    for entry in found:
        require(
            len(entry.fits) > 0,
            f"{entry.model.name} has no lag curve in its weights (position by "
            f"{entry.model.position}), so --fit has nothing to export.",
        )
    if path.suffix != ".safetensors":
        check_folder(path)
        names = [f"{file_name(entry.model.name)}.layer-{layer}" for entry, layer, _ in layers]
        paths = [path / f"{name}.safetensors" for name in names]
    else:
        require(
            len(layers) == 1,
            f"--fit {path} is one file, for one layer of one model, and there are {len(layers)}: "
            "give a folder.",
        )
        check_folder(path.parent)
        paths = [path]
    return [
        partial(export_tisa, fits, target, source=entry.model.name)
        for (entry, _, fits), target in zip(layers, paths, strict=True)
    ]
