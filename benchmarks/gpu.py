"""Attention with a learned position on one GPU: every bar that the fused kernels are held to.

    python benchmarks/gpu.py [--out results/gpu] [--seconds 300] [--only "shaw;one layer"]

Forward + backward with the gradients of the position's own parameters, bfloat16, 16,384 tokens a
batch. The most important bars come first, and bars.json is written after every point, so that what
the time did not suffice for is missing and nothing else. What is not exact is not timed. TISA has
its default start, whose Gaussians are wide; the authors' narrow ones ("released") are figures.
"""

import argparse
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from whence.bench import Point, Session
from whence.bench.session import Record

ROOT = Path(__file__).resolve().parent.parent
TOKENS = 16_384
TISA, REACH, SHAW = "tisa:kernels=5", "tisa:reach=256", "shaw:clip=16"
RELEASED = f"{TISA},start=released"
FLASH, CUDNN, PLAIN, OURS = "flash", "cudnn", "plain", "whence:fused"
LENGTHS = (512, 2048, 4096, 8192, 16_384)


@dataclass(frozen=True)
class Bar:
    """value(a) / value(b) must be at most, or at least, the limit; none is a figure to know."""

    what: str
    a: Point
    b: Point
    rule: str
    limit: float | None
    value: Callable[[Record], float | None]
    unit: str


def called(record: Record) -> float | None:
    return None if record["ms"] is None else record["ms"]["median"]


def replayed(record: Record) -> float | None:
    return None if record["graph_ms"] is None else record["graph_ms"]["median"]


def extra(record: Record) -> float | None:
    return record["extra_bytes"]


UNITS = {called: "ms", replayed: "ms from a CUDA graph", extra: "bytes beyond the inputs"}


def attention(contender: str, method: str, n: int, d: int = 64, *, causal: bool = False) -> Point:
    batch = max(1, TOKENS // n)
    return Point(contender, method, n, d_head=d, batch=batch, causal=causal)


def limit_of(contender: str, n: int, d: int = 64, *, causal: bool = False) -> Point:
    """An attention without position."""
    return attention(contender, "nope", n, d, causal=causal)


def decoding(contender: str, method: str, batch: int) -> Point:
    return Point(contender, method, 32_768, mode="decode", batch=batch, causal=True)


def bars() -> Iterable[Bar]:
    """Every bar, the most important first; points shared with an earlier one are not run again."""

    def bar(
        what: str,
        a: Point,
        b: Point,
        rule: str,
        limit: float | None,
        value: Callable[[Record], float | None] = called,
    ) -> Bar:
        return Bar(what, a, b, rule, limit, value, UNITS[value])

    for n, most in ((128, 1.5), (512, 1.2)):
        what = f"TISA, one layer, as called, over FA2 without bias, n={n:,}"
        yield bar(what, attention(OURS, TISA, n), limit_of(FLASH, n), "at most", most)
    ours, peer = decoding(OURS, TISA, 1), decoding(PLAIN, "nope", 1)
    what = "decode, one sequence, cache of 32,768, as called, over SDPA"
    yield bar(what, ours, peer, "at most", 1.6)  # 1.1, further down, is what we hope for
    for n in LENGTHS:
        ours, flash = attention(OURS, TISA, n), limit_of(FLASH, n)
        most = {512: 1.6, 2048: 1.15}.get(n, 1.0)
        yield bar(f"TISA over FA2 without bias, n={n:,}", ours, flash, "at most", most)
        what = f"TISA over FA2 without bias, n={n:,}, from a CUDA graph"
        yield bar(what, ours, flash, "at most", most, replayed)
        cudnn = limit_of(CUDNN, n)
        yield bar(f"TISA over cuDNN without bias, n={n:,}", ours, cudnn, "at most", None)
    for n in (512, 2048, TOKENS):
        ours, flash = attention(OURS, RELEASED, n), limit_of(FLASH, n)
        what = f"TISA, start=released, over FA2 without bias, n={n:,}"
        yield bar(what, ours, flash, "at most", None)
        yield bar(f"{what}, from a CUDA graph", ours, flash, "at most", None, replayed)
    ours, dense = attention(OURS, TISA, TOKENS), attention("eager", TISA, TOKENS)
    yield bar("eager over TISA, n=16,384, time", dense, ours, "at least", 60.0)
    yield bar("eager over TISA, n=16,384, extra memory", dense, ours, "at least", 200.0, extra)
    by_index = attention("eager-index", TISA, TOKENS)
    what = "eager with its bias looked up by index over TISA, n=16,384"
    yield bar(what, by_index, ours, "at least", 60.0)
    for d in (64, 128):
        for method in (REACH, "t5"):
            for n in (8192, TOKENS, 2 * TOKENS):
                ours, most = attention(OURS, method, n, d), 1.3 if n == 8192 else 1.15
                what = f"{method} over cuDNN without bias, heads of {d}, n={n:,}"
                yield bar(what, ours, limit_of(CUDNN, n, d), "at most", most)
                what = f"{method} over FA2 without bias, heads of {d}, n={n:,}"
                bound = 0.75 if d == 128 and n >= TOKENS else None
                yield bar(what, ours, limit_of(FLASH, n, d), "at most", bound)
    ours = attention(OURS, TISA, 8192, 128, causal=True)
    for name, contender, most in (("FA2", FLASH, 1.0), ("cuDNN", CUDNN, None)):
        peer = limit_of(contender, 8192, 128, causal=True)
        yield bar(f"TISA over {name}, causal, heads of 128, n=8,192", ours, peer, "at most", most)
    for n in (8192, TOKENS):
        tisa = attention(OURS, TISA, n)
        for method, most in (("t5", 1.1), ("alibi", 1.1), ("kerple", None)):
            ours = attention(OURS, method, n)
            yield bar(f"{method} over TISA, n={n:,}", ours, tisa, "at most", most)
    for n in (2048, 8192, TOKENS):
        ours, flash = attention(OURS, SHAW, n), limit_of(FLASH, n)
        most = 1.5 if n == 2048 else 1.2
        yield bar(f"Shaw over FA2 without bias, n={n:,}", ours, flash, "at most", most)
        what = f"Shaw over FA2 without bias, n={n:,}, extra memory"
        yield bar(what, ours, flash, "at most", 4.0, extra)
    for batch in (1, 16):
        ours, peer = decoding(OURS, TISA, batch), decoding(PLAIN, "nope", batch)
        what = f"decoding with TISA over SDPA without bias, cache of 32,768, {batch} sequences"
        yield bar(what, ours, peer, "at most", 1.1)
        yield bar(what + ", from a CUDA graph", ours, peer, "at most", 1.1, replayed)
    article, ours = attention("article", SHAW, 2048), attention(OURS, SHAW, 2048)
    yield bar("the article's algorithm over Shaw, n=2,048", article, ours, "at least", None)
    dense, ours = attention("sdpa-dense", TISA, 8192), attention(OURS, TISA, 8192)
    yield bar("SDPA with a dense bias over TISA, n=8,192", dense, ours, "at least", None)
    for n in (8192, TOKENS):  # from here on, a compilation of half a minute for each set of tiles
        flex, ours = attention("flex-best", TISA, n), attention(OURS, TISA, n)
        yield bar(f"Flex, best tiles, over TISA, n={n:,}", flex, ours, "at least", 2.5)
    flex, ours = attention("flex", TISA, 8192), attention(OURS, TISA, 8192)
    yield bar("Flex, default tiles, over TISA, n=8,192", flex, ours, "at least", None)
    for n, mode in ((8192, "both"), (TOKENS, "both"), (TOKENS, "forward")):
        flex, ours = (
            replace(attention(each, "kerple", n), mode=mode) for each in ("flex-best", OURS)
        )
        alone = ", forward alone" if mode == "forward" else ""
        yield bar(f"Flex, best tiles, over KERPLE, n={n:,}{alone}", flex, ours, "at least", 1.0)


def chosen(only: str | None, skip: str | None) -> list[Bar]:
    """The bars whose name has a text of `only` (a;b) and none of `skip`, in any case."""

    def has(bar: Bar, texts: str) -> bool:
        return any(text in bar.what.lower() for text in texts.lower().split(";"))

    return [bar for bar in bars() if has(bar, only or "") and not (skip and has(bar, skip))]


def judged(bar: Bar, a: Record | None, b: Record | None) -> dict[str, Any]:
    """What was found; `held` is None where nothing was, or where there is no limit."""
    top, bottom = (None if record is None else bar.value(record) for record in (a, b))
    ratio = top / bottom if top is not None and bottom else None
    held = None
    if ratio is not None and bar.limit is not None:
        held = ratio <= bar.limit if bar.rule == "at most" else ratio >= bar.limit
    missing = [
        f"{point}: {'not measured' if record is None else why(record)}"
        for point, record, value in ((bar.a, a, top), (bar.b, b, bottom))
        if value is None
    ]
    return {
        "what": bar.what,
        "value": ratio,
        "rule": bar.rule,
        "limit": bar.limit,
        "held": held,
        "unit": bar.unit,
        "measured": [top, bottom],
        "why_not": "; ".join(missing) or None,
    }


def why(record: Record) -> str:
    return record["skipped"] or record["notes"].get("graph") or "no such figure"


def verdict(found: dict[str, Any]) -> str:
    word = {True: "pass", False: "MISS", None: "-"}[found["held"]]
    if found["value"] is None:
        return f"{word:5} {found['what']}: {found['why_not']}"
    limit = "" if found["limit"] is None else f" ({found['rule']} {found['limit']:g})"
    return f"{word:5} {found['what']}: {found['value']:.2f}{limit}"


def measure(session: Session, wanted: Iterable[Bar]) -> list[dict[str, Any]]:
    """The bars, each judged as soon as its points are measured and then written."""
    found: list[dict[str, Any]] = []
    session.more["bars"] = found
    for bar in wanted:
        a, b = session.measure(bar.a), session.measure(bar.b)
        found.append(judged(bar, a, b))
        print(verdict(found[-1]), flush=True)
        session.save()
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "gpu", help="folder")
    parser.add_argument("--seconds", type=float, default=300.0, help="after which it ends")
    parser.add_argument("--only", help="bars whose name has one of these texts (a;b), in any case")
    parser.add_argument("--skip", help="bars whose name has one of these texts (a;b) are left out")
    parser.add_argument("--commit", help="of the sources, where git cannot tell")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("benchmarks/gpu.py needs an NVIDIA GPU; there is none here.", file=sys.stderr)
        return 2
    session = Session(
        options.out / "bars.json",
        device="cuda",
        config={"tokens": TOKENS, "n_heads": 12, "dtype": "bfloat16"},
        seconds=options.seconds,
        graphs_up_to=2 * TOKENS,
        say=lambda text: print(text, flush=True),
    )
    if options.commit:
        session.machine["commit"] = options.commit
    found = measure(session, chosen(options.only, options.skip))
    held = [bar["held"] for bar in found]
    print(
        f"{held.count(True)} held, {held.count(False)} missed, {held.count(None)} without a limit "
        f"or figure, in {session.results()['seconds']:.0f} s; wrote {session.path}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
