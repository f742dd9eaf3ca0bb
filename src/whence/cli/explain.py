"""`whence explain METHOD`: which backend would run it, and why not the others."""

import json
from dataclasses import asdict
from typing import Annotated

import torch
import typer
from rich import box
from rich.table import Table

from whence.analysis import Described, describe
from whence.checks import one_of
from whence.cli.console import plain_console
from whence.cli.errors import one_line_errors
from whence.cli.specs import read_spec

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
DEVICES = ("cpu", "cuda")


def explain(
    method: Annotated[str, typer.Argument(help="For example tisa, tisa:kernels=3 or tisa+alibi.")],
    length: Annotated[int, typer.Option(help="Tokens.")] = 8192,
    heads: Annotated[int, typer.Option(help="Query heads.")] = 12,
    kv_heads: Annotated[
        int | None, typer.Option(help="Key and value heads; as many as query heads unless given.")
    ] = None,
    d_head: Annotated[int, typer.Option(help="Size of a head.")] = 64,
    batch: Annotated[int, typer.Option(help="Sequences.")] = 1,
    device: Annotated[
        str, typer.Option(metavar="|".join(DEVICES), help="No such device is needed to ask.")
    ] = "cpu",
    dtype: Annotated[
        str, typer.Option(metavar="|".join(DTYPES), help="Of q, k and v.")
    ] = "float32",
    causal: Annotated[bool, typer.Option("--causal", help="Only keys at lag <= 0.")] = False,
    window: Annotated[int | None, typer.Option(help="Only keys at |lag| <= window.")] = None,
    dropout: Annotated[float, typer.Option(help="On the weights, in training.")] = 0.0,
    train: Annotated[bool, typer.Option(help="With gradients, or without.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Say which backend attention with METHOD would take, and what kind of term it adds.

    Nothing of the call is allocated, so any length and any device may be asked about.
    """
    with one_line_errors():
        one_of("device", device, DEVICES)
        one_of("dtype", dtype, DTYPES)
        method = read_spec(method)
        described = describe(
            method,
            length=length,
            n_heads=heads,
            n_kv_heads=kv_heads,
            d_head=d_head,
            batch=batch,
            device=device,
            dtype=DTYPES[dtype],
            causal=causal,
            window=window,
            dropout=dropout,
            train=train,
        )
    if as_json:
        typer.echo(json.dumps(_plain(method, described), indent=2, ensure_ascii=False))
    else:
        _print(method, described)


def _plain(method: str, described: Described) -> dict[str, object]:
    explanation = described.explanation
    names = ("backend", "runs", "why")
    return {
        "method": method,
        **{key: value for key, value in asdict(described).items() if key != "explanation"},
        "chosen": explanation.chosen,
        "backends": [dict(zip(names, row, strict=True)) for row in explanation.rows],
        "dense": explanation.dense,
    }


def _print(method: str, described: Described) -> None:
    console, explanation = plain_console(), described.explanation
    console.print(f"{method}: {described.parameters:,} parameters a layer")
    for term in described.terms or ("no term: position enters nowhere",):
        console.print(f"  {term}")
    table = Table(box=box.SIMPLE)
    for title in ("", "backend", "", "why"):
        table.add_column(title, no_wrap=title != "why")
    for name, runs, why in explanation.rows:
        table.add_row("->" if name == explanation.chosen else "", name, _verdict(runs), why)
    console.print(table)
    for caveat in described.caveats:
        console.print(f"  note: {caveat}")


def _verdict(runs: bool) -> str:
    return "runs" if runs else "refuses"
