"""Why sinusoids do badly in a model whose token embeddings start small: the same runs, scaled.

    python benchmarks/lm_embedding_scale.py --data wikitext-2.train.txt --valid wikitext-2.valid.txt

The native models add what stands at the input to token embeddings as they are, which start with a
standard deviation of 0.02. Vaswani et al. (2017) multiply embeddings by sqrt(d_model) first, so
that sinusoids, of amplitude 1, do not drown them. A small model on one CPU core is trained with
factors of 1, of sqrt(d_model), and of 50, which brings 0.02 to 1; the factor is put around the
models' embeddings here and is no option of theirs. Factors that the file has are not run again.
"""

import argparse
import contextlib
import json
import math
import tempfile
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from whence.analysis.language import Language, ranked
from whence.bench.machine import machine
from whence.bench.saved import save
from whence.experiments import LMConfig, run_lm
from whence.models import model as models

METHODS = ("sinusoidal", "learned", "nope", "rope")


def scaled(factor: float) -> AbstractContextManager[Any]:
    """Within it, models multiply token embeddings by the factor; the output layer stays."""
    if factor == 1:
        return contextlib.nullcontext()
    plain = models.embedded

    def larger(table: Any, input_ids: Any, inputs_embeds: Any) -> Tensor:
        return plain(table, input_ids, inputs_embeds) * factor

    return mock.patch.object(models, "embedded", larger)


def rows(results: Language, factor: float) -> list[dict[str, Any]]:
    """A record a method: mean and each seed's loss from scratch at each length."""
    found = []
    for row in ranked(results):
        jobs = [job for job in results.jobs if job.method == row.method]
        seeds = {
            str(n): [None if (x := job.loss(n)) is None else x.loss for job in jobs]
            for n in results.lengths
        }
        found.append({"method": row.method, "factor": factor, "losses": seeds})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--valid", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--out", type=Path, default=Path("results/lm/embedding_scale.json"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    config = LMConfig(
        methods=METHODS,
        data=str(options.data),
        valid=str(options.valid),
        seeds=2,
        train_length=64,
        eval_lengths=(64, 256),
        eval_tokens=16_384,
        vocab_size=1024,
        n_layers=3,
        n_heads=3,
        d_model=96,
        steps=options.steps,
        batch=16,
        learning_rates=(2e-3,),
        warmup=options.steps // 10,
        device="cpu",
    )
    named = {"data": options.data.name, "valid": options.valid.name}
    plain = json.loads(json.dumps(config.plain() | named))
    found: list[dict[str, Any]] = []
    if options.out.is_file():
        before = json.loads(options.out.read_text(encoding="utf-8"))
        found = before["rows"] if before["config"] == plain else []
    done = {row["factor"] for row in found}
    for factor in sorted({1.0, math.sqrt(config.d_model), 50.0} - done):
        with scaled(factor), tempfile.TemporaryDirectory() as folder:
            results = run_lm(config, Path(folder))
        found += rows(results, factor)
        for row in found[-len(METHODS) :]:
            print(f"{row['factor']:.2f} {row['method']}: {row['losses']}", flush=True)
        save({"config": plain, "machine": machine(), "rows": found}, options.out)


if __name__ == "__main__":
    main()
