"""`whence report DIR...`: the page and the figures again, from the results, without measuring."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import typer

from whence.checks import one_of, require
from whence.cli.errors import one_line_errors
from whence.cli.inspect import FORMATS
from whence.cli.progress import progress_bar


def report(
    folders: Annotated[
        list[Path],
        typer.Argument(
            help="Where inspect, compare-checkpoints, lm or glue wrote; several of a kind."
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(help="The folder for page and figures; that of the results unless given."),
    ] = None,
    formats: Annotated[
        list[str], typer.Option("--format", metavar="|".join(FORMATS), help="Of the figures.")
    ] = ["png"],  # noqa: B006  typer copies it
) -> None:
    """Draw page and figures of FOLDERS from the JSON files in them; nothing is measured again.

    Several folders of the same command make one page, in OUT. A file that
    `whence criteria --out FOLDER/criteria.json` wrote adds its table to the page.
    """
    with one_line_errors("plot"):
        for name in formats:
            one_of("format", name, FORMATS)
        for folder in folders:
            require(folder.is_dir(), f"there is no folder {folder}.")
        distinct = {folder.resolve() for folder in folders}
        require(len(distinct) == len(folders), "a folder is given twice.")
        require(
            out is not None or len(folders) == 1,
            f"one page of {len(folders)} folders goes into a folder of its own: give it as --out.",
        )
        with progress_bar() as say:
            from whence.report.folder import check_folder
            from whence.report.glue_folder import GLUE, read_glue_folder, write_glue_report
            from whence.report.lm_folder import LANGUAGE

            target = folders[0] if out is None else out
            check_folder(target)
            if len(folders) == 1 and (folders[0] / GLUE).is_file():
                page = write_glue_report(read_glue_folder(folders[0]), target, formats=formats)
                typer.echo(f"wrote {page}")
                return
            trained = [folder for folder in folders if (folder / LANGUAGE).is_file()]
            others = [folder for folder in folders if folder not in trained]
            require(
                not (trained and others),
                f"one page shows one kind of results: {(trained or folders)[0]} is of whence lm, "
                f"{(others or folders)[0]} is not.",
            )
            if trained:
                say("page", 0.0)
                page = _trained(folders, target, formats)
            else:
                page = _inspected(folders, target, formats, say)
    typer.echo(f"wrote {page}")


def _inspected(
    folders: Sequence[Path], target: Path, formats: Sequence[str], say: Callable[[str, float], None]
) -> Path:
    """The page of all models in the folders."""
    from whence.report.folder import Results, read_folder, write_folder

    results = Results()
    for folder in folders:
        found = read_folder(folder)
        require(
            len(found.inspections) > 0,
            f"{folder} has no results of whence inspect: no JSON file of kind Inspection.",
        )
        known = {entry.model.name for entry in results.inspections}
        for entry in found.inspections:
            name = entry.model.name
            require(name not in known, f"{name} is in two of these folders: a page shows it once.")
        results = results.with_earlier(found)
    return write_folder(target, results, formats=formats, progress=say)


def _trained(folders: Sequence[Path], target: Path, formats: Sequence[str]) -> Path:
    """The page of one comparison of methods, or of several side by side."""
    from whence.report.lm_folder import read_lm_folder, write_lm_report, write_runs_report
    from whence.report.style import labels

    runs = [read_lm_folder(folder) for folder in folders]
    if len(runs) == 1:
        return write_lm_report(runs[0], target, formats=formats)
    names = labels([folder.resolve().as_posix() for folder in folders])
    return write_runs_report(dict(zip(names, runs, strict=True)), target, formats=formats)
