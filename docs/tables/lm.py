"""Language modelling: what the comparison found, how sure it is, and with what it was made."""

from functools import cache
from math import sqrt
from statistics import fmean, stdev

from scipy.stats import t as student

from tables.results_folder import MISSING, ResultsFolder
from whence.analysis.lm_results import SLIDING, Job, Language, Mean, Row, ranked
from whence.analysis.results import worded
from whence.report.lm_table import loss_text
from whence.report.text_table import NONE

COMMAND = "python benchmarks/lm_gpu.py"
MAIN = {
    "python": "Python source",
    "wikitext": "WikiText-2",
    "python_masked": "Python source, masked",
}
ABLATIONS = {"python_ablation": "Python source", "wikitext_ablation": "WikiText-2"}
LONG = {"python_long": "python", "wikitext_long": "wikitext"}
TOEPLITZ_STEPS = (0, 1000, 1600, 2500, 3000, 5000, 7500, 10_000)
# How each variant of the ablation starts, and in what units it is trained. When it was run, KERPLE
# was in the units of its paper, and kerple_scaled in those that KERPLE has now.
PAPER, OURS = "of the paper", "ours"
VARIANTS = {
    "tisa_paper:start=released,gain=1": ("TISA", "released", PAPER),
    "tisa_paper:start=released,gain=30": ("TISA", "released", f"{PAPER}, rate x 30"),
    "tisa:start=released": ("TISA", "released", OURS),
    "tisa:start=zero": ("TISA", "zero", OURS),
    "tisa_paper:start=local,gain=1": ("TISA", "local", PAPER),
    "tisa_paper:start=local,gain=30": ("TISA", "local", f"{PAPER}, rate x 30"),
    "tisa": ("TISA", "local", OURS),
    "t5_paper:start=normal,gain=1": ("T5", "normal", PAPER),
    "t5:start=normal": ("T5", "normal", OURS),
    "t5_paper:start=local,gain=1": ("T5", "local", PAPER),
    "t5": ("T5", "local", OURS),
    "shaw_paper:start=xavier": ("Shaw, clip 16", "xavier", PAPER),
    "shaw:clip=16,start=xavier": ("Shaw, clip 16", "xavier", OURS),
    "shaw:clip=16": ("Shaw, clip 16", "wide", OURS),
    "kerple": ("KERPLE", "its own", PAPER),
    "kerple_scaled": ("KERPLE", "its own", OURS),
    "content_band:start=normal": ("content band", "normal", PAPER),
    "content_band": ("content band", "local", PAPER),
    "rope": ("RoPE", "", ""),
}


def lm_losses(stored: ResultsFolder) -> str:
    """Losses at the length of training and at the longest, on each corpus."""
    runs = _runs(stored, MAIN)
    if runs is None:
        return MISSING.format(COMMAND)
    home, far = _lengths(next(iter(runs.values())))
    head = ["", *(f"{MAIN[name]}, {n:,}" for name in runs for n in (home, far))]
    rows = {name: {row.method: row for row in ranked(run)} for name, run in runs.items()}
    lines = _head(head)
    for method in rows["python"]:
        cells = []
        for name, run in runs.items():
            row = rows[name].get(method)
            for length in (home, far):
                cells.append(_cell(row, run.lengths.index(length), rows[name]))
        lines.append(_line([f"`{method}`", *cells]))
    told = (
        f"Nats a token from scratch, mean ± standard deviation over {_seeds(runs)} seeds, each "
        "method at its best of three learning rates; in bold the smallest of a column. `learned` "
        f"knows {home} positions. The masked objective was not run with `sandwich` and `nope`."
    )
    return "\n".join([*lines, "", told]) + "\n"


def _cell(row: Row | None, place: int, rows: dict[str, Row]) -> str:
    found = None if row is None else row.scratch[place]
    if found is None:
        return NONE if row is not None else ""
    others = [x.mean for other in rows.values() if (x := other.scratch[place]) is not None]
    text = loss_text(found)
    return f"**{text}**" if found.mean == min(others) else text


def lm_paired(stored: ResultsFolder) -> str:
    """The loss of each method less that of RoPE with the same seed."""
    runs = _runs(stored, MAIN)
    if runs is None:
        return MISSING.format(COMMAND)
    lines = _head(["less RoPE", *MAIN.values()])
    methods = [m for m in runs["python"].methods if m != "rope"]
    found = {m: [_difference(run, m, "rope") for run in runs.values()] for m in methods}
    for method, cells in sorted(found.items(), key=lambda item: _middle(item[1][0])):
        lines.append(_line([f"`{method}`", *map(_interval, cells)]))
    home = _lengths(runs["python"])[0]
    told = (
        f"At {home} tokens: mean of the differences of equal seeds, its 95% interval (Student's, "
        f"{_seeds(runs)} seeds), and in brackets the smallest and the largest. An interval that "
        "holds 0 says that the order is not sure."
    )
    return "\n".join([*lines, "", told]) + "\n"


def _difference(run: Language, method: str, other: str) -> list[float]:
    home = _lengths(run)[0]
    first, second = ({j.seed: j for j in run.jobs if j.method == x} for x in (method, other))
    seeds = sorted(first.keys() & second.keys())
    pairs = [(_loss(first[seed], home), _loss(second[seed], home)) for seed in seeds]
    return [a - b for a, b in pairs if a is not None and b is not None]


def _middle(values: list[float]) -> float:
    return fmean(values) if values else float("inf")


def _interval(values: list[float]) -> str:
    if len(values) < 2:
        return ""
    half = student.ppf(0.975, len(values) - 1) * stdev(values) / sqrt(len(values))
    return f"{fmean(values):+.3f} ± {half:.3f} ({min(values):+.3f} to {max(values):+.3f})"


def lm_far(stored: ResultsFolder) -> str:
    """How the loss changes from the length of training to the longest."""
    runs = _runs(stored, MAIN)
    if runs is None:
        return MISSING.format(COMMAND)
    columns = [(name, how) for name in runs for how in ("from scratch", SLIDING)]
    columns.remove(("python_masked", SLIDING))
    rows = {name: {row.method: row for row in ranked(run)} for name, run in runs.items()}
    lines = _head(["", *(f"{MAIN[name]}, {how}" for name, how in columns)])
    for method in rows["python"]:
        changes = [_change(rows[name].get(method), how) for name, how in columns]
        if any(x is not None for x in changes):
            lines.append(
                _line([f"`{method}`", *("" if x is None else f"{x:+.3f}" for x in changes)])
            )
    home, far = _lengths(runs["python"])
    told = (
        f"Loss at {far:,} tokens less that at {home}. From scratch the longer sequences have an "
        "advantage: fewer of their tokens have little before them. With sliding windows, of which "
        "the second half is scored, both have at least half a window."
    )
    return "\n".join([*lines, "", told]) + "\n"


def _change(row: Row | None, how: str) -> float | None:
    if row is None:
        return None
    means: tuple[Mean | None, ...] = row.sliding if how == SLIDING else row.scratch
    near, far = means[0], means[-1]
    return None if near is None or far is None else far.mean - near.mean


def lm_long(stored: ResultsFolder) -> str:
    """Half of the steps and all of them: how flat the curves are."""
    lines = _head(["", "", "steps", "loss at 512", "8,192", "RoPE less TISA at 512"])
    for name, short in LONG.items():
        runs = [language(stored, short), language(stored, name)]
        if runs[0] is None or runs[1] is None:
            return MISSING.format(COMMAND)
        for run in (x for x in runs if x is not None):
            found = {m: _of_seed(run, m) for m in ("tisa", "rope")}
            lead = _shown(found["rope"], 512, found["tisa"])
            for method, job in found.items():
                losses = [f"{_loss(job, n) or 0:.3f}" for n in (512, 8192)]
                steps = f"{run.config['steps']:,}"
                cells = [MAIN[short], f"`{method}`", steps, *losses]
                lines.append(_line([*cells, lead if method == "rope" else ""]))
    told = "One seed, learning rate 3e-3. Each run has its own cosine down to a rate of 0."
    return "\n".join([*lines, "", told]) + "\n"


def _shown(job: Job, length: int, other: Job) -> str:
    a, b = _loss(job, length), _loss(other, length)
    return "" if a is None or b is None else f"{a - b:+.3f}"


def _of_seed(run: Language, method: str) -> Job:
    return next(job for job in run.jobs if (job.method, job.seed) == (method, 0))


def lm_ablation(stored: ResultsFolder) -> str:
    """Start times units times rate."""
    runs = {name: language(stored, name) for name in ABLATIONS}
    if runs["python_ablation"] is None:
        return MISSING.format(COMMAND)
    known = {name: run for name, run in runs.items() if run is not None}
    rates = [float(x) for x in runs["python_ablation"].config["learning_rates"]]
    columns = [(name, rate) for name in known for rate in rates]
    titles = [f"{ABLATIONS[name]}, rate {rate:g}" for name, rate in columns]
    lines = _head(["", "start", "units", *titles])
    for method, told in VARIANTS.items():
        cells = [_tuned(known[name], method, rate) for name, rate in columns]
        if any(cells):
            lines.append(_line([*told, *cells]))
    steps = ", ".join(
        f"{run.config['steps']} steps on {ABLATIONS[name]}" for name, run in known.items()
    )
    told = (
        f"Loss at 512 tokens on the part of the text by which rates are chosen; one seed, {steps}. "
        "Empty: not run, because the time on the GPU was spent. The paper's units are a, b and c "
        "themselves; ours are a, the logarithm of the width and c over the width, held as a 30th "
        "of themselves (now a 32nd)."
    )
    return "\n".join([*lines, "", told]) + "\n"


def lm_rates(stored: ResultsFolder) -> str:
    """The loss of every method at each learning rate, on the part that is not reported."""
    runs = _runs(stored, MAIN)
    if runs is None:
        return MISSING.format(COMMAND)
    rates = [float(x) for x in runs["python"].config["learning_rates"]]
    columns = [(name, rate) for name in runs for rate in rates]
    lines = _head(["", *(f"{MAIN[name]}, {rate:g}" for name, rate in columns)])
    for method in runs["python"].methods:
        cells = [_tuned(runs[name], method, rate, best=True) for name, rate in columns]
        lines.append(_line([f"`{method}`", *cells]))
    told = "Loss at 512 tokens on other text than is reported, seed 0; in bold what was chosen."
    return "\n".join([*lines, "", told]) + "\n"


def _tuned(run: Language, method: str, rate: float, *, best: bool = False) -> str:
    found = {x.learning_rate: x.loss for x in run.tuning if x.method == method}
    loss = found.get(rate)
    if loss is None:
        return ""
    chosen = best and loss == min(x for x in found.values() if x is not None)
    return f"**{loss:.3f}**" if chosen else f"{loss:.3f}"


def lm_toeplitz(stored: ResultsFolder) -> str:
    """R^2 of the best Toeplitz fit of a learned table against steps, beside its null."""
    run = language(stored, "toeplitz")
    if run is None:
        return MISSING.format(COMMAND)
    traces = {trace.step: trace.table for trace in run.jobs[0].toeplitz}
    lines = _head(["step", "R² without the diagonal", "a random table's", "R²", "a random table's"])
    for step in TOEPLITZ_STEPS:
        at = traces[step]
        values = (at.r2_off_diagonal, at.null_r2_off_diagonal, at.r2, at.null_r2)
        lines.append(_line([f"{step:,}", *(worded(x) for x in values)]))
    config = run.config
    told = (
        f"`learned`, masked objective on WikiText-2, {config['n_layers']} layers of "
        f"{config['n_heads']} heads, width {config['d_model']}, {config['steps']:,} steps of "
        f"{config['batch']} sequences of {config['train_length']} tokens; one seed. The random "
        "table has rows of the same norms."
    )
    return "\n".join([*lines, "", told]) + "\n"


def lm_setting(stored: ResultsFolder) -> str:
    """What was trained on what, and where."""
    runs = _runs(stored, MAIN)
    if runs is None:
        return MISSING.format(COMMAND)
    run = runs["python"]
    config, machine = run.config, run.machine
    job = run.jobs[0]
    size = (job.parameters - job.positional) / 1e6
    rates = ", ".join(f"{float(x):g}" for x in config["learning_rates"])
    lines = [
        f"- Model: {config['n_layers']} layers of {config['n_heads']} heads, width "
        f"{config['d_model']}, {size:.1f} million parameters without the position; dropout 0.1 on "
        "WikiText-2 and none on Python source.",
        f"- Training: AdamW, {config['batch']} sequences of {config['train_length']} tokens a "
        f"step, warm-up over a tenth of the steps, then a cosine to 0, weight decay "
        f"{config['weight_decay']:g} but for numbers of a logit's size, bfloat16. Learning rates "
        f"{rates}, each with seed 0; the best on {config['tuning_tokens']:,} tokens that are not "
        "reported, then two more seeds at it.",
        *(f"- {MAIN[name]}: {_corpus(each)}" for name, each in runs.items()),
        f"- Tested on the first {config['eval_tokens']:,} tokens of the validation text at each "
        "length, from scratch and with windows that slide.",
        f"- Machine: {machine['gpu']}, torch {machine['torch']}, Triton {machine['triton']}, "
        f"Python {machine['python']}, commit {machine['commit']}; up to {run.side_by_side} runs "
        "side by side.",
    ]
    return "\n".join(lines) + "\n"


def _corpus(run: Language) -> str:
    config, data = run.config, run.data
    tokens = config["steps"] * config["batch"] * config["train_length"]
    return (
        f"{int(data['train_tokens']):,} training tokens of a byte-level BPE with "
        f"{int(data['vocab_size']):,} entries ({data['characters_a_token']} characters a token), "
        f"{config['steps']:,} steps, {tokens / int(data['train_tokens']):.2f} times through them; "
        f"SHA-256 of the text {str(data['sha256'])[:12]}."
    )


@cache
def language(stored: ResultsFolder, name: str) -> Language | None:
    """One comparison, or None where it has not been run."""
    path = stored.path(f"lm/{name}/lm.json")
    return Language.load(path) if path.is_file() else None


def _runs(stored: ResultsFolder, names: dict[str, str]) -> dict[str, Language] | None:
    found = {name: language(stored, name) for name in names}
    known = {name: run for name, run in found.items() if run is not None}
    return known if len(known) == len(names) else None


def _lengths(run: Language) -> tuple[int, int]:
    return int(run.config["train_length"]), run.lengths[-1]


def _loss(job: Job, length: int) -> float | None:
    found = job.loss(length)
    return None if found is None else found.loss


def _seeds(runs: dict[str, Language]) -> int:
    counts = {
        sum(job.method == name for job in run.jobs) for run in runs.values() for name in run.methods
    }
    (count,) = counts
    return count


def _head(titles: list[str]) -> list[str]:
    return [
        _line(titles),
        "|" + "|".join("---" if i == 0 else "---:" for i in range(len(titles))) + "|",
    ]


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"
