"""Writes the generated tables into the Markdown files, between their markers.

    python docs/make_tables.py           write them
    python docs/make_tables.py --check   exit with 1 if a file is out of date

A table stands between `<!-- table: NAME -->` and `<!-- end of table -->`.
"""

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
BLOCK = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end of table -->)", re.DOTALL)


def methods() -> str:
    """Every method, from `whence methods --json`, so that the README says what the command says."""
    command = [sys.executable, "-m", "whence", "methods", "--json"]
    entries = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    rows = ["| name | what it is | sites | parameters | paper |", "|---|---|---|---:|---|"]
    for entry in entries:
        sites = ", ".join(entry["sites"]) or "none"
        causal = " (causal only)" if entry["causal_only"] else ""
        what = entry["summary"].rstrip(".").replace("|", r"\|")
        count = "" if entry["parameters"] is None else f"{entry['parameters']:,}"
        rows.append(
            f"| `{entry['name']}` | {what} | {sites}{causal} | {count} | {_links(entry['paper'])} |"
        )
    return "\n".join(rows) + "\n"


CONTENDERS = {
    "whence": "`whence`",
    "eager": "eager, n x n",
    "sdpa_dense": "SDPA, dense bias",
    "plain": "SDPA, no bias",
    "article": "the article's algorithm",
}


def cpu_tisa() -> str:
    """Time and memory of TISA's attention on a CPU."""
    return _measured("tisa")


def cpu_shaw() -> str:
    """Time and memory of attention with Shaw's keys and values on a CPU."""
    return _measured("shaw")


def cpu_bars() -> str:
    """What the CPU benchmark promises, what was measured, and where."""
    results = _cpu_results()
    rows = ["| | measured | promised | |", "|---|---:|---|---|"]
    for bar in results["bars"]:
        value = "" if bar["value"] is None else f"{bar['value']:.2f}"
        word = {True: "held", False: "missed", None: "not measured"}[bar["held"]]
        rows.append(f"| {bar['what']} | {value} | {bar['rule']} {bar['limit']} | {word} |")
    machine = results["machine"]
    place = (
        f"Measured on {machine['cpu']} ({machine['instructions']}), {machine['cores']} cores, "
        f"torch {machine['torch']}, Python {machine['python']}, commit {machine['commit']}."
    )
    return "\n".join([*rows, "", place]) + "\n"


def _measured(group: str) -> str:
    cells: dict[int, dict[str, str]] = {}
    for row in _cpu_results()["rows"]:
        if row["group"] == group:
            shown = "-"
            if row["seconds"] is not None:
                milliseconds, megabytes = row["seconds"]["median"] * 1e3, row["peak_bytes"] / 1e6
                shown = f"{milliseconds:,.0f} ms, {megabytes:,.0f} MB"
            cells.setdefault(row["n"], {})[row["contender"]] = shown
    names = list(next(iter(cells.values())))
    rows = [
        "| n | " + " | ".join(CONTENDERS[name] for name in names) + " |",
        "|---:|" + "---:|" * len(names),
        *(f"| {n:,} | " + " | ".join(cells[n].values()) + " |" for n in cells),
    ]
    return "\n".join(rows) + "\n"


def _cpu_results() -> Any:
    return json.loads((ROOT / "results/cpu/attention.json").read_text(encoding="utf-8"))


MARKS = {True: "✓", False: "✗", None: "-"}


def criteria() -> str:
    """Table 1 as measured, the methods of the slides first, with their ticks in brackets."""
    results = _criteria_results()
    rows = sorted(results["rows"], key=lambda row: row["criteria"][0]["slides"] is None)
    titles = ["method", *results["rules"], "time"]
    lines = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    for row in rows:
        cells = [_judged(cell) for cell in row["criteria"]]
        lines.append(f"| `{row['method']}` | {' | '.join(cells)} | {row['time']:.1f}x |")
    versions = ", ".join(f"{name} {value}" for name, value in results["versions"].items())
    return "\n".join([*lines, "", f"Measured with {versions}."]) + "\n"


def rules() -> str:
    """What each criterion of Table 1 measures, and when it is met."""
    return "".join(f"- **{name}**: {rule}\n" for name, rule in _criteria_results()["rules"].items())


def differences() -> str:
    """Where a measurement and the slides' tick differ, and why."""
    lines = []
    for row in _criteria_results()["rows"]:
        for cell in row["criteria"]:
            if cell["slides"] not in (None, cell["verdict"]):
                says, found = MARKS[cell["slides"]], f"{MARKS[cell['verdict']]} {cell['text']}"
                lines.append(
                    f"- `{row['method']}`, {cell['name']}: {found}, slides {says}. {cell['why']}\n"
                )
    return "".join(lines)


def notes() -> str:
    """What else to know of a verdict."""
    cells = [
        (row["method"], cell) for row in _criteria_results()["rows"] for cell in row["criteria"]
    ]
    noted = [(method, cell) for method, cell in cells if cell["why"] and cell["slides"] is None]
    return "".join(f"- `{method}`, {cell['name']}: {cell['why']}\n" for method, cell in noted)


def _criteria_results() -> dict[str, Any]:
    path = ROOT / "results" / "criteria.json"
    results: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return results


def _judged(cell: dict[str, Any]) -> str:
    shown = f"{MARKS[cell['verdict']]} {cell['text']}"
    if cell["slides"] is None:
        return shown
    slides = MARKS[cell["slides"]]
    return f"{shown} ({slides})" if cell["slides"] == cell["verdict"] else f"{shown} (**{slides}**)"


TABLES: dict[str, Callable[[], str]] = {
    "methods": methods,
    "cpu_tisa": cpu_tisa,
    "cpu_shaw": cpu_shaw,
    "cpu_bars": cpu_bars,
    "criteria": criteria,
    "rules": rules,
    "differences": differences,
    "notes": notes,
}


def filled(text: str) -> str:
    """The text with every table made anew."""
    return BLOCK.sub(lambda block: block[1] + TABLES[block[2]]() + block[3], text)


def main() -> int:
    """Write, or check, every Markdown file that has a table."""
    out_of_date = []
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        text = path.read_text(encoding="utf-8")
        new = filled(text)
        if new != text:
            out_of_date.append(path.relative_to(ROOT))
            if "--check" not in sys.argv:
                path.write_text(new, encoding="utf-8")
    if out_of_date and "--check" in sys.argv:
        names = ", ".join(map(str, out_of_date))
        print(f"out of date: {names}. Run python docs/make_tables.py", file=sys.stderr)
        return 1
    return 0


def _links(paper: str) -> str:
    """The arXiv numbers as links; the authors stand in the summary."""
    numbers = re.findall(r"arXiv:(\d{4}\.\d{4,5})", paper)
    return ", ".join(f"[{n}](https://arxiv.org/abs/{n})" for n in numbers)


if __name__ == "__main__":
    sys.exit(main())
