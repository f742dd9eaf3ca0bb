"""What position costs a whole model: a row for each mode and method, a column for each length."""

from typing import Any

from tables.results_folder import MISSING, ResultsFolder

COMMAND = "python benchmarks/model_cost.py --prepare"
BASELINE = "nope"
BELOW = """
Median of {rounds} turns of {turn} steps. {layers} layers of {width}, {heads} heads, a vocabulary of
{vocabulary:,}, {tokens:,} tokens a step, {dtype} autocast, fused AdamW. {gpu}, torch {torch},
Triton {triton}, commit {commit}. To measure again: `{command}`.
"""


def model_cost(stored: ResultsFolder) -> str:
    """Milliseconds a step and the cost over NoPE, with what was promised of it."""
    results = stored.json("gpu/model_cost.json")
    if results is None:
        return MISSING.format(COMMAND)
    records = results["records"]
    lengths = sorted({record["n"] for record in records})
    cells = {(r["mode"], r["method"], r["n"]): _cell(r) for r in records}
    lines = [
        "| mode | | " + " | ".join(f"n = {n:,}" for n in lengths) + " |",
        "|---|---|" + "---:|" * len(lengths),
    ]
    for mode, method in dict.fromkeys((r["mode"], r["method"]) for r in records):
        shown = (cells.get((mode, method, n), "") for n in lengths)
        lines.append(f"| {mode} | `{method}` | {' | '.join(shown)} |")
    reasons = [
        f"- {r['mode']}, `{r['method']}`, n = {r['n']:,}: {r['skipped']}\n"
        for r in records
        if r["skipped"] is not None
    ]
    left_out = "\nLeft out:\n\n" + "".join(reasons) if reasons else ""
    where = {"gpu": "a CPU", "triton": "-", **results["machine"]}  # a CPU's record has neither
    below = BELOW.format(**results["config"], **where, command=COMMAND)
    return "\n".join(lines) + "\n" + left_out + below


def _cell(record: dict[str, Any]) -> str:
    if record["ms"] is None:
        return "-"
    text = f"{record['ms']['median']:.1f} ms"
    if record["method"] == BASELINE or record["cost"] is None:
        return text
    text += f", {record['cost']:+.1%}"
    if record["limit"] is None:
        return text
    return f"{text} ({'held' if record['held'] else 'missed'}: at most {record['limit']:.0%})"
