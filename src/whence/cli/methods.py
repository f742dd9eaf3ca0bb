"""`whence methods`: every method, where it enters, what it costs and who published it."""

import json
from dataclasses import asdict
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from whence.analysis import Entry, catalogue
from whence.cli.errors import one_line_errors


def methods(
    heads: Annotated[
        int, typer.Option(help="Heads of the layer whose parameters are counted.")
    ] = 12,
    d_head: Annotated[int, typer.Option(help="Size of a head.")] = 64,
    length: Annotated[int, typer.Option(help="Longest input, for tables of a fixed length.")] = 512,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """List every method: its sites, its parameters in one layer, its paper."""
    with one_line_errors():
        entries = catalogue(n_heads=heads, d_head=d_head, length=length)
    if as_json:
        typer.echo(json.dumps([asdict(entry) for entry in entries], indent=2, ensure_ascii=False))
        return
    Console().print(_table(entries, f"{heads} heads of {d_head}, length {length}"))


def _table(entries: tuple[Entry, ...], shape: str) -> Table:
    table = Table(
        box=box.SIMPLE, caption=f"Parameters of one layer: {shape}.", caption_justify="left"
    )
    for title in ("method", "sites"):
        table.add_column(title, no_wrap=True)
    table.add_column("parameters", justify="right", no_wrap=True)
    table.add_column("formula")
    table.add_column("paper")
    for entry in entries:
        count = entry.needs if entry.parameters is None else f"{entry.parameters:,}"
        table.add_row(
            entry.name, ", ".join(entry.sites) or "none", count, entry.formula, entry.paper
        )
    return table
