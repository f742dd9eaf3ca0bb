"""The commands of the command line: what each does, by its own help, and which speak JSON."""

from typing import Any

from typer.main import get_command

from tables.results_folder import ResultsFolder
from whence.cli.root import app


def commands(stored: ResultsFolder) -> str:
    """A row for each command, and which of them have no `--json`."""
    found: dict[str, Any] = get_command(app).commands  # type: ignore[attr-defined]
    rows = ["| command | what it does |", "|---|---|"]
    for name, command in found.items():
        told = (command.help or "").partition("\n\n")[0].replace("\n", " ").replace("|", r"\|")
        rows.append(f"| `{' '.join(['whence', name, *_arguments(command)])}` | {told} |")
    without = sorted(f"`{name}`" for name, command in found.items() if not _has_json(command))
    named = ", ".join(without[:-1]) + f" and {without[-1]}"
    return "\n".join(rows) + f"\n\nAll but {named} take `--json`; every command has `--help`.\n"


def _arguments(command: Any) -> list[str]:
    found = [p for p in command.params if p.param_type_name == "argument"]
    several = {p.name: "..." * (p.nargs == -1) for p in found}
    words = [f"{p.name.upper()}{several[p.name]}" for p in found]
    return [w if p.required else f"[{w}]" for w, p in zip(words, found, strict=True)]


def _has_json(command: Any) -> bool:
    return any("--json" in parameter.opts for parameter in command.params)
