"""The telling numbers of an inspected model: what one would read out first."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from whence.analysis.comparison import near_window
from whence.analysis.results import HeadReport, Inspection
from whence.report.fits import picked


@dataclass(frozen=True)
class Number:
    """A number as text, what it is, what to hold it against; `key` is the same in all models."""

    key: str
    value: str
    what: str
    against: str = ""


def telling(inspection: Inspection) -> list[Number]:
    """What there is to tell, the most telling first: table, heads, fits, profiles."""
    numbers: list[Number] = []
    table = inspection.table
    if table is not None:
        whole = table.whole
        last = whole.stop - 1
        numbers.append(
            Number(
                "Toeplitzness of P, all positions",
                f"{whole.r2:.3f}",
                f"Toeplitzness of P, positions {whole.start}..{last}",
                _random(whole.null_r2),
            )
        )
        numbers.append(
            Number(
                "without the main diagonal",
                f"{whole.r2_off_diagonal:.3f}",
                "without the main diagonal",
                _random(whole.null_r2_off_diagonal),
            )
        )
        near = near_window(table)
        if near is not whole:
            numbers.append(
                Number(
                    "Toeplitzness of P, near",
                    f"{near.r2:.3f}",
                    f"Toeplitzness of P, positions {near.start}..{near.stop - 1}",
                    _random(near.null_r2),
                )
            )
        numbers.append(
            Number(
                "effective dimensions",
                f"{table.effective_dimensions:.1f}",
                "effective dimensions of the table",
                f"of {len(table.explained)}; {table.components_for_90} hold 90% of variance",
            )
        )
    numbers += _of_heads(inspection.heads, "positional attention")
    numbers += _of_heads(inspection.relative, "stated bias")
    if inspection.profiles:
        best = max(inspection.profiles, key=lambda entry: entry.explained)
        mean = float(np.mean([entry.explained for entry in inspection.profiles]))
        numbers.append(
            Number(
                "logit variance by lag, at most",
                f"{best.explained:.0%}",
                "of a head's logit variance is by lag",
                f"the most: {best.layer}.{best.head}; mean {mean:.0%}",
            )
        )
    if inspection.fits:
        fits = [picked(entry) for entry in inspection.fits]
        numbers.append(
            Number(
                "Gaussians a head",
                f"{float(np.median([fit.kernels for fit in fits])):g}",
                "Gaussians fit a head's lag curve",
                f"medians; R² {float(np.median([fit.r2 for fit in fits])):.3f}",
            )
        )
    return numbers


def _of_heads(heads: Sequence[HeadReport], what: str) -> list[Number]:
    if not heads:
        return []
    r2 = [head.r2 for head in heads]
    layers = sorted({head.layer for head in heads})
    of = f"layer {layers[0]}" if len(layers) == 1 else f"layers {layers[0]}..{layers[-1]}"
    biases = "with biases" if heads[0].with_biases else "without biases"
    against = f"R² {min(r2):.2f} to {max(r2):.2f}, {biases}"
    if what == "stated bias":
        against = f"{what}, a function of lag alone"
    return [
        Number(
            f"heads sensitive to position, {what}",
            f"{sum(head.sensitive for head in heads)} of {len(heads)}",
            f"heads of {of} sense position",
            against,
        )
    ]


def _random(null: float | None) -> str:
    return "" if null is None else f"random table: {null:.3f}"
