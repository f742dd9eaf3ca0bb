"""Attention with a learned lag bias on a CPU: time and memory against the n x n way.

    python benchmarks/cpu.py                 measure all into results/cpu/attention.json
    python benchmarks/cpu.py --quick         up to 2,048 tokens, few repeats
    python benchmarks/cpu.py --figure-only   draw the figures again from the JSON

Nothing is timed before all contenders have been found to agree in float64.
"""

import argparse
import json
import math
import os
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch

from cpu_contenders import GROUPS, Setting, Step, check_exactness
from cpu_figure import draw
from whence.bench.machine import machine
from whence.bench.peak_memory import TINY, available, peak_here, peak_in_fresh_process
from whence.bench.wall_time import summary, take_turns
from whence.files import write_json

ROOT = Path(__file__).resolve().parent.parent
NAME = "attention.json"
REPEATS = {512: 31, 1024: 7, 2048: 5, 4096: 3, 8192: 1}
QUICK = {512: 5, 1024: 5, 2048: 3}
ROOM = 0.9  # share of the available memory that a step may be expected to take


def memory(
    setting: Setting, group: str, lengths: Sequence[int]
) -> dict[tuple[str, int], int | str]:
    """Peak bytes of every contender and length, or why there is none.

    Before a length is tried, its need is guessed from the last one: four times as much when n is
    twice as large is the worst that any contender does.
    """
    found: dict[tuple[str, int], int | str] = {}
    for contender in GROUPS[group]:
        last: tuple[int, int] | None = None
        for n in lengths:
            guess = 0 if last is None else last[1] * (n / last[0]) ** 2
            if guess > ROOM * (room := available()):
                found[contender, n] = f"needs about {guess / 1e9:.0f} GB, {room / 1e9:.0f} are free"
            else:
                peak = peak_in_fresh_process(
                    [__file__, "--peak", group, contender, str(n), json.dumps(asdict(setting))]
                )
                found[contender, n] = "ran out of memory" if peak is None else peak
                last = (n, peak) if peak else last
            say(f"memory  {group:5}{contender:11}n={n:<6}{shown(found[contender, n])}")
    return found


def peak(setting: Setting, group: str, contender: str, n: int) -> int:
    """Bytes that a step takes in this very process, which did nothing before."""
    torch.set_num_threads(setting.threads)
    Step(setting, group, TINY).run(contender)
    step = Step(setting, group, n)
    return peak_here(partial(step.run, contender))


def shown(peak: int | str) -> str:
    return peak if isinstance(peak, str) else f"{peak / 1e6:,.1f} MB"


def times(
    setting: Setting, group: str, n: int, contenders: list[str], repeats: int
) -> dict[str, dict[str, float]]:
    """Wall and processor seconds of each contender, in turns."""
    step = Step(setting, group, n)
    turns = take_turns({name: partial(step.run, name) for name in contenders}, repeats)
    found = {name: summary(samples) for name, samples in turns.items()}
    for contender, s in found.items():
        say(
            f"time    {group:5}{contender:11}n={n:<6}{s['median'] * 1e3:9,.1f} ms  "
            f"({s['q20'] * 1e3:,.1f} to {s['q80'] * 1e3:,.1f}), "
            f"cores: ours {s['cpu'] / s['median']:.2f}, others' {s['others'] / s['median']:.2f}"
        )
    return found


def exponent(points: list[tuple[int, float]]) -> float | None:
    """The slope of a least-squares line through log n and log value."""
    if len(points) < 2:
        return None
    fit = statistics.linear_regression(
        [math.log(n) for n, _ in points], [math.log(value) for _, value in points]
    )
    return fit.slope


def exponents(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """How time and memory grow with n: over all lengths, and over the last two alone.

    Where a constant is a large part of the small sizes, the second is the more telling one.
    """
    found = []
    for group, contenders in GROUPS.items():
        for contender in contenders:
            entry: dict[str, Any] = {"group": group, "contender": contender}
            mine = [r for r in rows if (r["group"], r["contender"]) == (group, contender)]
            for what, pick in (
                ("time", lambda row: row["seconds"]["median"]),
                ("memory", lambda row: row["peak_bytes"]),
            ):
                points = [(row["n"], pick(row)) for row in mine if row["skipped"] is None]
                entry[what] = exponent(points)
                entry[f"{what}_last_two"] = exponent(points[-2:])
            found.append(entry)
    return found


def bars(rows: list[dict[str, Any]], grown: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What we promise of TISA's attention, and whether it held; None where it was not measured."""
    median = {
        (row["contender"], row["n"]): row["seconds"]["median"]
        for row in rows
        if row["group"] == "tisa" and row["skipped"] is None
    }

    def speed_up(n: int) -> float | None:
        if ("eager", n) not in median or ("whence", n) not in median:
            return None
        return median["eager", n] / median["whence", n]

    ours = next(e for e in grown if (e["group"], e["contender"]) == ("tisa", "whence"))
    found = []
    for what, value, rule, limit in (
        ("exponent of memory in n", ours["memory"], "at most", 1.15),
        ("times as fast as eager at n=4096", speed_up(4096), "at least", 2.0),
        ("times as fast as eager at n=512", speed_up(512), "at least", 0.9),
    ):
        held = None
        if value is not None:
            held = value <= limit if rule == "at most" else value >= limit
        found.append({"what": what, "value": value, "rule": rule, "limit": limit, "held": held})
    return found


def measure(setting: Setting, repeats: dict[int, int], article_up_to: int) -> dict[str, Any]:
    """Everything: exactness, memory, time, and what follows from them."""
    torch.set_num_threads(setting.threads)
    say("exactness in float64")
    errors = check_exactness(setting)
    say("        " + ", ".join(f"{name} {error:.0e}" for name, error in errors.items()))
    rows: list[dict[str, Any]] = []
    load = {"start": os.getloadavg()[0]}
    for group, contenders in GROUPS.items():
        lengths = [n for n in repeats if group == "tisa" or n <= article_up_to]
        peaks = memory(setting, group, lengths)
        for n in lengths:
            able = [c for c in contenders if isinstance(peaks[c, n], int)]
            seconds = times(setting, group, n, able, repeats[n])
            for contender in contenders:
                peak, ran = peaks[contender, n], contender in able
                rows.append(
                    {
                        "group": group,
                        "contender": contender,
                        "n": n,
                        "repeats": repeats[n],
                        "seconds": seconds[contender] if ran else None,
                        "peak_bytes": peak if ran else None,
                        "skipped": None if ran else peak,
                    }
                )
    grown = exponents(rows)
    return {
        "config": asdict(setting) | {"dtype": "float32", "causal": False, "lengths": list(repeats)},
        "machine": machine(),
        "load": load | {"end": os.getloadavg()[0]},
        "largest_error_in_float64": errors,
        "rows": rows,
        "exponents": grown,
        "bars": bars(rows, grown),
    }


def say(text: str) -> None:
    print(text, flush=True)


def say_bars(results: dict[str, Any]) -> None:
    """A line for each bar."""
    for bar in results["bars"]:
        word = {True: "pass", False: "MISS", None: "not measured"}[bar["held"]]
        value = "" if bar["value"] is None else f"{bar['value']:.2f} "
        say(f"{word}: {value}{bar['what']} ({bar['rule']} {bar['limit']})")


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description="Attention with a learned lag bias on a CPU.")
    parser.add_argument("--quick", action="store_true", help="up to 2,048 tokens, few repeats")
    parser.add_argument("--figure-only", action="store_true", help="draw from the JSON again")
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "cpu", help="folder")
    parser.add_argument("--peak", nargs=4, help=argparse.SUPPRESS)  # the fresh process of `memory`
    options = parser.parse_args(arguments)
    if options.peak:
        group, contender, n, setting = options.peak
        print(peak(Setting(**json.loads(setting)), group, contender, int(n)))
        return 0
    path = options.out / NAME
    if not options.figure_only:
        results = measure(Setting(), QUICK if options.quick else REPEATS, article_up_to=1024)
        write_json(path, results)
        say_bars(results)
    for figure in draw(json.loads(path.read_text(encoding="utf-8")), options.out):
        say(f"wrote {figure}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
