"""`whence bench`: time and memory of attention with every method, against its peers."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import torch
import typer
from rich import box
from rich.table import Table

from whence.checks import one_of, require
from whence.cli.console import plain_console
from whence.cli.errors import one_line_errors
from whence.cli.progress import progress_bar
from whence.cli.specs import read_specs
from whence.files import check_folder

if TYPE_CHECKING:
    from whence.bench.plan import Plan

DEVICES = ("cpu", "cuda")


def bench(
    methods: Annotated[
        str | None, typer.Option(help="For example tisa,shaw:clip=8, or all.", show_default=False)
    ] = None,
    backends: Annotated[
        str | None, typer.Option(help="Of attend: auto unless given.", show_default=False)
    ] = None,
    peers: Annotated[
        str | None,
        typer.Option(
            help="What to measure against, or none; all unless given.", show_default=False
        ),
    ] = None,
    modes: Annotated[
        str | None, typer.Option(metavar="forward,both,decode", help="All unless given.")
    ] = None,
    lengths: Annotated[str | None, typer.Option(help="Tokens, for example 512,2048.")] = None,
    head_sizes: Annotated[str | None, typer.Option(help="For example 64,128.")] = None,
    heads: Annotated[int | None, typer.Option(help="Heads; 12 unless given.")] = None,
    tokens: Annotated[
        int | None, typer.Option(help="Tokens a batch: a length's sequences times the length.")
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="bfloat16 on a GPU, float32 on a CPU unless given.")
    ] = None,
    causal: Annotated[bool, typer.Option("--causal", help="Only keys at lag <= 0.")] = False,
    device: Annotated[
        str | None,
        typer.Option(metavar="|".join(DEVICES), help="cuda where there is one, unless given."),
    ] = None,
    seconds: Annotated[
        float | None, typer.Option(help="Stop after this time; what was measured is kept.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="One method, two short lengths.")] = False,
    no_figures: Annotated[bool, typer.Option("--no-figures", help="Draw none.")] = False,
    out: Annotated[
        Path, typer.Option(help="The folder for bench.json and figures; made if missing.")
    ] = Path("out/bench"),
) -> None:
    """Measure time and peak memory of attention, forward, forward and backward, and decoding.

    A contender is timed after its output and gradients were found exact; one that is not, that does
    not fit or that fails has a record that says so. bench.json is written after every point.
    """
    with one_line_errors("plot"):
        from whence.bench import Session
        from whence.bench.plan import quick as quick_plan
        from whence.bench.plan import usual

        device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        one_of("device", device, DEVICES)
        require(
            device == "cpu" or torch.cuda.is_available(),
            "there is no NVIDIA GPU here: give --device cpu.",
        )
        require(seconds is None or seconds > 0, f"--seconds must be positive, got {seconds}.")
        plan = quick_plan(device) if quick else usual(device)
        given: dict[str, Any] = {
            "methods": None if methods is None else _methods(methods),
            "backends": _listed(backends),
            "peers": () if peers == "none" else _listed(peers),
            "modes": _listed(modes),
            "lengths": _numbers("--lengths", lengths),
            "head_sizes": _numbers("--head-sizes", head_sizes),
            "n_heads": heads,
            "tokens": tokens,
            "dtype": dtype,
            "causal": causal,
        }
        plan = replace(plan, **{name: value for name, value in given.items() if value is not None})
        if not no_figures:  # a missing extra and a bad folder show before the work
            from whence.report.figure_files import save_png
            from whence.report.speed import draw_speed
        check_folder(out)
        results = _measured(Session, plan, out / "bench.json", seconds)
        written = [out / "bench.json"]
        if not no_figures:
            for name, figure in draw_speed(results).items():
                written.append(save_png(figure, out / f"{name}.png", dpi=160))
    _print(results)
    for path in written:
        typer.echo(f"wrote {path}")


def _measured(session_of: Any, plan: "Plan", path: Path, seconds: float | None) -> dict[str, Any]:
    points = list(dict.fromkeys(plan.points()))
    session = session_of(path, device=plan.device, config=asdict(plan), seconds=seconds)
    with progress_bar() as say:
        for place, point in enumerate(points):
            say(str(point), place / len(points))
            if session.measure(point) is None:
                break
    if session.stopped is not None:
        left = len(points) - len(session.records)
        typer.echo(f"whence: {session.stopped}; {left} of {len(points)} points left out", err=True)
    session.save()
    results: dict[str, Any] = session.results()
    return results


def _methods(text: str) -> tuple[str, ...]:
    return read_specs(None if text == "all" else text)


def _listed(text: str | None) -> tuple[str, ...] | None:
    return None if text is None else tuple(piece.strip() for piece in text.split(","))


def _numbers(option: str, text: str | None) -> tuple[int, ...] | None:
    pieces = _listed(text)
    if pieces is None:
        return None
    for piece in pieces:
        require(piece.isdecimal(), f"{option} takes whole numbers such as 512,2048, got {text!r}.")
    return tuple(int(piece) for piece in pieces)


def _print(results: dict[str, Any]) -> None:
    console = plain_console()
    records = results["records"]
    groups = dict.fromkeys((r["mode"], r["d_head"], _batch(r)) for r in records)
    for mode, d_head, batch in groups:
        mine = [r for r in records if (r["mode"], r["d_head"], _batch(r)) == (mode, d_head, batch)]
        lengths = sorted({record["n"] for record in mine})
        sequences = "" if batch is None else f", {batch} sequences"
        table = Table(box=box.SIMPLE, pad_edge=False, title=f"{mode}, heads of {d_head}{sequences}")
        table.add_column("method")
        table.add_column("computed by")
        for n in lengths:
            table.add_column(f"n = {n:,}", justify="right", no_wrap=True)
        cells = {(r["method"], r["contender"], r["n"]): _cell(r) for r in mine}
        for method, name in dict.fromkeys((r["method"], r["contender"]) for r in mine):
            shown = [cells.get((method, name, n), "") for n in lengths]
            table.add_row("none" if method == "nope" else method, name, *shown)
        console.print(table)
    skipped = dict.fromkeys(
        f"{r['contender']}, {r['method']}: {r['skipped']}" for r in records if r["skipped"]
    )
    for line in skipped:
        console.print(f"left out: {line}", soft_wrap=True)


def _batch(record: dict[str, Any]) -> int | None:
    """Sequences, where they do not follow from the length."""
    batch: int = record["batch"]
    return batch if record["mode"] == "decode" else None


def _cell(record: dict[str, Any]) -> str:
    if record["ms"] is None:
        return "-"
    return f"{record['ms']['median']:,.2f} ms, {record['extra_bytes'] / 1e6:,.0f} MB"
