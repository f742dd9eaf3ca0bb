"""`whence params`: what position costs in a whole model, for every method."""

from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.table import Table

from whence.cli.console import plain_console
from whence.cli.errors import one_line_errors
from whence.cli.specs import read_specs

if TYPE_CHECKING:
    from whence.analysis.params import ParametersTable


def params(
    layers: Annotated[int, typer.Option(help="Layers of the model.")] = 12,
    heads: Annotated[int, typer.Option(help="Heads of a layer.")] = 12,
    d_head: Annotated[int, typer.Option(help="Size of a head.")] = 64,
    length: Annotated[int, typer.Option(help="Longest input, for tables of a fixed length.")] = 512,
    methods: Annotated[
        str | None, typer.Option(help="For example tisa,shaw:clip=8; all unless given.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Count the positional parameters of a whole model: formula, number and share of a BERT."""
    with one_line_errors():
        from whence.analysis.params import Shape, parameters_table  # NumPy is an extra

        specs = read_specs(methods, n_heads=heads, d_head=d_head)
        shape = Shape(n_layers=layers, n_heads=heads, d_head=d_head, length=length)
        table = parameters_table(specs, shape=shape)
    if as_json:
        typer.echo(table.to_json())
        return
    plain_console().print(_table(table))


def _table(found: "ParametersTable") -> Table:
    shape = found.shape
    table = Table(
        box=box.SIMPLE,
        caption=f"{shape.n_layers} layers, {shape.n_heads} heads of {shape.d_head}, length "
        f"{shape.length}. Share: of a BERT of this shape with the method in place of its own "
        f"positions ({shape.without_position():,} parameters without any).",
        caption_justify="left",
    )
    table.add_column("method", no_wrap=True)
    table.add_column("parameters", justify="right", no_wrap=True)
    table.add_column("share", justify="right", no_wrap=True)
    table.add_column("grows\nwith length", no_wrap=True)
    table.add_column("formula")
    for row in found.rows:
        if row.count is None or row.share is None:
            table.add_row(row.method, "", "", "", row.needs)
            continue
        share, grows = f"{100 * row.share:.2g}%", "yes" if row.grows else "no"
        table.add_row(row.method, f"{row.count:,}", share, grows, row.formula)
    return table
