"""A progress bar on stderr, for a person: in a pipe there is none."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn


@contextmanager
def progress_bar() -> Iterator[Callable[[str, float], None]]:
    """A function of what is being done and the share of all that is done; the bar goes at the end.

    It must be gone before an error is printed, so errors are caught outside of it.
    """
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TimeElapsedColumn())
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task("", total=1.0)

        def say(what: str, share: float) -> None:
            bar.update(task, description=what, completed=share)

        yield say
