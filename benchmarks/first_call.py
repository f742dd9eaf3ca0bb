"""How long the first call of a kind takes on a GPU, whose kernels nobody has compiled yet.

    python benchmarks/first_call.py [--methods "tisa:kernels=5,t5"] [--out results/gpu]

Forward + backward of one layer, 12 heads of 64, causal, bfloat16, 16,384 tokens. Every method has a
process of its own with an empty cache of kernels, in which plain attention has run. Timed are the
first call at 512 tokens; then one of another length, which compiles nothing; one beyond 512 tokens,
whose tiles have other sizes; and a later one. Run it on a quiet machine: compiling takes all its
cores. The bar: the first call of a new kind takes at most six seconds.
"""

import argparse
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from training_turns import split_methods
from whence import build
from whence.bench.machine import machine
from whence.files import write_json
from whence.nn import positioned_attention

ROOT = Path(__file__).resolve().parent.parent
TOKENS, HEADS, WIDTH = 16_384, 12, 64
METHODS = "nope,rope,tisa:kernels=5,t5,alibi,shaw:clip=16"
LENGTHS = {"first": 512, "other_length": 384, "other_tiles": 576, "later": 512}
LIMIT = 6.0  # seconds of the first


def seconds_of(method: str) -> dict[str, float]:
    """Seconds of a call at each of LENGTHS, in this order."""
    device = torch.device("cuda")
    position = build(method, n_heads=HEADS, d_head=WIDTH).to(device)
    found = {}
    for name, n in {"plain": TOKENS, **LENGTHS}.items():
        shape = (TOKENS // n, HEADS, n, WIDTH)
        q, k, v = (
            torch.randn(shape, device=device, dtype=torch.bfloat16, requires_grad=True)
            for _ in range(3)
        )
        torch.cuda.synchronize()
        start = time.perf_counter()
        if name == "plain":  # it starts PyTorch's own part of the GPU
            out = scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            out = positioned_attention(position, q, k, v, causal=True)
        out.sum().backward()
        torch.cuda.synchronize()
        found[name] = time.perf_counter() - start
    return found


def work(method: str, pipe: Any) -> None:
    """A process: what it measures, or why it cannot, and the machine."""
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TRITON_CACHE_DIR"] = cache
        try:
            pipe.send((seconds_of(method), machine("cuda")))
        except Exception as error:
            pipe.send((f"{type(error).__name__}: {error}", None))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--methods", default=METHODS)
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "gpu", help="folder")
    parser.add_argument("--commit", help="of the sources, where git cannot tell")
    options = parser.parse_args(arguments)
    # Forked, so that importing is not done anew; this process never touches the GPU.
    context = multiprocessing.get_context("fork")
    records, where = [], None
    for method in split_methods(options.methods):
        pipe, other = context.Pipe()
        process = context.Process(target=work, args=(method, other), daemon=True)
        process.start()
        found, seen = pipe.recv()
        process.join()
        if isinstance(found, str):
            print(f"{method}: {found}", file=sys.stderr)
            return 1
        where = seen
        records.append({"method": method, **found})
        told = ", ".join(f"{name} {1e3 * found[name]:.1f} ms" for name in list(LENGTHS)[1:])
        verdict = "pass" if found["first"] <= LIMIT else "MISS"
        print(f"{method:16} first call {found['first']:5.2f} s {verdict}, {told}", flush=True)
    if where is not None:
        where["commit"] = options.commit or where["commit"]
    result = {"config": {"lengths": LENGTHS, "limit": LIMIT}, "machine": where, "records": records}
    write_json(options.out / "first_call.json", result)
    return 0 if all(record["first"] <= LIMIT for record in records) else 1


if __name__ == "__main__":
    sys.exit(main())
