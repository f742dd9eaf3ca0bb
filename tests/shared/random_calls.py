"""Random calls of `attend` against the formulas, written down here without any of whence's code.

    python tests/shared/random_calls.py --backend sdpa --calls 2000
    TRITON_INTERPRET=1 python tests/shared/random_calls.py --backend fused --calls 300

The rule: the root mean square error of the output and of every gradient is at most twice that of
the formulas in PyTorch, evaluated in the dtype of the call; both are held against float64. Errors
are pooled over some draws of the numbers, because the error of one draw of few numbers is luck; a
call that seems beyond is drawn ten times as often. An error below a quarter of the dtype's epsilon, relative to the tensor, counts as none, and so does
one of 1e-6 in a gradient (a row that sees one key has none at all). Beyond float64 there is nothing
to hold it against: its error is at most 1e-12.
"""

import argparse
import copy
import json
import math
import os
import random
import sys
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
from layouts import LAYOUTS
from shaking import gain, shake
from whence import LagBias, LagValues, Line, LowRankBias, Mask, attend, build

METHODS = ("tisa", "t5", "alibi", "kerple", "shaw")
TERMS = ("none", "band", "lines", "clipped", "low rank")
DRAWS, MORE_DRAWS, MOST_DRAWS, FEW = 2, 12, 120, 32
ABSOLUTE = {torch.float64: 5e-13}  # of numbers around 1, half of what is allowed
Numbers = dict[str, Tensor]


class Call(NamedTuple):
    """Everything about a call but its numbers."""

    seed: int
    dtype: torch.dtype
    heads: tuple[int, int, int, int]  # sequences, query heads, key heads, columns
    n_q: int
    n_k: int
    bias: str
    reach: int
    own: tuple[bool, bool]  # whether each sequence, and each query, has a bias of its own
    values: bool
    masks: tuple[str, ...]
    layouts: dict[str, str]
    options: dict[str, Any]  # causal, window, scale, q_start

    @staticmethod
    def random(seed: int, backend: str) -> "Call":
        """The call with this number."""
        pick = random.Random(seed)
        # Triton's interpreter multiplies bfloat16 wrongly, and takes seconds for a large call.
        fused = backend == "fused"
        dtypes = [torch.float32, torch.float16, torch.float32 if fused else torch.bfloat16]
        dtype = pick.choice(dtypes if fused else [*dtypes, torch.float64])
        groups, h_kv = pick.choice([1, 1, 2, 3]), pick.choice([1, 2])
        n_k = pick.choice([1, 2, 7, 16, 17, 33, 40] if fused else [1, 2, 5, 16, 31, 64, 97, 150])
        n_q = pick.choice([n_k, n_k, n_k, 1, min(3, n_k), max(1, n_k // 2)])
        causal = pick.random() < 0.5
        window = pick.choice([None, None, None, 0, 3, (5, None), (None, 2), (4, 1)])
        options = {
            "causal": causal,
            "window": window,
            "scale": pick.choice([None, None, 1.0, 0.0]),
            "q_start": pick.choice([None, None, 0, n_k // 2]),
        }
        bias = pick.choice([*METHODS, *TERMS])
        masks = ("keys", "segments") if fused else ("keys", "segments", "pairs")
        tensors = ("q", "k", "v", "slope", "band", "left", "right", "table", "x", "y", "keys")
        return Call(
            *(seed, dtype),
            (pick.choice([1, 2]), groups * h_kv, h_kv, pick.choice([8, 16, 24])),
            *(n_q, n_k, bias, pick.choice([0, 1, 4, n_k, n_k + 3])),
            (pick.random() < 0.3, pick.random() < 0.3),
            pick.random() < 0.3,
            tuple(x for x in masks if pick.random() < 0.2),
            {x: pick.choice(["as it is", *LAYOUTS]) for x in tensors},
            options,
        )

    def text(self) -> str:
        """The call on one line."""
        return json.dumps({**self._asdict(), "dtype": str(self.dtype)})


class Drawn:
    """A call with numbers."""

    def __init__(self, call: Call, draw: int) -> None:
        torch.manual_seed(call.seed * 100 + draw)
        self.call = call
        b, h, h_kv, d = call.heads
        n_q, n_k, width = call.n_q, call.n_k, 2 * call.reach + 1
        rows = (b if call.own[0] else 1, h, n_q if call.own[1] else 1)
        shapes: dict[str, tuple[int, ...]] = {
            "q": (b, h, n_q, d),
            "k": (b, h_kv, n_k, d),
            "v": (b, h_kv, n_k, d),
        }
        if call.bias in ("band", "lines", "clipped"):
            shapes["band"] = (*rows, width)
        if call.bias == "lines":
            for side in ("left", "right"):
                shapes |= {f"{side} const": rows, f"{side} slope": rows}
        if call.bias == "low rank":
            shapes |= {"x": (1, h, n_q, 3), "y": (1, h, n_k, 3)}
        if call.values:
            shapes["table"] = (h, width, d)
        of_heads = ("q", "k", "v")
        self.leaves = {
            name: torch.randn(shape).to(call.dtype if name in of_heads else self.wide(call.dtype))
            for name, shape in shapes.items()
        }
        self.slope = torch.randn(b, h, n_q, d).to(call.dtype)
        self.method: nn.Module | None = None
        if call.bias in METHODS:
            spec = f"shaw:clip={max(1, call.reach)}" if call.bias == "shaw" else call.bias
            self.method = build(spec, n_heads=h, d_head=d).to(self.wide(call.dtype))
            shake(self.method, 0.3)
        self.masks = {
            "keys": torch.rand(b, n_k) < 0.7,
            "q segments": torch.arange(n_q).expand(b, n_q) * 3 // n_q << 33,
            "k segments": torch.arange(n_k).expand(b, n_k) * 3 // n_k << 33,
            "pairs": torch.rand(1, h, n_q, n_k) < 0.7,
        }

    @staticmethod
    def wide(dtype: torch.dtype) -> torch.dtype:
        """The dtype of what a bias is made of, beside heads of this one."""
        return torch.promote_types(dtype, torch.float32)

    def ours(self, backend: str) -> dict[str, Tensor]:
        """The output and all gradients, by whence, of tensors that lie in memory as the call says."""
        call, method = self.call, copy.deepcopy(self.method)
        leaves = {name: x.clone().requires_grad_() for name, x in self.leaves.items()}
        x = {name: self._laid(name, leaf) for name, leaf in leaves.items()}
        bias, values = self._terms(x, method)
        mask = None
        if call.masks:
            segments = tuple(self._laid("keys", self.masks[f"{side} segments"]) for side in "qk")
            mask = Mask(
                keys=self._laid("keys", self.masks["keys"]) if "keys" in call.masks else None,
                segments=segments if "segments" in call.masks else None,
                pairs=self._laid("keys", self.masks["pairs"]) if "pairs" in call.masks else None,
            )
        out = attend(
            *(x["q"], x["k"], x["v"]),
            **{"bias": bias, "values": values, "mask": mask, "backend": backend, **call.options},
        )
        return self._gradients(out, leaves, method, self._laid("slope", self.slope))

    def _terms(
        self, x: Numbers, method: nn.Module | None
    ) -> tuple[LagBias | LowRankBias | None, LagValues | None]:
        call = self.call
        values = LagValues(x["table"]) if call.values else None
        if call.bias == "none":
            return None, values
        if call.bias == "low rank":
            return LowRankBias(x["x"], x["y"]), values
        if call.bias == "clipped":
            return LagBias.clipped(x["band"]), values
        if call.bias == "band":
            return LagBias(x["band"], Line(), Line()), values
        if call.bias == "lines":
            left, right = (Line(x[f"{s} const"], x[f"{s} slope"]) for s in ("left", "right"))
            return LagBias(x["band"], left, right), values
        assert method is not None
        q_pos, k_pos = self._start() + torch.arange(call.n_q), torch.arange(call.n_k)
        of_method = method.value_term(q_pos, k_pos)
        if values is not None and of_method is not None:
            of_method = values + of_method
        return method.score_term(x["q"], q_pos, k_pos), of_method or values

    def formula(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """The output and all gradients, by the formulas, in this dtype."""
        call, method = self.call, copy.deepcopy(self.method)
        exact = dtype == torch.float64
        leaves = {
            name: self._as_laid(name, x).to(torch.float64 if exact else x.dtype).requires_grad_()
            for name, x in self.leaves.items()
        }
        if method is not None and exact:
            method = method.double()
        b, h, h_kv, d = call.heads
        q, (k, v) = leaves["q"], (leaves[x].repeat_interleave(h // h_kv, 1) for x in "kv")
        lag = torch.arange(call.n_k) - (self._start() + torch.arange(call.n_q))[:, None]
        scale = d**-0.5 if call.options["scale"] is None else call.options["scale"]
        logits = q @ k.transpose(-1, -2) * scale
        bias, tables = self._bias_at(leaves, method, lag)
        if bias is not None:
            logits = logits + bias.to(dtype)
        seen = self._seen(lag).expand(b, h, *lag.shape)
        weights = logits.masked_fill(~seen, -math.inf).softmax(-1).masked_fill(~seen, 0.0)
        out = weights @ v
        for table in tables:
            reach = table.shape[1] // 2
            rows = table[:, lag.clamp(-reach, reach) + reach].to(dtype)
            out = out + torch.einsum("bhqk,hqkd->bhqd", weights, rows.expand(h, -1, -1, -1))
        return self._gradients(out, leaves, method, self._as_laid("slope", self.slope).to(dtype))

    def _bias_at(self, x: Numbers, method: Any, lag: Tensor) -> tuple[Tensor | None, list[Tensor]]:
        """The bias of every pair, and the tables of vectors that are added to values."""
        call, distance = self.call, lag.abs()
        tables = [x["table"]] if call.values else []
        if call.bias == "none":
            return None, tables
        if call.bias == "low rank":
            return x["x"] @ x["y"].transpose(-1, -2), tables
        if call.bias in ("band", "lines", "clipped"):
            clipped = lag.clamp(-call.reach, call.reach) + call.reach
            band = x["band"].expand(-1, -1, call.n_q, -1)
            inside = band.gather(3, clipped.expand(*band.shape[:2], *lag.shape))
            if call.bias == "clipped":
                return inside, tables
            beyond = torch.zeros(())
            if call.bias == "lines":
                left, right = (
                    x[f"{s} const"][..., None] + x[f"{s} slope"][..., None] * distance
                    for s in ("left", "right")
                )
                beyond = torch.where(lag < 0, left, right)
            return torch.where(distance <= call.reach, inside, beyond), tables
        if call.bias == "tisa":
            a, b, c = (
                p[:, :, None, None] for p in (method.amplitude, method.sharpness, method.offset)
            )
            return (a * torch.exp(-b.abs() * (lag - c) ** 2)).sum(1)[None], tables
        if call.bias == "t5":
            far = torch.log(distance.clamp(min=1).float() / 8) / math.log(128 / 8) * 8
            bucket = torch.where(distance < 8, distance, (8 + far.long()).clamp(max=15))
            return method.table[bucket + 16 * (lag > 0)].permute(2, 0, 1)[None], tables
        if call.bias == "alibi":
            return -alibi_slopes(call.heads[1])[:, None, None] * distance, tables
        if call.bias == "kerple":
            p, a = (nn.functional.softplus(y)[:, None, None] for y in (method.raw_p, method.raw_a))
            return -p * torch.log1p(a * distance), tables
        clip = max(1, call.reach)
        rows = method.key_table[:, lag.clamp(-clip, clip) + clip]
        d = call.heads[3]
        bias = torch.einsum(
            "bhqd,hqkd->bhqk", x["q"].to(rows.dtype), rows.expand(call.heads[1], -1, -1, -1)
        )
        return bias * d**-0.5, [*tables, method.value_table]

    def _seen(self, lag: Tensor) -> Tensor:
        options, masks = self.call.options, self.call.masks
        seen = torch.ones(1, 1, *lag.shape, dtype=torch.bool)
        window = options["window"]
        before, after = window if isinstance(window, tuple) else (window, window)
        if options["causal"]:
            seen = seen & (lag <= 0)
        if before is not None:
            seen = seen & (lag >= -before)
        if after is not None:
            seen = seen & (lag <= after)
        if "keys" in masks:
            seen = seen & self._as_laid("keys", self.masks["keys"])[:, None, None]
        if "segments" in masks:
            of_q, of_k = (self._as_laid("keys", self.masks[f"{s} segments"]) for s in "qk")
            seen = seen & (of_q[:, None, :, None] == of_k[:, None, None])
        if "pairs" in masks:
            seen = seen & self._as_laid("keys", self.masks["pairs"])
        return seen

    def _start(self) -> int:
        start = self.call.options["q_start"]
        return self.call.n_k - self.call.n_q if start is None else int(start)

    def _laid(self, name: str, x: Tensor) -> Tensor:
        layout = self.call.layouts[name.split()[0]]
        return x if layout == "as it is" or x.numel() == 0 else LAYOUTS[layout](x)

    def _as_laid(self, name: str, x: Tensor) -> Tensor:
        """The same numbers, packed: an expanded tensor repeats its first row."""
        return self._laid(name, x).detach().clone(memory_format=torch.contiguous_format)

    def _gradients(
        self, out: Tensor, leaves: Numbers, method: nn.Module | None, slope: Tensor
    ) -> dict[str, Tensor]:
        wanted = dict(leaves)
        if method is not None:
            wanted |= {n: p for n, p in method.named_parameters() if p.requires_grad}
        found = torch.autograd.grad(out, list(wanted.values()), slope, allow_unused=True)
        grads = zip(wanted.items(), found, strict=True)
        zeroed = {n: torch.zeros_like(x) if g is None else g for (n, x), g in grads}
        for (
            name
        ) in leaves:  # the formula's leaf is what is laid out: every copy of a row is its own
            if self.call.layouts[name.split()[0]] == "expanded":
                zeroed[name] = zeroed[name].sum(0)
        return {"out": out.detach(), **zeroed}


def alibi_slopes(h: int) -> Tensor:
    """2^(-8 i / n) for the largest power of two n <= h, then every second of those of 2 n."""
    n = 2 ** int(math.log2(h))
    slopes = [2 ** (-8 * i / n) for i in range(1, n + 1)]
    return torch.tensor([*slopes, *(2 ** (-4 * i / n) for i in range(1, 2 * n, 2))][:h])


def judged(call: Call, backend: str) -> dict[str, float]:
    """For the output and each gradient, our error over PyTorch's in the same dtype."""
    sums: dict[str, list[float]] = {}
    ratios: dict[str, float] = {}
    for draws in range(1, MOST_DRAWS + 1):
        drawn = Drawn(call, draws - 1)
        truth, same, ours = (
            drawn.formula(torch.float64),
            drawn.formula(call.dtype),
            drawn.ours(backend),
        )
        for name, exact in truth.items():
            wrong = ours[name].double() - exact
            row = sums.setdefault(name, [0.0, 0.0, 0.0])
            for i, x in enumerate((wrong, same[name].double() - exact, exact)):
                row[i] += x.square().mean().item()
            if not torch.isfinite(wrong).all():
                row[0] = math.inf
            ratios[name] = _ratio(call, name, *row, draws)
        few = any(x.numel() < FEW for x in truth.values())
        enough = MORE_DRAWS if few else DRAWS
        if draws >= enough and max(ratios.values()) <= 2:
            break
    return ratios


def _ratio(
    call: Call, name: str, wrong: float, same_wrong: float, size: float, draws: int
) -> float:
    dtype = call.dtype if name in ("out", "q", "k", "v") else Drawn.wide(call.dtype)
    absolute = gain(name) * ABSOLUTE.get(dtype, 1e-6) * draws**0.5
    floor = max(0.25 * torch.finfo(dtype).eps * size**0.5, absolute)
    return wrong**0.5 / max(same_wrong**0.5, floor)


def main() -> None:
    """Judge the calls of a range of seeds."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--backend", choices=["sdpa", "fused", "reference"], default="sdpa")
    parser.add_argument("--calls", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0, help="of the first call")
    options = parser.parse_args()
    if options.backend == "fused" and not torch.cuda.is_available():
        os.environ.setdefault("TRITON_INTERPRET", "1")
    torch.set_num_threads(1)
    beyond, refused, worst = 0, Counter[str](), []
    for seed in range(options.seed, options.seed + options.calls):
        call = Call.random(seed, options.backend)
        try:
            ratios = judged(call, options.backend)
        except ValueError as error:
            if "cannot run this call" not in str(error):
                print("CALL", call.text(), flush=True)
                raise
            refused[str(error)[:90]] += 1
            continue
        bad = {name: round(x, 2) for name, x in ratios.items() if not x <= 2}
        worst.append(max(ratios.values()))
        if bad:
            beyond += 1
            print("BEYOND", bad, call.text(), flush=True)
        if (seed + 1) % 100 == 0:
            print(f"{seed + 1 - options.seed} calls, {beyond} beyond twice", flush=True)
    worst.sort()
    print(
        f"{len(worst)} calls on {options.backend}: {beyond} beyond twice, worst {worst[-1]:.2f}, median {worst[len(worst) // 2]:.2f}"
    )
    for text, count in refused.items():
        print(f"{count} refused: {text}")
    sys.exit(beyond > 0)


if __name__ == "__main__":
    main()
