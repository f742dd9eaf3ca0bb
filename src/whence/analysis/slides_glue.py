"""Table 3 of the TISA slides: ALBERT base v2 on GLUE's dev sets, the median of 5 runs."""

MODEL = "albert-base-v2"
KERNELS = (1, 3, 5)

# By form and task: baseline, S = 1, 3, 5, delta, and the relative error reduction in percent.
# Delta is the best S less the baseline; both were rounded from unrounded scores.
TABLE_3 = {
    "a": {
        "sst2": (92.9, 93.3, 93.1, 93.1, 0.4, 6.5),
        "mnli": (83.8, 84.1, 84.4, 84.8, 1.0, 5.9),
        "qqp": (88.2, 88.0, 88.3, 88.3, 0.1, 1.2),
        "stsb": (90.3, 90.4, 90.0, 90.4, 0.1, 1.5),
        "cola": (57.2, 57.0, 56.5, 58.5, 1.3, 2.9),
        "mrpc": (89.6, 90.1, 89.0, 90.1, 0.5, 5.3),
        "qnli": (91.6, 91.7, 91.4, 91.6, 0.1, 0.4),
        "rte": (72.9, 71.1, 73.6, 73.6, 0.7, 2.7),
    },
    "b": {
        "sst2": (85.1, 85.9, 85.8, 86.0, 0.9, 6.2),
        "mnli": (78.8, 80.9, 81.4, 81.6, 2.8, 13.4),
        "qqp": (86.3, 86.2, 86.5, 86.8, 0.5, 3.4),
        "stsb": (89.0, 89.0, 89.1, 89.1, 0.1, 0.3),
        "mrpc": (82.8, 83.1, 83.3, 83.1, 0.5, 3.3),
        "qnli": (86.6, 87.2, 87.4, 87.7, 1.1, 7.8),
        "rte": (62.1, 61.7, 62.5, 62.8, 0.7, 1.9),
    },
}


def is_of_the_slides(model: str) -> bool:
    """Whether a model, by its name or the name of its folder, is the one of the slides."""
    return model.rstrip("/").rsplit("/", 1)[-1] == MODEL
