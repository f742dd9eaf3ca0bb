"""The sections of the page of `whence lm`; None where the results have nothing for one.

The words and the markup of a section are in its template, in templates/lm.
"""

from typing import Any

from whence.analysis.lm_results import SCRATCH, SLIDING, Job, Language
from whence.report import lm_plots
from whence.report.html_page import Section
from whence.report.lm_table import rank_table, reasons
from whence.report.lm_winners import winners

OPEN = 4  # methods whose pictures are shown at once; the others' at a click


def ranking(results: Language) -> Section:
    """The ranking."""
    return _section(
        "ranking",
        "Ranking",
        winners=winners(results),
        table=rank_table(results),
        reasons=reasons(results),
    )


def lengths(results: Language) -> Section:
    """Loss against length, along the longest sequences, and training."""
    drawn = {how: lm_plots.by_length(results, how) for how in (SCRATCH, SLIDING)}
    longest = max(results.lengths)
    return _section(
        "lengths",
        "Loss and length",
        by_length={how: figure for how, figure in drawn.items() if figure["data"]},
        longest=longest,
        by_position=lm_plots.by_position(results, longest),
        training=lm_plots.training(results),
    )


def tables(results: Language) -> Section | None:
    """Learned tables: heat maps before and after, and Toeplitzness over training."""
    methods = [
        {
            "name": job.method,
            "before": lm_plots.gram_map(job.gram_before),
            "after": lm_plots.gram_map(job.gram_after),
            "toeplitz": lm_plots.toeplitz(job),
        }
        for job in _shown(results)
        if job.gram_after is not None and job.gram_before is not None
    ]
    return _section("tables", "Learned tables", methods=methods) if methods else None


def lag_curves(results: Language) -> Section | None:
    """What each method adds at each lag, before (dotted) and after, a line a head."""
    methods = [
        {
            "name": job.method,
            "quantity": job.stated[0].quantity,
            "layers": [(view.layer, lm_plots.heads(view)) for view in job.stated],
        }
        for job in _shown(results)
        if job.stated
    ]
    return _section("curves", "Lag curves", methods=methods, open=OPEN) if methods else None


def attention(results: Language) -> Section | None:
    """Mean attention weight by head and lag, before and after."""
    methods = [
        {
            "name": job.method,
            "before": lm_plots.attention_map(job.attention, "before"),
            "after": lm_plots.attention_map(job.attention, "after"),
        }
        for job in _shown(results)
    ]
    return (
        _section("attention", "Where heads look", methods=methods, open=OPEN) if methods else None
    )


def setting(results: Language) -> Section:
    """Configuration, data and machine."""
    facts = {
        "configuration": _told(results.config),
        "data": _told(results.data),
        "machine": _told(results.machine),
    }
    return _section("setting", "Setting", facts=facts)


def _told(facts: dict[str, Any]) -> dict[str, str]:
    return {
        key: ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
        for key, value in facts.items()
        if value is not None
    }


def _shown(results: Language) -> list[Job]:
    """The jobs whose pictures are kept, best method first."""
    with_pictures = {job.method: job for job in results.jobs if job.attention}
    order = [name for name, *_ in lm_plots.looks(results)]
    return [with_pictures[name] for name in order if name in with_pictures]


def _section(key: str, heading: str, **values: Any) -> Section:
    return Section(key, heading, f"lm/{key}.html", values)
