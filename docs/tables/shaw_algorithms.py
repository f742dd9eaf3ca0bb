"""Three ways to compute Shaw's attention: time and memory against the length, by device."""

from typing import Any

from tables.results_folder import MISSING, ResultsFolder
from whence.bench import CONTENDERS

ORDER = ("whence:auto", "naive", "article", "plain")
WORDS = {"forward": "Forward alone", "both": "Forward and backward, with all gradients"}
COMMAND = "python benchmarks/shaw_algorithms.py --device {}"


def shaw_cpu(stored: ResultsFolder) -> str:
    """On a CPU."""
    return _section(stored, "cpu", "cpu")


def shaw_gpu(stored: ResultsFolder) -> str:
    """On a GPU."""
    return _section(stored, "gpu", "cuda")


def _section(stored: ResultsFolder, folder: str, device: str) -> str:
    results = stored.json(f"{folder}/shaw_algorithms.json")
    if results is None:
        return MISSING.format(COMMAND.format(device))
    records, config, machine = results["records"], results["config"], results["machine"]
    parts = []
    for mode, words in WORDS.items():
        mine = [record for record in records if record["mode"] == mode]
        parts += [f"{words}:\n\n", _table(mine), "\n"]
    reasons = dict.fromkeys(
        f"- {CONTENDERS[r['contender']].title}, n = {r['n']:,}: {r['skipped']}\n"
        for r in records
        if r["skipped"] is not None
    )
    if results["stopped"] is not None:
        parts.append(f"Empty cells were not measured: {results['stopped']}.\n\n")
    if reasons:
        parts += ["Left out:\n\n", *reasons, "\n"]
    parts.append(
        f"{config['n_heads']} heads of {config['head_sizes'][0]}, {config['tokens']:,} tokens a "
        f"batch and at least one sequence, {config['dtype']}.\n"
        f"{machine.get('gpu') or machine['cpu']}, torch {machine['torch']}, commit "
        f"{machine['commit']}. To measure again: `{COMMAND.format(device)}`.\n"
    )
    figure = f"{folder}/shaw_algorithms.png"
    if stored.path(figure).is_file():
        what = "Time and memory of three ways to compute Shaw's attention"
        parts.append(f"\n![{what}](../results/{figure})\n")
    return "".join(parts)


def _table(records: list[dict[str, Any]]) -> str:
    lengths = sorted({record["n"] for record in records})
    cells = {(r["contender"], r["n"]): _cell(r) for r in records}
    lines = [
        "| | " + " | ".join(f"n = {n:,}" for n in lengths) + " |",
        "|---|" + "---:|" * len(lengths),
    ]
    for name in ORDER:
        shown = (cells.get((name, n), "") for n in lengths)
        lines.append(f"| {CONTENDERS[name].title} | {' | '.join(shown)} |")
    return "\n".join(lines) + "\n"


def _cell(record: dict[str, Any]) -> str:
    if record["ms"] is None:
        return "-"
    return f"{record['ms']['median']:,.2f} ms, {record['extra_bytes'] / 1e6:,.0f} MB"
