"""The command line: `whence`. Its own dependencies are an extra, so they are imported on call."""

import io
import sys


def main() -> None:
    """Run the command line, or say in one line which extra it needs."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a name may hold what the terminal cannot show
            stream.reconfigure(errors="backslashreplace")
    try:
        from whence.cli.errors import last_resort, one_line_errors
        from whence.cli.typer_app import empty_app

        if sys.argv[1:2] == ["explore"]:
            # Its page is to be there within seconds, and the other commands import torch.
            from whence.cli.explore import explore

            app = empty_app()
            app.command()(explore)
            app.callback()(lambda: None)
        else:
            from whence.cli.root import app
    except ImportError as error:
        print(f"whence: {error}", file=sys.stderr)
        raise SystemExit(1) from None
    with last_resort(), one_line_errors():
        app(prog_name="whence")
