"""Cells of a Markdown table by their row and column."""


def cell(table: str, column: str, *first: str) -> str:
    """The cell under a title, of the one row that begins with these cells."""
    lines = [line.strip("|").split("|") for line in table.splitlines() if line.startswith("|")]
    head, _, *rows = [[cell.strip() for cell in line] for line in lines]
    (row,) = (row for row in rows if row[: len(first)] == list(first))
    return row[head.index(column)]
