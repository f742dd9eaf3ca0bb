"""An empty command line, to which commands are added; what it needs is checked here."""

from whence.extras import install

try:
    import rich as _rich  # noqa: F401  both are checked here, so that commands may rely on them
    import typer
except ImportError as error:
    raise ImportError(
        f"the command line needs {error.name}, which is not installed: {install('cli')}",
        name=error.name,
    ) from error


def empty_app() -> typer.Typer:
    """Plain help and errors: they stay greppable, and an error's last line says all of it."""
    return typer.Typer(
        name="whence",
        help="Positional information in Transformers.",
        add_completion=False,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
    )
