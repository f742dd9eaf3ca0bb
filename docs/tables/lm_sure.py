"""Language modelling: what the seeds agree on, from the losses at the length of training."""

import math
from itertools import product

from tables.lm_losses import LM, loss_of, rate_of, runs_in
from tables.stored import MISSING, Stored
from whence.analysis.language import Language

DECAYS = ("tisa2", "sandwich", "alibi", "kerple")  # penalise distance from the first step on
PAIRS = (
    (DECAYS, ("rope",)),
    (("rope", "transformer_xl"), ("shaw:clip=16",)),
    (("shaw:clip=16",), ("tisa:kernels=5", "t5", "learned", "nope")),
    (("tisa2",), ("sandwich",)),
    (("sandwich",), ("alibi",)),
    (("alibi",), ("kerple",)),
    (("transformer_xl",), ("kerple",)),
    (("rope",), ("tupe",)),
    (("rope",), ("tisa:kernels=5+rope",)),
    (("t5", "tisa:kernels=5"), ("nope",)),
)


def lm_short(stored: Stored) -> str:
    """How little was trained."""
    runs = runs_in(stored)
    if runs is None:
        return MISSING.format(LM)
    steps = runs[0].config["steps"]
    means = [
        sum(found) / len(found)
        for method in runs[0].methods
        if method != "sinusoidal" and (found := list(_seeds(runs[0], method).values()))
    ]
    low, high = (math.exp(loss) for loss in (min(means), max(means)))
    counts = sorted({len(_seeds(runs[0], method)) for method in runs[0].methods})
    seeds = " or ".join(map(str, counts))
    return (
        f"These are short runs of a small model: {steps} steps, perplexities between {low:.0f} and "
        f"{high:.0f} (sinusoids left aside),\n{seeds} seeds. They say which method gets somewhere "
        "in the first few hundred steps, not which one is better\nin a trained language model.\n"
    )


def lm_sure(stored: Stored) -> str:
    """Differences by seeds in common: where all are of one sign and not small, it is sure."""
    runs = runs_in(stored)
    if runs is None:
        return MISSING.format(LM)
    titles = ["", "lower than", *map(rate_of, runs)]
    lines = [f"| {' | '.join(titles)} |", "|---|---|" + "---:|" * len(runs)]
    for first, second in PAIRS:
        cells = [", ".join(f"`{name}`" for name in names) for names in (first, second)]
        cells += [_apart(run, first, second) for run in runs]
        lines.append(f"| {' | '.join(cells)} |")
    near, far = [], []
    for method in runs[0].methods:
        (near if method in DECAYS else far).extend(_seeds(runs[0], method).values())
    told = (
        "Smallest and largest difference between two of the same seed, in brackets how many there "
        "are; below 0 the second is lower."
    )
    if near and far:
        told += (
            f" All seeds at {rate_of(runs[0])}: {min(near):.3f} to {max(near):.3f} with "
            f"{', '.join(DECAYS)}; {min(far):.3f} and more with the other methods."
        )
    return "\n".join([*lines, "", told]) + "\n"


def _seeds(run: Language, method: str) -> dict[int, float]:
    """The losses at the length of training by seed."""
    found = {job.seed: loss_of(run, method, job.seed) for job in run.jobs if job.method == method}
    return {seed: loss for seed, loss in found.items() if loss is not None}


def _apart(run: Language, first: tuple[str, ...], second: tuple[str, ...]) -> str:
    """The smallest and the largest difference between two of the same seed, and how many."""
    found = []
    for better, worse in product(first, second):
        mine, its = _seeds(run, better), _seeds(run, worse)
        found += [its[seed] - mine[seed] for seed in mine if seed in its]
    if not found:
        return ""
    if len(found) == 1:
        return f"{found[0]:.3f} (1)"
    return f"{min(found):.3f} to {max(found):.3f} ({len(found)})"
