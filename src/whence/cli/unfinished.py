"""A sweep that ends before all is done says so in one line, and that the same command goes on."""

from collections.abc import Iterator
from contextlib import contextmanager

import typer

from whence.cli.errors import FAILED

UNFINISHED, INTERRUPTED = 3, 130  # exit codes; the second is what shells give after Ctrl-C


@contextmanager
def ends_in_order() -> Iterator[None]:
    """Exit with a line and a code where the time is spent, jobs failed, or Ctrl-C was pressed."""
    from whence.experiments.progress import JobsFailedError, OutOfTimeError

    try:
        yield
    except OutOfTimeError as error:
        typer.echo(f"whence: the time given is spent, {error}; the same command goes on", err=True)
        raise SystemExit(UNFINISHED) from None
    except JobsFailedError as error:
        typer.echo(f"whence: {error}; the same command tries them again", err=True)
        raise SystemExit(FAILED) from None
    except KeyboardInterrupt:
        typer.echo("whence: interrupted; the same command goes on", err=True)
        raise SystemExit(INTERRUPTED) from None
