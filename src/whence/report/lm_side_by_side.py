"""Several runs of `whence lm` side by side: what differs between them, and their losses."""

from collections.abc import Mapping
from itertools import cycle
from typing import Any

from whence.analysis.lm_results import Language, ranked
from whence.report.html_page import Section
from whence.report.lm_plots import loss_line
from whence.report.lm_table import loss_text
from whence.report.lm_winners import in_front, losses
from whence.report.plots import BELOW, COLORS, DASHES, SYMBOLS, Plot, counts_axis, plot
from whence.report.text_table import NONE

SCORED_ALIKE = ("task", "distance", "objective")  # of the configuration


def side_by_side(runs: Mapping[str, Language]) -> Section:
    """The settings that differ, and the losses at the first and last length that all runs have."""
    common = common_lengths(runs)
    lengths = list(dict.fromkeys((*common[:1], *common[-1:])))
    return Section(
        "runs",
        "Side by side",
        "lm/runs.html",
        {
            "names": list(runs),
            "differing": differing(runs),
            "alike": scored_alike(runs),
            "lengths": lengths,
            "rows": _rows(runs, lengths),
            "chart": _by_length(runs) if scored_alike(runs) else None,
        },
    )


def common_lengths(runs: Mapping[str, Language]) -> list[int]:
    """At which all runs were tested."""
    return sorted(set.intersection(*(set(results.lengths) for results in runs.values())))


def scored_alike(runs: Mapping[str, Language]) -> bool:
    """Whether all runs predict the same tokens of the same data, so that losses can be compared."""
    settings = [
        (results.data, [results.config.get(key) for key in SCORED_ALIKE])
        for results in runs.values()
    ]
    return all(setting == settings[0] for setting in settings)


def differing(runs: Mapping[str, Language]) -> dict[str, list[str]]:
    """The settings that are not the same in all runs: name -> one text a run."""
    found = [
        {
            **{f"data: {key}": value for key, value in results.data.items()},
            **results.config,
            **{f"machine: {key}": value for key, value in results.machine.items()},
        }
        for results in runs.values()
    ]
    keys = dict.fromkeys(key for facts in found for key in facts)
    return {
        key: [_text(facts.get(key)) for facts in found]
        for key in keys
        if any(facts.get(key) != found[0].get(key) for facts in found)
    }


def _text(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return ", ".join(map(str, value))
    return NONE if value is None else str(value)


def _rows(runs: Mapping[str, Language], lengths: list[int]) -> list[dict[str, Any]]:
    """A row a method, with a cell for each run and length: its text, and whether it is in front."""
    rows = {name: {row.method: row for row in ranked(run)} for name, run in runs.items()}
    methods = dict.fromkeys(method for found in rows.values() for method in found)
    front = {
        (name, length): set(in_front(found)) if len(found) > 1 else set()
        for name, run in runs.items()
        for length in lengths
        for found in [losses(run, length)]
    }
    return [
        {
            "method": method,
            "cells": [
                (
                    loss_text(rows[name][method].scratch[run.lengths.index(length)])
                    if method in rows[name]
                    else NONE,
                    method in front[name, length],
                )
                for name, run in runs.items()
                for length in lengths
            ],
        }
        for method in methods
    ]


def _by_length(runs: Mapping[str, Language]) -> Plot:
    """Loss against length: a colour a method, a dash and a symbol a run."""
    methods = dict.fromkeys(row.method for run in runs.values() for row in ranked(run))
    colors = dict(zip(methods, cycle(COLORS), strict=False))
    traces = []
    for (name, run), dash, symbol in zip(runs.items(), cycle(DASHES), cycle(SYMBOLS), strict=False):
        for row in ranked(run):
            label = f"{row.method}, {name}"
            found = zip(run.lengths, row.scratch, strict=True)
            line = loss_line(label, found, colors[row.method], dash, symbol)
            traces += [] if line is None else [line]
    ticks = sorted({length for run in runs.values() for length in run.lengths})
    return plot(
        traces,
        xaxis=counts_axis(ticks, "tokens"),
        yaxis={"title": {"text": "loss, nats"}},
        legend=BELOW,
        showlegend=True,
    )
