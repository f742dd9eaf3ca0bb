"""Random calls of the fused backend on a GPU, against float64 and same-dtype PyTorch.

    python benchmarks/gpu_exactness.py --calls 500 --seed 1 --processes 15 --out results/gpu

The rule: the root mean square error of the output and of every gradient is at most twice that of
the definition run by PyTorch in the same dtype. Errors are pooled over three draws of the numbers,
and over 24 where a tensor holds fewer than 32 of them: the error of one number in one draw is luck.
Below a floor of a quarter of the dtype's epsilon times the tensor's size, and of 1e-5, an error
counts as none. The split runs from eight times its far parts' start on, as `strategy.py` has it.

Five calls in a row share what the compiler must know (dtype, head sizes, which options are there)
and differ in the rest (lengths, reach, windows, positions, axes): compiling is what takes the time.
"""

import argparse
import json
import random
import sys
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp
from torch import Tensor

from whence import LagBias, LagValues, Line, Mask, attend
from whence.bench.machine import machine
from whence.files import write_json
from whence.kernels import strategy
from whence.kernels.call import as_call
from whence.kernels.reference import attend_rows
from whence.lag import CurveBias, LowRankBias, QueryBias

SHARED = 5  # calls that share what the compiler must know
DRAWS, MORE_DRAWS, FEW = 3, 24, 32


def call_of(seed: int) -> dict[str, Any]:
    """The options of one call: first what five of them share, then its own."""
    kind = random.Random(f"kind {seed // SHARED}")
    own = random.Random(f"own {seed}")
    mode = kind.choice(["one pass", "one pass", "one pass", "split", "decode"])
    dtype = kind.choice(["bfloat16"] * 5 + ["float16"] * 4 + ["float32"])
    if mode == "split" and dtype == "float32":
        dtype = "bfloat16"
    d = kind.choice([16, 32, 64, 64, 128, 40, 80, 96])
    if kind.random() < 0.06:
        d = kind.choice([192, 256])
    d = min(d, 64) if dtype == "float32" else min(d, 128) if mode == "split" else d
    d_v = d if mode == "split" or kind.random() < 0.8 else 64
    groups = kind.choice([1, 1, 2, 4])
    biases = ["band", "constant", "clipped", "product", "curve"]
    bias = kind.choice(biases if mode == "split" else ["none", "band", "sloped", *biases])
    per_row, values = kind.random() < 0.3, kind.random() < 0.35
    mask = "none" if mode == "split" else kind.choice(["none", "none", "keys", "packed"])
    causal, even = kind.random() < 0.4, kind.random() < 0.3
    by_token = kind.random() < 0.6
    window = None if mode == "split" else kind.choice([None, None, "both", "before"])
    low_rank = d <= 192 and kind.random() < 0.1  # three more columns than the head has
    dropout = 0.2 if mode == "one pass" and kind.random() < 0.2 else 0.0
    n_k = own.choice([64, 128, 192, 256, 512]) if even else own.choice([1, 17, 63, 129, 257, 300])
    n_q = n_k if own.random() < 0.6 else own.choice([1, 64, 70, 128])
    if mode == "split":
        n_k = n_q = own.choice([512, 640, 1024]) if even else own.choice([517, 777, 1001])
    if mode == "decode":
        n_k = own.choice([512, 1024]) if even else own.choice([300, 777, 1501])
        n_q = own.choice([1, 2, 4])
    if dropout:  # what it keeps is read off from an identity in place of the values
        n_k = n_q = own.choice([64, 129])
    h_kv = own.choice([1, 2, 3])
    return {
        "seed": seed,
        "mode": mode,
        "dtype": dtype,
        "b": own.choice([1, 2]),
        "h": h_kv * groups,
        "h_kv": h_kv,
        "n_q": n_q,
        "n_k": n_k,
        "d": d,
        "d_v": d_v,
        "bias": bias,
        "low_rank": low_rank,
        "dropout": dropout,
        "reach": own.choice([0, 1, 3, 9, 40] + ([] if mode == "split" else [200])),
        "per_row": per_row,
        "by_token": by_token,
        "apart": own.random() < 0.3,
        "per_batch": own.random() < 0.3,
        "value_reach": own.choice([0, 1, 2, 16]) if values else None,
        "mask": mask,
        "causal": causal,
        "window": {
            None: None,
            "both": own.choice([0, 30, 100]),
            "before": (own.choice([9, 50]), None),
        }[window],
        "q_start": None if mode == "split" else own.choice([None, None, None, 0, 2]),
        "scale": own.choice([None, None, 0.3, 0.0]) if mode != "split" else own.choice([None, 0.3]),
    }


def errors_of(call: dict[str, Any], draw: int) -> list[tuple[str, float, float, float, float, int]]:
    """For each tensor: name, squared errors of ours and PyTorch's and its size, floor, count."""
    torch.manual_seed(1000 * call["seed"] + draw)
    dtype = getattr(torch, call["dtype"])
    b, h, n_q, n_k, d, d_v = (call[x] for x in ("b", "h", "n_q", "n_k", "d", "d_v"))
    leaves: list[tuple[str, Tensor, torch.dtype]] = []

    def leaf(name: str, *shape: int, half: bool = False) -> int:
        x = torch.randn(*shape, device="cuda", dtype=torch.float64)
        kind = dtype if half else torch.float32
        leaves.append((name, x.to(kind).double(), kind))
        return len(leaves) - 1

    q, k, v = (
        leaf("q", *((b, n_q, h, d) if call["by_token"] else (b, h, n_q, d)), half=True),
        leaf("k", b, call["h_kv"], n_k, d, half=True),
        leaf("v", b, call["h_kv"], n_k, d_v, half=True),
    )
    axes = (b if call["per_batch"] else 1, h, n_q if call["per_row"] else 1)
    band, factor, curve, lines = None, None, None, [None] * 4
    if call["bias"] == "product":
        factor = leaf("key table", h if call["per_batch"] else 1, 2 * call["reach"] + 1, d)
    elif call["bias"] == "curve":
        curve = [leaf(name, h, 5) for name in ("amplitude", "sharpness", "offset")]
    elif call["bias"] != "none":
        band = leaf("band", *axes, 2 * call["reach"] + 1)
    if call["bias"] in ("constant", "sloped"):
        lines[0], lines[2] = leaf("left", *axes), leaf("right", *axes)
    if call["bias"] == "sloped":
        lines[1], lines[3] = leaf("left slope", *axes), leaf("right slope", *axes)
    sides, table, keep = None, None, None
    if call["low_rank"]:
        sides = (leaf("low rank, queries", 1, h, n_q, 3), leaf("low rank, keys", 1, h, n_k, 3))
    if call["dropout"]:
        keep = kept(b, h, n_q, n_k, call["dropout"], draw)
    if call["value_reach"] is not None:
        table = leaf("table", 1, 2 * call["value_reach"] + 1, d_v)
    mask: Any = None
    if call["mask"] == "keys":
        mask = torch.rand(b, n_k, device="cuda") > 0.3
    if call["mask"] == "packed":
        places = (torch.arange(n, device="cuda")[None] // 37 for n in (n_q, n_k))
        mask = Mask(segments=tuple(places))

    def run(how: str) -> list[Tensor]:
        xs = [(x if how == "float64" else x.to(t)).clone().requires_grad_() for _, x, t in leaves]
        pick = [None if i is None else xs[i] for i in lines]
        bias = None if band is None else LagBias(xs[band], Line(*pick[:2]), Line(*pick[2:]))
        bias = LagBias.clipped(xs[band]) if call["bias"] == "clipped" else bias
        heads = (xs[q].transpose(1, 2) if call["by_token"] else xs[q], xs[k], xs[v])
        if factor is not None:
            query = heads[0] * 1 if call["apart"] else heads[0]
            bias = QueryBias(query, xs[factor], scale=d**-0.5)
        if curve is not None:
            bias = curve_of(call["reach"], [xs[i] for i in curve], how == "fused")
        if sides is not None:
            extra = LowRankBias(*(xs[i] for i in sides))
            bias = extra if bias is None else bias + extra
        options = {
            "bias": bias,
            "values": None if table is None else LagValues(xs[table]),
            "mask": mask,
            **{x: call[x] for x in ("causal", "window", "scale", "q_start")},
        }
        if how == "fused":
            torch.manual_seed(draw)
            out = attend(*heads, backend="fused", dropout=call["dropout"], **options)
            torch.manual_seed(draw)
            with torch.no_grad():  # another way for few queries and a curve
                alone = attend(*heads, backend="fused", dropout=call["dropout"], **options)
        else:
            whole = as_call(*heads, dropout=0.0, **options).with_kv_heads_expanded()
            out = alone = attend_rows(whole, slice(0, n_q), keep=keep)
        torch.manual_seed(draw)
        slope = torch.randn(out.shape, device="cuda", dtype=torch.float64).to(dtype).to(out.dtype)
        found = torch.autograd.grad(out, xs, slope, allow_unused=True)
        pairs = zip(xs, found, strict=True)
        return [out, alone, *(torch.zeros_like(x) if g is None else g for x, g in pairs)]

    truth, same, ours = run("float64"), run("same"), run("fused")
    rows = []
    names = ["out", "out without gradients", *(x[0] for x in leaves)]
    for name, t, s, o in zip(names, truth, same, ours, strict=True):
        wrong = float("inf") if not torch.isfinite(o).all() else mean_square(o.double() - t)
        floor = 0.25 * torch.finfo(o.dtype).eps
        rows.append((name, wrong, mean_square(s.double() - t), mean_square(t), floor, t.numel()))
    return rows


def kept(b: int, h: int, n_q: int, n_k: int, dropout: float, seed: int) -> Tensor:
    """What dropout multiplies each weight by: that of equal weights, read off from an identity."""
    q, k = (torch.zeros(b, h, n, 16, device="cuda") for n in (n_q, n_k))
    torch.manual_seed(seed)
    eye = torch.eye(n_k, device="cuda").expand(b, h, n_k, n_k)
    return (attend(q, k, eye, dropout=dropout, backend="fused") != 0).double() / (1 - dropout)


def curve_of(reach: int, parameters: list[Tensor], fused: bool) -> LagBias:
    """TISA's, which the fused backend makes itself; by PyTorch it is float32 at least."""
    if fused:
        from whence.methods.tisa_kernel import CURVE

        return CurveBias(CURVE, reach, *parameters)
    a, b, c = (x[..., None] for x in parameters)
    lag = torch.arange(-reach, reach + 1, device="cuda")
    curve = (a * torch.exp(-b.abs() * (lag - c).square())).sum(1)
    return LagBias(curve[None, :, None], Line(), Line())


def mean_square(x: Tensor) -> float:
    return x.square().mean().item()


def judged(call: dict[str, Any]) -> dict[str, Any]:
    """The call with its worst ratio of errors, and the tensors beyond twice PyTorch's."""
    split = call["mode"] == "split"
    strategy.SHORTEST = {256: 0} if split else {}
    draws = [errors_of(call, draw) for draw in range(DRAWS)]
    if any(tensor[5] < FEW for tensor in draws[0]):
        draws += [errors_of(call, draw) for draw in range(DRAWS, MORE_DRAWS)]
    ratios = {}
    for tensors in zip(*draws, strict=True):
        name, floor = tensors[0][0], tensors[0][4]
        ours, same, size = (sum(t[i] for t in tensors) / len(draws) for i in (1, 2, 3))
        ratios[name] = ours**0.5 / max(same**0.5, floor * size**0.5, 1e-5)
    bad = {name: round(ratio, 3) for name, ratio in ratios.items() if not ratio <= 2}
    return {**call, "worst": round(max(ratios.values()), 3), "bad": bad}


def worker(index: int, count: int, seeds: list[int], queue: Any) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    groups = sorted({seed // SHARED for seed in seeds})[index::count]
    for seed in (s for group in groups for s in seeds if s // SHARED == group):
        try:
            queue.put(judged(call_of(seed)))
        except Exception as error:
            text = f"{type(error).__name__}: {str(error)[:200]}"
            queue.put({**call_of(seed), "worst": float("inf"), "bad": {"error": text}})
            traceback.print_exc(limit=2)
    queue.put(None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--calls", type=int, default=500)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=540)
    parser.add_argument(
        "--again", type=Path, help="an earlier result: its calls beyond, and those it did not reach"
    )
    parser.add_argument("--commit", default=None)
    parser.add_argument("--out", type=Path, default=Path("results/gpu"))
    options = parser.parse_args()
    first = options.seed * 1_000_000
    seeds = list(range(first, first + options.calls))
    where = machine("cuda")
    where["commit"] = options.commit or where["commit"]
    before = []
    if options.again:
        earlier = json.loads(options.again.read_text())
        commit = earlier["machine"]["commit"]
        before = [{"commit": commit, **row} for row in earlier["rows"] if not row["bad"]]
        done = {row["seed"] for row in before}
        seeds = [seed for seed in seeds if seed not in done]
    start, running, rows = time.time(), options.processes, []
    mp.set_start_method("spawn")
    queue: Any = mp.Queue()
    workers = [
        mp.Process(target=worker, args=(i, options.processes, seeds, queue), daemon=True)
        for i in range(options.processes)
    ]
    for process in workers:
        process.start()
    while running and time.time() - start < options.seconds:
        try:
            row = queue.get(timeout=5)
        except Exception:
            continue
        if row is None:
            running -= 1
        else:
            rows.append(row)
    for process in workers:
        process.terminate()
    rows = before + [{"commit": where["commit"], **row} for row in rows]
    rows.sort(key=lambda row: row["seed"])
    bad = [row for row in rows if row["bad"]]
    for row in bad[:20]:
        print("BEYOND", json.dumps(row))
    worst = sorted(row["worst"] for row in rows) or [float("nan")]
    summary = {
        "calls": len(rows),
        "asked": options.calls,
        "beyond_twice": len(bad),
        "worst": worst[-1],
        "median": worst[len(worst) // 2],
        "by_mode": {m: sum(r["mode"] == m for r in rows) for m in ("one pass", "split", "decode")},
        "by_commit": dict(Counter(row["commit"] for row in rows)),
        "seconds": round(time.time() - start),
    }
    print(json.dumps(summary))
    result = {"seed": options.seed, "machine": where, **summary, "rows": rows}
    write_json(options.out / "exactness.json", result)
    sys.exit(1 if bad or len(rows) < options.calls else 0)


if __name__ == "__main__":
    main()
