"""The methods: a table of all, and a section for each from its docstring."""

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
            f"| `{entry['name']}` | {what} | {sites}{causal} | {count} | {_links(entry['paper'])} |"
        )
    return "\n".join(rows) + "\n"


def method_pages(stored: ResultsFolder) -> str:
    """A section for each method: its docstring without the example, and its options."""
    return "\n".join(_section(name) for name in METHODS)


def spec_with_defaults(name: str) -> str:
    """A method with every option spelled out, as `build` reads it."""
    parameters = inspect.signature(METHODS[name].__init__).parameters.values()
    named = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    options = [f"{p.name}={p.default}".lower() for p in named if p.name not in GIVEN]
    return f"{name}:{','.join(options)}" if options else name


def _section(name: str) -> str:
    cls = METHODS[name]
    module = sys.modules[cls.__module__]
    summary = (module.__doc__ or "").strip()
    formula, *rest = (inspect.getdoc(cls) or "").split("\n\n")
    sites = ", ".join(cls.sites()) or "none"
    facts = [f"Sites: {sites}"]
    facts += ["causal attention only"] * cls.causal_only
    facts += ["one instance for all layers"] * cls.shared_by_layers
    facts += [_links(cls.paper)] if _links(cls.paper) else []
    lines = [f"### {name}", "", summary, "", "```text", formula, "```", ""]
    for paragraph in rest:
        if paragraph.lstrip().startswith(">>>"):
            continue
        listed = re.search(r"\S {2,}\S", paragraph)  # columns, which prose would run together
        lines += ["```text", paragraph, "```", ""] if listed else [paragraph, ""]
    lines += [f"With its defaults: `{spec_with_defaults(name)}`. {'; '.join(facts)}.", ""]
    return "\n".join(lines)


def _links(paper: str) -> str:
    """The arXiv numbers as links; the authors stand in the summary."""
    numbers = re.findall(r"arXiv:(\d{4}\.\d{4,5})", paper)
    return ", ".join(f"[{n}](https://arxiv.org/abs/{n})" for n in numbers)
