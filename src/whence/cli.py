"""The command line: `whence`."""


def main() -> None:
    """Run the command line."""
