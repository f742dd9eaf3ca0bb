"""The tables of `whence glue`: Table 3 in the slides' layout, how sure it is, what is won back."""

from whence.analysis.glue_results import FORMS, Cell, Difference, Glue, GlueRow, table, won_back
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


def tables(results: Glue) -> list[TextTable]:
    """Everything there is to show, the slides' own numbers last where the model is theirs."""
    rows = table(results)
    found = []
    for form in results.forms:
        mine = [row for row in rows if row.form == form]
        found += [_scores(results, form, mine), _certainty(results, form, mine)]
    recovered = _won_back(results)
    found += [recovered] if recovered is not None else []
    if is_of_the_slides(str(results.config["model"])):
        found += [_slides(results, form) for form in results.forms]
    return found


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
    cells, bold = [], set()
    for place, row in enumerate(rows):
        for column, found in enumerate(row.differences, 1):
            if found is not None and found.p is not None and found.p < SURE:
                bold.add((place, column))
        cells.append((task_title(row.task), *(_difference(found) for found in row.differences)))
    tests = sum(found is not None for row in rows for found in row.differences)
    return TextTable(
        f"({form}) how sure: S less the baseline, seed by seed",
        ("task", *(f"S = {s}" for s in results.kernels)),
        tuple(cells),
        frozenset(bold),
        "Mean difference over seeds with its 95% interval and p of Student's paired test (bold: "
        f"below {SURE}), then how many seeds are better. Of {tests} tests without any effect "
        f"{SURE * tests:.1f} would be below {SURE} by chance. It tells whether another seed would "
        "give the same sign, not whether other rows would.",
    )


def _won_back(results: Glue) -> TextTable | None:
    found = won_back(results)
    if not found:
        return None
    rows = []
    for task in results.tasks:
        mine = {one.kernels: one for one in found if one.task == task}
        if not mine:
            continue
        lost = next(iter(mine.values())).lost
        shares = []
        for s in results.kernels:
            one = mine.get(s)
            if one is None or one.share is None:
                shares.append(NONE)
                continue
            inside = NONE if one.low is None else f"{one.low:.0%} to {one.high:.0%}"
            shares.append(minus(f"{one.share:.0%} ({inside})"))
        rows.append((task_title(task), minus(f"{lost:.1f}"), *shares))
    return TextTable(
        "what kernels win back of what leaving the position embeddings out loses",
        ("task", "lost", *(f"S = {s}" for s in results.kernels)),
        tuple(rows),
        frozenset(),
        "Lost: mean points from the baseline of (a) to that of (b). Shares: how much of it (b) "
        "with S kernels wins back, with the 95% interval of resampled seeds; no interval where the "
        "loss itself is not told from 0.",
    )


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


def _difference(found: Difference | None) -> str:
    if found is None:
        return NONE
    inside = "" if found.low is None else f" [{found.low:+.1f}, {found.high:+.1f}]"
    p = "" if found.p is None else f" p = {found.p:.2g}"
    return minus(f"{found.mean:+.1f}{inside}{p}, {found.better} of {found.n}")


def _signed(number: float | None) -> str:
    return NONE if number is None else minus(f"{number:+.1f}")
