"""The tab *Model*: what the weights of one model know about position, from `whence inspect`."""

import re
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from whence.analysis.fit import fitted
from whence.analysis.results import Fit, HeadReport, Inspection, LagProfile, worded
from whence.app.cards import cards, note, plot_card
from whence.app.svg import Drawing, Line, draw_lines, draw_matrix
from whence.checks import require
from whence.colours import BLUE, GREY, INFERNO, ORANGE
from whence.files import from_home
from whence.report.fits import fitted_lags, picked
from whence.report.key_numbers import key_numbers
from whence.report.style import LAG, matrix_limits

HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
NEAR = 64  # the largest |lag| of a small curve
MOST_LETTERS = 400
HEADS = (
    "Click a head to enlarge it. Curves of heads that sense position are blue, the others grey. "
    "S is the number of Gaussians in the fit (dashed), R² the share of the curve that it explains."
)
SMALL: dict[str, Any] = {"width": 240, "height": 180, "legend": False}
LARGE: dict[str, Any] = {"height": 370}


def allowed_model(name: str, root: Path, given: str) -> str:
    """A model that the page may read: the command line's own, one inside of root, or a hub name.

    Names are resolved before they are compared, so that neither .. nor a link leads out of root.
    """
    require(bool(name.strip()), "there is no model: give a folder, or a name on the hub.")
    require(len(name) <= MOST_LETTERS, f"a model's name has at most {MOST_LETTERS} letters.")
    require(name.isprintable(), "a model's name has no control characters.")
    name = name.strip()
    if given and name == given:
        return name
    base = root.resolve()
    path = (base / from_home(name)).resolve()
    inside, there = path.is_relative_to(base), path.exists() or Path(name).exists()
    if inside and path.exists():
        return str(path)
    local = HUB_NAME.fullmatch(name) is None
    require(
        not there and (inside or not local),
        f"{name} is outside of {base}: start whence explore with --root to allow another folder.",
    )
    require(not local, f"there is no {name} in {base}.")
    return name


def facts(found: Inspection) -> str:
    """What the model is, its key numbers, and notes."""
    model = found.model
    rows = "".join(
        f"<tr><td><b>{escape(one.value)}</b></td><td>{escape(one.what)}</td>"
        f"<td>{escape(one.against)}</td></tr>"
        for one in key_numbers(found)
    )
    head = f"{model.name}: {model.family}, position by {model.position}, {model.shape}"
    return f"<div class='facts'><p><b>{escape(head)}</b></p><table>{rows}</table></div>" + "".join(
        note(text) for text in found.notes
    )


def windows(found: Inspection) -> tuple[int, ...]:
    """The numbers of first positions that a heat map can show."""
    if found.table is None:
        return ()
    n = len(found.table.gram)
    return tuple(sorted({min(window.stop, n) for window in found.table.windows} | {n}))


def heat_map(found: Inspection, place: int) -> str:
    """The inner products of the first positions, and Toeplitzness by window, that one marked."""
    table = found.table
    if table is None:
        return note(f"Position by {found.model.position}: there is no table to show.")
    stops = windows(found)
    stop = stops[max(0, min(place, len(stops) - 1))]
    measured = {window.stop: window for window in (*table.windows, table.whole)}
    window = measured.get(stop)
    gram = table.gram[:stop, :stop]
    said = "" if window is None else f"R² {worded(window.r2)}, random {worded(window.null_r2)}"
    drawing = draw_matrix(
        gram,
        title=f"Inner products of positions 0..{stop - 1}",
        detail=f"Toeplitz {said}" if said else "",
        what="p·p",
        limits=matrix_limits(gram),
        colours=INFERNO,
    )
    ordered = [measured[each] for each in sorted(measured)]
    x = [each.stop for each in ordered]

    def line(name: str, field: str, colour: str, dash: str) -> Line:
        y = [getattr(each, field) for each in ordered]
        return Line(
            name, x, [np.nan if v is None else v for v in y], colour, dash, markers=dash == "-"
        )

    chosen = Line("shown", [stop, stop], [0.0, 1.0], GREY, ":", labelled=False)
    curves = draw_lines(
        [
            line("with the diagonal", "r2", BLUE, "-"),
            line("without it", "r2_off_diagonal", ORANGE, "-"),
            line("random table", "null_r2", BLUE, ":"),
            line("random, without", "null_r2_off_diagonal", ORANGE, ":"),
            *([chosen] if len(x) > 1 else []),
        ],
        title="Toeplitzness by window",
        detail="R² of the best function of lag alone",
        x_name="positions",
        y_name="R²",
        log_x=True,
        x_ticks=x,
        tick_names=[str(each) for each in x],
        **LARGE,
    )
    return cards(plot_card(drawing, name="inner-products"), plot_card(curves, name="windows"))


def strongest(found: Inspection) -> int | None:
    """The head whose curve says most about position, of those that are sensitive to it if any."""
    heads = _curves(found)
    if heads:
        return max(heads, key=lambda head: (head.sensitive, head.strength)).head
    return found.profiles[0].head if found.profiles else None


def head_list(found: Inspection) -> str:
    """A small curve for each head of the layer, with its fit; a click enlarges it."""
    curves = _curves(found)
    if not curves:
        shown = [
            plot_card(
                _profile(each, small=True), name=f"profile-{each.head}", choice=f"{each.head}"
            )
            for each in found.profiles
        ]
        return cards(*shown, look="small") if shown else note("Its weights state no lag curve.")
    return cards(
        *(
            plot_card(
                _curve(each, _fit(found, each), small=True),
                name=f"head-{each.head}",
                choice=str(each.head),
            )
            for each in curves
        ),
        look="small",
    ) + note(HEADS)


def one_head(found: Inspection, number: int) -> str:
    """One head enlarged: its curve with the spread along diagonals, its fit, its matrix."""
    head = next((each for each in _curves(found) if each.head == number), None)
    profile = next((each for each in found.profiles if each.head == number), None)
    require(head is not None or profile is not None, f"there is no head {number}.")
    parts = []
    if head is not None:
        fit = _fit(found, head)
        parts.append(plot_card(_curve(head, fit, small=False), name=f"head-{number}"))
        if np.isfinite(head.matrix).any() and len(head.matrix) > 1:
            drawing = draw_matrix(
                head.matrix,
                title=f"Positional attention of head {number}",
                detail=f"first {len(head.matrix)} positions",
                what="logits",
                limits=matrix_limits(head.matrix),
            )
            parts.append(plot_card(drawing, name=f"head-{number}-matrix"))
    if profile is not None:
        parts.append(plot_card(_profile(profile, small=False), name=f"profile-{number}"))
    return cards(*parts)


def _curves(found: Inspection) -> tuple[HeadReport, ...]:
    return found.heads or found.relative


def _fit(found: Inspection, head: HeadReport) -> Fit | None:
    entries = [each for each in found.fits if (each.layer, each.head) == (head.layer, head.head)]
    return picked(entries[0]) if entries else None


def _curve(head: HeadReport, fit: Fit | None, *, small: bool) -> Drawing:
    near = np.abs(head.lag) <= (NEAR if small else np.inf)
    lag, curve = head.lag[near], head.curve[near]
    spread = head.spread[near]
    band: dict[str, Any] = {} if small else {"low": curve - spread, "high": curve + spread}
    lines = [Line("lag curve", lag, curve, BLUE if head.sensitive else GREY, width=1.8, **band)]
    detail = "" if head.r2 is None else f"R² {worded(head.r2, '.2f')}"
    if fit is not None:
        inside = near & fitted_lags(fit, head)
        at = head.lag[inside]
        sum_of = f"fit of {fit.kernels} Gaussian{'s' * (fit.kernels > 1)}"
        lines.append(Line(sum_of, at, fitted(fit, at) + fit.level, ORANGE, "--"))
        detail = f"{sum_of}: R² {worded(fit.r2, '.3f')}"
    if small:
        detail = "" if fit is None else f"S = {fit.kernels}, R² {worded(fit.r2, '.2f')}"
    return draw_lines(
        lines,
        title=f"Head {head.head}" + ("" if small else f", layer {head.layer}"),
        detail=detail,
        x_name=LAG,
        y_name="logits",
        **(SMALL if small else LARGE),
    )


def _profile(profile: LagProfile, *, small: bool) -> Drawing:
    line = Line("mean logit of real text", profile.lag, profile.mean, BLUE, width=1.8)
    return draw_lines(
        [line],
        title=f"Head {profile.head}" + ("" if small else ", measured on text"),
        detail=f"lag explains {worded(profile.explained, '.0%')}" if profile.explained else "",
        x_name=LAG,
        y_name="logits",
        **(SMALL if small else LARGE),
    )
