"""The page of `whence glue`: its tables, scores against kernels, and every curve learned."""

from typing import Any, NamedTuple

from whence.analysis.glue_results import (
    DROPPED,
    FORMS,
    Glue,
    mean_difference,
    mean_won_back,
)
from whence.report.glue_figures import shown
from whence.report.glue_plots import by_kernels
from whence.report.glue_table import (
    certainty_tables,
    model_name,
    p_text,
    reasons,
    score_tables,
    slides_tables,
    task_title,
)
from whence.report.html_page import Section, html_page
from whence.report.lm_plots import heads
from whence.report.text_table import minus


class Card(NamedTuple):
    """A number, what it is, and what to hold it against."""

    value: str
    what: str
    against: str


def make_glue_page(results: Glue) -> str:
    """The page as text."""
    name = model_name(results)
    return html_page(
        f"{name} on GLUE with TISA",
        f"{name} on GLUE, with {results.config['position']} and without",
        [
            _findings(results),
            _tables(results),
            *(_curves(results, form) for form in results.forms),
            _setting(results),
        ],
        footer="Made by whence glue. Lag is key minus query; layers and heads count from 0. "
        "Pictures are of the first seed.",
    )


def _findings(results: Glue) -> Section:
    n = len(results.tasks)
    over = "" if n == 1 else f", mean of {n} tasks"
    groups = [(f"({form}) {FORMS[form]}{over}", _cards(results, form)) for form in results.forms]
    charts = [(task_title(task), by_kernels(results, task)) for task in results.tasks]
    values = {"groups": groups, "charts": charts}
    return Section("findings", "Findings", "glue/findings.html", values)


def _cards(results: Glue, form: str) -> list[Card]:
    """What kernels add, or in form (b) what they win back of its loss, where (a) was run too."""
    back = {s: mean_won_back(results, s) if form == DROPPED else None for s in results.kernels}
    lost = next((one.lost for one in back.values() if one is not None), None)
    cards = []
    if lost is not None:
        cards.append(Card(minus(f"{-lost:+.1f}"), "points without kernels, against (a)", ""))
    for s in results.kernels:
        share, apart = back[s], mean_difference(results, form, s)
        if share is not None and share.share is not None:
            inside = "" if share.low is None else f"{share.low:.0%} to {share.high:.0%}"
            what = f"of that is won back by S = {s}"
            cards.append(Card(minus(f"{share.share:.0%}"), what, _interval(inside)))
        elif apart is not None:
            inside = "" if apart.low is None else f"{apart.low:+.1f} to {apart.high:+.1f}"
            p = "" if apart.p is None else f", p {p_text(apart.p)}"
            value = minus(f"{apart.mean:+.1f}")
            cards.append(Card(value, f"points by S = {s}", f"{_interval(inside)}{p}"))
    return cards


def _interval(inside: str) -> str:
    return minus(f"95% interval {inside}") if inside else "seeds give no interval"


def _tables(results: Glue) -> Section:
    columns = [
        [*score_tables(results), *slides_tables(results)],
        certainty_tables(results),
    ]
    values = {"columns": columns, "reasons": reasons(results)}
    return Section("tables", "Tables", "glue/tables.html", values)


def _curves(results: Glue, form: str) -> Section | None:
    jobs = [
        {
            "name": f"{task_title(job.task)}, S = {job.kernels}",
            "layers": [(view.layer, heads(view)) for view in job.curves],
        }
        for job in shown(results, form)
    ]
    heading = f"Learned curves, ({form}) {FORMS[form]}"
    return Section(f"curves-{form}", heading, "glue/curves.html", {"jobs": jobs}) if jobs else None


def _setting(results: Glue) -> Section:
    facts: dict[str, Any] = {
        "configuration": _told(results.config),
        "data": _told(results.data),
        "machine": _told(results.machine),
    }
    return Section("setting", "Setting", "lm/setting.html", {"facts": facts})


def _told(facts: dict[str, Any]) -> dict[str, str]:
    return {
        key: ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
        for key, value in facts.items()
    }
