"""The commands of `whence`, put together."""

from typing import Annotated

from whence.extras import install

try:
    import rich as _rich  # noqa: F401  both are checked here, so that commands may rely on them
    import typer
except ImportError as error:
    raise ImportError(
        f"the command line needs {error.name}, which is not installed: {install('cli')}",
        name=error.name,
    ) from error

import whence
from whence.cli.bench import bench
from whence.cli.compare import compare_checkpoints
from whence.cli.criteria import criteria
from whence.cli.demo import demo
from whence.cli.distill import distill
from whence.cli.explain import explain
from whence.cli.glue import glue
from whence.cli.inspect import inspect
from whence.cli.lm import lm
from whence.cli.methods import methods
from whence.cli.params import params
from whence.cli.report import report
from whence.cli.translate import translate
from whence.cli.tune import tune
from whence.cli.whole_sentences import WholeSentences

# Plain help and errors: they stay greppable, and an error's last line says all of it.
app = typer.Typer(
    name="whence",
    help="Positional information in Transformers.",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command()(methods)
app.command()(explain)
app.command()(demo)
app.command()(criteria)
app.command()(params)
app.command()(inspect)
app.command()(compare_checkpoints)
app.command()(distill)
app.command()(report)
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
