"""A progress bar on stderr, for a person: in a pipe there is none."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)


@contextmanager
def progress_bar(*, left: bool = False) -> Iterator[Callable[[str, float], None]]:
    """A function of what is being done and the share of all that is done; the bar goes at the end.

    With `left` it shows the time left besides. It must be gone before an error is printed, so
    errors are caught outside of it.
    """
    console = Console(stderr=True)
    columns: list[ProgressColumn] = [TextColumn("{task.description}", markup=False), BarColumn()]
    columns += [TimeElapsedColumn()]
    if left:
        columns += [TextColumn("left"), TimeRemainingColumn(elapsed_when_finished=False)]
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task("", total=1.0)

        def say(what: str, share: float) -> None:
            bar.update(task, description=what, completed=share)

        yield say
