"""The key numbers of an inspected model: the few that a reader needs first."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from whence.analysis.comparison import near_window
from whence.analysis.results import HeadReport, Inspection
from whence.report.fits import picked


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
                f"{whole.r2:.3f}",
                f"Toeplitzness of P, {whole.start}..{last}",
                _random(whole.null_r2),
            )
        )
        numbers.append(
            KeyNumber(
                "without the main diagonal",
                f"{whole.r2_off_diagonal:.3f}",
                "the same without the main diagonal",
                _random(whole.null_r2_off_diagonal),
            )
        )
        near = near_window(table)
        if near is not whole:
            numbers.append(
                KeyNumber(
                    "Toeplitzness of P, near",
                    f"{near.r2:.3f}",
                    f"Toeplitzness of P, {near.start}..{near.stop - 1}",
                    f"{_random(near.null_r2)}; without the diagonal {near.r2_off_diagonal:.3f}, "
                    f"{_random(near.null_r2_off_diagonal)}",
                )
            )
        numbers.append(
            KeyNumber(
                "effective dimensions",
                f"{table.effective_dimensions:.1f}",
                "effective dimensions of the table",
                f"random table: {table.null_effective_dimensions:.1f}; {table.components_for_90} "
                f"of {len(table.explained)} hold 90% of the variance",
            )
        )
    numbers += _of_heads(inspection.heads, "positional attention")
    numbers += _of_heads(inspection.relative, "stated bias")
    if inspection.profiles:
        best = max(inspection.profiles, key=lambda entry: entry.explained)
        mean = float(np.mean([entry.explained for entry in inspection.profiles]))
        numbers.append(
            KeyNumber(
                "logit variance by lag, at most",
                f"{best.explained:.0%}",
                "of a head's logit variance is by lag",
                f"in layer {best.layer}, head {best.head}, the most of {len(inspection.profiles)}; "
                f"mean {mean:.0%}",
            )
        )
    if inspection.fits:
        fits = [picked(entry) for entry in inspection.fits]
        most = max(fit.kernels for entry in inspection.fits for fit in entry.fits)
        full = sum(fit.kernels == most for fit in fits)
        ceiling = f"; {full} at the ceiling of {most}" if full and most > 1 else ""
        numbers.append(
            KeyNumber(
                "Gaussians a head",
                f"{float(np.median([fit.kernels for fit in fits])):g}",
                "Gaussians for a lag curve, by BIC",
                f"R² of the curve {float(np.median([fit.r2 for fit in fits])):.3f}; medians of "
                f"{len(fits)} heads{ceiling}",
            )
        )
    return numbers


def _of_heads(heads: Sequence[HeadReport], what: str) -> list[KeyNumber]:
    if not heads:
        return []
    r2 = [head.r2 for head in heads]
    layers = sorted({head.layer for head in heads})
    of = f"layer {layers[0]}" if len(layers) == 1 else f"layers {layers[0]}..{layers[-1]}"
    biases = "with biases" if heads[0].with_biases else "without biases"
    against = f"R² {min(r2):.2f} to {max(r2):.2f} {biases}"
    nulls = [head.null_r2 for head in heads if head.null_r2 is not None]
    if nulls:
        against += f"; random table: {min(nulls):.2f} to {max(nulls):.2f}"
    if what == "stated bias":
        against = f"{what}, a function of lag alone"
    return [
        KeyNumber(
            f"heads sensitive to position, {what}",
            f"{sum(head.sensitive for head in heads)} of {len(heads)}",
            f"heads of {of} sense position",
            against,
        )
    ]


def _random(null: float | None) -> str:
    return "" if null is None else f"random table: {null:.3f}"
