"""The methods: an index of all, and what the page of each has from its code and from results."""

import inspect
import re
from typing import Any

import torch

from tables.criteria import MARKS
from tables.lm import MAIN, language
from tables.results_folder import ResultsFolder
from whence.analysis import Entry, describe, entry
from whence.analysis.lm_results import Language, Row, ranked
from whence.methods import CONTEXT, METHODS, counts_once
from whence.report.lm_table import NONE, loss_text

LONG = 8192  # tokens of the call that is described
BEGIN_AT_ZERO = ("cope",)  # drawn with parameters from N(0, 1)
NUMBERS = {"parameters", "loss at 512", "at 8,192", "less RoPE at 512", "rank at 512"}


def method_index(stored: ResultsFolder) -> str:
    """Every method with a link to its page."""
    rows = []
    for name in METHODS:
        found = entry(name)
        what = found.summary.rstrip(".").replace("|", r"\|")
        sites = ", ".join(found.sites) or "none"
        causal = " (causal only)" if found.causal_only else ""
        count = f"{found.parameters:,}"
        rows.append([f"[`{name}`]({name}.md)", what, sites + causal, count])
    return _table(["method", "what it is", "sites", "parameters"], rows)


def method_facts(stored: ResultsFolder, name: str) -> str:
    """Its picture, and where it enters, what it costs and what attention makes of it."""
    found, cls = entry(name), METHODS[name]
    picture = f"![Lag curves of {name}, and its first head as a matrix]({name}.svg)"
    start = "Before any training"
    if name in BEGIN_AT_ZERO:
        start = "It begins at zero; here its parameters are drawn from N(0, 1)"
    facts = {
        "in a text": f"`{_shortest(found)}`",
        "sites": (", ".join(found.sites) or "none")
        + (" (causal attention only)" if found.causal_only else ""),
        "parameters": _parameters(found, shared=counts_once(cls)),
        f"at {LONG:,} tokens": _runs_as(name),
        "paper": _paper(found.paper),
    }
    first, *others = ([key, text] for key, text in facts.items())
    told = (
        f"*{start}: four heads at each lag, and the first of them for 36 positions, coloured over "
        "its own range.*"
    )
    return f"{picture}\n\n{told}\n\n{_table(first, others)}"


def method_definition(stored: ResultsFolder, name: str) -> str:
    """The docstring of its class, and its options."""
    found = entry(name)
    formula, *rest = found.description.split("\n\n")
    lines = ["```text", formula, "```", ""]
    for paragraph in rest:
        paragraph = re.sub(r"docs/(\w+\.md)", r"[\1](../\1)", paragraph)
        listed = re.search(r"\S {2,}\S", paragraph)  # columns, which prose would run together
        lines += ["```text", paragraph, "```", ""] if listed else [paragraph, ""]
    if not found.options:
        return "\n".join([*lines, "It has no options."]) + "\n"
    rows = [
        [f"`{option.name}`", option.kind.replace("|", ", "), f"`{option.default}`"]
        for option in found.options
    ]
    told = f"All spelled out: `{spec_with_defaults(name)}`.\n"
    return "\n".join([*lines, _table(["option", "takes", "default"], rows), told])


def method_measured(stored: ResultsFolder, name: str) -> str:
    """The six criteria, and its losses where it was trained."""
    return f"{_criteria(stored, name)}\n{_language(stored, name)}"


def spec_with_defaults(name: str) -> str:
    """A method with every option spelled out, as `build` reads it."""
    parameters = inspect.signature(METHODS[name].__init__).parameters.values()
    named = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    options = [f"{p.name}={p.default}".lower() for p in named if p.name not in ("self", *CONTEXT)]
    return f"{name}:{','.join(options)}" if options else name


def _shortest(found: Entry) -> str:
    example = next((o for o in found.options if o.default not in ("", "none")), None)
    return found.name if example is None else f"{found.name}:{example.name}={example.default}"


def _parameters(found: Entry, *, shared: bool) -> str:
    if found.formula == "0":
        return "none"
    where = "for all layers together" if shared else "a layer"
    formula = "" if len(found.formula) > 80 else f": `{found.formula}`"
    return f"{found.parameters:,} {where} (12 heads of 64, length 512){formula}"


def _runs_as(name: str) -> str:
    """The kind of its terms and the backend, for a long training call on a GPU."""
    described = describe(name, length=LONG, device="cuda", dtype=torch.bfloat16, causal=True)
    terms = (term.replace("|", r"\|") for term in described.terms)
    return "; ".join([*terms, f"on a GPU run by `{described.explanation.chosen}`"])


def _paper(paper: str) -> str:
    return re.sub(r"arXiv:(\d{4}\.\d{4,5})", r"[arXiv:\1](https://arxiv.org/abs/\1)", paper)


def _criteria(stored: ResultsFolder, name: str) -> str:
    rows = {row["method"]: row for row in stored.json("criteria.json")["rows"]}
    cells = rows[name]["criteria"]
    known = any(cell["slides"] is not None for cell in cells)
    judged = [
        [cell["name"], f"{MARKS[cell['verdict']]} {cell['text']}", MARKS[cell["slides"]]]
        for cell in cells
    ]
    titles = ["criterion", "measured", "slides"]
    table = _table(titles, judged) if known else _table(titles[:2], [row[:2] for row in judged])
    why = [_why(cell) for cell in cells if cell["why"]]
    time = rows[name]["time"]
    told = (
        f"[The rules](../criteria.md#the-rules). On one CPU thread attention to 256 tokens takes "
        f"{time:.1f} times as long with it as without any position."
    )
    return "\n".join([table, *why, told]) + "\n"


def _why(cell: dict[str, Any]) -> str:
    return f"{cell['name'].capitalize()}: {cell['why']}\n"


def _language(stored: ResultsFolder, name: str) -> str:
    lines = []
    for corpus, title in MAIN.items():
        run = language(stored, corpus)
        rows = {} if run is None else {row.method.partition(":")[0]: row for row in ranked(run)}
        if run is not None and name in rows:
            lines.append([title, *_losses(run, rows, name)])
    if not lines:
        return "It was not part of our [comparison on language modelling](../lm_results.md).\n"
    told = (
        "Nats a token, mean ± standard deviation over 3 seeds, a model of 5 million parameters "
        "trained at 512 tokens. [How sure this is](../choosing.md#how-sure)."
    )
    titles = ["trained on", "loss at 512", "at 8,192", "less RoPE at 512", "rank at 512"]
    return f"{_table(titles, lines)}\n{told}\n"


def _losses(run: Language, rows: dict[str, Row], name: str) -> list[str]:
    row, rope = rows[name], rows["rope"]
    home, far = (row.scratch[run.lengths.index(n)] for n in (512, LONG))
    less = "" if home is None or name == "rope" else f"{home.mean - _mean(rope, run):+.3f}"
    place = sorted(rows, key=lambda other: _mean(rows[other], run)).index(name) + 1
    shown = [NONE if x is None else loss_text(x) for x in (home, far)]
    return [*shown, less, f"{place} of {len(rows)}"]


def _mean(row: Row, run: Language) -> float:
    found = row.scratch[run.lengths.index(512)]
    return float("inf") if found is None else found.mean


def _table(titles: list[str], rows: list[list[str]]) -> str:
    """A table of Markdown; a column of numbers is ruled to the right by its title."""
    rule = ["---:" if title in NUMBERS else "---" for title in titles]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in (titles, rule, *rows))
