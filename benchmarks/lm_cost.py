"""What position costs in training: tokens a second of a whole model, against no position at all.

    python benchmarks/lm_cost.py [--out results/lm/cost.json] [--seconds 200] [--compile]

The model of lm_gpu.py: 12 layers, 6 heads of 64, 27.5 million parameters. One step is forward,
backward and AdamW under bfloat16 autocast, without a cache, a mask or dropout; all models are the
same but for their position. Two measurements at each length:

bars    TISA and Shaw against NoPE on FlashAttention-2, taking turns of a few steps, so that a drift
        of the clock is a drift of all. A turn is timed as a whole, as training runs: the host may
        be ahead of the GPU. Bars: TISA costs at most 3%, Shaw's keys and values at most 7% of the
        tokens a second, which is what Shaw's own paper reports.
alone   every method by itself, with the fewest tokens a step: tokens a second, the most memory and
        what the host needs. These are the speeds in the tables of results/lm, where methods were
        trained side by side. First comes the article's algorithm, for which a bar's row is made
        too, against the baseline of the same length; it runs with fewer sequences where its tensors
        of n x n x d do not fit.

One number of tokens would mislead: with few of them a step takes as long as the host needs to
launch it, with many as long as the GPU needs. So the bars are measured with each of `--tokens`, and
each has `gpu_cost` beside `cost`: the share of the time of the kernels, however long the host
takes. With `--compile` they are measured under torch.compile too, and from CUDA graphs, where the
host has little to do; with the fewest tokens alone, since a compilation takes ten seconds even if
all its kernels are there already.

Once a process has profiled, it launches more slowly: TISA took 70 ms a step where it had taken 44.
So the kernels' times come after all eager steps are timed: the turns, then each alone, then the
profiles, of models built anew; last what `--compile` asks for, each group timed and profiled. What
a part leaves of its time goes to the next.

A process that compiles spends most of its time doing so. N processes with `--warm 0/N` to
`--warm N-1/N` before the real one fill the caches of Triton and Inductor side by side.
"""

import argparse
import gc
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch

from lm_clock import TURN, Record, Shape, alone, forget, in_turns, profiled, seconds_a_step
from lm_contender import (
    ARTICLE,
    BASELINE,
    COMPILED,
    EAGER,
    GRAPHED,
    SHAW,
    TISA,
    VOCABULARY,
    Contender,
    named,
    random_ids,
    taken_apart,
)
from whence.bench.machine import machine
from whence.bench.session import first_line
from whence.files import write_json

METHODS = (
    "nope",
    "tisa:kernels=5",
    "rope",
    "transformer_xl",
    "content_band",
    "alibi",
    "t5",
    "shaw:clip=16",
    "learned",
    "sinusoidal",
    "tupe",
    "kerple",
    "tisa2",
    "tisa:kernels=5+rope",
    "xpos",
    "sandwich",
    "forget",
    "fire",
)
TOKENS = "32768,131072"
BARS = {TISA: 0.03, SHAW: 0.07}  # the most of the tokens a second
EAGER_SHARE, COMPILED_SHARE = 0.12, 0.03  # of all seconds, for the turns themselves
ALONE_UNTIL, PROFILED_UNTIL = 0.6, 0.75  # of all seconds, the rest is for what is compiled
ALONE_UNTIL_ELSE = 0.8  # where nothing is, and the rest is for profiles
EACH = 1.25  # seconds at most for turns of one that is measured alone
SPENT = "not measured, the time was spent"
Group = tuple[int, int, list[str]]  # length, tokens a step, contenders


def groups(lengths: list[int], tokens: list[int], compiled: bool) -> list[Group]:
    """What takes turns: first as called; with `compiled` then the other two modes."""
    eager = [BASELINE, "nope", TISA, SHAW]
    found: list[Group] = [(n, many, eager) for n in lengths for many in tokens]
    for mode in (GRAPHED, COMPILED) if compiled else ():
        names = [named(name, mode) for name in (BASELINE, TISA, SHAW)]
        found += [(n, min(tokens), names) for n in lengths]
    return found


def bars(turns: list[Record], article: list[Record]) -> list[Record]:
    """The share of tokens a second and of the GPU's time that each costs.

    Against the baseline of the same length, tokens and mode; the article's algorithm, whose tokens
    may be fewer, against that with the fewest tokens. Time on the GPU is counted a token.
    """
    base: dict[tuple[int, int, str], Record] = {}
    for record in turns:
        plain, mode = taken_apart(record["contender"])
        if plain == BASELINE and "skipped" not in record:
            base[record["n"], record["tokens"], mode] = record
    pairs: list[tuple[Record, Record | None]] = []
    for record in turns:
        plain, mode = taken_apart(record["contender"])
        if plain != BASELINE:
            pairs.append((record, base.get((record["n"], record["tokens"], mode))))
    for record in article:
        near = [key for key in base if key[0] == record["n"] and key[2] == EAGER]
        pairs.append((record, base[min(near)] if near else None))
    return [_bar(own, its) for own, its in pairs if its is not None and "skipped" not in own]


def _bar(own: Record, base: Record) -> Record:
    plain, mode = taken_apart(own["contender"])
    cost, limit = 1 - own["tokens_a_second"] / base["tokens_a_second"], BARS.get(plain)
    mine, its = ((r.get("gpu_ms") or 0.0) / r["tokens"] for r in (own, base))
    return {
        "what": own["contender"],
        "n": own["n"],
        "tokens": own["tokens"],
        "mode": mode,
        "cost": cost,
        "gpu_cost": 1 - its / mine if its and mine else None,
        "limit": limit,
        "held": None if limit is None else cost <= limit,
    }


def told(record: Record) -> str:
    where = f"n = {record['n']}, {record['contender']}"
    if "skipped" in record:
        return f"{where}: {record['skipped'][:160]}"
    ms = record["ms"]
    said = [
        f"{record['tokens_a_second'] / 1e3:,.0f}k tokens/s of {record['tokens']:,}",
        f"{ms['median']:.1f} ({ms['q20']:.1f} to {ms['q80']:.1f}) ms",
    ]
    if record.get("gpu_ms") is not None:
        said.append(f"GPU {record['gpu_ms']:.1f} ms, {record['launches']:,} launches")
    if "unprofiled" in record:
        said.append(f"GPU: {record['unprofiled'][:160]}")
    if record.get("peak_bytes") is not None:
        said.append(f"{record['peak_bytes'] / 1e9:.1f} GB")
    if "host_ms" in record:
        said.append(f"host {record['host_ms']:.1f} ms")
    return f"{where}: {', '.join(said)}"


def told_bar(bar: Record) -> str:
    verdict = {True: "held", False: "missed", None: ""}[bar["held"]]
    limit = "" if bar["limit"] is None else f" (at most {bar['limit']:.0%})"
    gpu = "" if bar["gpu_cost"] is None else f", GPU {bar['gpu_cost']:+.1%}"
    where = f"n = {bar['n']}, {bar['tokens']:,} tokens, {bar['what']}"
    return f"BAR {where}: {bar['cost']:+.1%}{limit} {verdict}{gpu}"


class Costs:
    """The measurements, in order, written to `out` after each part."""

    def __init__(self, found: dict[str, Any], out: Path, shape: Shape, device: str) -> None:
        self.found = found | {"bars": [], "turns": [], "alone": []}
        self.out, self.shape, self.device = out, shape, device

    def keep(self) -> None:
        """Write what there is."""
        self.found["bars"] = bars(self.found["turns"], self.article())
        write_json(self.out, self.found)

    def article(self) -> list[Record]:
        """What there is of the article's algorithm."""
        return [record for record in self.found["alone"] if record["contender"] == ARTICLE]

    def take_turns(self, group: Group, seconds: float) -> None:
        """Time a group; then profile it if it is compiled, since to build it anew takes long.

        Should a profile end the process, the times are there.
        """
        n, tokens, names = group
        eager = taken_apart(names[0])[1] == EAGER
        records, ready = in_turns(names, self.shape, n, tokens, self.device, seconds)
        self.found["turns"] += records
        self.keep()
        for record in records:
            if not eager and record["contender"] in ready:
                record |= profiled(partial(ready.__getitem__, record["contender"]), n, tokens)
            print(told(record), flush=True)
        ready.clear()
        if not eager:
            torch.compiler.reset()  # memory of graphs; and the next length is no dynamic shape
            self.keep()

    def leave_out(self, group: Group) -> None:
        """Say that there was no time for a group."""
        n, tokens, names = group
        for name in names:
            record = {"contender": name, "n": n, "tokens": tokens, "mode": taken_apart(name)[1]}
            self.found["turns"].append(record | {"skipped": SPENT})
            print(told(self.found["turns"][-1]), flush=True)
        self.keep()

    def measure(
        self, name: str, n: int, tokens: int, seconds: float | None, *, host: bool = False
    ) -> None:
        """One alone; without seconds it is said that there were none."""
        record: Record = {"contender": name, "n": n, "skipped": SPENT}
        if seconds is not None:
            record = alone(name, self.shape, n, tokens, self.device, seconds, host=host)
        self.found["alone"].append(record)
        self.keep()
        print("alone " + told(record), flush=True)

    def profile(self, end: float) -> None:
        """What the GPU has to do in the turns and by the article, until `end`.

        Each is built anew, and gone before the next.
        """
        for record in (*self.found["turns"], *self.article()):
            if "skipped" in record:
                continue
            if time.monotonic() < end:
                forget(self.device)
                n, tokens = record["n"], record["tokens"]
                made = partial(Contender, record["contender"], self.shape, n, self.device)
                record |= profiled(made, n, tokens)
            else:
                record |= {"gpu_ms": None, "launches": None, "unprofiled": SPENT}
            self.keep()
            print("profiled " + told(record), flush=True)
        forget(self.device)

    def tell_bars(self) -> None:
        """All bars so far."""
        for bar in self.found["bars"]:
            print(told_bar(bar), flush=True)


def measured(costs: Costs, plan: list[Group], methods: tuple[str, ...], seconds: float) -> None:
    """Eager bars, the article and every method alone, profiles of what was eager, other bars."""
    start = time.monotonic()
    eager = [group for group in plan if taken_apart(group[2][0])[1] == EAGER]
    later = [group for group in plan if group not in eager]
    for group in eager:
        costs.take_turns(group, EAGER_SHARE * seconds / len(eager))
    costs.tell_bars()
    forget(costs.device)
    gc.freeze()  # what is there stays; to look through it before each would take longer than a step
    lengths = list(dict.fromkeys(n for n, _, _ in plan))
    fewest = min(tokens for _, tokens, _ in plan)
    singles = [(name, n) for name in (ARTICLE, BASELINE, *methods) for n in lengths]
    end = start + (ALONE_UNTIL if later else ALONE_UNTIL_ELSE) * seconds
    for place, (name, n) in enumerate(singles):
        left = end - time.monotonic()
        each = min(max(left, 0.0) / (len(singles) - place) / 2, EACH)
        late = left < 0 and name != ARTICLE  # which is asked for, as the bars are
        costs.measure(name, n, fewest, None if late else each, host=n == lengths[0])
    costs.profile(start + (PROFILED_UNTIL if later else 1.0) * seconds)
    gc.unfreeze()
    for group in later:
        if time.monotonic() < start + seconds:
            costs.take_turns(group, COMPILED_SHARE * seconds / len(later))
        else:
            costs.leave_out(group)
    costs.tell_bars()


def warm(share: str, plan: list[Group], methods: tuple[str, ...], costs: Costs, end: float) -> None:
    """One step of every N-th contender, so that what it compiles lies in the caches."""
    place, _, of = share.partition("/")
    if not (place.isdigit() and of.isdigit() and int(place) < int(of)):
        raise SystemExit(f"--warm takes I/N with 0 <= I < N, got {share}.")
    fewest = min(tokens for _, tokens, _ in plan)
    turns = [(name, n) for n, tokens, names in plan if tokens == fewest for name in names]
    slow = sorted(turns, key=lambda job: taken_apart(job[0])[1] == EAGER)
    lengths = dict.fromkeys(n for n, _, _ in plan)
    jobs = list(dict.fromkeys([*slow, *((name, n) for name in methods for n in lengths)]))
    for name, n in jobs[int(place) :: int(of)]:
        if time.monotonic() > end:
            print(f"warm: n = {n}, {name}: {SPENT}", flush=True)
            continue
        try:
            contender = Contender(name, costs.shape, n, costs.device)
            ids = random_ids(n, fewest, costs.device)
            took = seconds_a_step(lambda c=contender, x=ids: c.step(x), costs.device, 1)
            said = f"{took:.0f} s"
            del contender, ids
        except Exception as error:
            said = first_line(error)
        print(f"warm: n = {n}, {name}: {said}", flush=True)
        torch.compiler.reset()  # else the next length would be compiled as a dynamic one
        forget(costs.device)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("results/lm/cost.json"))
    parser.add_argument("--seconds", type=float, default=200.0, help="after which no more is begun")
    parser.add_argument("--methods", help="measured alone, separated by ';'; all unless given")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--heads", type=int, default=6)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--lengths", default="512,4096")
    parser.add_argument("--tokens", default=TOKENS, help="a step, for the bars; one or several")
    parser.add_argument("--compile", action="store_true", help="bars of compiled models too")
    parser.add_argument("--commit", help="of these sources, where git is not at hand")
    parser.add_argument("--warm", metavar="I/N", help="measure nothing, fill the caches")
    options = parser.parse_args(arguments)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    shape = {
        "hidden_size": options.width,
        "num_hidden_layers": options.layers,
        "num_attention_heads": options.heads,
    }
    lengths, tokens = (
        [int(n) for n in text.split(",")] for text in (options.lengths, options.tokens)
    )
    methods = tuple(options.methods.split(";")) if options.methods else METHODS
    facts = machine(device)
    if options.commit:
        facts["commit"] = options.commit
    config = {**shape, "vocab_size": VOCABULARY, "tokens": tokens, "steps_a_turn": TURN}
    config |= {"dtype": "bfloat16 autocast", "optimizer": "AdamW", "dropout": 0.0}
    costs = Costs({"config": config, "machine": facts}, options.out, shape, device)
    plan = groups(lengths, tokens, options.compile)
    if options.warm:
        warm(options.warm, plan, methods, costs, time.monotonic() + options.seconds)
    else:
        measured(costs, plan, methods, options.seconds)


if __name__ == "__main__":
    main()
