"""`whence report DIR...`: the page and the figures again, from the results, without measuring."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from whence.checks import require
from whence.cli.errors import one_line_errors
from whence.cli.figures import FiguresOption, check_figures
from whence.cli.progress import progress_bar

if TYPE_CHECKING:
    from whence.report.experiment_report import ExperimentReport


def report(
    folders: Annotated[
        list[Path],
        typer.Argument(
            help="Where inspect, compare-checkpoints, lm, glue or translate wrote; several alike."
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(help="The folder for page and figures; that of the results unless given."),
    ] = None,
    figures: FiguresOption = ["png"],  # noqa: B006  typer copies it
) -> None:
    """Draw page and figures of FOLDERS from the JSON files in them; nothing is measured again.

    Several folders of the same command make one page, in OUT. A file that
    `whence criteria --out FOLDER/criteria.json` wrote adds its table to the page.
    """
    with one_line_errors("plot"):
        check_figures(figures)
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

            target = folders[0] if out is None else out
            check_folder(target)
            shown = {folder: _experiment(folder) for folder in folders}
            first, *others = shown
            for folder in others:
                require(
                    shown[folder] is shown[first],
                    f"one page shows one kind of results: {first} is {_origin(shown[first])}, "
                    f"{folder} is {_origin(shown[folder])}.",
                )
            experiment = shown[first]
            if experiment is None:
                page = _inspected(folders, target, figures, say)
            else:
                say("page", 0.0)
                page = _trained(experiment, folders, target, figures)
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
            f"{folder} has no results of whence inspect, lm, glue or translate.",
        )
        known = {entry.model.name for entry in results.inspections}
        for entry in found.inspections:
            name = entry.model.name
            require(name not in known, f"{name} is in two of these folders: a page shows it once.")
        results = results.with_earlier(found)
    return write_folder(target, results, formats=formats, progress=say)


def _experiment(folder: Path) -> "ExperimentReport[Any] | None":
    """The experiment whose results are in a folder; None where they are of whence inspect."""
    from whence.report.glue_report import GLUE_REPORT
    from whence.report.lm_report import LM_REPORT
    from whence.report.translation_report import TRANSLATION_REPORT

    reports = (LM_REPORT, GLUE_REPORT, TRANSLATION_REPORT)
    return next((report for report in reports if report.is_in(folder)), None)


def _origin(experiment: "ExperimentReport[Any] | None") -> str:
    return "not of an experiment" if experiment is None else f"of {experiment.command}"


def _trained(
    experiment: "ExperimentReport[Any]",
    folders: Sequence[Path],
    target: Path,
    formats: Sequence[str],
) -> Path:
    """The page of one run of an experiment, or of several side by side."""
    from whence.report.style import labels

    runs = [experiment.read(folder) for folder in folders]
    if len(runs) == 1:
        return experiment.write(runs[0], target, formats=formats)
    names = labels([folder.resolve().as_posix() for folder in folders])
    return experiment.write_several(dict(zip(names, runs, strict=True)), target, formats=formats)
