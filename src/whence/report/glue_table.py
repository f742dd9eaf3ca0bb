"""The tables of `whence glue`: Table 3 in the slides' layout, how sure it is, what is won back."""

from whence.analysis.glue_results import (
    FORMS,
    Cell,
    Difference,
    Glue,
    GlueRow,
    WonBack,
    mean_difference,
    mean_won_back,
    table,
    won_back,
)
from whence.analysis.slides_glue import KERNELS, MODEL, TABLE_3, is_of_the_slides
from whence.report.text_table import NONE, TextTable, minus

TITLES = {
    "sst2": "SST-2",
    "mnli": "MNLI",
    "qqp": "QQP",
    "stsb": "STS-B",
    "cola": "CoLA",
    "mrpc": "MRPC",
    "qnli": "QNLI",
    "rte": "RTE",
}
SURE = 0.05
MEAN = "mean of tasks"


def tables(results: Glue) -> list[TextTable]:
    """Everything there is to show, the slides' own numbers last where the model is theirs."""
    return [*score_tables(results), *certainty_tables(results), *slides_tables(results)]


def score_tables(results: Glue) -> list[TextTable]:
    """Table 3 in each form, and what is won back."""
    rows = table(results)
    found = [_scores(results, f, [row for row in rows if row.form == f]) for f in results.forms]
    recovered = _won_back(results)
    return found if recovered is None else [*found, recovered]


def certainty_tables(results: Glue) -> list[TextTable]:
    """How sure the differences of each form are."""
    rows = table(results)
    return [_certainty(results, f, [row for row in rows if row.form == f]) for f in results.forms]


def slides_tables(results: Glue) -> list[TextTable]:
    """The slides' own numbers, where the model is theirs."""
    same = is_of_the_slides(str(results.config["model"]))
    return [_slides(results, form) for form in results.forms] if same else []


def _scores(results: Glue, form: str, rows: list[GlueRow]) -> TextTable:
    head = ("task", "baseline", *(f"S = {s}" for s in results.kernels), "Δ", "Δ%", "seeds")
    cells, bold = [], set()
    for place, row in enumerate(rows):
        known = [cell.median for cell in (row.baseline, *row.cells) if cell is not None]
        for column, cell in enumerate((row.baseline, *row.cells), 1):
            if cell is not None and len(known) > 1 and cell.median == max(known):
                bold.add((place, column))
        scores = [_cell(cell) for cell in (row.baseline, *row.cells)]
        share = NONE if row.reduction is None else f"{row.reduction:.1%}"
        n = sorted({cell.n for cell in (row.baseline, *row.cells) if cell is not None})
        cells.append((task_title(row.task), *scores, _signed(row.delta), minus(share), _seeds(n)))
    return TextTable(
        f"({form}) {FORMS[form]}",
        head,
        tuple(cells),
        frozenset(bold),
        f"{model_name(results)} on GLUE's dev sets: median ± standard deviation over seeds, in "
        "percent. Δ is the best S less the baseline, Δ% the same over what the baseline lacks of "
        "100. A score is the mean of the task's metrics, as GLUE's own average takes it. Each "
        "cell's settings are the same but for S.",
    )


def _certainty(results: Glue, form: str, rows: list[GlueRow]) -> TextTable:
    found = [(task_title(row.task), one) for row in rows for one in row.differences]
    tests = sum(one is not None and one.p is not None for _, one in found)
    found += [(MEAN, mean_difference(results, form, s)) for s in results.kernels]
    cells = [(name, *difference_cells(one)) for name, one in found if one is not None]
    sure = [one.p is not None and one.p < SURE for _, one in found if one is not None]
    return TextTable(
        f"({form}) how sure: S less the baseline, seed by seed",
        ("task", "S", "difference", "95% interval", "p", "seeds better"),
        tuple(cells),
        frozenset((place, 2) for place, is_sure in enumerate(sure) if is_sure),
        "Mean difference over seeds with its 95% interval and p, by Student's paired test (bold: "
        f"p below {SURE}). Of {tests} tests without any effect {SURE * tests:.1f} would be below "
        f"{SURE} by chance. The last rows weigh tasks alike, with Welch's degrees of freedom. A "
        "test tells whether other seeds would give the same sign, not whether other rows would.",
    )


def _won_back(results: Glue) -> TextTable | None:
    found = won_back(results)
    if not found:
        return None
    means = [mean_won_back(results, s) for s in results.kernels]
    every = [*found, *(one for one in means if one is not None)]
    rows = []
    for task in (*results.tasks, ""):
        mine = {one.kernels: one for one in every if one.task == task}
        if mine:
            lost = minus(f"{next(iter(mine.values())).lost:.1f}")
            shares = (won_back_text(mine.get(s)) for s in results.kernels)
            rows.append((task_title(task) or MEAN, lost, *shares))
    return TextTable(
        "what kernels win back of the loss from (a) to (b)",
        ("task", "lost", *(f"S = {s}" for s in results.kernels)),
        tuple(rows),
        frozenset(),
        "Lost: mean points from the baseline of (a) to that of (b). Shares: how much of it (b) "
        "with S kernels wins back, with the 95% interval of resampled seeds; no interval where "
        "some seeds lose nothing. The last row is all that is won back over all that is "
        "lost.",
    )


def won_back_text(one: WonBack | None) -> str:
    """A share with its interval."""
    if one is None or one.share is None:
        return NONE
    inside = NONE if one.low is None else f"{100 * one.low:.0f} to {one.high:.0%}"
    return minus(f"{one.share:.0%} ({inside})")


def _slides(results: Glue, form: str) -> TextTable:
    known = TABLE_3[form]
    rows = []
    for task in results.tasks:
        if task in known:
            *scores, delta, share = known[task]
            cells = (*(f"{x:.1f}" for x in scores), f"+{delta:.1f}", f"{share:.1f}%")
            rows.append((task_title(task), *cells))
    return TextTable(
        f"({form}) the slides' own",
        ("task", "baseline", *(f"S = {s}" for s in KERNELS), "Δ", "Δ%"),
        tuple(rows),
        frozenset(),
        f"Table 3 of the slides: {MODEL}, the median of 5 runs.",
    )


def reasons(results: Glue) -> list[str]:
    """Why a job has no score, a line each."""
    return [
        f"{task_title(job.task)} ({job.form}), S = {job.kernels}, seed {job.seed}: {job.stopped}"
        for job in results.jobs
        if job.stopped
    ]


def task_title(task: str) -> str:
    """A task as papers write it."""
    return TITLES.get(task, task)


def model_name(results: Glue) -> str:
    """The last part of the model's name or folder."""
    return str(results.config["model"]).rstrip("/").rsplit("/", 1)[-1]


def _seeds(n: list[int]) -> str:
    return "0" if not n else str(n[0]) if len(n) == 1 else f"{n[0]} to {n[-1]}"


def _cell(cell: Cell | None) -> str:
    if cell is None:
        return NONE
    spread = "" if cell.spread is None else f" ± {cell.spread:.1f}"
    return minus(f"{cell.median:.1f}{spread}")


def difference_cells(found: Difference) -> tuple[str, ...]:
    """S, the difference, its interval, p, and the seeds that are better."""
    inside = NONE if found.low is None else f"{found.low:+.1f} to {found.high:+.1f}"
    better = f"{found.better} of {found.n}"
    return str(found.kernels), _signed(found.mean), minus(inside), p_text(found.p), better


def p_text(p: float | None) -> str:
    """A probability to two digits."""
    return NONE if p is None else "< 0.001" if p < 0.001 else f"{p:.2g}"


def _signed(number: float | None) -> str:
    return NONE if number is None else minus(f"{number:+.1f}")
