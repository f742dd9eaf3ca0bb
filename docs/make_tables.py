"""Writes the generated tables into the Markdown files, between their markers.

    python docs/make_tables.py           write them
    python docs/make_tables.py --check   exit with 1 if a file is out of date

A table stands between `<!-- table: NAME -->` and `<!-- end of table -->`. One whose results are not
there says so, or is left out with its heading.
"""

import inspect
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from whence.analysis.language import SCRATCH, SLIDING, Job, Language, Row, ranked
from whence.bench import CONTENDERS as BENCHED
from whence.methods import METHODS

ROOT = Path(__file__).resolve().parent.parent
BLOCK = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end of table -->)", re.DOTALL)


def methods() -> str:
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


GIVEN = ("self", "n_heads", "d_head", "d_model", "max_length", "causal", "n_layers")


def method_pages() -> str:
    """A section a method, from its docstring: formula, convention, surprise; and its options."""
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
        listed = re.search(r"\S {2,}\S", paragraph)  # columns, which prose would run together
        lines += ["```text", paragraph, "```", ""] if listed else [paragraph, ""]
    lines += [f"With its defaults: `{spec_with_defaults(name)}`. {'; '.join(facts)}.", ""]
    return "\n".join(lines)


def minilm() -> str:
    """The telling numbers of one real model, each beside what it must be held against."""
    results = _results("inspect_minilm.json")
    if results is None:
        return MISSING.format("python docs/make_pictures.py")
    rows = ["| | | to hold it against |", "|---:|---|---|"]
    for number in results["telling"]:
        rows.append(f"| {number['value']} | {number['what']} | {number['against']} |")
    versions = ", ".join(f"{name} {value}" for name, value in results["versions"].items())
    model = results["model"]
    place = f"{model['name']}, SHA-256 {model['sha256'][:16]}... Read with {versions}."
    return "\n".join([*rows, "", place]) + "\n"


def minilm_windows() -> str:
    """R^2 of one table as a function of the window, with and without the main diagonal."""
    results = _results("inspect_minilm.json")
    if results is None:
        return MISSING.format("python docs/make_pictures.py")
    rows = [
        "| positions | R² | random table | without the main diagonal | random table |",
        "|---|---:|---:|---:|---:|",
    ]
    for window in results["windows"]:
        numbers = ("r2", "null_r2", "r2_off_diagonal", "null_r2_off_diagonal")
        cells = [f"{window[name]:.3f}" for name in numbers]
        rows.append(f"| {window['start']}..{window['stop'] - 1} | {' | '.join(cells)} |")
    return "\n".join(rows) + "\n"


MISSING = "Not measured yet: `{}`.\n"
CONTENDERS = {
    "whence": "`whence`",
    "eager": "eager, n x n",
    "sdpa_dense": "SDPA, dense bias",
    "plain": "SDPA, no bias",
    "article": "the article's algorithm",
}


def cpu_tisa() -> str:
    """Time and memory of TISA's attention on a CPU."""
    return _measured("tisa", "attention", "Time and memory of attention with TISA's bias")


def cpu_shaw() -> str:
    """Time and memory of attention with Shaw's keys and values on a CPU."""
    return _measured("shaw", "shaw", "Time and memory of attention with Shaw's tables")


def cpu_bars() -> str:
    """What the CPU benchmark promises, what was measured, and where."""
    results = _results("cpu/attention.json")
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


def _measured(group: str, figure: str, caption: str) -> str:
    results = _results("cpu/attention.json")
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
    if (ROOT / "results" / "cpu" / f"{figure}.png").is_file():
        rows += ["", f"![{caption}](../results/cpu/{figure}.png)"]
    return "\n".join(rows) + "\n"


GPU_RUNS = ("gpu/bars.json", "gpu/flex.json", "gpu/bars_before.json")  # the newest first


def gpu() -> str:
    """The whole section on one GPU, or nothing where it has not been measured.

    What the newest run did not reach is from one before it, with its commit.
    """
    runs = [results for results in map(_results, GPU_RUNS) if results is not None]
    if not runs:
        return ""
    parts = [GPU.format(**runs[0]["config"], **runs[0]["machine"]), "\n", _gpu_bars(runs)]
    seen: set[tuple[Any, ...]] = set()
    for results in runs:
        fresh = [r for r in results["records"] if _gpu_point(r) not in seen]
        seen |= {_gpu_point(r) for r in fresh}
        groups = dict.fromkeys(_gpu_group(record) for record in fresh)
        for mode, d_head, causal, batch in sorted(groups, key=str):
            mine = [r for r in fresh if _gpu_group(r) == (mode, d_head, causal, batch)]
            words = {"both": "Forward and backward", "forward": "Forward", "decode": "Decoding"}
            heading = f"{words[mode]}, heads of {d_head}"
            heading += ", causal" * (causal and mode != "decode")
            several = "" if batch is None else f", {batch} sequences"
            heading += ", 1 sequence" if batch == 1 else several
            heading += f" (commit {results['machine']['commit'][:7]})"
            parts += [f"\n### {heading}\n\n", _gpu_table(mine), _gpu_left_out(mine)]
    return "".join(parts)


def gpu_short() -> str:
    """For the README: TISA on one GPU against what there is, time and memory over n."""
    results = _results("gpu/bars.json")
    if results is None:
        return MISSING.format("python benchmarks/gpu.py")
    names = {
        ("whence:fused", TISA): "`whence`, TISA with its gradients",
        ("replayed", TISA): "the same, from a CUDA graph",
        ("flash", "nope"): "FlashAttention-2, no bias",
        ("cudnn", "nope"): "cuDNN, no bias",
        ("flex-best", TISA): "FlexAttention, the same bias, best tiles",
        ("eager", TISA): "eager, the same bias",
    }
    records = [*results["records"]]
    for record in results["records"]:
        if record["contender"] == "whence:fused" and record.get("graph_ms"):
            records.append({**record, "contender": "replayed", "ms": record["graph_ms"]})
    peers = _results("gpu/flex.json")
    if peers is not None:
        records += [r for r in peers["records"] if r["contender"] == "flex-best"]
    usual = [r for r in records if _gpu_group(r) == ("both", 64, False, None)]
    mine = [r for r in usual if (r["contender"], r["method"]) in names and r["n"] <= 16_384]
    where = "{gpu}, torch {torch}, commit {commit}".format(**results["machine"])
    return _gpu_table(mine, names) + (
        f"\nForward and backward, 12 heads of 64, 16,384 tokens a batch, bfloat16: {where}.\n"
    )


TISA = "tisa:kernels=5"
GPU = """
## Attention on a GPU

One layer's attention: {n_heads} heads, {tokens:,} tokens a batch, {dtype}. The position method is
part of the step: its curve or tables are evaluated and, with a backward, get their gradients, as do
q, k and v. Median time as called, and the most memory beyond the inputs.

Nothing was timed before it was exact. A kernel's output and gradients, at the size that is timed,
are at most twice as far from float64 as PyTorch's own in the same dtype, where an error below
0.05 % of a tensor's size (0.2 % for a method's own parameters) counts as that much. The peers in
plain PyTorch (eager, SDPA with a dense bias, the article's algorithm) equal the definition in
float64, at up to 512 tokens. The stricter check is `benchmarks/gpu_exactness.py`.

Measured on {gpu}, driver {driver}, torch {torch}, Triton {triton}, cuDNN {cudnn}, Python {python},
commit {commit}; what the GPU's time did not suffice for is from an earlier commit, named beside it.
Both sides of a ratio are of one run. At 512 and 2,048 tokens a step as called waits for the host,
and hosts differ by half; from a CUDA graph it is the GPU's time alone. All numbers, with quantiles:
[results/gpu](../results/gpu/bars.json). To measure again: `python benchmarks/gpu.py`.
"""


def _gpu_group(record: dict[str, Any]) -> tuple[Any, ...]:
    """One table each: the batch follows from n, except when decoding."""
    batch = record["batch"] if record["mode"] == "decode" else None
    return record["mode"], record["d_head"], record["causal"], batch


def _gpu_point(record: dict[str, Any]) -> tuple[Any, ...]:
    return (*_gpu_group(record), record["contender"], record["method"], record["n"])


def _gpu_bars(runs: list[dict[str, Any]]) -> str:
    """Every bar by the newest run that has a figure for it; both sides are of one run."""
    lines = ["| | measured | promised | | commit |", "|---|---:|---|---|---|"]
    found: dict[str, tuple[dict[str, Any], str]] = {}
    for results in runs:
        for bar in results["bars"]:
            if bar["what"] not in found or found[bar["what"]][0]["value"] is None:
                found[bar["what"]] = bar, results["machine"]["commit"][:7]
    for bar, commit in found.values():
        value = "-" if bar["value"] is None else f"{bar['value']:.2f}"
        limit = "" if bar["limit"] is None else f"{bar['rule']} {bar['limit']:g}"
        word = {True: "held", False: "missed", None: ""}[bar["held"]]
        if bar["value"] is None:
            word = "not measured"
        lines.append(f"| {bar['what']} | {value} | {limit} | {word} | {commit} |")
    return "\n".join(lines) + "\n"


def _gpu_table(
    records: list[dict[str, Any]], names: dict[tuple[str, str], str] | None = None
) -> str:
    lengths = sorted({record["n"] for record in records})
    cells = {(r["contender"], r["method"], r["n"]): _gpu_cell(r) for r in records}
    found = dict.fromkeys((r["contender"], r["method"]) for r in records)
    lines = [
        "| | " + " | ".join(f"n = {n:,}" for n in lengths) + " |",
        "|---|" + "---:|" * len(lengths),
    ]
    for contender, method in [key for key in names if key in found] if names else found:
        title = names[contender, method] if names else _gpu_title(contender, method)
        shown = (cells.get((contender, method, n), "") for n in lengths)
        lines.append(f"| {title} | {' | '.join(shown)} |")
    return "\n".join(lines) + "\n"


def _gpu_title(contender: str, method: str) -> str:
    title = BENCHED[contender].title
    return title if method == "nope" else f"`{method}`, {title}"


def _gpu_cell(record: dict[str, Any]) -> str:
    if record["ms"] is None:
        return "-"
    return f"{record['ms']['median']:,.2f} ms, {record['extra_bytes'] / 1e6:,.0f} MB"


def _gpu_left_out(records: list[dict[str, Any]]) -> str:
    """Why a cell has a dash."""
    lines = [
        f"- {_gpu_title(r['contender'], r['method'])}, n = {r['n']:,}: {r['skipped']}\n"
        for r in records
        if r["skipped"]
    ]
    return "\nLeft out:\n\n" + "".join(lines) if lines else ""


def _results(name: str) -> Any:
    """What a benchmark wrote, or None."""
    path = ROOT / "results" / name
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


DISTILLED = {
    "original": "the original, with its table",
    "deleted": "table deleted",
    "rows": "table deleted, its mean rows moved into the words",
    "fitted": "TISA fitted",
    "tuned": "TISA fitted and tuned",
}


def distilled() -> str:
    """One real model with TISA in place of its table: score, change and closeness."""
    results = _results("distill_minilm.json")
    if results is None:
        return MISSING.format("python benchmarks/distill_minilm.py")
    rows = [
        "| | S | rows moved | text | Spearman | change | pooled cosine | error, last layer |",
        "|---|---:|---|---|---:|---:|---:|---:|",
    ]
    start = results["rows"][0]["score"]
    for row in results["rows"]:
        name = DISTILLED[row["stage"]] + (f", seed {row['seed']}" if row.get("seed") else "")
        cells = [name, str(row.get("kernels", "")), row.get("rows", ""), row["text"]]
        cells += [f"{row['score']:.2f}", f"{row['score'] - start:+.2f}"]
        cells += [f"{row['pooled']:.3f}", f"{row['error'][-1]:.3f}"]
        rows.append(f"| {' | '.join(cells)} |")
    config, machine = results["config"], results["machine"]
    versions = ", ".join(f"{name} {value}" for name, value in results["versions"].items())
    place = (
        f"{results['model']}, SHA-256 {results['sha256'][:16]}...; {results['pairs']:,} pairs of "
        f"STS-B's dev set. Tuned for {config['steps']} steps of {config['batch']} sequences. "
        f"{results['cpu_seconds'] / 60:.0f} minutes of one core of {machine['cpu']}, commit "
        f"{machine['commit']}, {versions}."
    )
    return "\n".join([*rows, "", place]) + "\n"


def distilled_long() -> str:
    """A document longer than the table, by what the kernels were fitted to."""
    results = _results("distill_minilm.json")
    if results is None:
        return MISSING.format("python benchmarks/distill_minilm.py")
    rows = [
        "| | tokens | cosine with the mean of the original's pieces |",
        "|---|---:|---:|",
    ]
    cut = results["long"]["cosine_of_the_originals_first_512_tokens"]
    rows.append(f"| the original, the rest cut off | 512 | {cut:.3f} |")
    texts = {
        "long": "S = 5, fitted and tuned on train.tsv",
        "long_wikitext": "S = 5, fitted to wikitext-2.train.txt",
    }
    for key, text in texts.items():
        found = results[key]
        cosine = f"{found['cosine_with_mean_of_pieces']:.3f}"
        rows.append(f"| {text} | {found['tokens']:,} | {cosine} |")
    pieces = ", ".join(f"{x:.3f}" for x in results["long"]["cosines_of_pieces_with_their_mean"])
    return "\n".join([*rows, "", f"The original's pieces themselves: {pieces}."]) + "\n"


LM = "python benchmarks/lm_gpu.py"


def lm_losses() -> str:
    """The ranking of methods on language modelling, as results/lm has it."""
    return _lm_file("table.md")


def lm_sliding() -> str:
    """Losses of sliding windows."""
    return _lm_file("sliding.md")


def _lm_file(name: str) -> str:
    path = ROOT / "results" / "lm" / name
    return path.read_text(encoding="utf-8") if path.is_file() else MISSING.format(LM)


def lm_half() -> str:
    """The ranking of the second run, with half the learning rate."""
    return _lm_file("half_rate/table.md")


def lm_seeds() -> str:
    """Every seed at the length of training, in both runs: what a mean of two hides."""
    runs = _lm_runs()
    if runs is None:
        return MISSING.format(LM)
    columns = [(run, seed) for run in runs for seed in sorted({job.seed for job in run.jobs})]
    titles = [f"{_lm_rate(run)}, seed {seed}" for run, seed in columns]
    lines = [f"| | {' | '.join(titles)} |", "|---|" + "---:|" * len(columns)]
    for row in ranked(runs[0]):
        cells = [_lm_home(run, row.method, seed) for run, seed in columns]
        shown = " | ".join("" if x is None else f"{x:.3f}" for x in cells)
        lines.append(f"| `{row.method}` | {shown} |")
    return "\n".join(lines) + "\n"


def lm_far() -> str:
    """How the loss changes from the length of training to the longest, in both runs."""
    runs = _lm_runs()
    if runs is None:
        return MISSING.format(LM)
    columns = [(run, how) for run in runs for how in (SCRATCH, SLIDING)]
    titles = [f"{how}, {_lm_rate(run)}" for run, how in columns]
    lines = [f"| | {' | '.join(titles)} |", "|---|" + "---:|" * len(columns)]
    rows = [{row.method: row for row in ranked(run)} for run, _ in columns]
    changes = {
        name: [
            _lm_change(found.get(name), how) for found, (_, how) in zip(rows, columns, strict=True)
        ]
        for name in rows[0]
    }
    known = {name: x for name, x in changes.items() if x[0] is not None}
    for name, cells in sorted(known.items(), key=lambda item: item[1][0] or 0.0):
        shown = " | ".join("" if x is None else f"{x:+.3f}" for x in cells)
        lines.append(f"| `{name}` | {shown} |")
    return "\n".join(lines) + "\n"


def lm_moved() -> str:
    """How far a method's term spans over the nearest lags, before and after training."""
    runs = _lm_runs()
    if runs is None:
        return MISSING.format(LM)
    lines = ["| | span at the start | span after training | moved by |", "|---|---:|---:|---:|"]
    first = {job.method: job for job in reversed(runs[0].jobs) if job.stated}
    for row in ranked(runs[0]):
        job = first.get(row.method)
        if job is not None and job.stated[0].quantity == LOGIT:
            before, after, moved = _lm_spans(job)
            name = f"`{job.method}`" + ("" if job.positional else " (fixed)")
            lines.append(f"| {name} | {before:.2f} | {after:.2f} | {moved:.2f} |")
    return "\n".join(lines) + "\n"


LOGIT = "the term added to the logit"


def _lm_spans(job: Job) -> tuple[float, float, float]:
    """Largest less smallest, and the mean change up to a constant: over heads and layers."""
    found = []
    for view in job.stated:
        seen = np.isfinite(view.after).any(axis=0)
        before, after = view.before[:, seen], view.after[:, seen]
        change = after - before
        change = change - change.mean(axis=1, keepdims=True)  # no softmax sees a constant
        found.append([np.ptp(before, 1).mean(), np.ptp(after, 1).mean(), np.abs(change).mean()])
    before, after, moved = (float(x) for x in np.mean(found, axis=0))
    return before, after, moved


def _lm_runs() -> list[Language] | None:
    """The comparison, and the one with half the learning rate."""
    paths = [ROOT / "results" / "lm" / name for name in ("lm.json", "half_rate/lm.json")]
    return [Language.load(path) for path in paths] if all(p.is_file() for p in paths) else None


def _lm_rate(run: Language) -> str:
    return f"rate {run.config['learning_rate']:g}"


def _lm_home(run: Language, method: str, seed: int) -> float | None:
    jobs = [job for job in run.jobs if (job.method, job.seed) == (method, seed)]
    found = jobs[0].loss(int(run.config["train_length"])) if jobs else None
    return None if found is None else found.loss


def _lm_change(row: Row | None, how: str) -> float | None:
    if row is None:
        return None
    means = row.scratch if how == SCRATCH else row.sliding
    near, far = means[0], means[-1]
    return None if near is None or far is None else far.mean - near.mean


def lm_trials() -> str:
    """The runs before the comparison, by which its setting was chosen."""
    results = _results("lm/trials.json")
    if results is None:
        return MISSING.format("python benchmarks/lm_trials.py")
    lines = [
        "| | learning rate | times that for the method | dropout | loss at 512 |",
        "|---|---:|---:|---:|---:|",
    ]
    for x in results["trials"]:
        times = f"{x['position_rate']:g}" if x["method"] != "rope" else ""
        cells = [f"`{x['method']}`", f"{x['learning_rate']:g}", times, f"{x['dropout']:g}"]
        lines.append(f"| {' | '.join(cells)} | {x['loss']:.3f} |")
    place = f"One seed each, {results['config']['steps']} steps; {results['machine']['gpu']}, "
    return "\n".join([*lines, "", f"{place}commit: {results['machine']['commit']}."]) + "\n"


def lm_bigram() -> str:
    """What counting gives on the same tokens."""
    results = _results("lm/bigram.json")
    if results is None:
        return MISSING.format("python benchmarks/lm_bigram.py")
    losses = results["losses"]
    parts, unknown = losses["nine_tenths"], losses["unknown_words_per_1000_characters"]
    return (
        "| counted on the training tokens | loss on the tested tokens |\n|---|---:|\n"
        f"| how frequent a token is | {losses['unigram']:.3f} |\n"
        f"| pairs of tokens | {losses['bigram']:.3f} |\n\n"
        f"Pairs counted on nine tenths of the training tokens: {parts['validation']:.3f} on the "
        f"tested tokens, {parts['the other tenth']:.3f} on the other tenth. `<unk>` stands "
        f"{unknown['data']:.1f} times in 1,000 characters of the training text and "
        f"{unknown['valid']:.1f} times in the validation text.\n"
    )


def lm_scale() -> str:
    """Input methods with token embeddings as they are, and scaled by the root of the width."""
    results = _results("lm/embedding_scale.json")
    if results is None:
        return MISSING.format("python benchmarks/lm_embedding_scale.py")
    config, rows = results["config"], results["rows"]
    factors = sorted({row["factor"] for row in rows})
    lengths = list(rows[0]["losses"])
    titles = [f"loss at {n}, embeddings x {factor:.3g}" for n in lengths for factor in factors]
    lines = [f"| | {' | '.join(titles)} |", "|---|" + "---:|" * len(titles)]
    found = {(row["method"], row["factor"]): row["losses"] for row in rows}
    for method in config["methods"]:
        cells = [found[method, factor][n] for n in lengths for factor in factors]
        shown = [", ".join("-" if x is None else f"{x:.3f}" for x in cell) for cell in cells]
        lines.append(f"| `{method}` | {' | '.join(shown)} |")
    place = (
        f"{config['n_layers']} layers, width {config['d_model']}, {config['steps']} steps of "
        f"{config['batch']} sequences of {config['train_length']}, learning rate "
        f"{config['learning_rate']:g}, {config['vocab_size']:,} tokens; each seed's loss. "
        f"{results['machine']['cpu']}, torch {results['machine']['torch']}, commit "
        f"{results['machine']['commit']}."
    )
    return "\n".join([*lines, "", place]) + "\n"


def lm_setting() -> str:
    """What was trained on what, and where."""
    results = _results("lm/lm.json")
    if results is None:
        return MISSING.format(LM)
    config, data, machine = results["config"], results["data"], results["machine"]
    counts = [sum(x["method"] == m for x in results["jobs"]) for m in config["methods"]]
    seeds = " or ".join(str(n) for n in sorted(set(counts)))
    together = max(job["side_by_side"] for job in results["jobs"])
    epochs = config["steps"] * config["batch"] * config["train_length"] / int(data["train_tokens"])
    tokens = {x["tokens"] for job in results["jobs"] for x in job["losses"] if x["tokens"]}
    lines = [
        f"- Data: {config['data']}, {int(data['train_tokens']):,} tokens of a byte-level BPE with "
        f"{int(data['vocab_size']):,} entries ({data['characters_a_token']} characters a token); "
        f"tested on the first {max(tokens):,} tokens of {config['valid']}.",
        f"- Model: {config['n_layers']} layers, {config['n_heads']} heads, width "
        f"{config['d_model']}, {_lm_parameters(results)} parameters without the position; "
        f"dropout {config['dropout']:g}.",
        f"- Training: {config['steps']:,} steps of {config['batch']} sequences of "
        f"{config['train_length']:,} tokens, {epochs:.1f} times through the text; AdamW, learning "
        f"rate {config['learning_rate']:g} after {config['warmup']} steps of warm-up "
        f"({_lm_times(config['position_rate'])} for TISA, TISAv2, T5 and KERPLE), a cosine, "
        f"weight decay {config['weight_decay']:g}, bfloat16; {seeds} seeds; {together} runs side "
        "by side.",
        f"- Machine: {machine.get('gpu') or machine['cpu']}, torch {machine['torch']}, Triton "
        f"{machine.get('triton')}, Python {machine['python']}, commit {machine['commit']}.",
        *_lm_second(config),
        "- All numbers and curves: [results/lm/lm.json](../results/lm/lm.json).",
    ]
    return "\n".join(lines) + "\n"


def _lm_times(rate: float) -> str:
    return "the same" if rate == 1 else f"{rate:g} times that"


def _lm_second(config: dict[str, Any]) -> list[str]:
    """In what the second run differs from the first."""
    second = _results("lm/half_rate/lm.json")
    if second is None:
        return []
    told = ("seeds", "methods", "data", "valid", "tokenizer")
    other = {k: v for k, v in second["config"].items() if k not in told and v != config[k]}
    words = ", ".join(f"{name.replace('_', ' ')} {value:g}" for name, value in other.items())
    together = max(job["side_by_side"] for job in second["jobs"])
    return [
        f"- Second run: {words}, all else the same; {together} runs side by side; commit "
        f"{second['machine']['commit']}; [half_rate/lm.json](../results/lm/half_rate/lm.json)."
    ]


def _lm_parameters(results: dict[str, Any]) -> str:
    job = results["jobs"][0]
    return f"{(job['parameters'] - job['positional']) / 1e6:.1f} million"


def lm_figures() -> str:
    """The figures that are there."""
    captions = {
        "length": "Loss against length, a panel a method",
        "position": "Loss along the longest sequences, a panel a method",
        "curves": "What learned methods add at each lag, before and after training",
        "tables": "Learned position tables before and after, and their Toeplitzness",
        "attention": "Where heads look after training",
    }
    found = [
        f"![{text}](../results/lm/figures/{name}.png)\n"
        for name, text in captions.items()
        if (ROOT / "results" / "lm" / "figures" / f"{name}.png").is_file()
    ]
    return "\n".join(found) if found else MISSING.format(LM)


def lm_bars() -> str:
    """What TISA and Shaw cost of the tokens a second, against no position."""
    costs = _results("lm/cost.json")
    if costs is None:
        return MISSING.format("python benchmarks/lm_cost.py")
    speed = {(r["contender"], r["n"]): r for r in costs["turns"]}
    lines = [
        "| n | | tokens/s | ms a step | tokens/s lost to NoPE on FlashAttention-2 | promised | |",
        "|---:|---|---:|---:|---:|---|---|",
    ]
    cost = {(bar["what"], bar["n"]): bar for bar in costs["bars"]}
    for (name, n), record in speed.items():
        bar = cost.get((name, n), {})
        limit = "" if bar.get("limit") is None else f"at most {bar['limit']:.0%}"
        word = {True: "held", False: "missed", None: ""}[bar.get("held")]
        slower = f"{bar['cost']:.1%}" if bar else ""
        lines.append(f"| {n:,} | {name} | {_lm_speed(record)} | {slower} | {limit} | {word} |")
    config, machine = costs["config"], costs["machine"]
    place = (
        f"{config['num_hidden_layers']} layers, {config['num_attention_heads']} heads, width "
        f"{config['hidden_size']}, {config['tokens']:,} tokens a step; turns of "
        f"{config['steps_a_turn']} steps. {machine.get('gpu') or machine['cpu']}, torch "
        f"{machine['torch']}, Triton {machine.get('triton')}, commit {machine['commit']}."
    )
    return "\n".join([*lines, "", place]) + "\n"


ALONE = """\
Each by itself, with the most memory that training took. "Host" is a step of a single sequence of
512 tokens, in which the GPU has next to nothing to do: what Python and PyTorch need to launch it.
Where fewer tokens a step are given, more did not fit into memory."""
ALONE_LATE = """\
The speed and memory of every method alone, the time of the host and the article's algorithm were
not reached before the time on the GPU was spent.
"""


def lm_alone() -> str:
    """Every method by itself: speed, memory, and what the host needs."""
    costs = _results("lm/cost.json")
    if costs is None:
        return MISSING.format("python benchmarks/lm_cost.py")
    if not costs["alone"]:
        return ALONE_LATE
    lines = [
        ALONE,
        "",
        "| n | | tokens a step | tokens/s | ms a step | memory | host, ms a step |",
        "|---:|---|---:|---:|---:|---:|---:|",
    ]
    for r in costs["alone"]:
        if "skipped" in r:
            lines.append(f"| {r['n']:,} | {r['contender']} | {r['skipped']} | | | | |")
            continue
        memory = "" if r["peak_bytes"] is None else f"{r['peak_bytes'] / 1e9:.1f} GB"
        cells = [f"{r['n']:,}", r["contender"], f"{r['tokens']:,}", _lm_speed(r), memory]
        lines.append(f"| {' | '.join(cells)} | {r['host_ms']:.1f} |")
    return "\n".join(lines) + "\n"


def _lm_speed(record: dict[str, Any]) -> str:
    if "skipped" in record:
        return f"{record['skipped']} |"
    ms = record["ms"]
    times = f"{ms['median']:.1f} ({ms['q20']:.1f} to {ms['q80']:.1f})"
    return f"{record['tokens_a_second']:,.0f} | {times}"


MARKS = {True: "✓", False: "✗", None: "-"}


def criteria() -> str:
    """Table 1 as measured, the methods of the slides first, with their ticks in brackets."""
    results = _criteria_results()
    rows = sorted(results["rows"], key=lambda row: row["criteria"][0]["slides"] is None)
    titles = ["method", *results["rules"], "time"]
    lines = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    for row in rows:
        cells = [_judged(cell) for cell in row["criteria"]]
        lines.append(f"| `{row['method']}` | {' | '.join(cells)} | {row['time']:.1f}x |")
    versions = ", ".join(f"{name} {value}" for name, value in results["versions"].items())
    return "\n".join([*lines, "", f"Measured with {versions}."]) + "\n"


def rules() -> str:
    """What each criterion of Table 1 measures, and when it is met."""
    return "".join(f"- **{name}**: {rule}\n" for name, rule in _criteria_results()["rules"].items())


def differences() -> str:
    """Where a measurement and the slides' tick differ, and why."""
    lines = []
    for row in _criteria_results()["rows"]:
        for cell in row["criteria"]:
            if cell["slides"] not in (None, cell["verdict"]):
                says, found = MARKS[cell["slides"]], f"{MARKS[cell['verdict']]} {cell['text']}"
                lines.append(
                    f"- `{row['method']}`, {cell['name']}: {found}, slides {says}. {cell['why']}\n"
                )
    return "".join(lines)


def notes() -> str:
    """What else to know of a verdict."""
    cells = [
        (row["method"], cell) for row in _criteria_results()["rows"] for cell in row["criteria"]
    ]
    noted = [(method, cell) for method, cell in cells if cell["why"] and cell["slides"] is None]
    return "".join(f"- `{method}`, {cell['name']}: {cell['why']}\n" for method, cell in noted)


def _criteria_results() -> dict[str, Any]:
    path = ROOT / "results" / "criteria.json"
    results: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return results


def _judged(cell: dict[str, Any]) -> str:
    shown = f"{MARKS[cell['verdict']]} {cell['text']}"
    if cell["slides"] is None:
        return shown
    slides = MARKS[cell["slides"]]
    return f"{shown} ({slides})" if cell["slides"] == cell["verdict"] else f"{shown} (**{slides}**)"


TABLES: dict[str, Callable[[], str]] = {
    "methods": methods,
    "method_pages": method_pages,
    "minilm": minilm,
    "minilm_windows": minilm_windows,
    "cpu_tisa": cpu_tisa,
    "cpu_shaw": cpu_shaw,
    "cpu_bars": cpu_bars,
    "gpu": gpu,
    "gpu_short": gpu_short,
    "distilled": distilled,
    "distilled_long": distilled_long,
    "lm_losses": lm_losses,
    "lm_sliding": lm_sliding,
    "lm_half": lm_half,
    "lm_seeds": lm_seeds,
    "lm_far": lm_far,
    "lm_moved": lm_moved,
    "lm_trials": lm_trials,
    "lm_bigram": lm_bigram,
    "lm_scale": lm_scale,
    "lm_setting": lm_setting,
    "lm_figures": lm_figures,
    "lm_bars": lm_bars,
    "lm_alone": lm_alone,
    "criteria": criteria,
    "rules": rules,
    "differences": differences,
    "notes": notes,
}


def filled(text: str) -> str:
    """The text with every table made anew."""
    return BLOCK.sub(lambda block: block[1] + TABLES[block[2]]() + block[3], text)


def main() -> int:
    """Write, or check, every Markdown file that has a table."""
    out_of_date = []
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        text = path.read_text(encoding="utf-8")
        new = filled(text)
        if new != text:
            out_of_date.append(path.relative_to(ROOT))
            if "--check" not in sys.argv:
                path.write_text(new, encoding="utf-8")
    if out_of_date and "--check" in sys.argv:
        names = ", ".join(map(str, out_of_date))
        print(f"out of date: {names}. Run python docs/make_tables.py", file=sys.stderr)
        return 1
    return 0


def _links(paper: str) -> str:
    """The arXiv numbers as links; the authors stand in the summary."""
    numbers = re.findall(r"arXiv:(\d{4}\.\d{4,5})", paper)
    return ", ".join(f"[{n}](https://arxiv.org/abs/{n})" for n in numbers)


if __name__ == "__main__":
    sys.exit(main())
