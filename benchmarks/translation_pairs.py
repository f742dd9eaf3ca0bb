"""Which relative positions differ in translation: BLEU of each pair, with the paired bootstrap.

    python benchmarks/translation_pairs.py results/translation/runs.tar.xz \\
        --out results/translation/pairs.json

`translation.json` compares each position with the first alone, and has no statistics of sentences;
the packed runs have them.
"""

import argparse
import tarfile
import tempfile
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

from whence.analysis.translation_results import VALID, TranslationJob
from whence.experiments.translation.bootstrap import compared, drawn_bleu
from whence.files import write_json

EXPERIMENTS = ("en-de", "en-fr")
POSITIONS = ("shaw:clip=16", "t5", "rope", "tisa")


def pairs(experiment: str, jobs: list[TranslationJob]) -> Iterator[dict[str, Any]]:
    """BLEU of one position less that of another, over the seeds that both have, on each test."""
    drawn = {
        (job.position, part.test, job.seed): drawn_bleu(part.statistics)
        for job in jobs
        for part in job.scores
        if part.test != VALID and part.joined == 1 and job.position in POSITIONS
    }
    for test in dict.fromkeys(test for _, test, _ in drawn):
        for first, second in combinations(POSITIONS, 2):
            ours, base = (
                {seed: bleu for (x, t, seed), bleu in drawn.items() if (x, t) == (position, test)}
                for position in (first, second)
            )
            seeds = sorted(ours.keys() & base.keys())
            found = compared([ours[seed] for seed in seeds], [base[seed] for seed in seeds])
            yield {
                "experiment": experiment,
                "test": test,
                "position": first,
                "less": second,
                **dict(zip(("mean", "low", "high", "p"), found, strict=True)),
                "by_seed": [float(ours[seed][0] - base[seed][0]) for seed in seeds],
            }


def main() -> None:
    """Read the packed runs and write all pairs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    found = []
    with tempfile.TemporaryDirectory() as folder, tarfile.open(options.runs) as archive:
        archive.extractall(folder, filter="data")
        for experiment in EXPERIMENTS:
            paths = sorted(Path(folder, experiment).glob("jobs/*/result.json"))
            found += pairs(experiment, [TranslationJob.load(path) for path in paths])
    write_json(options.out, {"pairs": found})


if __name__ == "__main__":
    main()
