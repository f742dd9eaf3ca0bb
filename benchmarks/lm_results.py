"""Everything under results/lm from one packed comparison: tables, figures, and a small lm.json.

    python benchmarks/lm_results.py --state state.tar.gz --experiment NAME --cost cost.json \\
        [--out results/lm]

`state.tar.gz` is what lm_gpu.py packed, `cost.json` what lm_cost.py wrote: methods were trained
side by side, so speed and memory in the table are those that lm_cost.py measured of each method
alone, if it reached all of them; else the memory is that of the runs. With `--light` a second
comparison keeps its numbers and no pictures. Nothing is measured here. `python docs/make_tables.py`
then fills docs/lm_results.md.
"""

import argparse
import json
import tarfile
import tempfile
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from whence.analysis.language import Job, LagView, Language, ranked
from whence.bench.saved import save
from whence.experiments.results import RESULTS
from whence.report.lm_figures import draw_attention
from whence.report.lm_methods import (
    draw_learned_curves,
    draw_lengths,
    draw_positions,
    draw_tables,
)
from whence.report.lm_table import NONE, RankTable, loss_text, rank_table, reasons, written
from whence.report.saved import save_bytes, save_png

MAP = 128  # rows of a learned table's P that are kept, evenly spaced
FIGURES = {
    "length": draw_lengths,
    "position": draw_positions,
    "curves": draw_learned_curves,
    "tables": draw_tables,
    "attention": draw_attention,
}


def unpacked(state: Path, experiment: str) -> Language:
    """The results of an experiment in a packed state."""
    with tempfile.TemporaryDirectory() as folder, tarfile.open(state) as archive:
        name = f"{experiment}/{RESULTS}"
        archive.extract(name, folder, filter="data")
        return Language.load(Path(folder) / name)


def thinned(results: Language) -> Language:
    """Small enough for a repository: no lags that a causal model never sees, smaller maps.

    Files are named without the folders in which they stood.
    """
    names = ("data", "valid", "tokenizer")
    named = {k: Path(str(v)).name for k, v in results.config.items() if k in names and v}
    jobs = tuple(_thinned(job) for job in results.jobs)
    return replace(results, config=results.config | named, jobs=jobs)


def _thinned(job: Job) -> Job:
    grams = (None if x is None else _sparse(x) for x in (job.gram_before, job.gram_after))
    before, after = grams
    fixed = 0 if job.positional else 1  # what has no parameters is the same in all layers
    stated = tuple(_seen(view) for view in job.stated[: fixed or None])
    return replace(job, gram_before=before, gram_after=after, stated=stated)


def _sparse(gram: Any) -> Any:
    places = np.unique(np.linspace(0, len(gram) - 1, min(MAP, len(gram))).round().astype(int))
    return np.ascontiguousarray(gram[np.ix_(places, places)])


def _seen(view: LagView) -> LagView:
    keep = np.isfinite(view.after).any(axis=0)
    return replace(view, lag=view.lag[keep], before=view.before[:, keep], after=view.after[:, keep])


def with_costs(results: Language, costs: dict[str, Any] | None) -> RankTable:
    """The ranking, with speed and memory of each method alone at the length of training.

    Where not all were measured there, memory stays that of the runs: one column, one measurement.
    """
    table = rank_table(results)
    home = int(results.config["train_length"])
    known = [] if costs is None else costs["alone"]
    alone = {r["contender"]: r for r in known if r["n"] == home and "skipped" not in r}
    if not all(row[0] in alone for row in table.rows):
        return table
    head, rows = list(table.head), [list(row) for row in table.rows]
    for name in ("tokens/s", "peak memory"):
        if name in head:
            place = head.index(name)
            for cells in (head, *rows):
                del cells[place]
    head[-1:-1] = ["tokens/s", "memory"]
    tokens = set()
    for row in rows:
        found = alone[row[0]]
        tokens.add(found["tokens"])
        peak = found["peak_bytes"]
        memory = NONE if peak is None else f"{peak / 1e9:.1f} GB"
        row[-1:-1] = [f"{found['tokens_a_second']:,.0f}", memory]
    steps = " or ".join(f"{n:,}" for n in sorted(tokens, reverse=True))
    told = (
        f"{table.caption.split(' No speed is given')[0]} Tokens a second and memory are of "
        f"training each method alone, with {steps} tokens a step and without dropout."
    )
    return RankTable(tuple(head), tuple(map(tuple, rows)), table.best, told)


def fewer_seeds(results: Language) -> list[str]:
    """The methods for which the time did not suffice."""
    counts = {name: sum(job.method == name for job in results.jobs) for name in results.methods}
    most = max(counts.values(), default=0)
    return [f"{name}: {n} of {most} seeds" for name, n in counts.items() if n < most]


def sliding_table(results: Language) -> RankTable:
    """Losses of sliding windows, and the training loss at the end to hold them against."""
    rows, lengths = ranked(results), results.lengths
    cells, best = [], set()
    for row in rows:
        ends = [float(j.train_loss[-1]) for j in results.jobs if j.method == row.method]
        end = f"{fmean(ends):.3f}" if ends else NONE
        cells.append((row.method, *(loss_text(x) for x in row.sliding), end))
    for column in range(len(lengths)):
        known = [(x.mean, i) for i, row in enumerate(rows) if (x := row.sliding[column])]
        best |= {(i, 1 + column) for mean, i in known if len(known) > 1 and mean == min(known)[0]}
    head = ("method", *(f"sliding, {n:,}" for n in lengths), "training loss")
    dropout = ", with dropout" if results.config["dropout"] else ""
    told = (
        "Loss of windows that overlap by half, of which the second half is scored; the training "
        f"loss is the mean over the last {results.config['log_every']} steps{dropout}."
    )
    return RankTable(head, tuple(cells), frozenset(best), told)


def write(
    results: Language, costs: dict[str, Any] | None, out: Path, *, light: bool = False
) -> None:
    """All files; a light one has no pictures."""
    small = thinned(results)
    if light:
        small = replace(small, jobs=tuple(job.lighter() for job in small.jobs))
    small.save(out / RESULTS)
    if costs is not None:
        save(costs, out / "cost.json")
    ranking = with_costs(small, costs)
    why = "".join(f"\n- {line}" for line in [*fewer_seeds(small), *reasons(small)])
    texts = {
        "table.md": written(ranking, "markdown") + (f"\n{why}" if why else ""),
        "table.tex": written(ranking, "latex"),
        "sliding.md": written(sliding_table(small), "markdown"),
    }
    for name, text in texts.items():
        save_bytes(f"{text}\n".encode(), out / name)
    for name, draw in () if light else FIGURES.items():
        figure = draw(results)
        if figure is not None:
            save_png(figure, out / "figures" / f"{name}.png", dpi=130)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--state", type=Path, help="of lm_gpu.py; else lm.json in --out again")
    parser.add_argument("--experiment", default="methods", help="of the plan that was packed")
    parser.add_argument("--cost", type=Path, help="of lm_cost.py; else cost.json in --out again")
    parser.add_argument("--out", type=Path, default=Path("results/lm"))
    parser.add_argument("--light", action="store_true", help="no pictures")
    options = parser.parse_args(arguments)
    results = (
        Language.load(options.out / RESULTS)
        if options.state is None
        else unpacked(options.state, options.experiment)
    )
    cost = options.out / "cost.json" if options.cost is None else options.cost
    costs = json.loads(cost.read_text(encoding="utf-8")) if cost.is_file() else None
    write(results, costs, options.out, light=options.light)
    for path in sorted(options.out.rglob("*.*")):
        print(f"{path}  {path.stat().st_size / 1e3:,.0f} kB")


if __name__ == "__main__":
    main()
