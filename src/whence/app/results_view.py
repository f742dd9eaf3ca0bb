"""The tab *Results*: the files of a results folder as tables and plots.

A file of a kind that whence writes is read by its strict reader. In other JSON every list of
records is a table, and records with times at several lengths are plotted.
"""

from collections.abc import Callable, Iterator
from html import escape
from itertools import groupby
from pathlib import Path
from typing import Any

from whence.analysis.criteria import CriteriaReport
from whence.analysis.glue_results import Glue
from whence.analysis.json_result import Result, kind_of, read_json
from whence.analysis.lm_results import Language, ranked
from whence.analysis.translation_results import Translation
from whence.app.cards import cards, note, plot_card, problem, table
from whence.app.svg import Line, draw_lines, draw_ranking
from whence.checks import require
from whence.colours import SERIES
from whence.report.checked import check_parts
from whence.report.text_table import TextTable

MOST_FILES, MOST_BYTES, MOST_ROWS, MOST_PLOTS = 300, 50_000_000, 200, 8


def result_names(folder: Path) -> list[str]:
    """The JSON files of a folder and of those in it, as paths from it."""
    require(
        folder.is_dir(),
        f"there is no folder {folder}: start whence explore with --results, or run a command that "
        "writes results, such as whence lm.",
    )
    paths = sorted(path for path in folder.rglob("*.json") if path.is_file())
    found = [path.relative_to(folder).as_posix() for path in paths[:MOST_FILES]]
    require(bool(found), f"there are no JSON files in {folder}.")
    return sorted(found, key=lambda name: (not name.endswith("/lm.json"), name))


def shown(folder: Path, name: str) -> str:
    """One file; whatever is wrong with it is said in its place."""
    require(bool(name), "there is no result to show.")
    base = folder.resolve()
    path = (base / name).resolve()
    require(path.is_relative_to(base), f"{name} is outside of {folder}.")
    require(path.is_file(), f"{name} is no longer in {folder}: read the folder again.")
    require(path.stat().st_size <= MOST_BYTES, f"{name} is too large to be shown here.")
    data = read_json(path)
    views: dict[str, tuple[type[Result], Callable[[Any], str]]] = {
        "Language": (Language, _language),
        "Glue": (Glue, _glue),
        "Translation": (Translation, _translation),
        "CriteriaReport": (CriteriaReport, _criteria),
    }
    kind = kind_of(data)
    if kind not in views:
        return _any(data, name)
    reader, view = views[kind]
    result = reader.from_data(data)
    check_parts(result)
    return view(result)


def _language(results: Language) -> str:
    from whence.report.lm_table import rank_table

    rows, lengths = ranked(results), results.lengths
    lines = []
    for place, row in enumerate(rows):
        colour, _, dash = SERIES[place % len(SERIES)]
        known = [
            (n, found) for n, found in zip(lengths, row.scratch, strict=True) if found is not None
        ]
        if known:
            y = [found.mean for _, found in known]
            lines.append(Line(row.method, [n for n, _ in known], y, colour, dash, markers=True))
    parts = []
    if lines:
        trained = int(results.config["train_length"])
        loss = draw_lines(
            lines,
            title="Loss by length, from scratch",
            detail=f"trained at {trained:,} tokens",
            x_name="tokens",
            y_name="nats a token",
            log_x=True,
            height=330,
            x_ticks=lengths,
            tick_names=[f"{n:,}" for n in lengths],
        )
        parts.append(plot_card(loss, name="loss-by-length"))
        home = lengths.index(trained)
        first = [(row.method, row.scratch[home]) for row in rows]
        bars = [(method, found) for method, found in first if found is not None]
        parts.append(
            plot_card(
                draw_ranking(
                    [method for method, _ in bars],
                    [found.mean for _, found in bars],
                    spreads=[found.spread for _, found in bars],
                    title=f"Loss at {trained:,} tokens",
                    detail="whisker: one standard deviation over seeds",
                    x_name="nats a token",
                ),
                name="loss-at-training-length",
            )
        )
    parts += _training_curves(results)
    return cards(*parts) + _listed(rank_table(results), name="methods")


def _training_curves(results: Language) -> Iterator[str]:
    lines: list[Line] = []
    seen: set[str] = set()
    for job in results.jobs:
        if job.method in seen or not len(job.steps):
            continue
        colour, _, dash = SERIES[len(seen) % len(SERIES)]
        seen.add(job.method)
        lines.append(Line(job.method, job.steps, job.train_loss, colour, dash, width=1.2))
    if lines:
        drawing = draw_lines(
            lines,
            title="Training loss, one seed a method",
            x_name="step",
            y_name="nats a token",
            height=330,
        )
        yield plot_card(drawing, name="training")


def _glue(results: Glue) -> str:
    from whence.analysis.glue_results import table as rows_of
    from whence.report.glue_table import tables

    parts = []
    for form, rows in groupby(rows_of(results), key=lambda row: row.form):
        names, values, spreads = [], [], []
        for row in rows:
            columns = [("0", row.baseline), *zip(map(str, results.kernels), row.cells, strict=True)]
            for count, cell in columns:
                if cell is not None:
                    names.append(f"{row.task}, S = {count}")
                    values.append(cell.median)
                    spreads.append(cell.spread)
        if names:
            drawing = draw_ranking(
                names,
                values,
                spreads=spreads,
                title=f"GLUE, form ({form})",
                detail="median over seeds; S = 0 is the baseline",
                x_name="score",
            )
            parts.append(plot_card(drawing, name=f"glue-{form}"))
    return cards(*parts) + "".join(map(_listed, tables(results)))


def _translation(results: Translation) -> str:
    from whence.report.translation_table import tables

    parts = []
    for test in results.tests:
        cells = [(position, results.cell(position, test)) for position in results.positions]
        known = [(position, cell) for position, cell in cells if cell is not None]
        if known:
            drawing = draw_ranking(
                [position for position, _ in known],
                [cell.mean for _, cell in known],
                spreads=[cell.spread for _, cell in known],
                title=f"BLEU on {test}",
                detail="mean over seeds; whisker: one standard deviation",
                x_name="BLEU",
            )
            parts.append(plot_card(drawing, name=f"bleu-{test}"))
    lines = []
    for place, position in enumerate(results.positions):
        colour, _, dash = SERIES[place % len(SERIES)]
        job = results.chosen(position)[0]
        if len(job.steps):
            lines.append(Line(position, job.steps, job.train_loss, colour, dash, width=1.2))
    if lines:
        drawing = draw_lines(
            lines,
            title="Training loss, one seed a position",
            x_name="step",
            y_name="nats a token",
            height=330,
        )
        parts.append(plot_card(drawing, name="training"))
    return cards(*parts) + "".join(map(_listed, tables(results)))


def _listed(each: TextTable, *, name: str = "") -> str:
    """A table of the report, between its title and its caption."""
    heading = f"<h3>{escape(each.title)}</h3>" if each.title else ""
    shown = table(each.head, each.rows, name=name or each.title, bold=each.bold)
    return heading + shown + note(each.caption)


def _criteria(results: CriteriaReport) -> str:
    names = [criterion.name for criterion in results.rows[0].criteria] if results.rows else []
    signs = {True: "yes", False: "no", None: "\N{EN DASH}"}
    rows = [
        [row.method, *(f"{signs[cell.verdict]} ({cell.text})" for cell in row.criteria)]
        for row in results.rows
    ]
    return note("What each method is, measured; in brackets the value behind a verdict.") + table(
        ["method", *names], rows, name="criteria"
    )


def _any(data: Any, name: str) -> str:
    """Every list of records in a file of no known kind."""
    if not isinstance(data, dict):
        return problem(f"{name} holds no object: there is nothing to show.")
    about = data.get("what") or data.get("command") or ""
    parts = [note(str(about))] if about else []
    plain = {key: value for key, value in _flat(data).items() if not isinstance(value, list | dict)}
    lists = [(key, value) for key, value in data.items() if _records(value)]
    for key, records in lists:
        flat = [_flat(record) for record in records]
        parts.append(cards(*_speed_plots(flat, key)))
        columns = list(dict.fromkeys(column for row in flat for column in row))[:24]
        cells = [[row.get(column) for column in columns] for row in flat[:MOST_ROWS]]
        more = f", the first {MOST_ROWS} of {len(flat):,}" if len(flat) > MOST_ROWS else ""
        parts.append(f"<h3>{escape(key)}{more}</h3>{table(columns, cells, name=key)}")
    if plain:
        parts.append(
            f"<h3>about it</h3>{table(['what', 'value'], list(plain.items()), name='about')}"
        )
    return "".join(parts) or problem(f"there is nothing in {name} that can be shown.")


def _speed_plots(rows: list[dict[str, Any]], key: str) -> list[str]:
    """Time against length, a plot for each setting and a line for each contender."""
    times = ("ms.median", "seconds.median", "ms", "us")
    field = next((name for name in times if any(name in row for row in rows)), None)
    if field is None:
        return []
    timed = [
        row
        for row in rows
        if isinstance(row.get("n"), int) and isinstance(row.get(field), int | float)
    ]

    def setting(row: dict[str, Any]) -> str:
        words = [str(row.get(name, "")) for name in ("group", "mode", "d_head")]
        words[2] = f"heads of {words[2]}" if words[2] else ""
        return ", ".join([*filter(None, words), *(["causal"] if row.get("causal") is True else [])])

    plots: list[str] = []
    for name, group in groupby(sorted(timed, key=setting), key=setting):
        mine, lines = list(group), []
        lengths = sorted({row["n"] for row in mine})
        if len(lengths) < 2:
            continue
        contenders = list(dict.fromkeys(_contender(row) for row in mine))
        for place, contender in enumerate(contenders[: 2 * len(SERIES)]):
            colour, _, dash = SERIES[place % len(SERIES)]
            points = sorted((row["n"], row[field]) for row in mine if _contender(row) == contender)
            x, y = zip(*points, strict=True)
            lines.append(Line(contender, x, y, colour, dash, markers=True))
        drawing = draw_lines(
            lines,
            title=f"{key}: {name}" if name else key,
            x_name="tokens",
            y_name=field,
            log_x=True,
            log_y=True,
            height=330,
            x_ticks=lengths,
            tick_names=[f"{n:,}" for n in lengths],
        )
        plots.append(plot_card(drawing, name=f"{key}-{len(plots) + 1}"))
    return plots[:MOST_PLOTS]


def _contender(row: dict[str, Any]) -> str:
    words = [str(row[name]) for name in ("contender", "method") if row.get(name)]
    return ", ".join(words) or "all"


def _records(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(each, dict) for each in value)


def _flat(record: dict[str, Any], before: str = "") -> dict[str, Any]:
    """The numbers and texts of a record; those inside of another get its name before theirs."""
    found: dict[str, Any] = {}
    for key, value in record.items():
        if isinstance(value, dict) and len(value) <= 12:
            found |= _flat(value, f"{before}{key}.")
        elif isinstance(value, str | int | float | None):
            found[f"{before}{key}"] = value
    return found
