"""`python -m whence.bench.fresh_process POINT`: prints the peak memory of a point, in JSON."""

import json
import sys
from dataclasses import replace

import torch

from whence.bench.contenders import CONTENDERS
from whence.bench.peak_memory import TINY, peak_here
from whence.bench.point import Point
from whence.bench.problem import Problem


def main(text: str) -> None:
    """Measure where nothing ran before but a tiny step of the same kind."""
    fields = json.loads(text)
    torch.set_num_threads(fields.pop("threads"))
    point = Point(**fields)
    attention = next(iter(CONTENDERS[point.contender].attentions().values()))
    Problem(replace(point, n=min(point.n, TINY))).run(attention)
    problem = Problem(point)
    print(peak_here(lambda: problem.run(attention)))


if __name__ == "__main__":
    main(sys.argv[1])
