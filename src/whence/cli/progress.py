"""How far a command is, on stderr: a bar in a terminal, lines in a log file."""

import contextlib
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
)
from rich.text import Text

INTERVAL = 30.0  # seconds between two lines of a log that say the same
SOON = 2.0  # seconds after which the time left can be told

Say = Callable[[str, float], None]


@contextmanager
def progress_bar(*, left: bool = False) -> Iterator[Say]:
    """A function of what is being done and the share of all that is done; the bar goes at the end.

    With `left` the command is one of hours: it shows the time left besides, and without a terminal
    it writes lines. The bar must be gone before an error is printed, so errors are caught outside
    of it.
    """
    console = Console(stderr=True)
    if left and not console.is_terminal:
        with _warnings_as_lines(console):
            yield _Log(console)
        return
    clock = Clock()
    time_column: ProgressColumn = _ClockColumn(clock) if left else TimeElapsedColumn()
    columns = [TextColumn("{task.description}", markup=False), BarColumn(), time_column]
    shown = _warnings_as_lines(console) if left else contextlib.nullcontext()
    with (
        shown,
        Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar,
    ):
        task = bar.add_task("", total=1.0)

        def say(what: str, share: float) -> None:
            clock.at(share)
            bar.update(task, description=what, completed=share)

        yield say


class Clock:
    """The time gone and the time left, told from the share that was done since the first report.

    A run that goes on begins at a share of its own, which took no time now.
    """

    def __init__(self) -> None:
        self.start = time.monotonic()
        self.first: tuple[float, float] | None = None  # when, and the share by then
        self.share = 0.0

    def at(self, share: float) -> None:
        """Note the share that is done by now."""
        self.share = share
        if self.first is None and share > 0:
            self.first = time.monotonic(), share

    def __str__(self) -> str:
        now = time.monotonic()
        gone = f"{duration(now - self.start)} gone"
        if self.first is None:
            return gone
        took, done = now - self.first[0], self.share - self.first[1]
        if took < SOON or done <= 0:
            return gone
        return f"{gone}, {duration(took / done * (1 - self.share))} left"


def duration(seconds: float) -> str:
    """Minutes and seconds, or hours, minutes and seconds."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


class _ClockColumn(ProgressColumn):
    max_refresh = 0.5

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.clock = clock

    def render(self, task: Task) -> Text:
        return Text(str(self.clock))


class _Log:
    """A line for each new thing that is done, and now and then for one that takes long.

    A remark in parentheses at the end, such as a loss, makes no new line by itself.
    """

    def __init__(self, console: Console) -> None:
        self.console, self.clock = console, Clock()
        self.what, self.last = "", 0.0

    def __call__(self, what: str, share: float) -> None:
        self.clock.at(share)
        head, now = what.partition(" (")[0], time.monotonic()
        if head != self.what or now - self.last > INTERVAL:
            self.what, self.last = head, now
            line(self.console, f"{share:4.0%} {what}; {self.clock}")


def line(console: Console, text: str) -> None:
    """One line, however long, without colours, and at once."""
    console.print(text, soft_wrap=True, markup=False, highlight=False, emoji=False)
    console.file.flush()


@contextmanager
def _warnings_as_lines(console: Console) -> Iterator[None]:
    """What whence itself warns of is one line; warnings of others are shown as ever."""
    with warnings.catch_warnings():
        others = warnings.showwarning

        def show(message: Warning | str, category: type[Warning], *where: Any) -> None:
            if category.__module__.startswith("whence."):
                line(console, f"whence: {message}")
            else:
                others(message, category, *where)

        warnings.showwarning = show  # type: ignore[assignment]
        yield
