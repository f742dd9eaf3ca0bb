"""A table of text cells, which a terminal, a page, Markdown and LaTeX show alike."""

from collections.abc import Iterable
from dataclasses import dataclass

from whence.checks import one_of

FORMATS = ("markdown", "latex")
NONE = "–"  # noqa: RUF001
ESCAPED = str.maketrans(
    {
        "_": r"\_",
        "%": r"\%",
        "&": r"\&",
        "#": r"\#",
        "±": r"$\pm$",
        "Δ": r"$\Delta$",
        "−": "$-$",  # noqa: RUF001
        NONE: "--",
    }
)


@dataclass(frozen=True)
class TextTable:
    """Cells of text; `bold` are the places (row, column) that stand out.

    >>> table = TextTable("", ("method", "loss"), (("tisa", "2.5"),), frozenset({(0, 1)}), "One.")
    >>> print(markdown(table))
    | method | loss |
    | --- | ---: |
    | tisa | **2.5** |
    <BLANKLINE>
    One.
    """

    title: str  # "" where the caption says all
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    bold: frozenset[tuple[int, int]]
    caption: str
    code: bool = False  # the first column holds names of code


def formatted(tables: Iterable[TextTable], form: str) -> str:
    """All tables as Markdown, or as LaTeX for booktabs."""
    one_of("format", form, FORMATS)
    write = markdown if form == "markdown" else latex
    return "\n\n".join(write(table) for table in tables)


def markdown(table: TextTable) -> str:
    """A heading where the table has a title, the table and its caption."""
    heading = [f"### {table.title}", ""] if table.title else []
    lines = [_line(table.head), _line(("---", *["---:"] * (len(table.head) - 1)))]
    lines += [_line(cells) for cells in _marked(table, table.rows, code="`{}`", bold="**{}**")]
    return "\n".join([*heading, *lines, "", table.caption])


def latex(table: TextTable) -> str:
    """A table for booktabs."""
    plain = [tuple(text.translate(ESCAPED) for text in row) for row in table.rows]
    rows = _marked(table, plain, code=r"\texttt{{{}}}", bold=r"\textbf{{{}}}")
    caption = f"{table.title}. {table.caption}" if table.title else table.caption
    return "\n".join(
        [
            r"\begin{table}",
            r"\centering",
            rf"\begin{{tabular}}{{l{'r' * (len(table.head) - 1)}}}",
            r"\toprule",
            " & ".join(text.translate(ESCAPED) for text in table.head) + r" \\",
            r"\midrule",
            *(" & ".join(row) + r" \\" for row in rows),
            r"\bottomrule",
            r"\end{tabular}",
            rf"\caption{{{caption.translate(ESCAPED)}}}",
            r"\end{table}",
        ]
    )


def minus(text: str) -> str:
    """With the sign of a number in place of a hyphen."""
    return text.replace("-", "−")  # noqa: RUF001


def _marked(
    table: TextTable, rows: Iterable[tuple[str, ...]], *, code: str, bold: str
) -> list[tuple[str, ...]]:
    """The cells with their marks around them."""
    found = []
    for place, row in enumerate(rows):
        cells = [code.format(x) if table.code and c == 0 else x for c, x in enumerate(row)]
        marked = (bold.format(x) if (place, c) in table.bold else x for c, x in enumerate(cells))
        found.append(tuple(marked))
    return found


def _line(cells: tuple[str, ...]) -> str:
    return "| " + " | ".join(cells) + " |"
