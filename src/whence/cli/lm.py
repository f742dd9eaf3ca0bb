"""`whence lm`: the same model trained with each method on the same data, and compared."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

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
    learning_rates,
    print_tables,
    run_experiment,
    whole_numbers,
)
from whence.cli.figures import FiguresOption
from whence.cli.specs import read_specs

if TYPE_CHECKING:
    from whence.analysis.lm_results import Language
    from whence.experiments.lm.sweep import LMSweep
    from whence.report.experiment_report import ExperimentReport


def lm(
    methods: Annotated[
        str | None, typer.Option(help="For example tisa:kernels=5,t5,rope.", show_default=False)
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(
            metavar="FILE|FOLDER|hub:NAME",
            help="A text in UTF-8, a data set, or a tokenized corpus (.safetensors).",
        ),
    ] = None,
    valid: Annotated[
        str | None,
        typer.Option(
            metavar="FILE|FOLDER|hub:NAME", help="To test on.", show_default="a tenth of the text"
        ),
    ] = None,
    text_column: Annotated[
        str | None, typer.Option(help="Of a data set.", show_default="text")
    ] = None,
    task: Annotated[
        str | None,
        typer.Option(metavar="copy|reverse|recall|back", help="In place of a text."),
    ] = None,
    distance: Annotated[
        int | None, typer.Option(help="Of the task back.", show_default="8")
    ] = None,
    objective: Annotated[
        str | None,
        typer.Option(
            metavar="causal|masked",
            help="Predict the next token, or tokens that are hidden.",
            show_default="causal",
        ),
    ] = None,
    seeds: Annotated[int | None, typer.Option(help="Runs a method.", show_default="1")] = None,
    train_length: Annotated[
        int | None, typer.Option(help="Tokens a sequence of training.", show_default="128")
    ] = None,
    eval_lengths: Annotated[
        str | None,
        typer.Option(
            help="To test at, for example 512,1024,2048.",
            show_default="1, 2 and 4 times --train-length",
        ),
    ] = None,
    eval_tokens: Annotated[
        int | None, typer.Option(help="Scored at each length, about.", show_default="16384")
    ] = None,
    vocab_size: Annotated[
        int | None, typer.Option(help="Of the byte-level BPE.", show_default="1024")
    ] = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="tokenizer.json of a run on the same data.",
            show_default="trained on the data",
        ),
    ] = None,
    layers: Annotated[
        int | None, typer.Option(help="Layers of the model.", show_default="4")
    ] = None,
    heads: Annotated[int | None, typer.Option(help="Heads of a layer.", show_default="4")] = None,
    d_model: Annotated[
        int | None, typer.Option(help="Width of the model.", show_default="128")
    ] = None,
    dropout: Annotated[
        float | None,
        typer.Option(help="Of the embedding and of each layer's output.", show_default="0.0"),
    ] = None,
    steps: Annotated[
        int | None, typer.Option(help="Steps of training.", show_default="200")
    ] = None,
    batch: Annotated[
        int | None, typer.Option(help="Sequences a step, over all processes.", show_default="16")
    ] = None,
    accumulate: Annotated[
        int | None, typer.Option(help="Passes that make up a step.", show_default="1")
    ] = None,
    learning_rate: Annotated[
        str | None,
        typer.Option(
            help="At its highest. Of several, 1e-3,2e-3, each method has its best.",
            show_default="0.001",
        ),
    ] = None,
    tuning_tokens: Annotated[
        int | None,
        typer.Option(
            help="By which one of several learning rates is chosen.", show_default="16384"
        ),
    ] = None,
    warmup: Annotated[
        int | None, typer.Option(help="Steps up to it; then a cosine.", show_default="20")
    ] = None,
    weight_decay: Annotated[
        float | None, typer.Option(help="Of AdamW.", show_default="0.1")
    ] = None,
    log_every: Annotated[
        int | None, typer.Option(help="Steps between looks at the loss.", show_default="10")
    ] = None,
    save_every: Annotated[
        int | None, typer.Option(help="Steps between checkpoints.", show_default="50")
    ] = None,
    bf16: BF16Option = None,
    compile_: Annotated[
        bool | None,
        typer.Option(
            "--compile/--no-compile", help="With torch.compile.", show_default="no-compile"
        ),
    ] = None,
    device: DeviceOption = None,
    fsdp: Annotated[
        bool | None,
        typer.Option(
            "--fsdp/--no-fsdp", help="With torchrun: cut up the weights.", show_default="no-fsdp"
        ),
    ] = None,
    keep_models: Annotated[
        bool | None,
        typer.Option(
            "--keep-models/--no-keep-models",
            help="Keep the trained weights.",
            show_default="no-keep-models",
        ),
    ] = None,
    config: ConfigOption = None,
    ray: RayOption = None,
    workers: WorkersOption = 1,
    side_by_side: Annotated[
        int, typer.Option(help="Jobs that share the device; with more than 1 no speed is shown.")
    ] = 1,
    seconds: SecondsOption = None,
    form: FormatOption = "text",
    figures: FiguresOption = ["png"],  # noqa: B006  typer copies it
    out: OutOption = Path("out/lm"),
    as_json: JsonOption = False,
) -> None:
    """Train the same model with each method on the same data, and rank the methods.

    Loss at each length, speed, memory, parameters, lag curves. Every run is a job of its own: one
    that is finished is not run again, one that was killed goes on from its last checkpoint and ends
    with the same numbers.
    """
    with one_line_errors("hf", "plot"):
        check_options(form, figures, seconds)
        flags: dict[str, Any] = {
            "methods": None if methods is None else read_specs(methods),
            "data": data,
            "valid": valid,
            "text_column": text_column,
            "task": task,
            "distance": distance,
            "objective": objective,
            "seeds": seeds,
            "train_length": train_length,
            "eval_lengths": whole_numbers(eval_lengths, "--eval-lengths", such_as="512,1024"),
            "eval_tokens": eval_tokens,
            "vocab_size": vocab_size,
            "tokenizer": tokenizer,
            "n_layers": layers,
            "n_heads": heads,
            "d_model": d_model,
            "dropout": dropout,
            "steps": steps,
            "batch": batch,
            "accumulate": accumulate,
            "learning_rates": learning_rates(learning_rate),
            "tuning_tokens": tuning_tokens,
            "warmup": warmup,
            "weight_decay": weight_decay,
            "log_every": log_every,
            "save_every": save_every,
            "bf16": bf16,
            "compile": compile_,
            "device": device,
            "fsdp": fsdp,
            "keep_models": keep_models,
        }
        found, page = compared(
            config,
            flags,
            out,
            seconds=seconds,
            ray=ray,
            workers=workers,
            side_by_side=side_by_side,
            figures=figures,
        )
    if page is None:
        return
    show(found, form=form, as_json=as_json)
    if not as_json:
        typer.echo(f"wrote {page}")


def compared(
    config: Path | None,
    flags: dict[str, Any],
    out: Path,
    *,
    seconds: float | None = None,
    ray: str | None = None,
    workers: int = 1,
    side_by_side: int = 1,
    figures: Sequence[str] = ("png",),
) -> tuple["Language", Path | None]:
    """Everything that the command does before it prints; no page but for the first process."""
    from whence.experiments.lm.config import read_config

    read = read_config(config, flags)
    read_specs(",".join(read.methods))
    return run_experiment(
        _load,
        read,
        out,
        seconds=seconds,
        ray=ray,
        workers=workers,
        side_by_side=side_by_side,
        figures=figures,
    )


def _load() -> "tuple[type[LMSweep], ExperimentReport[Language]]":
    from whence.experiments.lm.sweep import LMSweep
    from whence.report.lm_report import LM_REPORT

    return LMSweep, LM_REPORT


def show(results: "Language", *, form: str = "text", as_json: bool = False) -> None:
    """The ranking, and why a cell is empty."""
    from whence.analysis.lm_results import ranked
    from whence.report.lm_table import rank_table, reasons

    if as_json:
        rows = [json.loads(row.to_json()) for row in ranked(results)]
        typer.echo(json.dumps({"lengths": results.lengths, "rows": rows}, indent=1))
        return
    print_tables([rank_table(results)], form, reasons=reasons(results), heading=_in_two_lines)


def _in_two_lines(heading: str) -> str:
    return "\n".join(heading.replace("/s", " /s").rsplit(" ", 1))
