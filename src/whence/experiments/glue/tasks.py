"""The tasks of GLUE: where their columns are, what their labels are, and how they are scored."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from whence.checks import require, unknown

Scores = dict[str, float]
LOWEST, HIGHEST = 0.0, 5.0  # scores of STS-B


@dataclass(frozen=True)
class Task:
    """One task in the official layout.

    `columns` names the text columns of a file with a header; `label` the one of the label. A task
    without a header has places instead. `labels` is empty for a regression. `dev` is the files to
    score on, each with the name that its metrics carry.
    """

    name: str  # on the command line and on the hub
    title: str  # in tables; also the folder in the official layout
    columns: tuple[str, ...]
    label: str
    labels: tuple[str, ...]
    metrics: Callable[[Sequence[float], Sequence[float]], Scores]
    hub_columns: tuple[str, ...]
    places: tuple[int, ...] | None = None  # text and label columns of a file without a header
    width: int | None = None  # its columns
    dev: tuple[tuple[str, str], ...] = (("dev", ""),)
    hub_dev: tuple[str, ...] = ("validation",)
    leaves_out_short_rows: bool = False  # official files with rows that break off, as the hub does

    @property
    def n_outputs(self) -> int:
        """Of the model's head."""
        return len(self.labels) or 1


def accuracy(found: Sequence[float], wanted: Sequence[float]) -> Scores:
    """The share of rows that are right, in percent."""
    from sklearn.metrics import accuracy_score

    return {"accuracy": 100 * float(accuracy_score(wanted, found))}


def matthews(found: Sequence[float], wanted: Sequence[float]) -> Scores:
    """Matthews' correlation, times 100; 0 where all predictions are the same."""
    from sklearn.metrics import matthews_corrcoef

    return {"Matthews": 100 * float(matthews_corrcoef(wanted, found))}


def f1_and_accuracy(found: Sequence[float], wanted: Sequence[float]) -> Scores:
    """F1 of the label 1, and accuracy."""
    from sklearn.metrics import f1_score

    return {"F1": 100 * float(f1_score(wanted, found, zero_division=0))} | accuracy(found, wanted)


def correlations(found: Sequence[float], wanted: Sequence[float]) -> Scores:
    """Pearson's and Spearman's correlation, times 100; 0 where all predictions are the same."""
    from scipy.stats import pearsonr, spearmanr

    if len(set(found)) < 2 or len(set(wanted)) < 2:
        return {"Pearson": 0.0, "Spearman": 0.0}
    return {
        "Pearson": 100 * float(pearsonr(found, wanted).statistic),
        "Spearman": 100 * float(spearmanr(found, wanted).statistic),
    }


YES_NO = ("0", "1")
ENTAILMENT = ("entailment", "not_entailment")
PAIR = ("sentence1", "sentence2")

# In the order of the slides' Table 3.
TASKS = {
    task.name: task
    for task in (
        Task("sst2", "SST-2", ("sentence",), "label", YES_NO, accuracy, ("sentence",)),
        Task(
            "mnli",
            "MNLI",
            PAIR,
            "gold_label",
            ("entailment", "neutral", "contradiction"),
            accuracy,
            ("premise", "hypothesis"),
            dev=(("dev_matched", "matched"), ("dev_mismatched", "mismatched")),
            hub_dev=("validation_matched", "validation_mismatched"),
        ),
        Task(
            "qqp",
            "QQP",
            ("question1", "question2"),
            "is_duplicate",
            YES_NO,
            f1_and_accuracy,
            ("question1", "question2"),
            leaves_out_short_rows=True,
        ),
        Task("stsb", "STS-B", PAIR, "score", (), correlations, PAIR),
        Task(
            "cola",
            "CoLA",
            ("sentence",),
            "label",
            YES_NO,
            matthews,
            ("sentence",),
            places=(3, 1),
            width=4,
        ),
        Task("mrpc", "MRPC", ("#1 String", "#2 String"), "Quality", YES_NO, f1_and_accuracy, PAIR),
        Task(
            "qnli",
            "QNLI",
            ("question", "sentence"),
            "label",
            ENTAILMENT,
            accuracy,
            ("question", "sentence"),
        ),
        Task("rte", "RTE", PAIR, "label", ENTAILMENT, accuracy, PAIR),
    )
}


def task_named(name: str) -> Task:
    """The task of a name."""
    require(name in TASKS, unknown("task", name, TASKS))
    return TASKS[name]
