"""The console that tables are printed on: text stays as it is."""

from rich.console import Console


def plain_console() -> Console:
    """Without markup, colours of numbers and emoji: "my_module:Wave:waves=3" is no 👋."""
    return Console(markup=False, highlight=False, emoji=False)
