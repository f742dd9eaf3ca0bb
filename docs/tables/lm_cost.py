"""Language modelling: what position costs in training."""

from typing import Any

from tables.results_folder import MISSING, ResultsFolder

COMMAND = "python benchmarks/lm_cost.py"
MODES = ("eager", "compiled", "graphed")
ARTICLE = "the article's algorithm"  # is measured alone, and shown beside the bars
BARS = (
    ("n", "---:"),
    ("tokens a step", "---:"),
    ("mode", "---"),
    ("", "---"),
    ("tokens/s", "---:"),
    ("ms a step", "---:"),
    ("GPU, ms a step", "---:"),
    ("tokens/s lost to NoPE on FlashAttention-2", "---:"),
    ("GPU time lost to it", "---:"),
    ("promised", "---"),
    ("", "---"),
)
GPU = """\
"GPU" is the time of all kernels of a step, in brackets how many there are: where it is far below
the time of a step, the GPU waits for the host. "Compiled" is torch.compile, "graphed" torch.compile
with CUDA graphs (`mode="reduce-overhead"`)."""
ALONE = """\
Each by itself, with the most memory that training took. "Host" is a step of a single sequence of
512 tokens, in which the GPU has next to nothing to do: what Python and PyTorch need to launch it,
measured once a method. Where fewer tokens a step are given, more did not fit into memory."""
ALONE_LATE = """\
The speed and memory of every method alone, the time of the host and the article's algorithm were
not reached before the time on the GPU was spent.
"""


def lm_bars(stored: ResultsFolder) -> str:
    """What TISA and Shaw cost of the tokens a second and of the GPU, against no position."""
    costs = stored.json("lm/cost.json")
    if costs is None:
        return MISSING.format(COMMAND)
    article = [r for r in costs["alone"] if ARTICLE in r["contender"] and "skipped" not in r]
    rows = sorted([*costs["turns"], *article], key=_place)
    lines = ["| " + " | ".join(title for title, _ in BARS) + " |"]
    lines.append("|" + "|".join(line for _, line in BARS) + "|")
    lines += [f"| {' | '.join(_cells(record, costs['bars']))} |" for record in rows]
    config, machine = costs["config"], costs["machine"]
    place = (
        f"{config['num_hidden_layers']} layers, {config['num_attention_heads']} heads, width "
        f"{config['hidden_size']}; turns of {config['steps_a_turn']} steps. "
        f"{machine.get('gpu') or machine['cpu']}, torch {machine['torch']}, Triton "
        f"{machine.get('triton')}, commit {machine['commit']}."
    )
    profiled = any(record.get("gpu_ms") is not None for record in rows)
    return "\n".join([*lines, "", *([GPU, ""] if profiled else []), place]) + "\n"


def _place(record: dict[str, Any]) -> tuple[int, bool, int, int]:
    """By length, mode and tokens; the article's algorithm at the end of its length."""
    mode = MODES.index(record.get("mode", MODES[0]))
    return record["n"], ARTICLE in record["contender"], mode, record["tokens"]


def _cells(record: dict[str, Any], bars: list[dict[str, Any]]) -> list[str]:
    name, mode = record["contender"], record.get("mode", "")
    speed, times = _speed(record)
    gpu = ""
    if record.get("gpu_ms") is not None:
        gpu = f"{record['gpu_ms']:.1f} ({record['launches']:,})"
    bar = _bar(record, bars)
    limit = "" if bar.get("limit") is None else f"at most {bar['limit']:.0%}"
    word = {True: "held", False: "missed", None: ""}[bar.get("held")]
    lost, of_gpu = (_share(bar.get(key)) for key in ("cost", "gpu_cost"))
    plain = name.removesuffix(f", {mode}")
    where = [f"{record['n']:,}", f"{record['tokens']:,}", mode, plain]
    return [*where, speed, times, gpu, lost, of_gpu, limit, word]


def _bar(record: dict[str, Any], bars: list[dict[str, Any]]) -> dict[str, Any]:
    """Of a record, or nothing; a run of one number of tokens does not say which."""
    wanted = record["contender"], record["n"], record["tokens"]
    for bar in bars:
        if (bar["what"], bar["n"], bar.get("tokens", record["tokens"])) == wanted:
            return bar
    return {}


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"


def lm_alone(stored: ResultsFolder) -> str:
    """Every method by itself: speed, memory, and what the host needs."""
    costs = stored.json("lm/cost.json")
    if costs is None:
        return MISSING.format(COMMAND)
    if not costs["alone"]:
        return ALONE_LATE
    lines = [
        ALONE,
        "",
        "| n | | tokens a step | tokens/s | ms a step | memory | host, ms a step |",
        "|---:|---|---:|---:|---:|---:|---:|",
    ]
    for r in sorted(costs["alone"], key=lambda r: r["n"]):
        cells = [f"{r['n']:,}", r["contender"]]
        if "skipped" in r:
            cells += [r["skipped"], "", "", "", ""]
        else:
            memory = "" if r["peak_bytes"] is None else f"{r['peak_bytes'] / 1e9:.1f} GB"
            host = "" if r.get("host_ms") is None else f"{r['host_ms']:.1f}"
            cells += [f"{r['tokens']:,}", *_speed(r), memory, host]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _speed(record: dict[str, Any]) -> tuple[str, str]:
    """Tokens a second, and the time of a step with its quantiles; or why there are none."""
    if "skipped" in record:
        return record["skipped"], ""
    ms = record["ms"]
    times = f"{ms['median']:.1f} ({ms['q20']:.1f} to {ms['q80']:.1f})"
    return f"{record['tokens_a_second']:,.0f}", times


def units_cost(stored: ResultsFolder) -> str:
    """A step before and after learned numbers were put into units of their own."""
    found = stored.json("lm/units_cost.json")
    if found is None:
        return MISSING.format("python benchmarks/step_time.py")
    lines = ["| units | | ms a step | over NoPE |", "|---|---|---:|---:|"]
    plain = {row["units"]: row["ms"] for row in found["rows"] if row["contender"] == "nope"}
    for row in found["rows"]:
        over = row["ms"] / plain[row["units"]] - 1
        shown = "" if row["contender"] == "nope" else f"{over:+.1%}"
        lines.append(f"| {row['units']} | `{row['contender']}` | {row['ms']:.2f} | {shown} |")
    config, machine = found["config"], found["machine"]
    place = (
        f"{config['layers']} layers of {config['heads']} heads, width {config['width']}, "
        f"{config['tokens']:,} tokens a step at n = {config['n']}, {config['steps']} steps each, "
        f"{config['mode']}. {machine['gpu']}, torch {machine['torch']}. {_on_a_cpu(found['cpu'])}"
    )
    return "\n".join([*lines, "", place]) + "\n"


NAMED = {"of the paper": "the units of the paper", "ours": "ours"}


def _on_a_cpu(found: dict[str, Any]) -> str:
    """TISA over NoPE in each of the runs there, before and after."""
    told = []
    for units in ("of the paper", "ours"):
        tisa, nope = (row["ms"] for row in found["rows"] if row["units"] == units)
        over = ", ".join(f"{a / b - 1:+.1%}" for a, b in zip(tisa, nope, strict=True))
        told.append(f"{over} in {NAMED[units]}")
    config = found["config"]
    return (
        f"On two CPU cores ({config['layers']} layers, n = {config['n']}, three runs by turns) a "
        f"step of TISA takes {' and '.join(told)} over NoPE."
    )
