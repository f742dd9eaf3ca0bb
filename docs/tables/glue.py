"""One real model on GLUE with TISA and without, in the layout of the slides' Table 3."""

from dataclasses import replace

from tables.results_folder import MISSING, ResultsFolder
from whence.analysis.glue_results import Glue
from whence.report.glue_table import tables
from whence.report.text_table import markdown

FILE = "glue/glue.json"


def glue_kept(stored: ResultsFolder) -> str:
    """Form (a): scores, and how sure they are."""
    return _titled(stored, "(a)")


def glue_dropped(stored: ResultsFolder) -> str:
    """Form (b): scores, and how sure they are."""
    return _titled(stored, "(b)")


def glue_won_back(stored: ResultsFolder) -> str:
    """How much of what leaving the position embeddings out loses the kernels win back."""
    return _titled(stored, "what kernels win back")


def glue_setting(stored: ResultsFolder) -> str:
    """How the jobs were run, in a sentence or two."""
    path = stored.path(FILE)
    if not path.is_file():
        return _missing()
    results = Glue.load(path)
    config, machine = results.config, results.machine
    rows = ", ".join(f"{name} {facts['train']:,}" for name, facts in results.data["tasks"].items())
    own = "; ".join(
        f"{task}: {', '.join(f'{name} {number:g}' for name, number in numbers.items())}"
        for task, numbers in config["exceptions"].items()
    )
    return (
        f"{len(results.jobs)} jobs on {machine.get('gpu', machine.get('cpu'))}, torch "
        f"{machine.get('torch')}. {config['epochs']:g} epochs, batches of {config['batch']} "
        f"({own}), learning rate {config['learning_rate']:g} and {config['position_rate']:g} for "
        f"the kernels, start {config['start']}, rows cut at {config['max_length']} tokens. "
        f"Training rows: {rows}.\n"
    )


def _titled(stored: ResultsFolder, start: str) -> str:
    path = stored.path(FILE)
    if not path.is_file():
        return _missing()
    found = [one for one in tables(Glue.load(path)) if one.title.startswith(start)]
    return "\n\n".join(markdown(replace(one, title="")) for one in found) + "\n"


def _missing() -> str:
    return MISSING.format("whence glue --config results/glue/glue.toml --out results/glue")
