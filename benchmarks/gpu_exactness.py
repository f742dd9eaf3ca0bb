"""Random calls of the fused backend on a GPU, against float64 and same-dtype PyTorch.

    python benchmarks/gpu_exactness.py --calls 1000 --seed 1 --processes 15 --out results/gpu
    compute-sanitizer python benchmarks/gpu_exactness.py --sanitize 60
    python benchmarks/gpu_exactness.py --simulated --calls 20 --processes 2 --out out

The rule: the root mean square error of the output and of every gradient is at most twice that of
the definition run by PyTorch in the same dtype. Errors are pooled over three draws of the numbers,
and over 24 where a tensor, or the weights that all gradients come from, are fewer than 32 of them:
the error of one number in one draw is luck.
Below a floor of a quarter of the dtype's epsilon times the tensor's size, and of 1e-5, an error
counts as none. A split call runs from eight times its far parts' start on, as `backend.far_start`
has it, and other calls never split.

Ten calls in a row share what the compiler must know (dtype, head sizes, which options are there)
and differ in the rest (lengths, reach, windows, positions, axes): compiling is what takes the time.
With `--sanitize` one process makes that many calls, each of another kind, and compares nothing.
Give PYTORCH_NO_CUDA_MEMORY_CACHING=1 with it, so that the sanitizer sees the end of each tensor.

With `--simulated` no GPU is needed: the kernels are compiled for an H200 and their PTX runs on the
CPU (tests/shared/simulated_gpu.py), which takes ten to twenty seconds a call. An address outside of
the tensors is an error there and, in the first of ten calls, a race. It takes one draw unless
--draws says more; a call that seems to be beyond is drawn 24 times.

With `--dtype float32` only those of the calls are made that have this dtype.
"""

import argparse
import json
import random
import sys
import time
import traceback
from collections import Counter
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp
import triton
from torch import Tensor

from whence import LagBias, LagValues, Line, Mask, attend
from whence.bench.machine import machine
from whence.files import write_json
from whence.kernels.call import as_call
from whence.kernels.fused import backend
from whence.kernels.reference import attend_rows
from whence.lag import BUCKETS, GAUSSIANS, LINE, Curve, CurveBias, LowRankBias, QueryBias
from whence.methods.t5 import t5_bucket
from whence.units import GAIN

SHARED = 10  # calls that share what the compiler must know
DRAWS, MORE_DRAWS, FEW = 3, 24, 32
FLOOR = 1e-5  # an error below it counts as none
MODES = ("short", "one pass", "split", "decode")
CURVES: dict[str, Curve] = {"gaussians": GAUSSIANS, "buckets": BUCKETS, "line": LINE}
BIASES = ("gaussians", "buckets", "product", "band", "constant", "clipped")
OTHERS = ("line", "sloped", "none")  # of which no part can be left to a plain kernel
# In turn, so that 500 calls have every mode with every bias; the newest kernels more often.
PAIRS = [
    (mode, bias)
    for bias in (*BIASES, *OTHERS)
    for mode in (*MODES, "short", "one pass")
    if mode != "split" or bias in BIASES
]
# Lengths that share a tile of the kernels for short sequences, and those just beyond them.
SHORT_LENGTHS = ([16, 3, 9], [17, 31, 32], [33, 48, 63, 64], [65, 96, 100, 127, 128])
N_BUCKETS, MAX_DISTANCE = 32, 128  # T5's own


def call_of(seed: int) -> dict[str, Any]:
    """The options of one call: first what all calls of its kind share, then its own."""
    number = seed // SHARED
    kind, own = random.Random(f"kind {number}"), random.Random(f"own {seed}")
    mode, bias = PAIRS[number % len(PAIRS)]
    dtype = kind.choice(["bfloat16"] * 5 + ["float16"] * 4 + ["float32"])
    if mode == "split" and dtype == "float32":
        dtype = "bfloat16"
    d = kind.choice([16, 32, 64, 64, 128, 40, 80, 96])
    if kind.random() < 0.06:
        d = kind.choice([192, 256])
    d = min(d, 64) if dtype == "float32" else min(d, 128) if mode == "split" else d
    d_v = d if mode == "split" or kind.random() < 0.8 else 64
    groups = kind.choice([1, 1, 2, 4])
    per_row, values = kind.random() < 0.3, kind.random() < 0.35
    if mode == "short":  # its kernels are not for these
        per_row, values = per_row and kind.random() < 0.3, values and kind.random() < 0.3
    mask = "none" if mode == "split" else kind.choice(["none", "none", "keys", "packed"])
    causal, even = kind.random() < 0.4, kind.random() < 0.3
    by_token, long_segments = kind.random() < 0.6, kind.random() < 0.5
    window = None if mode == "split" else kind.choice([None, None, "both", "before"])
    low_rank = d <= 192 and kind.random() < 0.1  # three more columns than the head has
    dropout = 0.2 if mode in ("short", "one pass") and kind.random() < 0.2 else 0.0
    lengths = kind.choice(SHORT_LENGTHS)
    if mode == "short":
        n_k, n_q = own.choice(lengths), own.choice(lengths)
        n_q = n_k if own.random() < 0.6 else n_q
    elif mode == "decode":
        n_k = own.choice([512, 1024]) if even else own.choice([300, 777, 1501])
        n_q = own.choice([1, 2, 4])
    elif mode == "split":
        n_k = n_q = own.choice([512, 640, 1024]) if even else own.choice([517, 777, 1001])
    else:
        n_k = own.choice([128, 192, 256, 512]) if even else own.choice([129, 257, 300])
        n_q = n_k if own.random() < 0.6 else own.choice([64, 70, 128])
        if dropout:  # what it keeps is read off from an identity in place of the values
            n_k = n_q = 129
    # As many heads as make a pool of numbers of a curve's parameters, where that is cheap.
    h_kv = own.choice([1, 2, 3])
    if bias == "gaussians":
        h_kv = own.choice([7, 8])
    elif bias == "line":
        h_kv = FEW // groups
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
        "long_segments": long_segments,
        "causal": causal,
        "window": {
            None: None,
            "both": own.choice([0, 30, 100]),
            "before": (own.choice([9, 50]), None),
        }[window],
        "q_start": None if mode == "split" else own.choice([None, None, None, 0, 2]),
        "scale": own.choice([None, None, 0.3, 0.0]) if mode != "split" else own.choice([None, 0.3]),
    }


class Drawn:
    """A call with the numbers of one draw; `run` computes it and its gradients."""

    def __init__(self, call: dict[str, Any], draw: int, device: str = "cuda") -> None:
        torch.manual_seed(1000 * call["seed"] + draw)
        self.call, self.draw, self.device = call, draw, device
        self.dtype = getattr(torch, call["dtype"])
        self.leaves: list[tuple[str, Tensor, torch.dtype]] = []
        b, h, n_q, n_k, d, d_v = (call[x] for x in ("b", "h", "n_q", "n_k", "d", "d_v"))
        self.q = self._leaf("q", (b, n_q, h, d) if call["by_token"] else (b, h, n_q, d), half=True)
        self.k = self._leaf("k", (b, call["h_kv"], n_k, d), half=True)
        self.v = self._leaf("v", (b, call["h_kv"], n_k, d_v), half=True)
        self._draw_bias(h, n_q, d)
        self.sides = self.table = None
        if call["low_rank"]:
            self.sides = [
                self._leaf("low rank, queries", (1, h, n_q, 3)),
                self._leaf("low rank, keys", (1, h, n_k, 3)),
            ]
        if call["value_reach"] is not None:
            self.table = self._leaf("table", (1, 2 * call["value_reach"] + 1, d_v))
        self.mask: Any = None
        if call["mask"] == "keys":
            self.mask = torch.rand(b, n_k, device=device) > 0.3
        if call["mask"] == "packed":
            kind = torch.int64 if call["long_segments"] else torch.int32
            places = (torch.arange(n, device=device)[None] // 37 for n in (n_q, n_k))
            self.mask = Mask(segments=tuple(place.to(kind) for place in places))

    def run(self, how: str) -> list[Tensor]:
        """The output, that without gradients, and the gradient of every leaf.

        By the kernels ("fused"), or the definition in this dtype ("same") or in "float64".
        """
        call = self.call
        xs = [
            (x if how == "float64" else x.to(kind)).clone().requires_grad_()
            for _, x, kind in self.leaves
        ]
        query = xs[self.q].transpose(1, 2) if call["by_token"] else xs[self.q]
        heads = (query, xs[self.k], xs[self.v])
        bias = self._bias(xs, query)
        if self.sides is not None:
            extra = LowRankBias(*(xs[i] for i in self.sides))
            bias = extra if bias is None else bias + extra
        options = {
            "bias": bias,
            "values": None if self.table is None else LagValues(xs[self.table]),
            "mask": self.mask,
            **{x: call[x] for x in ("causal", "window", "scale", "q_start")},
        }
        if how == "fused":
            torch.manual_seed(self.draw)
            out = attend(*heads, backend="fused", dropout=call["dropout"], **options)
            torch.manual_seed(self.draw)
            with torch.no_grad():  # nothing is kept for gradients, so other plans are made
                alone = attend(*heads, backend="fused", dropout=call["dropout"], **options)
        else:
            keep = self._kept() if call["dropout"] else None
            whole = as_call(*heads, dropout=0.0, **options).with_kv_heads_expanded()
            out = alone = attend_rows(whole, slice(0, call["n_q"]), keep=keep)
        torch.manual_seed(self.draw)
        d_out = torch.randn(out.shape, device=self.device, dtype=torch.float64)
        found = torch.autograd.grad(out, xs, d_out.to(self.dtype).to(out.dtype), allow_unused=True)
        pairs = zip(xs, found, strict=True)
        return [out, alone, *(torch.zeros_like(x) if g is None else g for x, g in pairs)]

    def _leaf(self, name: str, shape: tuple[int, ...], *, half: bool = False) -> int:
        x = torch.randn(*shape, device=self.device, dtype=torch.float64)
        return self._add(name, x, self.dtype if half else torch.float32)

    def _add(self, name: str, x: Tensor, kind: torch.dtype) -> int:
        self.leaves.append((name, x.to(kind).double(), kind))
        return len(self.leaves) - 1

    def _draw_bias(self, h: int, n_q: int, d: int) -> None:
        call, name = self.call, self.call["bias"]
        axes = (call["b"] if call["per_batch"] else 1, h, n_q if call["per_row"] else 1)
        self.band = self.factor = None
        self.curve: list[int] = []
        self.lines: list[int | None] = [None] * 4
        if name == "product":
            shape = (h if call["per_batch"] else 1, 2 * call["reach"] + 1, d)
            self.factor = self._leaf("key table", shape)
        elif name in CURVES:
            self.curve = [
                self._add(part, x, torch.float32) for part, x in self._parameters(name, h).items()
            ]
        elif name != "none":
            self.band = self._leaf("band", (*axes, 2 * call["reach"] + 1))
        if name in ("constant", "sloped"):
            self.lines[0], self.lines[2] = self._leaf("left", axes), self._leaf("right", axes)
        if name == "sloped":
            self.lines[1] = self._leaf("left slope", axes)
            self.lines[3] = self._leaf("right slope", axes)

    def _parameters(self, name: str, h: int) -> dict[str, Tensor]:
        """The learned parameters of a curve: as a method holds them, and of sizes as in models."""

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, device=self.device, dtype=torch.float64)

        if name == "line":
            return {"slope": 0.3 * normal(h).abs()}
        if name == "buckets":
            return {"bucket table": normal(N_BUCKETS, h) / GAIN}
        widths = 2 + normal(h, 5)  # logarithms: a few lags
        return {
            "amplitude": normal(h, 5) / GAIN,
            "width": widths / GAIN,
            "offset": normal(h, 5) / GAIN,
        }

    def _bias(self, xs: list[Tensor], query: Tensor) -> LagBias | None:
        call, pick = self.call, [None if i is None else xs[i] for i in self.lines]
        if self.factor is not None:
            query = query * 1 if call["apart"] else query
            return QueryBias(query, xs[self.factor], scale=call["d"] ** -0.5)
        if self.curve:
            reach, parameters = call["reach"], [xs[i] for i in self.curve]
            if call["bias"] == "line":
                reach = 0
            if call["bias"] == "buckets":
                lag = torch.arange(-reach, reach + 1, device=self.device)
                parameters.append(t5_bucket(lag, N_BUCKETS, MAX_DISTANCE, causal=False))
            return CurveBias(CURVES[call["bias"]], reach, *parameters)
        if self.band is None:
            return None
        if call["bias"] == "clipped":
            return LagBias.clipped(xs[self.band])
        return LagBias(xs[self.band], Line(*pick[:2]), Line(*pick[2:]))

    def _kept(self) -> Tensor:
        """What dropout multiplies each weight by, read off from an identity as the values."""
        b, h, n_q, n_k, dropout = (self.call[x] for x in ("b", "h", "n_q", "n_k", "dropout"))
        q, k = (torch.zeros(b, h, n, 16, device=self.device) for n in (n_q, n_k))
        torch.manual_seed(self.draw)
        eye = torch.eye(n_k, device=self.device).expand(b, h, n_k, n_k)
        return (attend(q, k, eye, dropout=dropout, backend="fused") != 0).double() / (1 - dropout)


def errors_of(
    call: dict[str, Any], draw: int, device: str = "cuda"
) -> list[tuple[str, float, float, float, float, int]]:
    """For each tensor: name, squared errors of ours and PyTorch's and its size, floor, count."""
    drawn = Drawn(call, draw, device)
    truth, same, ours = (drawn.run(how) for how in ("float64", "same", "fused"))
    rows = []
    names = ["out", "out without gradients", *(leaf[0] for leaf in drawn.leaves)]
    for name, t, s, o in zip(names, truth, same, ours, strict=True):
        wrong = float("inf") if not torch.isfinite(o).all() else mean_square(o.double() - t)
        floor = 0.25 * torch.finfo(o.dtype).eps
        rows.append((name, wrong, mean_square(s.double() - t), mean_square(t), floor, t.numel()))
    return rows


def mean_square(x: Tensor) -> float:
    return x.square().mean().item()


def judged(
    call: dict[str, Any], least: int = DRAWS, device: str = "cuda", floor: float = FLOOR
) -> dict[str, Any]:
    """The call with its worst ratio of errors, and the tensors beyond twice PyTorch's."""
    set_mode(call["mode"])
    draws = [errors_of(call, draw, device) for draw in range(least)]
    cells = call["b"] * call["h"] * call["n_q"] * call["n_k"]
    few = min(cells, *(tensor[5] for tensor in draws[0])) < FEW
    ratios = ratios_of(draws, floor)
    # On a CPU draws are slow: there are more only of a call that seems to be beyond.
    again = few if device == "cuda" else max(ratios.values()) > 2
    if again:
        draws += [errors_of(call, draw, device) for draw in range(least, MORE_DRAWS)]
        ratios = ratios_of(draws, floor)
    bad = {name: round(ratio, 3) for name, ratio in ratios.items() if not ratio <= 2}
    worst = round(max(ratios.values(), key=lambda x: (x != x, x)), 3)  # NaN before all numbers
    return {**call, "worst": worst, "bad": bad, "draws": len(draws)}


def ratios_of(
    draws: list[list[tuple[str, float, float, float, float, int]]], floor: float = FLOOR
) -> dict[str, float]:
    """For each tensor our error over PyTorch's, of all draws together."""
    ratios = {}
    for tensors in zip(*draws, strict=True):
        name, relative = tensors[0][0], tensors[0][4]
        ours, same, size = (sum(t[i] for t in tensors) / len(draws) for i in (1, 2, 3))
        ratios[name] = ours**0.5 / max(same**0.5, relative * size**0.5, floor)
    return ratios


def set_mode(mode: str) -> None:
    """Make the backend split every call that it can, or none."""
    backend.SHORTEST = {256: 0 if mode == "split" else 2**31}


def gpu_of(device: str, *, checked: bool = True) -> AbstractContextManager[Any]:
    """A simulated GPU where the device is a CPU; else nothing."""
    if device == "cuda":
        return nullcontext()
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "shared"))
    from simulated_gpu import simulated_gpu

    return simulated_gpu(checked=checked)


def worker(tasks: Any, found: Any, least: int, device: str) -> None:
    """Judge the calls of one kind after another, until there is none left."""
    torch.set_num_threads(1)
    torch.backends.cuda.matmul.allow_tf32 = False
    while (seeds := tasks.get()) is not None:
        for seed in seeds:
            with gpu_of(device, checked=seed % SHARED == 0):
                try:
                    found.put(judged(call_of(seed), least, device))
                except Exception as error:
                    text = f"{type(error).__name__}: {str(error)[:200]}"
                    found.put({**call_of(seed), "worst": float("inf"), "bad": {"error": text}})
                    traceback.print_exc(limit=2)
    found.put(None)


def sanitize(count: int, first: int, device: str) -> int:
    """Make calls of as many kinds with their gradients, for a tool that watches the memory."""
    with gpu_of(device):
        for index in range(count):
            call = call_of(first + index * SHARED + index % SHARED)
            set_mode(call["mode"])
            Drawn(call, 0, device).run("fused")
            if device == "cuda":
                torch.cuda.synchronize()
            what = {
                x: call[x] for x in ("seed", "mode", "dtype", "bias", "n_q", "n_k", "d", "mask")
            }
            print(index + 1, json.dumps(what), flush=True)
    return 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--calls", type=int, default=1000)
    parser.add_argument("--sanitize", type=int, metavar="N", help="make N calls, compare nothing")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=540)
    parser.add_argument(
        "--again", type=Path, help="an earlier result: its calls beyond, and those it did not reach"
    )
    dtypes = ["bfloat16", "float16", "float32"]
    parser.add_argument("--dtype", choices=dtypes, help="only calls of this dtype")
    parser.add_argument("--simulated", action="store_true", help="on a CPU, by the kernels' PTX")
    parser.add_argument("--draws", type=int, help="of a call's numbers, at least")
    parser.add_argument("--commit", default=None)
    parser.add_argument("--out", type=Path, default=Path("results/gpu"))
    options = parser.parse_args()
    first = options.seed * 1_000_000
    device = "cpu" if options.simulated else "cuda"
    least = options.draws or (1 if options.simulated else DRAWS)
    if options.sanitize is not None:
        sys.exit(sanitize(options.sanitize, first, device))
    seeds = list(range(first, first + options.calls))
    if options.dtype:
        seeds = [seed for seed in seeds if call_of(seed)["dtype"] == options.dtype]
    asked = len(seeds)
    where = machine(device)
    where["commit"] = options.commit or where["commit"]
    where["triton"] = triton.__version__
    before = []
    if options.again:
        earlier = json.loads(options.again.read_text())
        commit = earlier["machine"]["commit"]
        before = [{"commit": commit, **row} for row in earlier["rows"] if not row["bad"]]
        done = {row["seed"] for row in before}
        seeds = [seed for seed in seeds if seed not in done]
    start, running, rows = time.time(), options.processes, []
    told = start
    mp.set_start_method("spawn")
    tasks: Any = mp.Queue()
    found: Any = mp.Queue()
    for kind in sorted({seed // SHARED for seed in seeds}):
        tasks.put([seed for seed in seeds if seed // SHARED == kind])
    workers = [
        mp.Process(target=worker, args=(tasks, found, least, device), daemon=True)
        for _ in range(options.processes)
    ]
    for process in workers:
        tasks.put(None)
        process.start()
    while running and time.time() - start < options.seconds:
        try:
            row = found.get(timeout=5)
        except Exception:
            continue
        if row is None:
            running -= 1
        else:
            rows.append(row)
        if time.time() - told > 30:
            told = time.time()
            beyond = sum(bool(row["bad"]) for row in rows)
            print(f"{len(rows)} of {len(seeds)} calls, {beyond} beyond", flush=True)
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
        "asked": asked,
        "beyond_twice": len(bad),
        "worst": worst[-1],
        "median": worst[len(worst) // 2],
        "by_mode": {m: sum(r["mode"] == m for r in rows) for m in MODES},
        "by_bias": dict(Counter(row["bias"] for row in rows)),
        "by_commit": dict(Counter(row["commit"] for row in rows)),
        "seconds": round(time.time() - start),
    }
    print(json.dumps(summary))
    result = {"seed": options.seed, "machine": where, **summary, "rows": rows}
    write_json(options.out / f"{'simulated' if options.simulated else 'exactness'}.json", result)
    sys.exit(1 if bad or len(rows) < asked else 0)


if __name__ == "__main__":
    main()
