"""Kernels that begin fitted to the model's own position embeddings, by what `whence distill` does.

In form (b) they stand in for the embeddings, which are left out and not moved into the words, so
that the baseline differs in nothing but the kernels. In form (a) they are in the places of the fit
at amplitude 0, so that no output changes at first.
"""

from collections.abc import Iterable
from pathlib import Path

from whence.distill.distilling import Plan, distill
from whence.distill.sequences import FIT_TOKENS, HELD_OUT_TOKENS
from whence.experiments.glue.config import GlueConfig
from whence.experiments.glue.rows import TaskRows

START = "start"  # the folder of the fitted models
LINES = 2 * (FIT_TOKENS + HELD_OUT_TOKENS)  # of the rows; a line has more than a token


def start_folder(out: Path, *, form: str, kernels: int) -> Path:
    """Where the model lies that jobs of this form with so many kernels begin with."""
    return out / START / f"form-{form}.kernels-{kernels}"


def fit_starts(config: GlueConfig, rows: Iterable[TaskRows], out: Path) -> None:
    """Fit, on the training rows of the tasks, every model that is not there yet."""
    text: str | None = None
    for form in config.forms:
        for kernels in sorted(s for s in config.kernels if s > 0):
            folder = start_folder(out, form=form, kernels=kernels)
            if folder.is_dir():
                continue
            text = _text(rows) if text is None else text
            plan = Plan(
                to=f"tisa:kernels={kernels}",
                rows="none",
                keep_table=config.keeps_positions(form),
                length=config.max_length,
            )
            distill(config.model, folder, plan, text=text, source="training rows of GLUE")


def _text(rows: Iterable[TaskRows]) -> str:
    """As many lines of each task, so that none is all there is to fit to."""
    lines = []
    for task in rows:
        texts = (*task.train.first[:LINES], *(task.train.second or ())[:LINES])
        lines += [" ".join(text.split()) for text in texts]
    return "\n".join(lines)
