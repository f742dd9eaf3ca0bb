"""What position costs a whole model: a row for each mode and method, a column for each length."""

import random
from statistics import median
from typing import Any

from tables.results_folder import FOLDED, MISSING, ResultsFolder

NEAR = 0.005  # a cost this close to its limit is at its limit
BELOW = """
Median of {rounds} turns of {turn} steps. {layers} {of_what} of {width}, {heads} heads, \
a vocabulary of
{vocabulary:,}, {tokens:,} {tokens_of} a step, {dtype} autocast, fused AdamW. {gpu}, torch {torch},
Triton {triton}, commit {commit}. To measure again: `python benchmarks/{name}.py --apart`.
"""


def model_cost(stored: ResultsFolder) -> str:
    """Milliseconds a step of a language model and the cost over NoPE, with what was promised."""
    return _table(stored, "model_cost", "nope", of_what="layers", tokens_of="tokens")


def translation_cost(stored: ResultsFolder) -> str:
    """The same of an encoder-decoder, over sinusoids, with steps a second."""
    return _table(
        stored,
        "translation_cost",
        "sinusoidal",
        of_what="layers of the encoder and as many of the decoder,",
        tokens_of="source and as many target tokens",
    )


def _table(stored: ResultsFolder, name: str, baseline: str, *, of_what: str, tokens_of: str) -> str:
    results = stored.json(f"gpu/{name}.json")
    if results is None:
        return MISSING.format(f"python benchmarks/{name}.py --apart")
    records = results["records"]
    lengths = sorted({record["n"] for record in records})
    cells = {(r["mode"], r["method"], r["n"]): _cell(r, baseline) for r in records}
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
    summary = f"{len(reasons)} not measured, and why"
    left_out = FOLDED.format(title=summary, text="".join(reasons)) if reasons else ""
    where = {"gpu": "a CPU", "triton": "-", **results["machine"]}  # a CPU's record has neither
    words = {"name": name, "of_what": of_what, "tokens_of": tokens_of}
    below = BELOW.format(**results["config"], **where, **words)
    return "\n".join(lines) + "\n" + left_out + below + _spread(records, baseline)


def _spread(records: list[dict[str, Any]], baseline: str) -> str:
    """How far the turns of the baseline lie apart, where they do most."""
    known = [r for r in records if r["method"] == baseline and r["ms"] is not None]
    if not known:
        return ""
    apart = [r["ms"]["most"] / r["ms"]["least"] - 1 for r in known]
    most = known[apart.index(max(apart))]
    return (
        f"The turns of `{baseline}` itself differ by up to {max(apart):.0%} ({most['mode']}, "
        f"n = {most['n']:,}): smaller costs than that are not sure there.\n"
    )


def _cell(record: dict[str, Any], baseline: str) -> str:
    if record["ms"] is None:
        return "-"
    text = f"{record['ms']['median']:.1f} ms"
    if baseline == "sinusoidal":
        text += f" ({record['steps_a_second']:.1f} a second)"
    if record["method"] == baseline or record["cost"] is None:
        return text
    text += f", {record['cost']:+.1%}"
    if record["limit"] is None:
        return text
    return f"{text} (≤ {record['limit']:.0%} {'held' if record['held'] else 'missed'})"


def cost_findings(stored: ResultsFolder) -> str:
    """The cost of each method, a column for each mode and length at which any was measured."""
    results = stored.json("gpu/model_cost.json")
    if results is None:
        return MISSING.format("python benchmarks/model_cost.py --apart")
    known = [r for r in results["records"] if r["cost"] is not None and r["method"] != "nope"]
    costs = {(r["method"], r["mode"], r["n"]): _cost(r) for r in known}
    columns = sorted({(r["mode"], r["n"]) for r in known})  # called, then compiled
    titles = [f"n = {n:,}" + f", {mode}" * (mode != "called") for mode, n in columns]
    lines = [f"| | {' | '.join(titles)} |", "|---|" + "---:|" * len(columns)]
    for method in dict.fromkeys(r["method"] for r in known):
        shown = (costs.get((method, *column), "") for column in columns)
        lines.append(f"| `{method}` | {' | '.join(shown)} |")
    judged = [r for r in known if r["held"] is not None]
    if judged:
        limits = sorted(r["limit"] for r in judged)
        held = sum(r["held"] for r in judged)
        lines += [
            "",
            f"Of {len(judged)} promised limits ({limits[0]:.0%} to {limits[-1]:.0%}), {held} hold; "
            "in bold the costs that are above theirs. Empty: not measured.",
        ]
    return "\n".join(lines) + "\n" + _at_their_limits(results["records"])


def _at_their_limits(records: list[dict[str, Any]]) -> str:
    """How sure the costs are that are within half a point of their limit: a line for each."""
    told = ""
    for record in records:
        if record["limit"] is None or record["cost"] is None:
            continue
        if abs(record["cost"] - record["limit"]) > NEAR:
            continue
        same = [r for r in records if (r["mode"], r["n"]) == (record["mode"], record["n"])]
        base = next(r for r in same if r["method"] == "nope")
        low, high = _range(record["turns"], base["turns"])
        told += (
            f"At its limit: `{record['method']}`, n = {record['n']:,}, {record['mode']}, "
            f"{low:+.1%} to {high:+.1%} in 95 of 100 draws of its turns and those of `nope`.\n"
        )
    return told


def _range(turns: list[float], base: list[float], draws: int = 4000) -> tuple[float, float]:
    """The cost in 95 of 100 draws: as many turns of each, with repetition, by chance."""
    pick = random.Random(0).choices
    costs = sorted(
        median(pick(turns, k=len(turns))) / median(pick(base, k=len(base))) - 1
        for _ in range(draws)
    )
    return costs[draws // 40], costs[-(draws // 40)]


def _cost(record: dict[str, Any]) -> str:
    told = f"{record['cost']:+.1%}"
    return f"**{told}**" if record["held"] is False else told


def first_call(stored: ResultsFolder) -> str:
    """Seconds of the first call of a kind, in a sentence."""
    results = stored.json("gpu/first_call.json")
    if results is None:
        return MISSING.format("python benchmarks/first_call.py")
    kinds = [record for record in results["records"] if record["method"] != "nope"]
    first = ", ".join(f"{record['first']:.1f} s with `{record['method']}`" for record in kinds)
    where = f"{results['machine']['gpu']}, commit {results['machine']['commit']}"
    again = max(max(record["other_length"], record["other_tiles"]) for record in kinds)
    return (
        f"- **The first call of a kind compiles its kernels**: {first} (one layer, {where}; to "
        "measure again: `python benchmarks/first_call.py`). After it another length compiles "
        "nothing, but where tiles or launches change, in general at 64, 128, 512, 1,024 and 2,048 "
        "tokens, and between lengths that are a multiple of 64 and others. That takes up to "
        f"{again:.1f} s, once. Kernels stay in Triton's cache on disk.\n"
    )
