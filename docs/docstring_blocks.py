"""An extension of the API reference: examples and lists in docstrings keep their lines.

Our docstrings have doctests, some of them indented, and lists in two columns. Without this,
Markdown takes `>>>` at the start of a line for a quotation, and runs the lines of a list together.
"""

import re
import textwrap
from typing import Any

import griffe

COLUMNS = re.compile(r"\S {2,}\S")


def with_blocks(docstring: str) -> str:
    """The docstring with a fenced block for every doctest and every list in columns."""
    return "\n\n".join(map(_paragraph, docstring.split("\n\n")))


def _paragraph(text: str) -> str:
    example = text.lstrip().startswith(">>>")
    if not example and not COLUMNS.search(text):
        return text
    return f"```{'pycon' if example else 'text'}\n{textwrap.dedent(text)}\n```"


class DocstringBlocks(griffe.Extension):
    """Rewrites every docstring as it is collected."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """A module, class, function or attribute has been read."""
        if obj.docstring is not None:
            obj.docstring.value = with_blocks(obj.docstring.value)
