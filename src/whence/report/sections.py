"""The sections of the page of inspected models; None where the results have nothing for one.

The words and the markup of a section are in its template, in templates/inspect.
"""

import math
from collections.abc import Sequence
from itertools import groupby
from typing import Any

from whence.analysis.comparison import Comparison
from whence.analysis.criteria import CriteriaReport
from whence.analysis.results import Fit, HeadReport, Inspection
from whence.report import plots
from whence.report.comparison_figures import sentence
from whence.report.fits import picked
from whence.report.heat_maps import caption
from whence.report.html_page import Section
from whence.report.key_numbers import key_numbers
from whence.report.style import beyond, labels, matrix_limits

MARKS = {True: "✓", False: "✗", None: "–"}  # noqa: RUF001
FIELDS = (
    ("Toeplitzness with the main diagonal", "r2"),
    ("Toeplitzness without it", "r2_off_diagonal"),
)
LEADING = 6  # principal components that are drawn


def summary(inspections: Sequence[Inspection]) -> Section:
    """The key numbers: as cards for one model, as a table for several."""
    told = [{one.key: one for one in key_numbers(entry)} for entry in inspections]
    return _section(
        "summary",
        "Summary",
        models=[entry.model for entry in inspections],
        names=_names(inspections),
        keys=dict.fromkeys(key for one in told for key in one),
        told=told,
    )


def tables(inspections: Sequence[Inspection]) -> Section | None:
    """The heat maps of P, and Toeplitzness by window."""
    with_table = [entry for entry in inspections if entry.table is not None]
    if not with_table:
        return None
    maps = [
        {
            "name": name,
            "table": entry.table,
            "plot": plots.heat_map(entry.table),
            "caption": caption(entry.table),
        }
        for name, entry in zip(_names(with_table), with_table, strict=True)
        if entry.table is not None
    ]
    charts = [(heading, plots.windows(with_table, field)) for heading, field in FIELDS]
    return _section("table", "Position table", maps=maps, charts=charts)


def components(inspections: Sequence[Inspection]) -> Section | None:
    """Principal components of the table with their spectra."""
    models = [
        {
            "name": entry.model.name,
            "table": entry.table,
            "explained": plots.explained(entry.table),
            "components": [
                {
                    "share": part.explained,
                    "values": plots.component(entry.table, place, "values"),
                    "power": plots.component(entry.table, place, "power"),
                }
                for place, part in enumerate(entry.table.components[:LEADING])
            ],
        }
        for entry in inspections
        if entry.table is not None
    ]
    return _of_models("components", "Principal components", inspections, models)


def heads(inspections: Sequence[Inspection]) -> Section | None:
    """Lag curves and matrices of every head, by layer."""
    models = []
    for entry in inspections:
        fits = {(part.layer, part.head): picked(part) for part in entry.fits}
        curves_of_fits = "positional attention" if entry.heads else "stated bias"
        every = [("positional attention", head) for head in entry.heads]
        every += [("stated bias", head) for head in entry.relative]

        def drawn(
            what: str, head: HeadReport, fits: Any = fits, of_fits: str = curves_of_fits
        ) -> dict[str, Any]:
            fit = fits.get((head.layer, head.head)) if what == of_fits else None
            corner = plots.drawn_corner(head)
            return {
                "head": head,
                "curve": plots.head_curve(head, fit),
                "matrix": plots.head_matrix(head),
                "beyond": beyond(corner, matrix_limits(corner)),
            }

        groups = groupby(every, key=lambda pair: (pair[0], pair[1].layer, pair[1].with_biases))
        layers = []
        for (what, layer, biases), group in groups:
            of_layer = [head for _, head in group]
            layers.append(
                {
                    "what": what,
                    "layer": layer,
                    "biases": biases,
                    "strongest": max(head.strength for head in of_layer),
                    "heads": [drawn(what, head) for head in of_layer],
                }
            )
        if layers:
            models.append({"name": entry.model.name, "layers": layers})
    return _of_models("heads", "Heads", inspections, models)


def fits(inspections: Sequence[Inspection]) -> Section | None:
    """What S Gaussians leave unexplained, and their parameters."""
    models = [
        {
            "name": entry.model.name,
            "chart": plots.criterion(entry),
            "heads": [
                {
                    "layer": part.layer,
                    "head": part.head,
                    "fit": picked(part),
                    "gaussians": _gaussians(picked(part)),
                }
                for part in entry.fits
            ],
        }
        for entry in inspections
        if entry.fits
    ]
    return _of_models("fits", "TISA fits", inspections, models)


def _gaussians(fit: Fit) -> list[tuple[float, float, float, float]]:
    """(amplitude, sharpness, centre, width) of each, the highest first."""
    parameters = zip(fit.amplitude, fit.sharpness, fit.offset, strict=True)
    rows = [
        (amplitude, sharpness, centre, math.sqrt(0.5 / sharpness) if sharpness else math.inf)
        for amplitude, sharpness, centre in parameters
    ]
    return sorted(rows, key=lambda row: -abs(row[0]))


def profiles(inspections: Sequence[Inspection]) -> Section | None:
    """Logits of real text by lag, each beside what its head's F says of position alone."""
    models = []
    for entry in inspections:
        alone = {(head.layer, head.head): head for head in entry.heads}
        layers = [
            (
                layer,
                [(part, plots.profile(part), alone.get((layer, part.head))) for part in group],
            )
            for layer, group in groupby(entry.profiles, key=lambda part: part.layer)
        ]
        if layers:
            models.append({"name": entry.model.name, "layers": layers})
    return _of_models("profiles", "Measured lag profiles", inspections, models)


def series(comparison: Comparison | None) -> Section | None:
    """Toeplitzness through a series of models, and against scores."""
    if comparison is None:
        return None
    against_score = []
    if comparison.correlations:
        for (heading, field), off in zip(FIELDS, (False, True), strict=True):
            said = [
                sentence(part)
                for part in comparison.correlations
                if ("without" in part.measure) == off
            ]
            against_score.append((heading, plots.scores(comparison, field), said))
    charts = [(heading, plots.steps(comparison, field)) for heading, field in FIELDS]
    return _section("series", "Through the series", charts=charts, against_score=against_score)


def criteria(report: CriteriaReport | None) -> Section | None:
    """Table 1, measured."""
    if report is None:
        return None
    return _section("criteria", "Criteria", rules=report.rules, rows=report.rows, marks=MARKS)


def notes(inspections: Sequence[Inspection]) -> Section | None:
    """What to know about the numbers."""
    models = [
        {"name": entry.model.name, "notes": entry.notes} for entry in inspections if entry.notes
    ]
    return _of_models("notes", "Notes", inspections, models)


def _names(inspections: Sequence[Inspection]) -> list[str]:
    return labels([entry.model.name for entry in inspections])


def _of_models(
    key: str, heading: str, inspections: Sequence[Inspection], models: Sequence[dict[str, Any]]
) -> Section | None:
    """A section with a part for each model, under the model's name where there are several."""
    if not models:
        return None
    return _section(key, heading, models=models, several=len(inspections) > 1)


def _section(key: str, heading: str, **values: Any) -> Section:
    return Section(key, heading, f"inspect/{key}.html", values)
