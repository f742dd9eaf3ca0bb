"""The page of `whence glue`: its tables, scores against kernels, and every curve learned."""

from typing import Any

from whence.analysis.glue_results import FORMS, Glue
from whence.report.glue_figures import shown
from whence.report.glue_table import model_name, reasons, tables, task_title
from whence.report.html_page import Section, html_page
from whence.report.lm_plots import heads


def make_glue_page(results: Glue) -> str:
    """The page as text."""
    name = model_name(results)
    return html_page(
        f"{name} on GLUE with TISA",
        f"{name} on GLUE, with {results.config['position']} and without",
        [_tables(results), *(_curves(results, form) for form in results.forms), _setting(results)],
        footer="Made by whence glue. Lag is key minus query; layers and heads count from 0. "
        "Pictures are of the first seed.",
    )


def _tables(results: Glue) -> Section:
    values = {"tables": tables(results), "reasons": reasons(results)}
    return Section("tables", "Table 3", "glue/tables.html", values)


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
