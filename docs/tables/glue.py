"""One real model on GLUE with TISA and without, in the layout of the slides' Table 3."""

from dataclasses import replace
from statistics import fmean

from tables.results_folder import MISSING, ResultsFolder
from whence.analysis.glue_results import (
    DROPPED,
    KEPT,
    Glue,
    GlueJob,
    mean_difference,
    mean_won_back,
    table,
)
from whence.analysis.slides_glue import KERNELS, MODEL, TABLE_3
from whence.report.glue_table import (
    MEAN,
    SURE,
    difference_cells,
    tables,
    task_title,
    won_back_text,
)
from whence.report.text_table import NONE, TextTable, markdown

RATES = ("5e-4", "1.5e-3", "5e-3", "1.5e-2")
FILE = "glue/glue.json"
FITTED = "glue/followup/distilled.json"


def glue_kept(stored: ResultsFolder) -> str:
    """Form (a): scores, and how sure they are."""
    return _titled(stored, "(a)")


def glue_dropped(stored: ResultsFolder) -> str:
    """Form (b): scores, and how sure they are."""
    return _titled(stored, "(b)")


def glue_won_back(stored: ResultsFolder) -> str:
    """How much of what leaving the position embeddings out loses the kernels win back."""
    return _titled(stored, "what kernels win back")


def glue_setting(stored: ResultsFolder) -> str:
    """How the jobs were run, in a sentence or two."""
    path = stored.path(FILE)
    if not path.is_file():
        return _missing()
    results = Glue.load(path)
    config, machine = results.config, results.machine
    rows = ", ".join(f"{name} {facts['train']:,}" for name, facts in results.data["tasks"].items())
    own = "; ".join(
        f"{task}: {', '.join(f'{name} {number:g}' for name, number in numbers.items())}"
        for task, numbers in config["exceptions"].items()
    )
    return (
        f"{len(results.jobs)} jobs on {machine.get('gpu', machine.get('cpu'))}, torch "
        f"{machine.get('torch')}. {config['epochs']:g} epochs, batches of {config['batch']} "
        f"({own}), learning rate {config['learning_rate']:g} and {config['position_rate']:g} for "
        f"the kernels, start {config['start']}, rows cut at {config['max_length']} tokens. "
        f"Training rows: {rows}.\n"
    )


def glue_search(stored: ResultsFolder) -> str:
    """Learning rates that were tried first, with S = 3 and without."""
    labels = {
        "rate_5e-5": "weights 5e-5",
        "rate_2e-4": "weights 2e-4",
        **{f"kernel_rate_{rate}": f"weights 1e-4, kernels {rate}" for rate in RATES},
    }
    tasks = ("stsb", "cola", "mrpc")
    head = ("learning rates", *(f"{task_title(task)} ({f})" for task in tasks for f in "ab"))
    rows = []
    for name, label in labels.items():
        path = stored.path(f"glue/search/{name}.json")
        if not path.is_file():
            return _missing()
        found = Glue.load(path)
        rows.append((label, *(_pair(found, task, form) for task in tasks for form in "ab")))
    caption = (
        "Without kernels → with S = 3 where both were run, on the dev sets. Mean over the seeds "
        "that both have, one or two: the search was cut off by its time."
    )
    return markdown(TextTable("", head, tuple(rows), frozenset(), caption)) + "\n"


def glue_chances(stored: ResultsFolder) -> str:
    """Form (b) with S = 3 in settings that may suit the kernels better."""
    settings = {
        "kernels at 5e-3": "kernel_rate_5e-3",
        "kernels at 1.5e-2": "kernel_rate_1.5e-2",
        "6 epochs": "epochs_6",
        "start fitted to the model's table": "distilled",
    }
    paths = {label: stored.path(f"glue/followup/{name}.json") for label, name in settings.items()}
    if not all(path.is_file() for path in paths.values()):
        return MISSING.format("whence glue --config results/glue/followup/distilled.toml")
    rows = []
    for label, path in ({"as above": stored.path(FILE)} | paths).items():
        results = Glue.load(path)
        place = results.kernels.index(3)
        for row in (row for row in table(results) if row.form == DROPPED):
            found = row.differences[place]
            if found is not None:
                scores = (results.scores(row.task, DROPPED, s).values() for s in (0, 3))
                means = (f"{fmean(values):.1f}" for values in scores)
                cells = (*means, *difference_cells(found)[1:])
                rows.append((task_title(row.task), label, *cells))
    tried = {row[0] for row in rows if row[1] != "as above"}
    order = [task_title(task) for task in Glue.load(stored.path(FILE)).tasks]
    rows = sorted((row for row in rows if row[0] in tried), key=lambda row: order.index(row[0]))
    head = ("task", "setting", "S = 0", "S = 3", "difference", "95% interval", "p", "seeds better")
    caption = (
        "Form (b), means over seeds. S = 0 of a setting that only kernels feel is that of above."
    )
    return markdown(TextTable("", head, tuple(rows), frozenset(), caption)) + "\n"


def glue_fitted(stored: ResultsFolder) -> str:
    """What S = 3 wins back from a start fitted to the model's table, and from zero."""
    paths = [stored.path(name) for name in (FILE, FITTED)]
    if not all(path.is_file() for path in paths):
        return MISSING.format("whence glue --config results/glue/followup/distilled.toml")
    zero, fitted = map(Glue.load, paths)
    kept = tuple(job for job in zero.jobs if job.form == KEPT)
    fitted = replace(fitted, jobs=(*kept, *fitted.jobs))
    # The zero start takes the place of the baseline, so that the fitted one is held against it.
    against = replace(fitted, jobs=(*_of_three(zero, as_kernels=0), *_of_three(fitted)))
    groups = {task_title(task): (task,) for task in zero.tasks}
    groups |= {MEAN: zero.tasks, "mean without RTE": tuple(x for x in zero.tasks if x != "rte")}
    rows, bold = [], set()
    for place, (name, tasks) in enumerate(groups.items()):
        only = zero.config | {"tasks": tasks}
        shares = [mean_won_back(replace(one, config=only), 3) for one in (zero, fitted)]
        found = mean_difference(replace(against, config=only), DROPPED, 3)
        if shares[0] is None or found is None:
            raise ValueError(f"{FILE} and {FITTED} have no seed of {name} in common.")
        if found.p is not None and found.p < SURE:
            bold.add((place, 4))
        lost = f"{shares[0].lost:.1f}"
        rows.append((name, lost, *map(won_back_text, shares), *difference_cells(found)[1:]))
    caption = (
        "Form (b), S = 3. Lost, and the shares of it that are won back, as in the table above; "
        "then points of the fitted start less those of the start at zero, seed by seed, by "
        f"Student's paired test (bold: p below {SURE})."
    )
    head = ("task", "lost", "from zero", "fitted", "fitted less zero", "95% interval", "p")
    found_table = TextTable("", (*head, "seeds better"), tuple(rows), frozenset(bold), caption)
    return markdown(found_table) + "\n"


def glue_slides(stored: ResultsFolder) -> str:
    """The slides' own numbers, of another model, for the tasks that were run here."""
    path = stored.path(FILE)
    if not path.is_file():
        return _missing()
    rows = []
    for task in Glue.load(path).tasks:
        cells = [task_title(task)]
        for form in "ab":
            base, *scores = TABLE_3[form].get(task, (None,))
            best = max(scores[: len(KERNELS)], default=None)
            known = base is not None and best is not None
            cells += [f"{base:.1f}", f"{best:.1f}", f"+{scores[-2]:.1f}"] if known else [NONE] * 3
        rows.append(tuple(cells))
    columns = (f"({form}) {what}" for form in "ab" for what in ("baseline", "best S", "Δ"))
    caption = f"Table 3 of the slides: {MODEL}, medians of 5 runs. They give no CoLA in form (b)."
    found = TextTable("", ("task", *columns), tuple(rows), frozenset(), caption)
    return markdown(found) + "\n"


def _of_three(results: Glue, *, as_kernels: int = 3) -> tuple[GlueJob, ...]:
    """The jobs of form (b) with S = 3, under another number of kernels if wanted."""
    jobs = (job for job in results.jobs if (job.form, job.kernels) == (DROPPED, 3))
    return tuple(replace(job, kernels=as_kernels) for job in jobs)


def _pair(results: Glue, task: str, form: str) -> str:
    base, ours = (results.scores(task, form, s) for s in (0, 3))
    seeds = sorted(base.keys() & ours.keys()) if ours else sorted(base)
    means = [fmean(one[seed] for seed in seeds) for one in (base, ours) if one and seeds]
    return " → ".join(f"{mean:.1f}" for mean in means) or NONE


def _titled(stored: ResultsFolder, start: str) -> str:
    path = stored.path(FILE)
    if not path.is_file():
        return _missing()
    found = [one for one in tables(Glue.load(path)) if one.title.startswith(start)]
    return "\n\n".join(markdown(replace(one, title="")) for one in found) + "\n"


def _missing() -> str:
    return MISSING.format("whence glue --config results/glue/glue.toml --out results/glue")
