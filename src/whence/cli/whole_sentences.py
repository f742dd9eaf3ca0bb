"""The list of commands in `whence --help`, each with its whole first sentence."""

from typing import Any

from typer.core import TyperGroup

WHOLE = 1000  # characters; click's own limit cuts a sentence in the middle


class WholeSentences(TyperGroup):
    """Commands whose first sentences are wrapped and not cut off."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the names and sentences, in the order in which commands were added.

        The arguments are of classes of click, which newer versions of typer carry in themselves.
        """
        rows = [
            (name, command.get_short_help_str(WHOLE))
            for name, command in self.commands.items()
            if not command.hidden
        ]
        with formatter.section("Commands"):
            formatter.write_dl(rows)
