"""The key numbers of an inspected model: the few that a reader needs first."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from whence.analysis.comparison import near_window
from whence.analysis.results import HeadReport, Inspection, LagProfile, worded
from whence.report.fits import picked, with_curves


@dataclass(frozen=True)
class KeyNumber:
    """A number as text, what it measures, and what to compare it with.

    `key` is the same for all models.
    """

    key: str
    value: str
    what: str
    against: str = ""


def key_numbers(inspection: Inspection) -> list[KeyNumber]:
    """The most telling numbers of an inspection, each with its null, the most important first.

    >>> from pathlib import Path
    >>> from whence.report import read_folder
    >>> found = read_folder(Path("out")).inspections[0]  # of whence inspect MODEL --out out
    >>> first = key_numbers(found)[0]
    >>> first.what, first.value, first.against
    ('Toeplitzness of P, 0..23', '0.700', 'random table: 0.400')
    """
    numbers: list[KeyNumber] = []
    table = inspection.table
    if table is not None:
        whole = table.whole
        last = whole.stop - 1
        numbers.append(
            KeyNumber(
                "Toeplitzness of P, all positions",
                worded(whole.r2),
                f"Toeplitzness of P, {whole.start}..{last}",
                _random(whole.null_r2),
            )
        )
        numbers.append(
            KeyNumber(
                "without the main diagonal",
                worded(whole.r2_off_diagonal),
                "the same without the main diagonal",
                _random(whole.null_r2_off_diagonal),
            )
        )
        near = near_window(table)
        if near is not whole:
            off_diagonal = (
                f"without the diagonal {worded(near.r2_off_diagonal)}",
                _random(near.null_r2_off_diagonal),
            )
            numbers.append(
                KeyNumber(
                    "Toeplitzness of P, near",
                    worded(near.r2),
                    f"Toeplitzness of P, {near.start}..{near.stop - 1}",
                    _joined("; ", _random(near.null_r2), _joined(", ", *off_diagonal)),
                )
            )
        numbers.append(
            KeyNumber(
                "effective dimensions",
                worded(table.effective_dimensions, ".1f"),
                "effective dimensions of the table",
                "all its vectors are the same"
                if table.effective_dimensions is None
                else f"random table: {worded(table.null_effective_dimensions, '.1f')}; "
                f"{table.components_for_90} of {len(table.explained)} hold 90% of the variance",
            )
        )
    numbers += _of_heads(inspection.heads, "positional attention")
    numbers += _of_heads(inspection.relative, "stated bias")
    numbers += _of_profiles(inspection.profiles)
    numbers += _of_fits(inspection)
    return numbers


def _of_profiles(profiles: Sequence[LagProfile]) -> list[KeyNumber]:
    known = [(entry.explained, entry) for entry in profiles if entry.explained is not None]
    if not known:
        return []
    most, best = max(known, key=lambda pair: pair[0])
    mean = float(np.mean([share for share, _ in known]))
    return [
        KeyNumber(
            "logit variance by lag, at most",
            f"{most:.0%}",
            "of a head's logit variance is by lag",
            f"in layer {best.layer}, head {best.head}, the most of {len(profiles)}; "
            f"mean {mean:.0%}",
        )
    ]


def _of_fits(inspection: Inspection) -> list[KeyNumber]:
    """Of the heads that sense position alone: a curve that does nothing is easy to fit."""
    pairs = with_curves(inspection.fits, inspection.heads or inspection.relative)
    found = [(picked(fits), fits, head) for fits, head in pairs if head.sensitive]
    if not found:
        return []
    strongest, _, head = max(found, key=lambda part: part[2].strength)
    most = max(fit.kernels for _, fits, _ in found for fit in fits.fits)
    full = sum(fit.kernels == most for fit, *_ in found)
    place = f"layer {head.layer}, head {head.head}"
    against = f"the strongest, {place}: S = {strongest.kernels}, R² {worded(strongest.r2)}"
    if len(found) > 1:
        r2 = _range([fit.r2 for fit, *_ in found], ".3f")
        against = f"R² of these {len(found)} curves {r2}; {against}"
    if full and most > 1:
        against += f"; {full} at the ceiling of {most}"
    near = "" if strongest.reach is None else f", up to lag {strongest.reach:.0f}"
    return [
        KeyNumber(
            "Gaussians a head",
            _range([float(fit.kernels) for fit, *_ in found], ".0f"),
            "Gaussians, heads that sense position",
            f"by BIC{near}; {against}",
        )
    ]


def _range(values: Sequence[float | None], form: str) -> str:
    """The smallest and the largest as text, or the one that there is."""
    known = [value for value in values if value is not None]
    if not known:
        return worded(None)
    low, high = (format(end, form) for end in (min(known), max(known)))
    return low if low == high else f"{low} to {high}"


def _of_heads(heads: Sequence[HeadReport], what: str) -> list[KeyNumber]:
    if not heads:
        return []
    sensing = [head for head in heads if head.sensitive]
    layers = sorted({head.layer for head in heads})
    of = f"layer {layers[0]}" if len(layers) == 1 else f"layers {layers[0]}..{layers[-1]}"
    biases = "with biases" if heads[0].with_biases else "without biases"
    against = f"their R² {_range([head.r2 for head in sensing], '.2f')} {biases}"
    near = [head.near for head in sensing if head.near is not None]
    if near:
        over = f"over positions {near[0].start}..{near[0].stop - 1}"
        against += f", {_range([part.r2 for part in near], '.2f')} {over}"
    nulls = [head.null_r2 for head in sensing if head.null_r2 is not None]
    if nulls:
        against += f"; random table: {_range(nulls, '.2f')}"
    if what == "stated bias":
        against = f"{what}, a function of lag alone"
    elif not sensing:
        against = "their curves are flat"
    return [
        KeyNumber(
            f"heads sensitive to position, {what}",
            f"{sum(head.sensitive for head in heads)} of {len(heads)}",
            f"heads of {of} sense position",
            against,
        )
    ]


def _joined(between: str, *parts: str) -> str:
    """The parts that say something."""
    return between.join(part for part in parts if part)


def _random(null: float | None) -> str:
    return "" if null is None else f"random table: {null:.3f}"
