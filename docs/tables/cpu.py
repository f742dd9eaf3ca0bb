"""Attention on a CPU: time and memory, and what was promised."""

from tables.results_folder import MISSING, ResultsFolder

CONTENDERS = {
    "whence": "`whence`",
    "eager": "eager, n x n",
    "sdpa_dense": "SDPA, dense bias",
    "plain": "SDPA, no bias",
    "article": "the article's algorithm",
}


def cpu_tisa(stored: ResultsFolder) -> str:
    """Time and memory of TISA's attention on a CPU."""
    return _measured(stored, "tisa", "attention", "Time and memory of attention with TISA's bias")


def cpu_shaw(stored: ResultsFolder) -> str:
    """Time and memory of attention with Shaw's keys and values on a CPU."""
    return _measured(stored, "shaw", "shaw", "Time and memory of attention with Shaw's tables")


def cpu_bars(stored: ResultsFolder) -> str:
    """What the CPU benchmark promises, what was measured, and where."""
    results = stored.json("cpu/attention.json")
    if results is None:
        return MISSING.format("python benchmarks/cpu.py")
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


def _measured(stored: ResultsFolder, group: str, figure: str, caption: str) -> str:
    results = stored.json("cpu/attention.json")
    if results is None:
        return MISSING.format("python benchmarks/cpu.py")
    cells: dict[int, dict[str, str]] = {}
    for row in results["rows"]:
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
    if stored.path(f"cpu/{figure}.png").is_file():
        rows += ["", f"![{caption}](../results/cpu/{figure}.png)"]
    return "\n".join(rows) + "\n"
