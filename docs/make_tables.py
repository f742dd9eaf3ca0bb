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


TABLES: dict[str, Callable[[], str]] = {"methods": methods}


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
