"""Table 1 of the slides as measured, its rules, and where the two differ."""

from typing import Any

from tables.results_folder import ResultsFolder

MARKS = {True: "✓", False: "✗", None: "-"}


def criteria(stored: ResultsFolder) -> str:
    """Table 1 as measured, the methods of the slides first, with their ticks in brackets."""
    results = stored.json("criteria.json")
    rows = sorted(results["rows"], key=lambda row: row["criteria"][0]["slides"] is None)
    titles = ["method", *results["rules"], "time"]
    lines = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    for row in rows:
        cells = [_judged(cell) for cell in row["criteria"]]
        lines.append(f"| `{row['method']}` | {' | '.join(cells)} | {row['time']:.1f}x |")
    versions = ", ".join(f"{name} {value}" for name, value in results["versions"].items())
    return "\n".join([*lines, "", f"Measured with {versions}."]) + "\n"


def criteria_findings(stored: ResultsFolder) -> str:
    """Which methods meet all criteria, by the measurement and by the slides, and how they agree."""
    rows = stored.json("criteria.json")["rows"]
    met = [r["method"] for r in rows if all(x["verdict"] for x in r["criteria"])]
    slides = [r["method"] for r in rows if all(x["slides"] for x in r["criteria"])]
    ticked = [x for r in rows for x in r["criteria"] if x["slides"] is not None]
    agree = sum(x["slides"] == x["verdict"] for x in ticked)
    return (
        f"**Measured, {_named(met)} meet all six.** In the slides {_named(slides)} does, of the "
        f"nine that they judge. {agree} of the slides' {len(ticked)} ticks are confirmed.\n"
    )


def _named(methods: list[str]) -> str:
    *others, last = (f"`{method}`" for method in methods)
    return f"{', '.join(others)} and {last}" if others else last


def rules(stored: ResultsFolder) -> str:
    """What each criterion of Table 1 measures, and when it is met."""
    return "".join(
        f"- **{name}**: {rule}\n" for name, rule in stored.json("criteria.json")["rules"].items()
    )


def differences(stored: ResultsFolder) -> str:
    """Where a measurement and the slides' tick differ, and why."""
    lines = []
    for row in stored.json("criteria.json")["rows"]:
        for cell in row["criteria"]:
            if cell["slides"] not in (None, cell["verdict"]):
                says, found = MARKS[cell["slides"]], f"{MARKS[cell['verdict']]} {cell['text']}"
                lines.append(
                    f"- `{row['method']}`, {cell['name']}: {found}, slides {says}. {cell['why']}\n"
                )
    return "".join(lines)


def notes(stored: ResultsFolder) -> str:
    """What else to know of a verdict."""
    cells = [
        (row["method"], cell)
        for row in stored.json("criteria.json")["rows"]
        for cell in row["criteria"]
    ]
    noted = [(method, cell) for method, cell in cells if cell["why"] and cell["slides"] is None]
    return "".join(f"- `{method}`, {cell['name']}: {cell['why']}\n" for method, cell in noted)


def _judged(cell: dict[str, Any]) -> str:
    shown = f"{MARKS[cell['verdict']]} {cell['text']}"
    if cell["slides"] is None:
        return shown
    slides = MARKS[cell["slides"]]
    return f"{shown} ({slides})" if cell["slides"] == cell["verdict"] else f"{shown} (**{slides}**)"
