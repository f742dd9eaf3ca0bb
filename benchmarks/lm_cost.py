"""What position costs in training: tokens a second of a whole model, against no position at all.

    python benchmarks/lm_cost.py [--out results/lm/cost.json] [--seconds 200] [--commit ID]

The model of lm_gpu.py: 12 layers, 6 heads of 64, 27.5 million parameters, 32,768 tokens a step. One
step is forward, backward and AdamW under bfloat16 autocast, without a cache, a mask or dropout;
all models are the same but for their position. Two measurements at each length:

alone   every method by itself: tokens a second and the most memory. These are the speeds in the
        tables of results/lm, where methods were trained side by side.
bars    TISA and Shaw against NoPE on FlashAttention-2, taking turns of a few steps, so that a drift
        of the clock is a drift of all. A turn is timed as a whole, as training runs: the host may
        be ahead of the GPU. Bars: TISA costs at most 3%, Shaw's keys and values at most 7% of the
        tokens a second, which is what Shaw's own paper reports.

`host_ms` is a step of one sequence of 512 tokens, where the GPU has next to nothing to do: what
the host needs to launch it. The article's algorithm runs with fewer sequences where its tensors of
n x n x d do not fit. With `--compile` both sides of the bars run under torch.compile as well.
"""

import argparse
import contextlib
import gc
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from lm_gpu import METHODS
from whence.bench.article import article_attention
from whence.bench.machine import machine
from whence.bench.saved import save
from whence.bench.session import first_line
from whence.models import WhenceConfig, WhenceForCausalLM

TOKENS, VOCABULARY = 32_768, 16_384
BASELINE, ARTICLE = "nope, FlashAttention", "shaw:clip=16, the article's algorithm"
TISA, SHAW = "tisa:kernels=5", "shaw:clip=16"
COMPILED = ", compiled"
BARS = {TISA: 0.03, SHAW: 0.07}  # the most of the tokens a second
TURN = 4  # steps
ENOUGH = 40  # turns of one contender
EACH = 1.25  # seconds for one that is measured alone
SLOW = 2.0  # seconds of a step, from which on two of them are enough


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
    """A model with its optimizer, and a step. The name is a method, or one of those above."""

    def __init__(self, name: str, shape: dict[str, int], n: int, device: str) -> None:
        torch.manual_seed(0)
        plain = name.removesuffix(COMPILED)
        self.article, self.device = plain == ARTICLE, device
        self.flash = plain == BASELINE and device == "cuda"
        options = WhenceConfig(
            position={BASELINE: "nope", ARTICLE: SHAW}.get(plain, plain),
            vocab_size=VOCABULARY,
            max_position_embeddings=n,
            backend="sdpa" if plain == BASELINE else "auto",
            use_cache=False,
            **shape,
        )
        self.model: Any = WhenceForCausalLM(options).to(device).train()
        fused = {"fused": True} if device == "cuda" else {}
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, **fused)
        self.run = torch.compile(self.model) if name.endswith(COMPILED) else self.model

    def step(self, ids: torch.Tensor) -> None:
        """Forward, backward, update."""
        around: AbstractContextManager[Any] = contextlib.nullcontext()
        if self.article:
            around = by_the_article()
        elif self.flash:
            around = sdpa_kernel(SDPBackend.FLASH_ATTENTION)
        with around, torch.autocast(self.device, torch.bfloat16):
            loss = self.run(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def counts(self) -> dict[str, int]:
        """Parameters, and those of them that are the method's."""
        own = self.model.model.stack.position.parameters()
        return {
            "parameters": sum(p.numel() for p in self.model.parameters()),
            "positional": sum(p.numel() for p in own),
        }


def waited(device: str) -> float:
    """The time, once all that was launched is done."""
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def seconds_a_step(step: Callable[[], None], device: str, steps: int = TURN) -> float:
    start = waited(device)
    for _ in range(steps):
        step()
    return (waited(device) - start) / steps


def forget(device: str) -> None:
    """Memory of models that are gone."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def random_ids(n: int, tokens: int, device: str) -> torch.Tensor:
    return torch.randint(VOCABULARY, (max(tokens // n, 1), n), device=device)


def summed_up(values: list[float], tokens: int) -> dict[str, Any]:
    """Milliseconds a step, and tokens a second of the median step."""
    low, middle, high = (float(x) for x in np.quantile(values, (0.2, 0.5, 0.8)))
    return {
        "ms": {"q20": 1e3 * low, "median": 1e3 * middle, "q80": 1e3 * high, "turns": len(values)},
        "tokens_a_second": tokens / middle,
    }


def alone(
    name: str, shape: dict[str, int], n: int, tokens: int, device: str, seconds: float
) -> dict[str, Any]:
    """One contender with the device for itself, with fewer sequences where memory ends."""
    record: dict[str, Any] = {"contender": name, "n": n}
    while True:
        forget(device)
        try:
            return record | _alone(name, shape, n, tokens, device, seconds)
        except torch.OutOfMemoryError:
            if tokens <= n:
                return record | {"skipped": f"out of memory with one sequence of {n:,}"}
            tokens = max(tokens // 2, n)
        except Exception as error:
            return record | {"skipped": first_line(error)}


def _alone(
    name: str, shape: dict[str, int], n: int, tokens: int, device: str, seconds: float
) -> dict[str, Any]:
    ids = random_ids(n, tokens, device)
    contender = Contender(name, shape, n, device)

    def step() -> None:
        contender.step(ids)

    seconds_a_step(step, device, 2)  # compiles
    forget(device)
    once = seconds_a_step(step, device, 1)
    turn = TURN if once < SLOW / TURN else 1
    values = [once] if once > SLOW else []
    end = time.monotonic() + seconds
    while time.monotonic() < end or len(values) < 2:
        values.append(seconds_a_step(step, device, turn))
    peak = torch.cuda.max_memory_allocated() if device == "cuda" else None
    short = ids[:1, :512].contiguous()
    seconds_a_step(lambda: contender.step(short), device, 2)
    host = seconds_a_step(lambda: contender.step(short), device, 2 * TURN)
    found = {"tokens": ids.numel(), **contender.counts(), **summed_up(values, ids.numel())}
    return found | {"peak_bytes": peak, "host_ms": 1e3 * host}


def in_turns(
    names: list[str], shape: dict[str, int], n: int, tokens: int, device: str, seconds: float
) -> list[dict[str, Any]]:
    """A record a contender, measured turn by turn; one that fails says why."""
    forget(device)
    ids = random_ids(n, tokens, device)
    ready: dict[str, Contender] = {}
    records = {name: {"contender": name, "n": n, "tokens": ids.numel()} for name in names}
    for name in names:
        try:
            contender = Contender(name, shape, n, device)
            seconds_a_step(lambda c=contender: c.step(ids), device, 3)
            ready[name] = contender
        except Exception as error:
            records[name]["skipped"] = first_line(error)
    times: dict[str, list[float]] = {name: [] for name in ready}
    end, rounds = time.monotonic() + seconds, 0
    while ready and rounds < ENOUGH and (time.monotonic() < end or rounds < 3):
        order = list(ready.items())
        shift = rounds % len(order)  # each follows each
        for name, contender in order[shift:] + order[:shift]:
            times[name].append(seconds_a_step(lambda c=contender: c.step(ids), device))
        rounds += 1
    for name, values in times.items():
        records[name] |= summed_up(values, ids.numel())
    return list(records.values())


def bars(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The share of the tokens a second that each costs, against the baseline of its kind."""
    found = []
    speed = {(r["contender"], r["n"]): r.get("tokens_a_second") for r in records}
    for (name, n), value in speed.items():
        compiled = name.endswith(COMPILED)
        base = speed.get((BASELINE + COMPILED * compiled, n))
        if name.startswith(BASELINE) or value is None or base is None:
            continue
        cost, limit = 1 - value / base, BARS.get(name.removesuffix(COMPILED))
        held = None if limit is None else cost <= limit
        found.append({"what": name, "n": n, "cost": cost, "limit": limit, "held": held})
    return found


def told(record: dict[str, Any]) -> str:
    if "skipped" in record:
        return f"n = {record['n']}, {record['contender']}: {record['skipped'][:160]}"
    ms, gigabytes = record["ms"], (record.get("peak_bytes") or 0) / 1e9
    more = f", {gigabytes:.1f} GB, host {record['host_ms']:.1f} ms" if "host_ms" in record else ""
    return (
        f"n = {record['n']}, {record['contender']}: {record['tokens_a_second'] / 1e3:,.0f}k "
        f"tokens/s, {ms['median']:.1f} ({ms['q20']:.1f} to {ms['q80']:.1f}) ms{more}"
    )


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("results/lm/cost.json"))
    parser.add_argument("--seconds", type=float, default=200.0, help="after which no more is begun")
    parser.add_argument("--methods", help="measured alone, separated by ';'; all unless given")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--heads", type=int, default=6)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--lengths", default="512,4096")
    parser.add_argument("--tokens", type=int, default=TOKENS)
    parser.add_argument("--compile", action="store_true", help="the bars under torch.compile too")
    parser.add_argument("--commit", help="of these sources, where git is not at hand")
    options = parser.parse_args(arguments)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    shape = {
        "hidden_size": options.width,
        "num_hidden_layers": options.layers,
        "num_attention_heads": options.heads,
    }
    lengths = [int(n) for n in options.lengths.split(",")]
    methods = tuple(options.methods.split(";")) if options.methods else METHODS
    facts = machine(device)
    if options.commit:
        facts["commit"] = options.commit
    config = {**shape, "vocab_size": VOCABULARY, "tokens": options.tokens, "steps_a_turn": TURN}
    config |= {"dtype": "bfloat16 autocast", "optimizer": "AdamW", "dropout": 0.0}
    contenders = [BASELINE, "nope", TISA, SHAW]
    if options.compile:
        contenders += [name + COMPILED for name in (BASELINE, TISA, SHAW)]
    singles = [(n, name) for n in lengths for name in (BASELINE, ARTICLE, *methods)]
    end = time.monotonic() + options.seconds
    turns = options.seconds / 3 / len(lengths)
    each = min(options.seconds / 3 / len(singles), EACH)
    found: dict[str, Any] = {"config": config, "machine": facts, "bars": [], "turns": []}
    found["alone"] = []

    def keep() -> None:
        found["bars"] = bars(found["turns"])
        save(found, options.out)

    for n in lengths:  # the bars first: they are what is asked for
        found["turns"] += in_turns(contenders, shape, n, options.tokens, device, turns)
        keep()
        for record in found["turns"]:
            if record["n"] == n:
                print(told(record), flush=True)
    for bar in found["bars"]:
        verdict = {True: "held", False: "missed", None: ""}[bar["held"]]
        limit = "" if bar["limit"] is None else f" (at most {bar['limit']:.0%})"
        print(f"BAR n = {bar['n']}, {bar['what']}: {bar['cost']:+.1%}{limit} {verdict}", flush=True)
    for n, name in singles:
        if time.monotonic() > end:
            print(f"n = {n}, {name}: not measured, the time is spent", flush=True)
            continue
        found["alone"].append(alone(name, shape, n, options.tokens, device, each))
        keep()
        print("alone " + told(found["alone"][-1]), flush=True)


if __name__ == "__main__":
    main()
