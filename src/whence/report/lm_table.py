"""The table that ranks methods: for a terminal, a page, Markdown and LaTeX."""

from whence.analysis.lm_results import Language, Mean, Row, ranked
from whence.report.lm_winners import certainty, in_front, losses
from whence.report.text_table import NONE, TextTable


def rank_table(results: Language) -> TextTable:
    """Losses at every length, accuracy for a task, what a method costs; the best method first."""
    rows = ranked(results)
    lengths = results.lengths
    task = results.config["task"] != "text"
    found = [losses(results, length) for length in lengths]
    best = {
        (place, 1 + column)
        for column, of_length in enumerate(found)
        for place, row in enumerate(rows)
        if len(of_length) > 1 and row.method in in_front(of_length)
    }
    head = ["method", *(f"loss at {n:,}" for n in lengths)]
    head += [f"right at {n:,}" for n in lengths] if task else []
    speed = results.side_by_side == 1 or any(row.tokens_a_second is not None for row in rows)
    counts = {name: sum(job.method == name for job in results.jobs) for name in results.methods}
    uneven = len(set(counts.values())) > 1
    head += ["seeds"] if uneven else []
    rates = _several_rates(results)
    head += ["rate"] if rates else []
    head += ["tokens/s"] if speed else []
    head += ["peak memory", "own parameters"]
    cells = tuple(
        _cells(row, task, speed, counts[row.method] if uneven else None, bool(rates))
        for row in rows
    )
    return TextTable("", tuple(head), cells, frozenset(best), caption(results), code=True)


def _several_rates(results: Language) -> list[float]:
    """The learning rates that each method chose from; empty where all had the same one."""
    rates = [float(rate) for rate in results.config.get("learning_rates", ())]
    return rates if len(rates) > 1 else []


def _cells(
    row: Row, task: bool, with_speed: bool, n_seeds: int | None, with_rate: bool
) -> tuple[str, ...]:
    share = [NONE if x is None else f"{x.mean:.1%}" for x in row.accuracy] if task else []
    known = NONE if row.tokens_a_second is None else f"{row.tokens_a_second:,.0f}"
    seeds = [] if n_seeds is None else [str(n_seeds)]
    rate = [f"{row.learning_rate:g}"] if with_rate else []
    speed = [known] if with_speed else []
    memory = NONE if row.peak_bytes is None else f"{row.peak_bytes / 1e6:,.0f} MB"
    scratch = [loss_text(x) for x in row.scratch]
    return (row.method, *scratch, *share, *seeds, *rate, *speed, memory, f"{row.positional:,}")


def loss_text(found: Mean | None) -> str:
    """Mean and, over several seeds, standard deviation."""
    if found is None:
        return NONE
    spread = "" if found.spread is None else f" ± {found.spread:.3f}"
    return f"{found.mean:.3f}{spread}"


def caption(results: Language) -> str:
    """What was trained on what, in a sentence or two."""
    config, data = results.config, results.data
    counts = [sum(job.method == name for job in results.jobs) for name in results.methods]
    seeds = f"{max(counts)}" if min(counts) == max(counts) else f"{min(counts)} to {max(counts)}"
    over = f"mean ± standard deviation over {seeds} seeds" if max(counts) > 1 else "one seed"
    what = "text" if config["task"] == "text" else f"task {config['task']}"
    if config["task"] == "back":
        what += f", {config['distance']} back"
    n = results.side_by_side
    shared = f" No speed is given of runs that shared the device, up to {n} at a time."
    tokens = f", {int(data['train_tokens']):,} tokens" if "train_tokens" in data else ""
    rates = ", ".join(f"{rate:g}" for rate in _several_rates(results))
    chosen = (
        f" Each method has that of the learning rates {rates} which gave it the smallest loss with "
        "the first seed, on data that is not reported here; nothing else was tuned."
    )
    one_rate = (
        f" All have the learning rate {float(next(iter(config['learning_rates']))):g}: nothing was "
        "tuned for any of them."
        if config.get("learning_rates")
        else ""
    )
    return (
        f"Loss in nats a token from scratch, {over}; {config['objective']}, {what}{tokens}. "
        f"{config['n_layers']} layers of {config['n_heads']} heads, width {config['d_model']}, "
        f"trained at length {config['train_length']} for {config['steps']:,} steps of "
        f"{config['batch'] * config['train_length']:,} tokens. Own parameters are the method's."
        f"{chosen if rates else one_rate} {certainty(results)}{shared if n > 1 else ''}"
    )


def reasons(results: Language) -> list[str]:
    """Why a cell is empty, a line each."""
    lines = []
    for row in ranked(results):
        lines += [f"{row.method}: {text}" for text in row.stopped]
        lines += [f"no loss at a longer length: {text}" for text in row.why_not]
    return list(dict.fromkeys(lines))
