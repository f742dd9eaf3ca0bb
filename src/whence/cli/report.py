"""`whence report DIR`: the page and the figures again, from the results, without measuring."""

from pathlib import Path
from typing import Annotated

import typer

from whence.checks import one_of, require
from whence.cli.errors import one_line_errors
from whence.cli.inspect import FORMATS
from whence.cli.progress import progress_bar

LANGUAGE = "lm.json"  # what whence lm leaves


def report(
    folder: Annotated[Path, typer.Argument(help="Where inspect, compare-checkpoints or lm wrote.")],
    formats: Annotated[
        list[str], typer.Option("--format", metavar="|".join(FORMATS), help="Of the figures.")
    ] = ["png"],  # noqa: B006  typer copies it
) -> None:
    """Draw page and figures of FOLDER from the JSON files in it; nothing is measured again.

    A file that `whence criteria --out FOLDER/criteria.json` wrote adds its table to the page.
    """
    with one_line_errors():
        for name in formats:
            one_of("format", name, FORMATS)
        require(folder.is_dir(), f"there is no folder {folder}.")
        if (folder / LANGUAGE).is_file():
            typer.echo(f"wrote {_language(folder)}")
            return
        with progress_bar() as say:
            from whence.report.folder import read_folder, write_folder

            results = read_folder(folder)
            require(
                len(results.inspections) > 0,
                f"{folder} has no results of whence inspect: no JSON file of kind Inspection.",
            )
            page = write_folder(folder, results, formats=formats, progress=say)
    typer.echo(f"wrote {page}")


def _language(folder: Path) -> Path:
    """The page of a comparison of methods."""
    from whence.analysis.lm_results import Language
    from whence.report.lm_page import write_lm_report

    return write_lm_report(Language.load(folder / LANGUAGE).check(), folder)
