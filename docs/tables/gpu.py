"""Attention on a GPU: bars, and a table for each kind of call."""

from typing import Any

from tables.results_folder import FOLDED, MISSING, ResultsFolder
from whence.bench import CONTENDERS as BENCHED

TISA = "tisa:kernels=5"
RELEASED = f"{TISA},start=released"
RUNS = tuple(  # newest first
    f"gpu/{name}.json" for name in ("windowed", "chained", "as_called", "bars", "flex")
)
HEADING = """
## All that was measured on a GPU

"""
SETTING = """\
One layer's attention: {n_heads} heads, {tokens:,} tokens a batch, {dtype}; {gpu}, driver {driver},
torch {torch}, Triton {triton}, cuDNN {cudnn}, Python {python}, commit {commit} unless another is
named. Both sides of a ratio are of one run. At 512 and 2,048 tokens a step as called waits for the
host, and hosts differ by half; from a CUDA graph it is the GPU's time alone. With quantiles:
[results/gpu](../results/gpu/chained.json). To measure again: `python benchmarks/gpu.py`.
"""
LATER = {  # a ratio: the name under which a later run has it, with a limit of its own
    "decoding with TISA over SDPA without bias, cache of 32,768, 1 sequences": (
        "decode, one sequence, cache of 32,768, as called, over SDPA"
    ),
}
FINDINGS = (  # sentences, and the bars whose values they tell; one without its values is left out
    (
        "**Against kernels without a bias** it takes {:.2f} times as long as FlashAttention-2 and "
        "{:.2f} times as long as cuDNN at 16,384 tokens, {:.2f} and {:.2f} times at 2,048.",
        "TISA over FA2 without bias, n=16,384",
        "TISA over cuDNN without bias, n=16,384",
        "TISA over FA2 without bias, n=2,048",
        "TISA over cuDNN without bias, n=2,048",
    ),
    (
        "**Against the n x n way** (eager) at 16,384 tokens it is {:.0f} times as fast, in a "
        "{:.0f}th of the memory. Against an eager bias that is looked up by an n x n index, as one "
        "writes it first, it is {:.0f} times as fast.",
        "eager over TISA, n=16,384, time",
        "eager over TISA, n=16,384, extra memory",
        "eager with its bias looked up by index over TISA, n=16,384",
    ),
    (
        "**Against FlexAttention** with the same bias and its best tiles it is {:.1f} times as "
        "fast.",
        "Flex, best tiles, over TISA, n=16,384",
    ),
    (
        "**Short sequences**: one layer called by itself takes {:.1f} "
        "times as long as FlashAttention-2 without a bias at 128 tokens, and {:.1f} times at 512.",
        "TISA, one layer, as called, over FA2 without bias, n=128",
        "TISA, one layer, as called, over FA2 without bias, n=512",
    ),
    (
        "**Decoding** one sequence from a cache of 32,768 keys takes {:.1f} times as long as "
        "without a bias.",
        "decode, one sequence, cache of 32,768, as called, over SDPA",
    ),
    (
        "**Shaw's** keys and values take {:.2f} times as long as FlashAttention-2 without a bias "
        "at 16,384 tokens; the article's algorithm takes {:.0f} times as long as ours at 2,048.",
        "Shaw over FA2 without bias, n=16,384",
        "the article's algorithm over Shaw, n=2,048",
    ),
)
DEFAULT_START = """\
TISA begins with wide Gaussians, its default; `start=released` is the authors' start, with narrow \
ones, which cost less."""
RELEASED_START = """\
TISA began as its authors have it (`start=released`), with narrow Gaussians; wider ones, as in the \
default start, cost more."""


def main_run(stored: ResultsFolder) -> dict[str, Any] | None:
    """The longest run, and the newest of these."""
    runs = [results for results in map(stored.json, RUNS) if results is not None]
    return max(runs, key=_size, default=None)


def gpu(stored: ResultsFolder) -> str:
    """The whole section on one GPU, or nothing where it has not been measured.

    What another run than the main one measured later, or alone, has its commit.
    """
    runs = [results for results in map(stored.json, RUNS) if results is not None]
    main = main_run(stored)
    if main is None:
        return ""
    parts = [HEADING, _bars(runs)]
    tables = [SETTING.format(**main["config"], **main["machine"])]
    seen = set[tuple[Any, ...]]()
    for results in runs:
        fresh = [r for r in results["records"] if _point(r) not in seen]
        seen |= {_point(r) for r in fresh}
        groups = dict.fromkeys(_group(record) for record in fresh)
        for mode, d_head, causal, batch in sorted(groups, key=str):
            mine = [r for r in fresh if _group(r) == (mode, d_head, causal, batch)]
            words = {"both": "Forward and backward", "forward": "Forward", "decode": "Decoding"}
            title = f"{words[mode]}, heads of {d_head}"
            title += ", causal" * (causal and mode != "decode")
            several = "" if batch is None else f", {batch} sequences"
            title += ", 1 sequence" if batch == 1 else several
            title += f" (commit {results['machine']['commit'][:7]})"
            tables.append(f"**{title}**\n\n{_table(mine)}{_left_out(mine)}")
    title = "Time and memory of everything, and how it was measured"
    return "".join([*parts, FOLDED.format(title=title, text="\n".join(tables))])


def gpu_short(stored: ResultsFolder) -> str:
    """TISA on one GPU against what there is, time and memory over n."""
    results = main_run(stored)
    if results is None:
        return MISSING.format("python benchmarks/gpu.py")
    names = {
        ("whence:fused", TISA): "`whence`, TISA with its gradients",
        ("replayed", TISA): "the same, from a CUDA graph",
        ("whence:fused", RELEASED): "the same, `start=released`",
        ("replayed", RELEASED): "the same, `start=released`, from a CUDA graph",
        ("flash", "nope"): "FlashAttention-2, no bias",
        ("cudnn", "nope"): "cuDNN, no bias",
        ("flex-best", TISA): "FlexAttention, the same bias, best tiles",
        ("eager", TISA): "eager, the same bias",
    }
    mine = [r for r in usual_records(stored) if (r["contender"], r["method"]) in names]
    mine = [record for record in mine if record["n"] <= 16_384]
    where = "{gpu}, torch {torch}, commit {commit}".format(**results["machine"])
    return _table(mine, names) + (
        f"\nForward and backward, 12 heads of 64, 16,384 tokens a batch, bfloat16: {where}. "
        f"{start_told(stored)}\n"
    )


def gpu_findings(stored: ResultsFolder) -> str:
    """What the ratios say, a sentence each, with the commit where it is not that of the table."""
    runs = [results for results in map(stored.json, RUNS) if results is not None]
    table = main_run(stored)
    if table is None:
        return MISSING.format("python benchmarks/gpu.py")
    found, lines = _newest(runs), []
    for text, *bars in FINDINGS:
        told = [found[what] for what in bars if what in found]
        values = [bar["value"] for bar, _ in told]
        if len(values) < len(bars) or None in values:
            continue
        others = sorted({commit for _, commit in told} - {table["machine"]["commit"][:7]})
        remark = f" (At commit {', '.join(others)}, not that of the table.)" if others else ""
        lines.append(f"- {text.format(*values)}{remark}\n")
    return "".join(lines)


def usual_records(stored: ResultsFolder) -> list[dict[str, Any]]:
    """Forward and backward with heads of 64, not causal; FlexAttention's are of a run of its own.

    What was replayed from a CUDA graph is a record of the contender "replayed".
    """
    results = main_run(stored)
    if results is None:
        return []
    records = [r for r in results["records"] if r["contender"] != "flex-best"]
    for record in results["records"]:
        if record["contender"] == "whence:fused" and record.get("graph_ms"):
            records.append({**record, "contender": "replayed", "ms": record["graph_ms"]})
    peers = stored.json("gpu/flex.json")
    if peers is not None:
        records += [r for r in peers["records"] if r["contender"] == "flex-best"]
    return [r for r in records if _group(r) == ("both", 64, False, None)]


def start_told(stored: ResultsFolder) -> str:
    """How TISA began in these runs, which matters to their time.

    Runs without figures for the released start are older than the default start of today.
    """
    main = main_run(stored)
    records = [] if main is None else main["records"]
    both = any(record["method"] == RELEASED for record in records)
    return DEFAULT_START if both else RELEASED_START


def _size(results: dict[str, Any]) -> int:
    return len(results["bars"])


def _group(record: dict[str, Any]) -> tuple[Any, ...]:
    """One table each: the batch follows from n, except when decoding."""
    batch = record["batch"] if record["mode"] == "decode" else None
    return record["mode"], record["d_head"], record["causal"], batch


def _point(record: dict[str, Any]) -> tuple[Any, ...]:
    return (*_group(record), record["contender"], record["method"], record["n"])


def _bars(runs: list[dict[str, Any]]) -> str:
    """Every bar by the newest run that has a figure for it; both sides are of one run.

    Those that were missed stand in the open, the others folded, in the order of the longest run.
    """
    found = _newest(runs)
    longest = sorted(runs, key=_size, reverse=True)
    order = dict.fromkeys(bar["what"] for results in longest for bar in results["bars"])
    rows, missed, words = [], [], []
    for bar, commit in map(found.__getitem__, order):
        value = "-" if bar["value"] is None else f"{bar['value']:.2f}"
        limit = "" if bar["limit"] is None else f"{bar['rule']} {bar['limit']:g}"
        word = {True: "held", False: "missed", None: ""}[bar["held"]]
        if bar["value"] is None:
            word = "not measured"
        rows.append(f"| {bar['what']} | {value} | {limit} | {word} | {commit} |\n")
        if limit:
            words.append(word)
        if word == "missed":
            remark = f"commit {commit}{_later(bar['what'], found)}"
            missed.append(f"- {bar['what']}: {value}, promised {limit} ({remark})\n")
    counts = ", ".join(f"{words.count(x)} {x}" for x in ("held", "missed", "not measured"))
    head = f"Of {len(words)} promised ratios: {counts}." + " Missed:\n\n" * bool(missed)
    table = "| | measured | promised | | commit |\n|---|---:|---|---|---|\n" + "".join(rows)
    folded = FOLDED.format(title=f"All {len(rows)} ratios", text=table)
    return head + ("".join(missed) or "\n") + folded


def _later(what: str, found: dict[str, tuple[dict[str, Any], str]]) -> str:
    """What a later run measured of the same ratio, if any did."""
    later = found.get(LATER.get(what, ""))
    if later is None or later[0]["value"] is None:
        return ""
    return f"; {later[0]['value']:.2f} at commit {later[1]}"


def _newest(runs: list[dict[str, Any]]) -> dict[str, tuple[dict[str, Any], str]]:
    """By what it compares: the bar of the newest run that has a figure for it, and its commit."""
    found: dict[str, tuple[dict[str, Any], str]] = {}
    for results in runs:
        for bar in results["bars"]:
            if bar["what"] not in found or found[bar["what"]][0]["value"] is None:
                found[bar["what"]] = bar, results["machine"]["commit"][:7]
    return found


def _table(records: list[dict[str, Any]], names: dict[tuple[str, str], str] | None = None) -> str:
    lengths = sorted({record["n"] for record in records})
    cells = {(r["contender"], r["method"], r["n"]): _cell(r) for r in records}
    found = dict.fromkeys((r["contender"], r["method"]) for r in records)
    lines = [
        "| | " + " | ".join(f"n = {n:,}" for n in lengths) + " |",
        "|---|" + "---:|" * len(lengths),
    ]
    for contender, method in [key for key in names if key in found] if names else found:
        title = names[contender, method] if names else _title(contender, method)
        shown = (cells.get((contender, method, n), "") for n in lengths)
        lines.append(f"| {title} | {' | '.join(shown)} |")
    return "\n".join(lines) + "\n"


def _title(contender: str, method: str) -> str:
    title = BENCHED[contender].title
    return title if method == "nope" else f"`{method}`, {title}"


def _cell(record: dict[str, Any]) -> str:
    if record["ms"] is None:
        return "-"
    return f"{record['ms']['median']:,.2f} ms, {record['extra_bytes'] / 1e6:,.0f} MB"


def _left_out(records: list[dict[str, Any]]) -> str:
    """Why a cell has a dash."""
    lines = [
        f"- {_title(r['contender'], r['method'])}, n = {r['n']:,}: {r['skipped']}\n"
        for r in records
        if r["skipped"]
    ]
    return "\nLeft out:\n\n" + "".join(lines) if lines else ""
