"""`whence glue`: a pretrained model fine-tuned on GLUE with and without TISA (Table 3)."""

import time
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from whence.checks import one_of, require
from whence.cli.errors import one_line_errors
from whence.cli.progress import progress_bar
from whence.cli.unfinished import ends_in_order

if TYPE_CHECKING:
    from whence.analysis.glue_results import Glue

FORMATS = ("text", "markdown", "latex")


def glue(
    model: Annotated[
        str | None,
        typer.Option(metavar="FOLDER|NAME", help="Pretrained: a folder, or a name on the hub."),
    ] = None,
    tasks: Annotated[
        str | None, typer.Option(help="Of sst2,mnli,qqp,stsb,cola,mrpc,qnli,rte; all unless given.")
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(
            metavar="FOLDER|hub:NAME",
            help="A folder in the official layout, or a data set; hub:nyu-mll/glue unless given.",
        ),
    ] = None,
    position: Annotated[
        str | None, typer.Option(help="The method: tisa, or another with kernels.")
    ] = None,
    kernels: Annotated[
        str | None, typer.Option(help="Numbers of kernels; 0 is the baseline. 0,1,3,5 by default.")
    ] = None,
    drop_position_embeddings: Annotated[
        bool,
        typer.Option(
            "--drop-position-embeddings",
            help="Form (b): leave the model's own position embeddings out.",
        ),
    ] = False,
    forms: Annotated[
        str | None, typer.Option(metavar="a|b|a,b", help="Which forms; a,b runs both.")
    ] = None,
    start: Annotated[
        str | None,
        typer.Option(
            metavar="zero|local|released|distilled",
            help="Where kernels begin; zero unless given. distilled: fitted to the model's table.",
        ),
    ] = None,
    share: Annotated[
        bool | None, typer.Option("--share", help="One set of kernels for all layers.")
    ] = None,
    seeds: Annotated[
        str | None, typer.Option(help="Runs a cell, 5 by default. For some tasks: 5,sst2=3.")
    ] = None,
    epochs: Annotated[
        str | None, typer.Option(help="Passes over the rows, 3 by default. Or 3,sst2=1.")
    ] = None,
    batch: Annotated[
        str | None, typer.Option(help="Rows a step over all processes, 32. Or 32,sst2=64.")
    ] = None,
    learning_rate: Annotated[
        float | None, typer.Option(help="Of the pretrained weights, at its highest; 5e-5.")
    ] = None,
    position_rate: Annotated[
        float | None, typer.Option(help="Of the method's own parameters; 1.5e-3.")
    ] = None,
    warmup: Annotated[float | None, typer.Option(help="Share of the steps; 0.06.")] = None,
    weight_decay: Annotated[float | None, typer.Option(help="Of AdamW; 0.01.")] = None,
    max_length: Annotated[int | None, typer.Option(help="Tokens a row at most; 128.")] = None,
    bf16: Annotated[bool | None, typer.Option("--bf16/--no-bf16", help="Mixed precision.")] = None,
    tf32: Annotated[
        bool | None, typer.Option("--tf32/--no-tf32", help="Products in TF32 on a GPU.")
    ] = None,
    backend: Annotated[
        str | None, typer.Option(metavar="original|auto|...", help="As whence.hf.attach has it.")
    ] = None,
    device: Annotated[
        str | None, typer.Option(metavar="auto|cpu|cuda", help="A GPU if there is one.")
    ] = None,
    save_every: Annotated[
        int | None, typer.Option(help="Steps between checkpoints; none by default.")
    ] = None,
    config: Annotated[
        Path | None, typer.Option(metavar="TOML", help="Options by name; flags win over it.")
    ] = None,
    ray: Annotated[
        str | None,
        typer.Option(metavar="local|ADDRESS", help="Run jobs in parallel on a Ray cluster."),
    ] = None,
    workers: Annotated[
        int, typer.Option(help="Processes that share the device, each with one job at a time.")
    ] = 1,
    seconds: Annotated[
        float | None, typer.Option(help="End in order after this time; the same command goes on.")
    ] = None,
    form: Annotated[
        str, typer.Option("--format", metavar="|".join(FORMATS), help="Of the printed tables.")
    ] = "text",
    out: Annotated[
        Path, typer.Option(help="The folder for results and page; made if missing.")
    ] = Path("out/glue"),
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Fine-tune a pretrained model on GLUE with S kernels of TISA and without: Table 3.

    Every task in every form with every S and seed is a job of its own: one that is finished is not
    run again. The table has medians over seeds, their spread, and a paired test.
    """
    with one_line_errors("glue", "plot"):
        one_of("format", form, FORMATS)
        require(seconds is None or seconds > 0, f"--seconds must be positive, got {seconds}.")
        require(
            not (drop_position_embeddings and forms is not None),
            "--drop-position-embeddings is --forms b: give one of them.",
        )
        numbers, exceptions = _numbers({"seeds": seeds, "epochs": epochs, "batch": batch})
        flags: dict[str, Any] = {
            "model": model,
            "tasks": _names(tasks),
            "data": data,
            "position": position,
            "kernels": _kernels(kernels),
            "forms": ("b",) if drop_position_embeddings else _names(forms),
            "start": start,
            "share": share,
            **numbers,
            "exceptions": exceptions or None,
            "learning_rate": learning_rate,
            "position_rate": position_rate,
            "warmup": warmup,
            "weight_decay": weight_decay,
            "max_length": max_length,
            "bf16": bf16,
            "tf32": tf32,
            "backend": backend,
            "device": device,
            "save_every": save_every,
        }
        deadline = None if seconds is None else time.monotonic() + seconds
        found, page = _compared(config, flags, out, deadline=deadline, ray=ray, workers=workers)
    if page is None:
        return
    show(found, form=form, as_json=as_json)
    if not as_json:
        typer.echo(f"wrote {page}")


def _compared(
    config: Path | None,
    flags: dict[str, Any],
    out: Path,
    *,
    deadline: float | None,
    ray: str | None,
    workers: int,
) -> tuple["Glue", Path | None]:
    """Everything that the command does before it prints; no page but for the first process."""
    from whence.experiments.config import read_options, typed_config
    from whence.experiments.glue.config import GlueConfig
    from whence.experiments.processes import named_device, processes
    from whence.experiments.progress import silent

    options = read_options(config, flags)
    require("model" in options, "name the pretrained model: --model albert-base-v2, or a folder.")
    read = typed_config(GlueConfig, options, where=str(config))
    first = processes()[0] == 0
    with ends_in_order(), progress_bar(left=True) if first else nullcontext(silent) as say:
        say("loading libraries", 0.0)
        import_module("sklearn.metrics")  # which scores are made with, after the first training
        from whence.bench.machine import machine
        from whence.experiments.glue.sweep import run_glue
        from whence.report.folder import check_folder
        from whence.report.glue_folder import write_glue_report

        check_folder(out)
        found = run_glue(
            read,
            out,
            machine=machine(named_device(read.device).type),
            say=say,
            deadline=deadline,
            ray=ray,
            workers=workers,
        )
        if not first:
            return found, None
        say("drawing the page", 1.0)
        return found, write_glue_report(found, out)


def show(results: "Glue", *, form: str = "text", as_json: bool = False) -> None:
    """All tables, and why a job has no score."""
    from whence.report.glue_table import formatted, reasons, tables

    if as_json:
        typer.echo(results.to_json())
        return
    if form != "text":
        typer.echo(formatted(results, form))
        return
    console = Console(highlight=False, markup=False)
    for found in tables(results):
        drawn = Table(
            box=box.SIMPLE,
            pad_edge=False,
            collapse_padding=True,
            padding=(0, 1, 0, 0),
            title=found.title,
            title_justify="left",
            caption=found.caption,
            caption_justify="left",
        )
        drawn.add_column(found.head[0], no_wrap=True)
        for heading in found.head[1:]:
            drawn.add_column(heading, justify="right")
        for row in found.rows:
            drawn.add_row(*row)
        console.print(drawn)
    for line in reasons(results):
        console.print(line, soft_wrap=True)


def _names(text: str | None) -> tuple[str, ...] | None:
    return None if text is None else tuple(piece.strip() for piece in text.split(","))


def _kernels(text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    pieces = [piece.strip() for piece in text.split(",")]
    for piece in pieces:
        require(piece.isdigit(), f"--kernels takes whole numbers such as 0,1,3,5, got {text!r}.")
    return tuple(int(piece) for piece in pieces)


def _numbers(
    given: dict[str, str | None],
) -> tuple[dict[str, int | float | None], dict[str, dict[str, int | float]]]:
    """Options such as 3,sst2=1: the number for all tasks, and those of some."""
    numbers: dict[str, int | float | None] = {}
    exceptions: dict[str, dict[str, int | float]] = {}
    for name, text in given.items():
        numbers[name] = None
        for piece in (piece.strip() for piece in text.split(",")) if text is not None else ():
            task, separator, number = piece.rpartition("=")
            try:
                value: int | float = float(number) if name == "epochs" else int(number)
            except ValueError:
                raise ValueError(
                    f"--{name} takes a number, and others for some tasks, such as 3,sst2=1, got "
                    f"{text!r}."
                ) from None
            if separator:
                exceptions.setdefault(task, {})[name] = value
            else:
                numbers[name] = value
    return numbers, exceptions
