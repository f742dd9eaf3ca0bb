"""What the commands of experiments share: their options, how one is run, how tables are printed."""

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.table import Table

from whence.checks import one_of, require
from whence.cli.console import plain_console
from whence.cli.figures import check_figures
from whence.cli.progress import progress_bar
from whence.cli.unfinished import ends_in_order

if TYPE_CHECKING:
    from whence.experiments.sweep import Sweep
    from whence.report.experiment_report import ExperimentReport
    from whence.report.text_table import TextTable

FORMATS = ("text", "markdown", "latex")

BF16Option = Annotated[
    bool | None, typer.Option("--bf16/--no-bf16", help="Mixed precision.", show_default="no-bf16")
]
DeviceOption = Annotated[
    str | None,
    typer.Option(
        metavar="auto|cpu|cuda", help="Auto is a GPU if there is one.", show_default="auto"
    ),
]
ConfigOption = Annotated[
    Path | None, typer.Option(metavar="TOML", help="Options by name; flags win over it.")
]
RayOption = Annotated[
    str | None,
    typer.Option(metavar="local|ADDRESS", help="Run jobs in parallel on a Ray cluster."),
]
WorkersOption = Annotated[
    int, typer.Option(help="Processes that run jobs side by side on this device.")
]
SecondsOption = Annotated[
    float | None, typer.Option(help="End in order after this time; the same command goes on.")
]
FormatOption = Annotated[
    str, typer.Option("--format", metavar="|".join(FORMATS), help="Of what is printed.")
]
OutOption = Annotated[Path, typer.Option(help="The folder for results and page; made if missing.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


def check_options(form: str, figures: Sequence[str], seconds: float | None) -> None:
    """Refuse wrong values of the options that all experiments have."""
    one_of("format", form, FORMATS)
    check_figures(figures)
    require(seconds is None or seconds > 0, f"--seconds must be positive, got {seconds}.")


def run_experiment(
    load: Callable[[], "tuple[type[Sweep[Any, Any]], ExperimentReport[Any]]"],
    config: Any,
    out: Path,
    *,
    seconds: float | None = None,
    ray: str | None = None,
    workers: int = 1,
    side_by_side: int = 1,
    figures: Sequence[str] = ("png",),
) -> tuple[Any, Path | None]:
    """Results and page of an experiment; no page but for the first process.

    `load` imports the experiment and its report, which takes seconds. `config` has a `device`.
    """
    from whence.experiments.processes import named_device, processes
    from whence.experiments.progress import silent

    deadline = None if seconds is None else time.monotonic() + seconds
    first = processes()[0] == 0
    with ends_in_order(), progress_bar(left=True) if first else nullcontext(silent) as say:
        say("loading libraries", 0.0)
        import_module("transformers.trainer")
        from whence.bench.machine import machine
        from whence.experiments.sweep import run_sweep
        from whence.report.folder import check_folder

        sweep, report = load()
        check_folder(out)
        found = run_sweep(
            sweep,
            config,
            out,
            machine=machine(named_device(config.device).type),
            say=say,
            deadline=deadline,
            ray=ray,
            workers=workers,
            side_by_side=side_by_side,
        )
        if not first:
            return found, None
        say("drawing the page", 1.0)
        return found, report.write(found, out, formats=figures)


def print_tables(
    tables: Iterable["TextTable"],
    form: str,
    *,
    reasons: Sequence[str] = (),
    heading: Callable[[str], str] = str,
) -> None:
    """Tables as Markdown or LaTeX, or for a terminal with the reasons of empty cells.

    `heading` breaks the heading of a column into lines.
    """
    from whence.report.text_table import formatted

    if form != "text":
        typer.echo(formatted(tables, form))
        return
    console = plain_console()
    for found in tables:
        drawn = Table(
            box=box.SIMPLE,
            pad_edge=False,
            collapse_padding=True,
            padding=(0, 1, 0, 0),
            title=found.title or None,
            title_justify="left",
            caption=found.caption,
            caption_justify="left",
        )
        drawn.add_column(found.head[0], no_wrap=True)
        for text in found.head[1:]:
            drawn.add_column(heading(text), justify="right", no_wrap=True)
        for row in found.rows:
            drawn.add_row(*row)
        console.print(drawn)
    for line in reasons:
        console.print(line, soft_wrap=True)


def whole_numbers(text: str | None, option: str, *, such_as: str) -> tuple[int, ...] | None:
    """An option such as 0,1,3,5."""
    if text is None:
        return None
    pieces = [piece.strip() for piece in text.split(",")]
    require(
        all(piece.isdecimal() for piece in pieces),
        f"{option} takes whole numbers such as {such_as}, got {text!r}.",
    )
    return tuple(int(piece) for piece in pieces)


def learning_rates(text: str | None) -> tuple[float, ...] | None:
    """The option --learning-rate of several rates: 1e-3,2e-3."""
    if text is None:
        return None
    try:
        return tuple(float(piece) for piece in text.split(","))
    except ValueError:
        raise ValueError(
            f"--learning-rate takes numbers such as 1e-3,2e-3, got {text!r}."
        ) from None
