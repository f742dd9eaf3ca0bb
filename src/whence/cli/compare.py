"""`whence compare-checkpoints`: Toeplitzness through a series of models, and against scores."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.table import Table

from whence.checks import require
from whence.cli.console import plain_console
from whence.cli.errors import one_line_errors
from whence.cli.figures import FiguresOption, check_figures
from whence.cli.inspect import inspect_all
from whence.cli.progress import progress_bar
from whence.files import from_home

if TYPE_CHECKING:
    from whence.analysis.comparison import Comparison


def compare_checkpoints(
    models: Annotated[
        list[str],
        typer.Argument(help="A folder of checkpoints, or two models or more, in order."),
    ],
    scores: Annotated[
        Path | None, typer.Option(help="A CSV with the columns model and score.")
    ] = None,
    out: Annotated[
        Path, typer.Option(help="The folder for results, figures and page; made if missing.")
    ] = Path("out/compare"),
    figures: FiguresOption = ["png"],  # noqa: B006  typer copies it
    allow_pickle: Annotated[
        bool, typer.Option("--allow-pickle", help="Also read pickled weights: trust their author.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Follow Toeplitzness through MODELS, and correlate it with their scores.

    Names such as checkpoint-500 are put in the order of their steps.
    """
    with one_line_errors("plot"):
        from whence.analysis.comparison import compare, read_scores

        check_figures(figures)
        known = None if scores is None else read_scores(scores)
        with progress_bar() as say:
            from whence.report.folder import (
                COMPARISON,
                Results,
                check_folder,
                check_names,
                read_folder,
                result_name,
                write_folder,
            )

            check_folder(out)
            names = series(models)
            check_names(names)
            earlier = read_folder(out, but=(COMPARISON, *map(result_name, names)))
            found = inspect_all(
                names,
                fit=False,
                profiles=False,
                allow_pickle=allow_pickle,
                progress=lambda what, share: say(what, 0.8 * share),
            )
            comparison = compare(found, known)
            order = [point.model for point in comparison.points]
            found.sort(key=lambda entry: order.index(entry.model.name))
            page = write_folder(
                out,
                Results(tuple(found), comparison).with_earlier(earlier),
                formats=figures,
                figures_of=(),
                keep=found,
                progress=lambda what, share: say(what, 0.8 + 0.2 * share),
            )
    if as_json:
        typer.echo(comparison.to_json())
        return
    _print(comparison)
    typer.echo(f"wrote {page}")


def series(models: Sequence[str]) -> list[str]:
    """The models themselves, or the checkpoints inside of a folder, by number."""
    if len(models) > 1:
        return list(models)
    folder = from_home(models[0])
    found = f"{folder} is a file" if folder.is_file() else f"there is no folder {folder}"
    require(folder.is_dir(), f"{found}: give a folder of checkpoints, or two models or more.")
    inside = [path for path in folder.iterdir() if (path / "config.json").is_file()]
    require(
        len(inside) > 1,
        f"{folder} holds {len(inside)} checkpoints (folders with a config.json): a comparison "
        "needs two or more.",
    )
    return [str(path) for path in sorted(inside, key=lambda path: _natural(path.name))]


def _natural(name: str) -> list[tuple[int, str]]:
    """checkpoint-9 before checkpoint-10."""
    return [
        (int(part or 0), "") if part.isdigit() else (0, part) for part in re.split(r"(\d+)", name)
    ]


def _print(comparison: "Comparison") -> None:
    from whence.analysis.results import worded
    from whence.report.comparison_figures import sentence
    from whence.report.style import labels

    points = comparison.points
    scored = any(point.score is not None for point in points)
    console, table = (
        plain_console(),
        Table(box=box.SIMPLE, pad_edge=False, collapse_padding=True),
    )
    near = points[0].near
    table.add_column("model", overflow="fold")
    for heading in (
        "R²\n(random)",
        "off diagonal\n(random)",
        f"R², {near.start}..{near.stop - 1}\n(random)",
        "dimen-\nsions",
        *(("score",) if scored else ()),
    ):
        table.add_column(heading, justify="right", no_wrap=True)
    for label, point in zip(labels([point.model for point in points]), points, strict=True):
        whole = point.whole
        table.add_row(
            label,
            _with_null(whole.r2, whole.null_r2),
            _with_null(whole.r2_off_diagonal, whole.null_r2_off_diagonal),
            _with_null(point.near.r2, point.near.null_r2),
            worded(point.effective_dimensions, ".1f"),
            *(("" if point.score is None else f"{point.score:.4g}",) if scored else ()),
        )
    console.print(table)
    for entry in comparison.correlations:
        console.print(f"score and R² ({entry.measure}): {sentence(entry)}", soft_wrap=True)


def _with_null(value: float | None, null: float | None) -> str:
    from whence.analysis.results import worded

    return worded(value) if null is None else f"{worded(value)} ({null:.3f})"
