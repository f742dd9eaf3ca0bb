"""`whence distill MODEL --to tisa:kernels=5 --out DIR`: a table's positions as TISA kernels."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.table import Table

from whence.checks import one_of, require
from whence.cli.console import plain_console
from whence.cli.errors import one_line_errors
from whence.cli.inspect import read_text
from whence.cli.progress import progress_bar

if TYPE_CHECKING:
    from whence.distill.results import Distillation

TASKS = ("stsb",)


def distill(
    model: Annotated[str, typer.Argument(help="A folder, or a name on the hub.")],
    out: Annotated[Path, typer.Option(help="The folder for the model; must not exist.")],
    to: Annotated[
        str, typer.Option(help="The method in place of the table: tisa with its kernels.")
    ] = "tisa:kernels=5",
    text: Annotated[
        Path | None,
        typer.Option(help="Unlabelled text, a sequence a line; a built-in one unless given."),
    ] = None,
    steps: Annotated[
        int, typer.Option(help="Tune the kernels for so many steps of 32 sequences.")
    ] = 0,
    train: Annotated[
        str, typer.Option(metavar="position|all", help="Tune the kernels alone, or all weights.")
    ] = "position",
    rows: Annotated[
        str,
        typer.Option(
            metavar="special|mean|none",
            help="Move mean rows of the table into the words: each special token's own, one for "
            "all, or none.",
        ),
    ] = "special",
    keep_table: Annotated[
        bool,
        typer.Option(
            "--keep-table", help="Keep the table, and the fitted kernels beside it at amplitude 0."
        ),
    ] = False,
    task: Annotated[
        str | None, typer.Option(metavar="stsb", help="Also measure on a task: its dev set.")
    ] = None,
    data: Annotated[Path | None, typer.Option(help="The folder of the task: GLUE's STS-B.")] = None,
    max_length: Annotated[int, typer.Option(help="Tokens that a line is cut at.")] = 256,
    seed: Annotated[int, typer.Option(help="Of the order of the text.")] = 0,
    force: Annotated[
        bool, typer.Option("--force", help="Replace OUT if an earlier distill wrote it.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON instead of tables; curves stay in OUT.")
    ] = False,
) -> None:
    """Fit TISA to the positional attention of MODEL, in its table's place, and say how close it is.

    OUT loads with whence.hf.from_pretrained or, after `import whence`, with transformers' Auto
    classes, and takes input longer than the table. It appears when all is done, or not at all.
    """
    with one_line_errors("analysis", "hf"):
        require(
            (task is None) == (data is None),
            "--task and --data belong together: --task stsb --data glue/STS-B.",
        )
        if task is not None:
            one_of("task", task, TASKS)
        words = None if text is None else read_text(text)
        with progress_bar() as say:
            from whence.distill.distilling import Plan
            from whence.distill.distilling import distill as run
            from whence.distill.stsb import read_pairs

            found = run(
                model,
                out,
                Plan(
                    to=to,
                    rows=rows,
                    keep_table=keep_table,
                    steps=steps,
                    train=train,
                    length=max_length,
                    seed=seed,
                ),
                text=words,
                source=str(text),
                task=None if data is None else read_pairs(data),
                task_name=task,
                force=force,
                progress=say,
            )
    if as_json:
        typer.echo(json.dumps({"out": str(out), **numbers(found)}, indent=1, ensure_ascii=False))
        return
    print_stages(found)
    typer.echo(f"wrote {out}")


def numbers(found: "Distillation") -> dict[str, object]:
    """The result without curves and fits."""
    data = json.loads(found.to_json())
    return {key: value for key, value in data.items() if key not in ("curves", "fits")}


def print_stages(found: "Distillation") -> None:
    """A row a stage: cosine of hidden states layer by layer, and the score."""
    from whence.distill.results import STAGES

    console = plain_console()
    text = found.text
    console.print(
        f"{found.model}: {found.position}, {found.n_parameters:,} parameters; fitted to "
        f"{text.fitted_tokens:,} tokens of {text.source}, measured on {text.held_out_tokens:,} "
        "others",
        soft_wrap=True,
    )
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("cosine with the original", no_wrap=True)
    last = len(found.stages[0].closeness.cosine) - 1
    shown = sorted({1, (last + 1) // 2, last})
    for layer in shown:
        table.add_column(f"layer {layer - 1}", justify="right", no_wrap=True)
    table.add_column("pooled", justify="right", no_wrap=True)
    if found.task is not None:
        table.add_column(found.task, justify="right", no_wrap=True)
        table.add_column("change", justify="right", no_wrap=True)
    start = found.stages[0].score
    for stage in found.stages:
        near = stage.closeness
        cells = [STAGES[stage.name], *(f"{near.cosine[layer]:.3f}" for layer in shown)]
        cells.append(f"{near.pooled:.3f}")
        if stage.score is not None and start is not None:
            cells += [f"{stage.score:.2f}", f"{stage.score - start:+.2f}"]
        table.add_row(*cells)
    console.print(table)
    for note in found.notes:
        console.print(f"note: {note}", soft_wrap=True)
