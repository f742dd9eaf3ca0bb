"""`whence methods`: every method, where it enters, what it costs and who published it; or one."""

import json
import re
import textwrap
from dataclasses import asdict
from typing import Annotated

import typer
from rich import box
from rich.table import Table

from whence.analysis import Entry, catalogue, entry
from whence.cli.console import plain_console
from whence.cli.errors import one_line_errors
from whence.cli.specs import read_spec


def methods(
    name: Annotated[
        str | None, typer.Argument(help="One method, for example tisa; all unless given.")
    ] = None,
    heads: Annotated[
        int, typer.Option(help="Heads of the layer whose parameters are counted.")
    ] = 12,
    d_head: Annotated[int, typer.Option(help="Size of a head.")] = 64,
    length: Annotated[int, typer.Option(help="Longest input, for tables of a fixed length.")] = 512,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
) -> None:
    """List every method, or show one: its formula, options, parameters in a layer, paper."""
    shape = f"{heads} heads of {d_head}, length {length}"
    with one_line_errors():
        if name is None:
            entries = catalogue(n_heads=heads, d_head=d_head, length=length)
        else:
            entries = (entry(read_spec(name), n_heads=heads, d_head=d_head, length=length),)
    if as_json:
        found = [asdict(each) for each in entries]
        shown = found if name is None else found[0]
        typer.echo(json.dumps(shown, indent=2, ensure_ascii=False))
    elif name is None:
        _print_table(entries, shape)
    else:
        _print_one(entries[0], shape)


def _print_table(entries: tuple[Entry, ...], shape: str) -> None:
    table = Table(box=box.SIMPLE, pad_edge=False)
    for title in ("method", "sites"):
        table.add_column(title, no_wrap=True)
    table.add_column("parameters", justify="right", no_wrap=True)
    table.add_column("by")
    for each in entries:
        count = "" if each.parameters is None else f"{each.parameters:,}"
        by = each.needs or each.paper.partition(", arXiv")[0]
        table.add_row(each.name, _sites(each), count, by)
    console = plain_console()
    console.print(table)
    console.print(f"Parameters of one layer: {shape}.")
    console.print("whence methods NAME: its formula, options with their defaults, and paper.")


def _print_one(found: Entry, shape: str) -> None:
    console = plain_console()
    console.print(found.summary)
    console.print(f"\n{_wrapped(found.description, console.width)}\n")
    facts = Table(box=None, show_header=False, pad_edge=False)
    facts.add_column(no_wrap=True)
    facts.add_column(overflow="fold")
    count = found.needs
    if found.parameters is not None:
        count = f"{found.parameters:,} in one layer ({shape}): {found.formula}"
    facts.add_row("parameters", count)
    facts.add_row("sites", _sites(found) + (" (causal only)" if found.causal_only else ""))
    facts.add_row("paper", found.paper or "none")
    facts.add_row("from the model", ", ".join(found.given) or "nothing")
    console.print(facts)
    if not found.options:
        console.print("options         none")
        return
    options = Table(box=box.SIMPLE, pad_edge=False)
    options.add_column("option", no_wrap=True)
    options.add_column("takes")
    options.add_column("default", no_wrap=True)
    for option in found.options:
        options.add_row(option.name, option.kind, option.default or "must be given")
    console.print(options)
    example = found.options[0]
    console.print(f"In a text: {found.name}:{example.name}={example.default or '...'}")


def _sites(found: Entry) -> str:
    return ", ".join(found.sites) or "none"


def _wrapped(description: str, width: int) -> str:
    """Paragraphs, indented by 2. In one that lists things in two columns each line stays one."""
    return "\n\n".join(_paragraph(text, width) for text in description.split("\n\n"))


def _paragraph(text: str, width: int) -> str:
    gap = r"\S {2,}(?=\S)"
    # A line that begins with a space belongs to the one before; in prose all lines do.
    joined = re.sub(r"\n +" if re.search(gap, text) else r"\s*\n\s*", " ", text)
    lines = []
    for line in joined.split("\n"):
        column = re.search(gap, line)
        hang = " " * (2 + (column.end() if column else 0))
        wrap = textwrap.TextWrapper(width, initial_indent="  ", subsequent_indent=hang)
        wrap.break_on_hyphens = False
        lines.append(wrap.fill(line))
    return "\n".join(lines)
