"""Language modelling: what was trained on what, and the small runs beside it."""

from typing import Any

from tables.lm_losses import LM, rates_in
from tables.stored import MISSING, Stored


def lm_setting(stored: Stored) -> str:
    """What was trained on what, and where."""
    results = stored.json("lm/lm.json")
    if results is None:
        return MISSING.format(LM)
    config, data, machine = results["config"], results["data"], results["machine"]
    seeds = _seeds(results)
    together = max(job["side_by_side"] for job in results["jobs"])
    epochs = config["steps"] * config["batch"] * config["train_length"] / int(data["train_tokens"])
    tokens = {x["tokens"] for job in results["jobs"] for x in job["losses"] if x["tokens"]}
    lines = [
        f"- Data: {config['data']}, {int(data['train_tokens']):,} tokens of a byte-level BPE with "
        f"{int(data['vocab_size']):,} entries ({data['characters_a_token']} characters a token); "
        f"tested on the first {max(tokens):,} tokens of {config['valid'] or 'its other part'}.",
        f"- Model: {config['n_layers']} layers, {config['n_heads']} heads, width "
        f"{config['d_model']}, {_parameters(results)} parameters without the position; "
        f"dropout {config['dropout']:g}.",
        f"- Training: {config['steps']:,} steps of {config['batch']} sequences of "
        f"{config['train_length']:,} tokens, {epochs:.1f} times through the text; AdamW, learning "
        f"rate {rates_in(config)} after {config['warmup']} steps of warm-up"
        f"{_times(config.get('position_rate'))}, a cosine, "
        f"weight decay {config['weight_decay']:g}, bfloat16; {seeds} seeds; up to {together} runs "
        "side by side.",
        f"- Machine: {machine.get('gpu') or machine['cpu']}, torch {machine['torch']}, Triton "
        f"{machine.get('triton')}, Python {machine['python']}, {_commits(machine)}.",
        *_second(stored, config),
        "- All numbers and curves: [results/lm/lm.json](../results/lm/lm.json).",
    ]
    return "\n".join(lines) + "\n"


def _seeds(results: dict[str, Any]) -> str:
    """How many a method has; of methods that differ, each number."""
    jobs, methods = results["jobs"], results["config"]["methods"]
    counts = {sum(job["method"] == method for job in jobs) for method in methods}
    return " or ".join(map(str, sorted(counts)))


def _times(rate: float | None) -> str:
    """What learned biases had beside it, in runs of versions that gave them a rate of their own."""
    if rate is None:
        return ""
    times = "the same" if rate == 1 else f"{rate:g} times that"
    return f" ({times} for TISA, TISAv2, T5 and KERPLE)"


def _second(stored: Stored, config: dict[str, Any]) -> list[str]:
    """In what the second run differs from the first."""
    second = stored.json("lm/half_rate/lm.json")
    if second is None:
        return []
    told = ("seeds", "methods", "data", "valid", "tokenizer")
    other = {k: v for k, v in second["config"].items() if k not in told and v != config.get(k)}
    words = ", ".join(f"{name.replace('_', ' ')} {_text(value)}" for name, value in other.items())
    seeds, together = _seeds(second), max(job["side_by_side"] for job in second["jobs"])
    return [
        f"- Second run: {words}, all else the same; {seeds} seeds; up to {together} runs "
        f"side by side; {_commits(second['machine'])}; "
        "[half_rate/lm.json](../results/lm/half_rate/lm.json)."
    ]


def _text(value: Any) -> str:
    return " or ".join(f"{x:g}" for x in value) if isinstance(value, list) else f"{value:g}"


def _commits(machine: dict[str, Any]) -> str:
    """The commit; of several that of most runs, then the others with theirs."""
    by_number = sorted(machine.get("commits", {}).items(), key=lambda item: -len(item[1]))
    if not by_number:
        return f"commit {machine['commit']}"
    (most, _), *others = by_number
    rest = [f"{', '.join(runs)} at commit {commit}" for commit, runs in others]
    return f"commit {most}, but {' and '.join(rest)}"


def _parameters(results: dict[str, Any]) -> str:
    job = results["jobs"][0]
    return f"{(job['parameters'] - job['positional']) / 1e6:.1f} million"


def lm_trials(stored: Stored) -> str:
    """The runs before the comparison, by which its setting was chosen."""
    results = stored.json("lm/trials.json")
    if results is None:
        return MISSING.format("a script of an earlier version")
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


def lm_bigram(stored: Stored) -> str:
    """What counting gives on the same tokens."""
    results = stored.json("lm/bigram.json")
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


def lm_scale(stored: Stored) -> str:
    """Input methods with token embeddings as they are, and scaled by the root of the width."""
    results = stored.json("lm/embedding_scale.json")
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
        f"{rates_in(config)}, {config['vocab_size']:,} tokens; each seed's loss. "
        f"{results['machine']['cpu']}, torch {results['machine']['torch']}, commit "
        f"{results['machine']['commit']}."
    )
    return "\n".join([*lines, "", place]) + "\n"
