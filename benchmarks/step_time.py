"""Milliseconds a training step of whole models takes, here and with other sources of whence.

    python benchmarks/step_time.py --methods nope,tisa --n 512 --out new.json
    PYTHONPATH=OTHER/src python benchmarks/step_time.py --methods nope,tisa --n 512 --out old.json

The models take turns, a step each, so that all see the same machine. By this the units in which
numbers are held were shown to cost nothing: docs/training_cost.md.
"""

import argparse
import json
import time
from pathlib import Path

import numpy as np
import torch

import whence
from whence.bench.machine import machine
from whence.models import WhenceConfig, WhenceForCausalLM

VOCABULARY = 8192


def times(
    methods: list[str], *, layers: int, heads: int, n: int, batch: int, steps: int
) -> dict[str, list[float]]:
    """Seconds of each step of each model, after three that do not count."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    ids = torch.randint(VOCABULARY, (batch, n), device=device)
    runs = []
    for method in methods:
        torch.manual_seed(0)
        config = WhenceConfig(
            position=method,
            vocab_size=VOCABULARY,
            hidden_size=64 * heads,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            max_position_embeddings=n,
            use_cache=False,
        )
        model = WhenceForCausalLM(config).to(device).train()
        runs.append((model, torch.optim.AdamW(model.parameters(), 1e-4)))
    found: dict[str, list[float]] = {method: [] for method in methods}
    for step in range(steps + 3):
        for method, (model, optimizer) in zip(methods, runs, strict=True):
            start = _now(device)
            with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
                loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            if step >= 3:
                found[method].append(_now(device) - start)
    return found


def _now(device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--methods", default="nope,tisa:start=released")
    parser.add_argument("--n", type=int, default=512)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    size = {x: getattr(options, x) for x in ("layers", "heads", "n", "batch", "steps")}
    found = times(options.methods.split(","), **size)
    rows = []
    for method, seconds in found.items():
        low, middle, high = (1e3 * np.quantile(seconds, (0.2, 0.5, 0.8))).round(3).tolist()
        rows.append({"contender": method, "ms": {"q20": low, "median": middle, "q80": high}})
    where = machine("cuda" if torch.cuda.is_available() else "cpu")
    if options.out is not None:
        result = {"config": size, "machine": where, "rows": rows}
        # Not by whence.files, which the other source may lack.
        options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(Path(whence.__file__).parent)
    for row in rows:
        low, middle, high = row["ms"].values()
        print(f"{row['contender']:24} {middle:8.2f} ms  ({low:.2f} to {high:.2f})")


if __name__ == "__main__":
    main()
