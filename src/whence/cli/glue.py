"""`whence glue`: a pretrained model fine-tuned on GLUE with and without TISA (Table 3)."""

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from whence.checks import require
from whence.cli.errors import one_line_errors
from whence.cli.experiment import (
    BF16Option,
    ConfigOption,
    DeviceOption,
    FormatOption,
    JsonOption,
    OutOption,
    RayOption,
    SecondsOption,
    WorkersOption,
    check_options,
    print_tables,
    run_experiment,
    whole_numbers,
)
from whence.cli.figures import FiguresOption

if TYPE_CHECKING:
    from whence.analysis.glue_results import Glue
    from whence.experiments.glue.config import GlueConfig
    from whence.experiments.glue.sweep import GlueSweep
    from whence.report.experiment_report import ExperimentReport


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
            help="Where kernels begin; zero unless given. distilled: fitted to the model's table, "
            "which wins back more of it in form (b).",
        ),
    ] = None,
    share: Annotated[
        bool | None,
        typer.Option("--share/--no-share", help="One set of kernels for all layers; no-share."),
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
    bf16: BF16Option = None,
    tf32: Annotated[
        bool | None, typer.Option("--tf32/--no-tf32", help="Products in TF32 on a GPU.")
    ] = None,
    backend: Annotated[
        str | None, typer.Option(metavar="original|auto|...", help="As whence.hf.attach has it.")
    ] = None,
    device: DeviceOption = None,
    save_every: Annotated[
        int | None, typer.Option(help="Steps between checkpoints; none by default.")
    ] = None,
    config: ConfigOption = None,
    ray: RayOption = None,
    workers: WorkersOption = 1,
    seconds: SecondsOption = None,
    form: FormatOption = "text",
    figures: FiguresOption = ["png"],  # noqa: B006  typer copies it
    out: OutOption = Path("out/glue"),
    as_json: JsonOption = False,
) -> None:
    """Fine-tune a pretrained model on GLUE with S kernels of TISA and without: Table 3.

    Every task in every form with every S and seed is a job of its own: one that is finished is not
    run again. The table has medians over seeds, their spread, and a paired test.
    """
    with one_line_errors("glue", "plot"):
        check_options(form, figures, seconds)
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
            "kernels": whole_numbers(kernels, "--kernels", such_as="0,1,3,5"),
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
        read = _read(config, flags)
        found, page = run_experiment(
            _load, read, out, seconds=seconds, ray=ray, workers=workers, figures=figures
        )
    if page is None:
        return
    show(found, form=form, as_json=as_json)
    if not as_json:
        typer.echo(f"wrote {page}")


def _read(config: Path | None, flags: dict[str, Any]) -> "GlueConfig":
    from whence.experiments.config import read_options, typed_config
    from whence.experiments.glue.config import GlueConfig

    options = read_options(config, flags)
    require("model" in options, "name the pretrained model: --model albert-base-v2, or a folder.")
    return typed_config(GlueConfig, options, where=str(config))


def _load() -> "tuple[type[GlueSweep], ExperimentReport[Glue]]":
    from whence.experiments.glue.sweep import GlueSweep
    from whence.report.glue_report import GLUE_REPORT

    import_module("sklearn.metrics")  # which scores are made with, after the first training
    return GlueSweep, GLUE_REPORT


def show(results: "Glue", *, form: str = "text", as_json: bool = False) -> None:
    """All tables, and why a job has no score."""
    from whence.report.glue_table import reasons, tables

    if as_json:
        typer.echo(results.to_json())
        return
    print_tables(tables(results), form, reasons=reasons(results))


def _names(text: str | None) -> tuple[str, ...] | None:
    return None if text is None else tuple(piece.strip() for piece in text.split(","))


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
