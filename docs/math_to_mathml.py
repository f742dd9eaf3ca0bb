"""A hook of the site: blocks of LaTeX become MathML, which browsers show without a script.

GitHub shows a fenced block of the language "math" as a formula by itself.
"""

import re

from latex2mathml.converter import convert

BLOCK = re.compile(r"^```math\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def on_page_markdown(markdown: str, **_: object) -> str:
    """The page with each formula as MathML, in a box of its own that scrolls if it is too wide."""
    return BLOCK.sub(lambda block: _formula(block[1].strip()), markdown)


def _formula(latex: str) -> str:
    return (
        f'<div style="overflow-x: auto; padding: 0.3em 0">{convert(latex, display="block")}</div>'
    )
