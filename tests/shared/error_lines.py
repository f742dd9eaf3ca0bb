"""A command that fails says so in one line; one of hours says before it how far it came."""

import re

from typer.testing import Result

LOG_LINE = re.compile(r" *\d+% .+; (\d+:)?\d+:\d\d gone(, (\d+:)?\d+:\d\d left)?")


def fails_with(result: Result, code: int, *phrases: str) -> None:
    """The code, nothing on stdout, and after lines of progress one line with all phrases."""
    assert result.exit_code == code, result.output
    assert result.stdout == ""
    *log, last = result.stderr.splitlines()
    for line in log:
        assert LOG_LINE.fullmatch(line), line
    assert last.startswith("whence: ")
    for phrase in phrases:
        assert phrase in last
