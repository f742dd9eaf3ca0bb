"""The commands of `whence`, put together."""

from typing import Annotated

import typer

import whence
from whence.cli.bench import bench
from whence.cli.compare import compare_checkpoints
from whence.cli.criteria import criteria
from whence.cli.demo import demo
from whence.cli.distill import distill
from whence.cli.explain import explain
from whence.cli.explore import explore
from whence.cli.glue import glue
from whence.cli.inspect import inspect
from whence.cli.lm import lm
from whence.cli.methods import methods
from whence.cli.params import params
from whence.cli.report import report
from whence.cli.translate import translate
from whence.cli.tune import tune
from whence.cli.typer_app import empty_app
from whence.cli.whole_sentences import WholeSentences

app = empty_app()
app.command()(methods)
app.command()(explain)
app.command()(demo)
app.command()(criteria)
app.command()(params)
app.command()(inspect)
app.command()(compare_checkpoints)
app.command()(distill)
app.command()(report)
app.command()(explore)
app.command()(bench)
app.command()(tune)
app.command()(lm)
app.command()(glue)
app.command()(translate)


def _version(wanted: bool) -> bool:
    if wanted:
        typer.echo(f"whence {whence.__version__}")
        raise typer.Exit
    return wanted


@app.callback(cls=WholeSentences)
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Positional information in Transformers: what each method is, costs and does."""
