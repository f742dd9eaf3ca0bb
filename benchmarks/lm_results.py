"""Everything under results/lm from what lm_gpu.py packed: figures, and a small lm.json each.

    python benchmarks/lm_results.py --state state.tar.gz [--out results/lm]

Each experiment of the plan has a folder: its numbers, and where pictures were kept, figures.
Nothing is measured here. `python docs/make_tables.py` then fills docs/lm_results.md.
"""

import argparse
import tarfile
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from whence.analysis.lm_results import Job, LagView, Language
from whence.experiments.lm.results import RESULTS
from whence.report.figure_files import save_png
from whence.report.lm_methods import draw_learned_curves, draw_lengths, draw_tables

MAP = 64  # rows of a learned table's P that are kept, evenly spaced
SHOWN = ("python", "python_masked", "wikitext")  # with pictures of what heads do at each lag
FIGURES = {
    "length": (draw_lengths, SHOWN),
    "curves": (draw_learned_curves, ("python", "python_masked")),
    "tables": (draw_tables, ("toeplitz",)),
}


def unpacked(state: Path) -> dict[str, Language]:
    """The results of every experiment in a packed state."""
    with tempfile.TemporaryDirectory() as folder, tarfile.open(state) as archive:
        archive.extractall(folder, filter="data")
        paths = sorted(Path(folder).glob(f"*/{RESULTS}"))
        return {path.parent.name: Language.load(path) for path in paths}


def thinned(results: Language, *, pictures: bool) -> Language:
    """Small enough for a repository: no lags that a causal model never sees, smaller maps.

    Where attention looked is left out, and so is where files stood.
    """
    names = ("data", "valid", "tokenizer")
    named = {k: Path(str(v)).name for k, v in results.config.items() if k in names and v}
    jobs = tuple(_thinned(job) if pictures else job.lighter() for job in results.jobs)
    return replace(results, config=results.config | named, jobs=jobs)


def _thinned(job: Job) -> Job:
    grams = (None if x is None else _sparse(x) for x in (job.gram_before, job.gram_after))
    before, after = grams
    fixed = 0 if job.positional else 1  # what has no parameters is the same in all layers
    stated = tuple(_seen(view) for view in job.stated[: fixed or None])
    return replace(job, gram_before=before, gram_after=after, stated=stated, attention=())


def _sparse(gram: Any) -> Any:
    places = np.unique(np.linspace(0, len(gram) - 1, min(MAP, len(gram))).round().astype(int))
    return np.ascontiguousarray(gram[np.ix_(places, places)])


def _seen(view: LagView) -> LagView:
    keep = np.isfinite(view.after).any(axis=0)
    return replace(view, lag=view.lag[keep], before=view.before[:, keep], after=view.after[:, keep])


def write(name: str, results: Language, out: Path) -> None:
    """The numbers and the figures of one experiment."""
    wanted = [figure for figure, (_, shown) in FIGURES.items() if name in shown]
    thinned(results, pictures=bool(wanted)).save(out / name / RESULTS)
    for figure in wanted:
        drawn = FIGURES[figure][0](results)
        if drawn is not None:
            save_png(drawn, out / name / f"{figure}.png", dpi=110)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--state", type=Path, required=True, help="of lm_gpu.py")
    parser.add_argument("--out", type=Path, default=Path("results/lm"))
    options = parser.parse_args(arguments)
    for name, results in unpacked(options.state).items():
        write(name, results, options.out)
    for path in sorted(options.out.rglob("*.*")):
        print(f"{path}  {path.stat().st_size / 1e3:,.0f} kB")


if __name__ == "__main__":
    main()
