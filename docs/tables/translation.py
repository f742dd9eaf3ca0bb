"""Translation with each position, in the layout of Shaw et al.'s tables."""

from collections.abc import Callable
from dataclasses import replace

from tables.results_folder import MISSING, ResultsFolder
from whence.analysis.translation_results import Translation
from whence.report.text_table import TextTable, markdown, minus
from whence.report.translation_table import SURE, tables

FOLDERS = ("en-de", "en-fr", "en-de-long")
COMMAND = "whence translate --data multi30k --config results/translation/{0}.toml"
PAIRS = "translation/pairs.json"


def translation_bleu(stored: ResultsFolder) -> str:
    """BLEU of each position, to German and to French."""
    return _each(stored, ("en-de", "en-fr"), lambda table: "BLEU of each position" in table.title)


def translation_sure(stored: ResultsFolder) -> str:
    """Differences from the first position with their intervals."""
    return _each(stored, ("en-de", "en-fr"), lambda table: "how sure" in table.title)


def translation_pairs(stored: ResultsFolder) -> str:
    """Relative positions against each other, with their intervals and seeds."""
    stored_pairs = stored.json(PAIRS)
    if stored_pairs is None:
        return MISSING.format(f"python benchmarks/translation_pairs.py RUNS --out results/{PAIRS}")
    found = stored_pairs["pairs"]
    columns = list(dict.fromkeys((one["experiment"], one["test"]) for one in found))
    rows: dict[tuple[str, str], list[str]] = {}
    bold = set()
    for one in found:
        cells = rows.setdefault((one["position"], one["less"]), [])
        column = columns.index((one["experiment"], one["test"])) + 1
        if one["p"] < SURE:
            bold.add((list(rows).index((one["position"], one["less"])), column))
        inside = f"[{one['low']:+.1f}, {one['high']:+.1f}]"
        better = f"{sum(x > 0 for x in one['by_seed'])} of {len(one['by_seed'])}"
        cells.append(minus(f"{one['mean']:+.1f} {inside} {better}"))
    table = TextTable(
        "",
        ("pair", *(f"{experiment}, {test}" for experiment, test in columns)),
        tuple((f"`{a}` less `{b}`", *cells) for (a, b), cells in rows.items()),
        frozenset(bold),
        "BLEU of the first less that of the second, the mean over seeds, with the 95% interval of "
        f"the paired bootstrap over test sentences (bold: p below {SURE}), and in how many seeds "
        f"the first is better. Of {len(found)} tests without any effect {SURE * len(found):.1f} "
        f"would be below {SURE} by chance.",
    )
    return markdown(table) + "\n"


def translation_clip(stored: ResultsFolder) -> str:
    """The paper's Table 2."""
    return _each(stored, ("en-de",), lambda table: "Table 2" in table.title)


def translation_parts(stored: ResultsFolder) -> str:
    """The paper's Table 3, the decoder, and absolute positions on top."""
    wanted = ("Table 3", "where relative positions stand")
    return _each(stored, ("en-de",), lambda table: any(words in table.title for words in wanted))


def translation_lengths(stored: ResultsFolder) -> str:
    """BLEU of rows that are longer than those of training."""
    return _each(stored, ("en-de-long",), lambda table: "several sentences" in table.title)


def translation_rates(stored: ResultsFolder) -> str:
    """The learning rates that were tried, on the validation text."""
    return _each(stored, ("search",), lambda table: "learning rate" in table.title)


def translation_setting(stored: ResultsFolder) -> str:
    """How the jobs were run, in a few sentences."""
    found = {name: _results(stored, name) for name in FOLDERS}
    known = {name: results for name, results in found.items() if results is not None}
    if not known:
        return MISSING.format(COMMAND.format("en-de"))
    first = next(iter(known.values()))
    config, machine = first.config, first.machine
    jobs = ", ".join(f"{name} {len(results.jobs)}" for name, results in known.items())
    norm = "pre" if config["norm_first"] else "post"
    signature = next(part.signatures[0] for part in first.jobs[0].scores if part.signatures)
    return (
        f"Jobs: {jobs}; on {machine.get('gpu', machine.get('cpu'))}, torch {machine.get('torch')}. "
        f"{config['n_layers']} + {config['n_layers']} layers of {config['d_model']} "
        f"({norm}-norm, {config['n_heads']} heads, inner width {config['d_ff']}), joint BPE of "
        f"{first.data['vocabulary']:,}, dropout {config['dropout']:g}, label smoothing "
        f"{config['label_smoothing']:g}, {config['steps']:,} steps of {config['tokens']:,} tokens "
        f"a side with padding, learning rate {config['learning_rates'][0]:g} after "
        f"{config['warmup']} steps of warm-up, then its inverse square root; the mean of the last "
        f"{config['average']} weights, {config['average_every']} steps apart; beams "
        f"{config['beams']}, length penalty {config['length_penalty']:g}. {first.data['rows']:,} "
        f"pairs. BLEU: `{signature}`.\n"
    )


def _results(stored: ResultsFolder, name: str) -> Translation | None:
    path = stored.path(f"translation/{name}/translation.json")
    return Translation.load(path) if path.is_file() else None


def _each(
    stored: ResultsFolder, names: tuple[str, ...], wanted: Callable[[TextTable], bool]
) -> str:
    """The tables of these experiments that are wanted, each under what it is of."""
    texts = []
    for name in names:
        results = _results(stored, name)
        if results is None:
            texts.append(MISSING.format(COMMAND.format(name)).rstrip())
            continue
        for table in tables(results):
            if wanted(table):
                title = f"**{table.title}**\n\n" if len(names) > 1 or "Table" in table.title else ""
                texts.append(title + markdown(replace(table, title="")))
    return "\n\n".join(texts) + "\n"
