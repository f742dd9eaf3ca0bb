"""The evidence for choosing a method: losses, numbers learned, the cost of a training step."""

from tables.first_screen import losses
from tables.lm import COMMAND
from tables.results_folder import MISSING, ResultsFolder
from whence import build
from whence.analysis.lm_results import Mean

CORPORA = {"python": "Python source", "wikitext": "WikiText-2", "python_masked": "masked"}
COST_LENGTH = 512
LAYER = {"n_heads": 12, "d_head": 64, "d_model": 768, "max_length": 512, "n_layers": 1}


def choosing(stored: ResultsFolder) -> str:
    """A row a method: its losses in three trainings, its parameters, what a step costs."""
    found = {name: losses(stored, name) for name in CORPORA}
    if not all(found.values()):
        return MISSING.format(COMMAND)
    home, far = min(found["python"]["tisa"]), max(found["python"]["tisa"])
    cost = _costs(stored)
    titles = [f"{title}, {n:,}" for title in CORPORA.values() for n in (home, far)]
    lines = [
        f"| | {' | '.join(titles)} | numbers a layer | a training step |",
        "|---|" + "---:|" * (len(titles) + 2),
    ]
    for method in found["python"]:
        cells = [_cell(found[name].get(method, {}).get(n)) for name in CORPORA for n in (home, far)]
        cells += [f"{build(method, **LAYER).n_parameters():,}", cost.get(_name(method), "")]
        lines.append(f"| `{method}` | {' | '.join(cells)} |")
    told = (
        f"Loss in nats a token, mean of 3 seeds, at the {home} tokens of training and at {far:,}. "
        f"Empty: not measured; `learned` has no rows beyond {home}. Numbers a layer: what 12 heads "
        "of 64 learn for position at a length of 512; for `t5` all layers share them. A training "
        "step: time over that of a model without position, 12 layers of 768, "
        f"{COST_LENGTH} tokens, not compiled ([other lengths](training_cost.md))."
    )
    return "\n".join([*lines, "", told]) + "\n"


def _cell(mean: Mean | None) -> str:
    return "" if mean is None else f"{mean.mean:.2f}"


def _costs(stored: ResultsFolder) -> dict[str, str]:
    """By the method's name without options, where it was measured as called."""
    records = (stored.json("gpu/model_cost.json") or {"records": []})["records"]
    return {
        _name(r["method"]): f"{r['cost'] or 0.0:+.1%}"  # the baseline has no cost over itself
        for r in records
        if (r["mode"], r["n"]) == ("called", COST_LENGTH) and r["ms"] is not None
    }


def _name(method: str) -> str:
    return method.partition(":")[0]
