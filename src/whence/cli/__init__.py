"""The command line: `whence`. Its own dependencies are an extra, so they are imported on call."""

import sys


def main() -> None:
    """Run the command line, or say in one line which extra it needs."""
    try:
        from whence.cli.root import app
    except ImportError as error:
        print(f"whence: {error}", file=sys.stderr)
        raise SystemExit(1) from None
    app(prog_name="whence")
