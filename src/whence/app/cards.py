"""Pieces of the page as HTML: plots with their downloads, tables, notes and errors."""

import json
from collections.abc import Container, Sequence
from html import escape
from typing import Any

from whence.app.svg import Drawing


def plot_card(drawing: Drawing, *, name: str, look: str = "", choice: str = "") -> str:
    """A plot with links that save it as SVG, and its numbers as JSON and CSV.

    page.js makes the files from what lies in the page. `name` is that of the files. A click on a
    card with a `choice` chooses that.
    """
    data = json.dumps(
        {"title": drawing.title, "columns": drawing.columns, "rows": drawing.rows},
        separators=(",", ":"),
        allow_nan=False,
    )
    title = escape(drawing.title, quote=True)
    links = "".join(
        f"<button type='button' data-save='{kind}' aria-label='{title} as {kind}'>{kind.upper()}"
        "</button>"
        for kind in ("svg", "json", "csv")
    )
    chosen = f" data-choice='{escape(choice, quote=True)}' tabindex='0'" if choice else ""
    return (
        f"<figure class='card {look}' data-name='{escape(name, quote=True)}'{chosen}>"
        f"{drawing.svg}<figcaption>{links}</figcaption>"
        f"<template class='numbers'>{escape(data)}</template></figure>"
    )


def cards(*parts: str, look: str = "") -> str:
    """Cards side by side where there is room."""
    return f"<div class='cards {look}'>{''.join(parts)}</div>"


def table(
    columns: Sequence[str],
    rows: Sequence[Sequence[Any]],
    *,
    name: str,
    bold: Container[tuple[int, int]] = (),
) -> str:
    """A table that scrolls by itself where it is wider than the window, with its downloads.

    `bold` has the places (row, column) that stand out.
    """
    head = "".join(f"<th>{escape(str(column))}</th>" for column in columns)
    body = "".join(
        "<tr>"
        + "".join(
            f"<td{' class=best' if (y, x) in bold else ''}>{escape(_shown(cell))}</td>"
            for x, cell in enumerate(row)
        )
        + "</tr>"
        for y, row in enumerate(rows)
    )
    data = json.dumps({"title": name, "columns": list(columns), "rows": rows}, default=str)
    links = "".join(
        f"<button type='button' data-save='{kind}'>{kind.upper()}</button>"
        for kind in ("json", "csv")
    )
    return (
        f"<figure class='card listed' data-name='{escape(name, quote=True)}'>"
        f"<div class='scroll'><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
        f"</div><figcaption>{links}</figcaption>"
        f"<template class='numbers'>{escape(data)}</template></figure>"
    )


def note(text: str) -> str:
    """A line of small print."""
    return f"<p class='note'>{escape(text)}</p>"


def problem(text: str) -> str:
    """What is wrong with what the user asked for, in place of what was asked for."""
    return f"<p class='problem' role='alert'>{escape(text)}</p>"


def _shown(cell: Any) -> str:
    if cell is None:
        return "\N{EN DASH}"
    if isinstance(cell, bool):
        return "yes" if cell else "no"
    if isinstance(cell, float):
        return f"{cell:,.4g}"
    if isinstance(cell, int):
        return f"{cell:,}"
    return str(cell)
