"""The trials before the comparison, read from their logs: results/lm/trials.json.

    python benchmarks/lm_trials.py --log trials.log --like lm.json [--commit TEXT]

Each trial was a run of lm_gpu.py with one method, one seed and the one length of training; their
logs follow each other in one file, in the order of TRIALS. `--like` is an lm.json of the same
machine and setting, from which all is taken that no trial changed.
"""

import argparse
import json
import re
from pathlib import Path
from typing import Any

from whence.bench.saved import save

TRIALS = (  # method, learning rate, times that for numbers of a logit's size, dropout
    ("rope", 1e-3, 1.0, 0.0),
    ("rope", 2e-3, 1.0, 0.0),
    ("rope", 1e-3, 1.0, 0.1),
    ("tisa:kernels=5", 1e-3, 10.0, 0.0),
    ("tisa:kernels=5", 1e-3, 30.0, 0.0),
    ("tisa:kernels=5", 1e-3, 1.0, 0.0),
)
DONE = re.compile(r"1/1 (?P<method>\S+)\.0: train (?P<train>[\d.]+), (?P<loss>[\d.]+);")
ALIKE = ("train_length", "n_layers", "n_heads", "d_model", "steps", "batch", "warmup")


def trials(log: str) -> list[dict[str, Any]]:
    """A record a trial: its setting, the training loss at its end, and the loss at its length."""
    found = list(DONE.finditer(log))
    names = [match["method"] for match in found]
    if names != [method for method, *_ in TRIALS]:
        raise SystemExit(f"the log is not of the six trials: it ends the runs of {names}.")
    keys = ("method", "learning_rate", "position_rate", "dropout")
    return [
        dict(zip(keys, setting, strict=True))
        | {"seed": 0, "train_loss": float(match["train"]), "loss": float(match["loss"])}
        for setting, match in zip(TRIALS, found, strict=True)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--log", type=Path, required=True)
    parser.add_argument("--like", type=Path, required=True)
    parser.add_argument("--commit", required=True)
    parser.add_argument("--out", type=Path, default=Path("results/lm/trials.json"))
    options = parser.parse_args()
    like = json.loads(options.like.read_text(encoding="utf-8"))
    config = {key: like["config"][key] for key in (*ALIKE, "eval_tokens", "weight_decay", "bf16")}
    where = like["machine"] | {"commit": options.commit}
    found = trials(options.log.read_text(encoding="utf-8"))
    save({"config": config, "data": like["data"], "machine": where, "trials": found}, options.out)


if __name__ == "__main__":
    main()
