"""Language modelling: what methods reach, near and far, and what they learned."""

from typing import Any

import numpy as np

from tables.stored import MISSING, Stored
from whence.analysis.language import SCRATCH, SLIDING, Job, Language, Row, ranked

LM = "python benchmarks/lm_gpu.py"
LOGIT = "the term added to the logit"


def lm_losses(stored: Stored) -> str:
    """The ranking of methods on language modelling, as results/lm has it."""
    return _file(stored, "table.md")


def lm_sliding(stored: Stored) -> str:
    """Losses of sliding windows."""
    return _file(stored, "sliding.md")


def lm_half(stored: Stored) -> str:
    """The ranking of the second run, with half the learning rate."""
    return _file(stored, "half_rate/table.md")


def _file(stored: Stored, name: str) -> str:
    path = stored.path(f"lm/{name}")
    return path.read_text(encoding="utf-8") if path.is_file() else MISSING.format(LM)


def lm_seeds(stored: Stored) -> str:
    """Every seed at the length of training, in both runs: what a mean of two hides."""
    runs = runs_in(stored)
    if runs is None:
        return MISSING.format(LM)
    seeds = [sorted({job.seed for job in run.jobs}) for run in runs]
    columns = [(run, seed) for run, some in zip(runs, seeds, strict=True) for seed in some]
    both = [seed for seed in seeds[0] if seed in seeds[1]]
    titles = [f"{rate_of(run)}, seed {seed}" for run, seed in columns]
    titles += [f"change by {rate_of(runs[1])}, seed {seed}" for seed in both]
    lines = [f"| | {' | '.join(titles)} |", "|---|" + "---:|" * len(titles)]
    for row in ranked(runs[0]):
        cells = [_shown(loss_of(run, row.method, seed), ".3f") for run, seed in columns]
        for seed in both:
            before, after = (loss_of(run, row.method, seed) for run in runs)
            known = before is not None and after is not None
            cells.append(_shown(after - before if known else None, "+.3f"))
        lines.append(f"| `{row.method}` | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _shown(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def lm_far(stored: Stored) -> str:
    """How the loss changes from the length of training to the longest, in both runs."""
    runs = runs_in(stored)
    if runs is None:
        return MISSING.format(LM)
    columns = [(run, how) for run in runs for how in (SCRATCH, SLIDING)]
    titles = [f"{how}, {rate_of(run)}" for run, how in columns]
    lines = [f"| | {' | '.join(titles)} |", "|---|" + "---:|" * len(columns)]
    rows = [{row.method: row for row in ranked(run)} for run, _ in columns]
    changes = {
        name: [_change(found.get(name), how) for found, (_, how) in zip(rows, columns, strict=True)]
        for name in rows[0]
    }
    known = {name: x for name, x in changes.items() if x[0] is not None}
    for name, cells in sorted(known.items(), key=lambda item: item[1][0] or 0.0):
        shown = " | ".join(_shown(x, "+.3f") for x in cells)
        lines.append(f"| `{name}` | {shown} |")
    return "\n".join(lines) + "\n"


def lm_moved(stored: Stored) -> str:
    """How far a method's term spans over the nearest lags, before and after training."""
    runs = runs_in(stored)
    if runs is None:
        return MISSING.format(LM)
    lines = ["| | span at the start | span after training | moved by |", "|---|---:|---:|---:|"]
    first = {job.method: job for job in reversed(runs[0].jobs) if job.stated}
    for row in ranked(runs[0]):
        job = first.get(row.method)
        if job is not None and job.stated[0].quantity == LOGIT:
            before, after, moved = _spans(job)
            name = f"`{job.method}`" + ("" if job.positional else " (fixed)")
            lines.append(f"| {name} | {before:.2f} | {after:.2f} | {moved:.2f} |")
    return "\n".join(lines) + "\n"


def _spans(job: Job) -> tuple[float, float, float]:
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


def runs_in(stored: Stored) -> list[Language] | None:
    """The comparison, and the one with half the learning rate."""
    paths = [stored.path(name) for name in ("lm/lm.json", "lm/half_rate/lm.json")]
    return [Language.load(path) for path in paths] if all(p.is_file() for p in paths) else None


def rate_of(run: Language) -> str:
    """By which a run is named."""
    return f"rate {rates_in(run.config)}"


def rates_in(config: dict[str, Any]) -> str:
    """The learning rates of a configuration; older ones have one alone, under another name."""
    rates = config.get("learning_rates") or [config["learning_rate"]]
    return " or ".join(f"{rate:g}" for rate in rates)


def loss_of(run: Language, method: str, seed: int) -> float | None:
    """At the length of training, from scratch."""
    jobs = [job for job in run.jobs if (job.method, job.seed) == (method, seed)]
    found = jobs[0].loss(int(run.config["train_length"])) if jobs else None
    return None if found is None else found.loss


def _change(row: Row | None, how: str) -> float | None:
    if row is None:
        return None
    means = row.scratch if how == SCRATCH else row.sliding
    near, far = means[0], means[-1]
    return None if near is None or far is None else far.mean - near.mean


def lm_figures(stored: Stored) -> str:
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
        if stored.path(f"lm/figures/{name}.png").is_file()
    ]
    return "\n".join(found) if found else MISSING.format(LM)
