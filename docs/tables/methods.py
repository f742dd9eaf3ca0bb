"""The methods: a table of all, and each spelled out."""

import inspect
import json
import re
import subprocess
import sys

from tables.results_folder import ResultsFolder
from whence.methods import METHODS

GIVEN = ("self", "n_heads", "d_head", "d_model", "max_length", "causal", "n_layers")


def methods(stored: ResultsFolder) -> str:
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
            f"| `{entry['name']}` | {what} | {sites}{causal} | {count} | {links(entry['paper'])} |"
        )
    return "\n".join(rows) + "\n"


def spec_with_defaults(name: str) -> str:
    """A method with every option spelled out, as `build` reads it."""
    parameters = inspect.signature(METHODS[name].__init__).parameters.values()
    named = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    options = [f"{p.name}={p.default}".lower() for p in named if p.name not in GIVEN]
    return f"{name}:{','.join(options)}" if options else name


def links(paper: str) -> str:
    """The arXiv numbers as links; the authors stand in the summary."""
    numbers = re.findall(r"arXiv:(\d{4}\.\d{4,5})", paper)
    return ", ".join(f"[{n}](https://arxiv.org/abs/{n})" for n in numbers)
