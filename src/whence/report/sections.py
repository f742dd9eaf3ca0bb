"""The sections of the page: each is HTML, or nothing where the results have nothing for it."""

import json
import math
from collections.abc import Sequence
from html import escape
from itertools import groupby
from typing import Any

from whence.analysis.comparison import Comparison
from whence.analysis.criteria import CriteriaReport
from whence.analysis.results import Inspection, worded
from whence.report import plots
from whence.report.comparison_figures import sentence
from whence.report.fits import picked
from whence.report.heat_maps import caption
from whence.report.key_numbers import key_numbers
from whence.report.style import labels, number

MARKS = {True: "✓", False: "✗", None: "–"}  # noqa: RUF001
FIELDS = (
    ("Toeplitzness with the main diagonal", "r2"),
    ("Toeplitzness without it", "r2_off_diagonal"),
)


class Page:
    """Plots by number, so that the HTML holds their places and one script holds their data."""

    def __init__(self) -> None:
        self._figures: list[plots.Plot] = []

    def plot(self, figure: plots.Plot, look: str, label: str) -> str:
        """The place of a plot; `look` is its class in the style sheet."""
        self._figures.append(figure)
        place = len(self._figures) - 1
        return (
            f'<div class="plot {look}" data-figure="{place}" role="img" '
            f'aria-label="{escape(label)}"></div>'
        )

    def figures(self) -> str:
        """All plots, as JSON for a script."""
        return _script_safe(dict(enumerate(self._figures)))


def _script_safe(data: Any) -> str:
    """JSON in which no text can end the script that holds it; what is not finite is a gap."""
    text = json.dumps(_finite(data), separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c")


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def summary(inspections: Sequence[Inspection]) -> str:
    """The key numbers: as cards for one model, as a table for several."""
    if len(inspections) > 1:
        return _side_by_side(inspections)
    (entry,) = inspections
    items = "".join(
        f"<li><b>{escape(told.value)}</b><span>{escape(told.what)}</span>"
        f'<span class="faint">{escape(told.against)}</span></li>'
        for told in key_numbers(entry)
    )
    return f'{_facts(entry)}<ul class="numbers">{items}</ul>'


def _facts(entry: Inspection) -> str:
    model = entry.model
    length = f", {model.n_positions} positions" if model.n_positions and model.n_layers else ""
    width = f", width {model.d_model}" if model.n_layers else ""
    return (
        f'<p class="facts"><b>{escape(model.name)}</b>: {escape(model.family)}, position by '
        f"{escape(model.position)}; {escape(model.shape)}{width}{length}. "
        f"SHA-256 {escape(model.sha256[:16])}…</p>"
    )


def _side_by_side(inspections: Sequence[Inspection]) -> str:
    """A row a number, a column a model; the wording of the first model that has it."""
    told = [{one.key: one for one in key_numbers(entry)} for entry in inspections]
    names = labels([entry.model.name for entry in inspections])
    heads = "".join(f"<th>{escape(name)}</th>" for name in names)
    rows = ""
    for key in dict.fromkeys(key for one in told for key in one):
        cells = ""
        for one in told:
            if key in one:
                against = escape(one[key].against)
                value = f"{escape(one[key].value)}<br><span class=faint>{against}</span>"
            cells += f"<td>{value if key in one else '–'}</td>"  # noqa: RUF001
        rows += f"<tr><td>{escape(key)}</td>{cells}</tr>"
    table = f'<div class="scroll"><table class="many"><tr><th></th>{heads}</tr>{rows}</table></div>'
    return table + "".join(_facts(entry) for entry in inspections)


def tables(page: Page, inspections: Sequence[Inspection]) -> str:
    """The heat maps of P, and Toeplitzness by window."""
    with_table = [entry for entry in inspections if entry.table is not None]
    if not with_table:
        return ""
    maps = ""
    names = labels([entry.model.name for entry in with_table])
    for name, entry in zip(names, with_table, strict=True):
        table = entry.table
        assert table is not None
        what = page.plot(plots.heat_map(table), "square", f"P of {entry.model.name}")
        maps += (
            f"<figure><h4>{escape(name)}</h4>{what}<figcaption>"
            f"{escape(caption(table))}. Monotonicity {number(table.monotonicity)}, symmetry "
            f"{number(table.symmetry)}. {escape(table.rows)}; {escape(table.space)}."
            "</figcaption></figure>"
        )
    charts = "".join(
        f"<figure><h4>{heading}</h4>"
        f"{page.plot(plots.windows(with_table, field), 'chart', heading)}</figure>"
        for heading, field in FIELDS
    )
    how = (
        '<p class="how">P = E Eᵀ holds the inner product of every two position vectors. If it is '
        "constant along its diagonals (Toeplitz), the table means distances and not places. "
        "Toeplitzness is the R² of the best Toeplitz fit, here by window. A random table has a "
        "bright diagonal too: hold the first plot against its thin line, and trust the second.</p>"
    )
    if len(with_table) == 1:  # the map on the left, both plots on the right
        return f'{how}<div class="wide">{maps}<div>{charts}</div></div>'
    return f'{how}<div class="wide">{maps}</div><div class="wide">{charts}</div>'


def components(page: Page, inspections: Sequence[Inspection]) -> str:
    """Principal components of the table with their spectra."""
    body = ""
    for entry in inspections:
        table = entry.table
        if table is None or not table.components:
            continue
        pairs = ""
        for place, component in enumerate(table.components[:6]):
            pairs += '<div class="pair">'
            for what, label in (("values", f"component {place + 1}"), ("power", "its spectrum")):
                plot = page.plot(plots.component(table, place, what), "small", label)
                share = f"{component.explained:.1%}" if what == "values" else ""
                pairs += f"<figure><h4>{label}<span>{share}</span></h4>{plot}</figure>"
            pairs += "</div>"
        summed = page.plot(plots.explained(table), "small", "variance explained")
        pairs += f"<figure><h4>variance explained, summed</h4>{summed}</figure>"
        body += _folded(
            inspections,
            entry,
            f"{worded(table.effective_dimensions, '.1f')} effective dimensions of "
            f"{len(table.explained)}, {table.components_for_90} components for nine tenths of "
            "the variance",
            f'<div class="wide">{pairs}</div>',
        )
    return body


def heads(page: Page, inspections: Sequence[Inspection]) -> str:
    """Lag curves and matrices of every head, by layer."""
    body = ""
    for entry in inspections:
        fits = {(part.layer, part.head): picked(part) for part in entry.fits}
        curves_of_fits = "positional attention" if entry.heads else "stated bias"
        stated = [("stated bias", head) for head in entry.relative]
        inside = ""
        every = [("positional attention", head) for head in entry.heads] + stated
        groups = groupby(every, key=lambda pair: (pair[0], pair[1].layer, pair[1].with_biases))
        for place, ((what, layer, biases), group) in enumerate(groups):
            curves = matrices = ""
            for _, head in group:
                fit = fits.get((head.layer, head.head)) if what == curves_of_fits else None
                label = f"head {head.head}"
                plot = page.plot(plots.head_curve(head, fit), "tile", f"layer {layer} {label}")
                against = "" if head.sensitive else ", not sensitive"
                r2 = f"R² {worded(head.r2, '.2f')}{against}"
                curves += f"<figure><h4>{label}<span>{r2}</span></h4>{plot}</figure>"
                plot = page.plot(plots.head_matrix(head), "square", f"matrix of {label}")
                matrices += f"<figure><h4>{label}</h4>{plot}</figure>"
            said = f"layer {layer}, {what}" + (", with biases" if biases else "")
            inside += (
                f"<details{' open' if place == 0 else ''}><summary>{said}: lag curves</summary>"
                f'<div class="tiles">{curves}</div></details>'
                f"<details><summary>{said}: matrices, first positions</summary>"
                f'<div class="squares">{matrices}</div></details>'
            )
        if inside:
            body += _titled(inspections, entry) + inside
    how = (
        '<p class="how">F = (E W<sub>Q</sub>)(E W<sub>K</sub>)ᵀ / √d is what positions alone say '
        "to each other. A curve is the mean of each diagonal, its band one deviation along it; the "
        "dashed line is the fitted sum of Gaussians. Grey heads are not sensitive to position. "
        "Each panel has its own scale.</p>"
    )
    return how + body if body else ""


def fits(page: Page, inspections: Sequence[Inspection]) -> str:
    """What S Gaussians leave unexplained, and their parameters."""
    body = ""
    for entry in inspections:
        if not entry.fits:
            continue
        rows = ""
        for part in entry.fits:
            fit = picked(part)
            kernels = "; ".join(
                f"{number(a)} exp(−{number(abs(b))} (k {_less(c)})²)"  # noqa: RUF001
                for a, b, c in zip(fit.amplitude, fit.sharpness, fit.offset, strict=True)
            )
            rows += (
                f"<tr><td>{part.layer}.{part.head}</td><td>{fit.kernels}</td>"
                f"<td>{worded(fit.r2, '.4f')}</td><td>{number(fit.residual)}</td>"
                f"<td class=text>{kernels}</td></tr>"
            )
        chart = page.plot(plots.criterion(entry), "chart", "what is left against S")
        body += (
            _titled(inspections, entry)
            + f'<figure class="alone">{chart}<figcaption>What S Gaussians leave unexplained, '
            "a line a head. Marked is the S that BIC picks, to which all that no function of lag "
            "explains of the head is noise; a mark at the last S says that more might "
            "pay.</figcaption></figure>"
            '<details><summary>Parameters</summary><div class="scroll"><table><tr>'
            "<th>layer.head</th><th>S</th><th>R²</th><th>residual</th><th>Gaussians of the lag k"
            f"</th></tr>{rows}</table></div></details>"
        )
    return body


def _less(offset: float) -> str:
    sign = "\N{MINUS SIGN}" if offset >= 0 else "+"
    return f"{sign} {number(abs(offset))}"


def profiles(page: Page, inspections: Sequence[Inspection]) -> str:
    """Logits of real text by lag."""
    body = ""
    for entry in inspections:
        inside = ""
        groups = groupby(entry.profiles, key=lambda part: part.layer)
        for place, (layer, group) in enumerate(groups):
            tiles = "".join(
                f"<figure><h4>head {part.head}<span>lag explains "
                f"{worded(part.explained, '.0%')}</span></h4>"
                + page.plot(plots.profile(part), "tile", f"layer {layer} head {part.head}")
                + "</figure>"
                for part in group
            )
            inside += (
                f"<details{' open' if place == 0 else ''}><summary>layer {layer}</summary>"
                f'<div class="tiles">{tiles}</div></details>'
            )
        if inside:
            body += _titled(inspections, entry) + inside
    how = (
        '<p class="how">Logits of real text, averaged over content at each lag, with the 95% '
        "confidence band of that mean, and the share of the logits' variance that lag explains.</p>"
    )
    return how + body if body else ""


def series(page: Page, comparison: Comparison | None) -> str:
    """Toeplitzness through a series of models, and against scores."""
    if comparison is None:
        return ""
    charts = "".join(
        f"<figure><h4>{heading}</h4>"
        f"{page.plot(plots.steps(comparison, field), 'chart', heading)}</figure>"
        for heading, field in FIELDS
    )
    body = f'<div class="wide">{charts}</div>'
    if comparison.correlations:
        charts = ""
        for (heading, field), off in zip(FIELDS, (False, True), strict=True):
            said = "; ".join(
                sentence(part)
                for part in comparison.correlations
                if ("without" in part.measure) == off
            )
            charts += (
                f"<figure><h4>{heading}</h4>"
                f"{page.plot(plots.scores(comparison, field), 'chart', heading)}"
                f"<figcaption>{said}</figcaption></figure>"
            )
        body += f'<h3>Toeplitzness against score</h3><div class="wide">{charts}</div>'
    return body


def criteria(report: CriteriaReport | None) -> str:
    """Table 1, measured."""
    if report is None:
        return ""
    names = list(report.rules)
    cells = "".join(f'<th title="{escape(report.rules[name])}">{name}</th>' for name in names)
    rows = ""
    for row in report.rows:
        rows += f"<tr><td>{escape(row.method)}</td>"
        for cell in row.criteria:
            slides = "" if cell.slides is None else f" (slides {MARKS[cell.slides]})"
            look = ' class="differs"' if cell.differs else ""
            rows += (
                f'<td{look} title="{escape(cell.why)}"><b>{MARKS[cell.verdict]}</b> '
                f'{escape(cell.text)}<span class="faint">{slides}</span></td>'
            )
        rows += "</tr>"
    return (
        '<p class="how">Each mark is a probe that ran on the code, beside the tick of the TISA '
        "slides' Table 1. Where they differ the cell is marked; hover for the reason.</p>"
        f'<div class="scroll"><table class="text"><tr><th>method</th>{cells}</tr>'
        f"{rows}</table></div>"
    )


def notes(inspections: Sequence[Inspection]) -> str:
    """What to know about the numbers."""
    body = ""
    for entry in inspections:
        if entry.notes:
            items = "".join(f"<li>{escape(note)}</li>" for note in entry.notes)
            body += f'{_titled(inspections, entry)}<ul class="notes">{items}</ul>'
    return body


def _titled(inspections: Sequence[Inspection], entry: Inspection) -> str:
    return f"<h3>{escape(entry.model.name)}</h3>" if len(inspections) > 1 else ""


def _folded(inspections: Sequence[Inspection], entry: Inspection, what: str, inside: str) -> str:
    shown = " open" if entry is inspections[0] else ""
    return (
        f"{_titled(inspections, entry)}<details{shown}><summary>{what}</summary>{inside}</details>"
    )
