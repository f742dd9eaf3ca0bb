"""`whence criteria`: Table 1 of the slides, measured on the code, beside the slides' ticks."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import torch
import typer
from rich import box
from rich.console import Console
from rich.progress import track
from rich.table import Table

from whence.checks import fits_memory
from whence.cli.console import plain_console
from whence.cli.errors import one_line_errors
from whence.cli.specs import read_specs
from whence.files import check_folder
from whence.methods import build

if TYPE_CHECKING:
    from whence.analysis.criteria import CriteriaReport, Criterion

HEADINGS = {  # in short lines, so that a table fits 80 columns
    "inductive": "induc-\ntive",
    "data-driven": "data-\ndriven",
    "parameter efficient": "parameter\nefficient",
    "translation invariant": "trans-\nlation\ninvariant",
    "parallelizable": "parallel-\nizable",
    "interpretable": "inter-\npretable",
}
MARKS = {True: "✓", False: "✗", None: "-"}


def criteria(
    methods: Annotated[
        str | None, typer.Option(help="For example tisa,shaw:clip=8; all unless given.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Also write the results to this JSON file.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Measure the six criteria of Table 1 on every method, and say where the slides differ."""
    with one_line_errors():
        from whence.analysis.criteria import criteria as measure  # NumPy is an extra

        specs = read_specs(methods)
        for spec in specs:
            _check_memory(spec)
        if out is not None:
            check_folder(out.parent)
        console = Console(stderr=True)
        quiet = not console.is_terminal
        report = measure(track(specs, "measuring", console=console, transient=True, disable=quiet))
        if out is not None:
            report.save(out)
    for method, needs in report.left_out.items():
        typer.echo(f"whence: left out {method}: {needs}", err=True)
    if as_json:
        typer.echo(report.to_json())
    else:
        _print(report)


def _check_memory(spec: str) -> None:
    """Raise where this machine could not hold the parameters: the system would kill the command."""
    from whence.analysis.probes import D_HEAD, HEADS

    try:
        with torch.device("meta"):
            count = build(spec, n_heads=HEADS, d_head=D_HEAD).n_parameters()
    except ImportError:
        return  # it is left out of the table
    fits_memory(spec, count, bytes_each=32)  # float64, their gradients, and both once more


def _print(report: "CriteriaReport") -> None:
    console = plain_console()
    narrow = console.width < 100
    table = Table(box=box.SIMPLE, pad_edge=False, padding=(0, 0 if narrow else 1))
    table.add_column("method", no_wrap=True)
    for name in report.rules:
        heading = HEADINGS[name]
        # No word of a heading or cell may be cut: a row takes more lines instead.
        table.add_column(heading, min_width=max(map(len, heading.split("\n"))), overflow="fold")
    table.add_column("time", justify="right", no_wrap=True)
    for row in report.rows:
        cells = [_cell(cell) for cell in row.criteria]
        table.add_row(row.method, *cells, f"{row.time:.1f}x")
    console.print(table)
    console.print("In brackets what the slides say, and ! where it differs.\n")
    for name, rule in report.rules.items():
        console.print(f"{name}: {rule}")
    console.print(
        "time: of attention with it, over attention without position, on one thread here."
    )
    differences = report.differences()
    if differences:
        console.print("\nWhere the slides say otherwise:")
    for method, cell in differences:
        console.print(f"  {method}, {cell.name}: {cell.why}")


def _cell(cell: "Criterion") -> str:
    shown = f"{MARKS[cell.verdict]} {cell.text}"
    if cell.slides is None:
        return shown
    return f"{shown} ({MARKS[cell.slides]}{'!' if cell.differs else ''})"
