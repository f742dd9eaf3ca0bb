"""What position costs in training: tokens a second of a whole model, against no position at all.

    python benchmarks/lm_cost.py [--out results/lm/cost.json] [--seconds 240] [--commit ID]

One step is forward, backward and AdamW under bfloat16 autocast; contenders take turns, step by
step, so that a drift of the clock is a drift of all. NoPE runs on FlashAttention. Bars: at n = 512
and 4,096 TISA costs at most 3% and Shaw's keys and values at most 7% of the tokens a second, which
is what Shaw's own paper reports; the article's algorithm is measured beside them where it fits.
"""

import argparse
import contextlib
import gc
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from whence.bench.article import article_attention
from whence.bench.machine import machine
from whence.bench.saved import save
from whence.bench.session import first_line
from whence.models import WhenceConfig, WhenceForCausalLM

TOKENS, VOCABULARY = 16_384, 16_384
BASELINE = "nope, FlashAttention"
CONTENDERS: dict[str, tuple[str, str]] = {  # name: position, backend
    BASELINE: ("nope", "sdpa"),
    "nope, auto": ("nope", "auto"),
    "tisa:kernels=5": ("tisa:kernels=5", "auto"),
    "shaw:clip=16": ("shaw:clip=16", "auto"),
    "shaw:clip=16, the article's algorithm": ("shaw:clip=16", "article"),
}
BARS = {"tisa:kernels=5": 0.03, "shaw:clip=16": 0.07}  # the most of the tokens a second


@contextlib.contextmanager
def by_the_article() -> Iterator[None]:
    """Attention of the models computed as the article says, with its O(n^2 d) tensors."""

    def attention(method: Any, q: Any, k: Any, v: Any, *, causal: bool, **rest: Any) -> Any:
        return article_attention(
            q,
            k,
            v,
            key_table=method.key_table[0].to(q.dtype),
            value_table=method.value_table[0].to(q.dtype),
            left=method.left,
            right=method.right,
            causal=causal,
        )

    with mock.patch("whence.models.attention.positioned_attention", attention):
        yield


class Contender:
    """A model with its optimizer, and a step."""

    def __init__(self, name: str, shape: dict[str, int], n: int, device: str) -> None:
        position, backend = CONTENDERS[name]
        torch.manual_seed(0)
        self.article = backend == "article"
        self.flash = name == BASELINE and device == "cuda"
        options = WhenceConfig(
            position=position,
            vocab_size=VOCABULARY,
            max_position_embeddings=n,
            backend="auto" if self.article else backend,
            **shape,
        )
        self.model = WhenceForCausalLM(options).to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), fused=device == "cuda")
        self.device = device

    def step(self, ids: torch.Tensor) -> None:
        """Forward, backward, update."""
        around: AbstractContextManager[Any] = contextlib.nullcontext()
        if self.article:
            around = by_the_article()
        elif self.flash:
            around = sdpa_kernel(SDPBackend.FLASH_ATTENTION)
        with around, torch.autocast(self.device, torch.bfloat16):
            loss = self.model(ids, labels=ids, use_cache=False).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


def seconds_of(step: Callable[[], None], device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    step()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def measured(
    shape: dict[str, int], n: int, tokens: int, device: str, seconds: float
) -> list[dict[str, Any]]:
    """A record a contender; one that fails says why."""
    ids = torch.randint(VOCABULARY, (max(tokens // n, 1), n), device=device)
    ready: dict[str, Contender] = {}
    records: dict[str, dict[str, Any]] = {}
    for name in CONTENDERS:
        records[name] = {"contender": name, "n": n, "tokens": ids.numel(), **shape}
        try:
            contender = Contender(name, shape, n, device)
            for _ in range(3):
                contender.step(ids)
            ready[name] = contender
        except Exception as error:
            records[name]["skipped"] = first_line(error)
            gc.collect()
            if device == "cuda":
                torch.cuda.empty_cache()
    times: dict[str, list[float]] = {name: [] for name in ready}
    end = time.monotonic() + seconds
    while ready and (time.monotonic() < end or len(times[BASELINE]) < 3):
        for name, contender in ready.items():
            times[name].append(seconds_of(lambda c=contender: c.step(ids), device))
    for name, values in times.items():
        records[name]["ms"] = 1e3 * statistics.median(values)
        records[name]["tokens_a_second"] = ids.numel() / statistics.median(values)
        records[name]["steps"] = len(values)
    return list(records.values())


def bars(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    found = []
    speed = {(r["contender"], r["n"]): r.get("tokens_a_second") for r in records}
    for (name, n), value in speed.items():
        base = speed[BASELINE, n]
        if name == BASELINE or value is None or base is None:
            continue
        cost, limit = 1 - value / base, BARS.get(name)
        held = None if limit is None else cost <= limit
        found.append({"what": name, "n": n, "cost": cost, "limit": limit, "held": held})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("results/lm/cost.json"))
    parser.add_argument("--seconds", type=float, default=240.0)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--lengths", default="512,4096")
    parser.add_argument("--tokens", type=int, default=TOKENS)
    parser.add_argument("--commit", help="of these sources, where git is not at hand")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    shape = {
        "hidden_size": options.width,
        "num_hidden_layers": options.layers,
        "num_attention_heads": options.heads,
    }
    lengths = [int(n) for n in options.lengths.split(",")]
    records: list[dict[str, Any]] = []
    facts = machine(device)
    if options.commit:
        facts["commit"] = options.commit
    for n in lengths:
        share = options.seconds / len(lengths)
        records += measured(shape, n, options.tokens, device, share)
        save({"machine": facts, "records": records, "bars": bars(records)}, options.out)
        for record in (r for r in records if r["n"] == n):
            told = record.get("skipped") or f"{record['tokens_a_second']:,.0f} tokens a second"
            print(f"n = {n}, {record['contender']}: {told}", flush=True)
    for bar in bars(records):
        verdict = {True: "held", False: "missed", None: ""}[bar["held"]]
        limit = "" if bar["limit"] is None else f" (at most {bar['limit']:.0%})"
        print(f"n = {bar['n']}, {bar['what']}: {bar['cost']:+.1%}{limit} {verdict}")


if __name__ == "__main__":
    main()
