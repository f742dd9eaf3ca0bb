"""`distill`: TISA in place of a pretrained model's position table, fitted, tuned and measured."""

import copy
import platform
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import whence
from whence.analysis.results import HeadFits
from whence.analysis.tokenized_text import SHORTEST
from whence.checks import at_least, one_of, require
from whence.distill.closeness import closeness
from whence.distill.fitting import fit_layers, kernels_of, put_fits, silence
from whence.distill.model_folder import check_out, write_model_folder
from whence.distill.original import Original, load_original
from whence.distill.results import Distillation, HeadCurve, Stage, TextFacts
from whence.distill.sequences import Sequences, read_sequences
from whence.distill.stsb import LENGTH, Pairs, spearman
from whence.distill.table_mean import ROWS, move_rows
from whence.distill.tuning import BATCH, TRAIN, tune
from whence.hf.attaching import Attached, attach

Progress = Callable[[str, float], None]
PACKAGES = ("torch", "transformers", "accelerate", "numpy", "scipy")
LINES = 4096  # of a text that are read if no more are needed to tune


@dataclass(frozen=True)
class Plan:
    """The settings of `distill`; wrong ones are refused before any work.

    to          the method that replaces the table, such as "tisa:kernels=5"
    rows        which part of the table is moved into the word embeddings: see `move_rows`
    keep_table  keep the table, and add TISA with amplitudes of 0 and the fitted places of its
                kernels: the model's outputs do not change, and fine-tuning starts from there
    steps       steps of tuning; 0 is the fit alone
    train       what is tuned: "position", the kernels alone, or "all" weights
    length      the longest sequence of the text in tokens; at most the table's rows

        >>> Plan(to="tisa:kernels=3", steps=200).train
        'position'
    """

    to: str = "tisa:kernels=5"
    rows: str = "special"
    keep_table: bool = False
    steps: int = 0
    train: str = "position"
    length: int = 256
    seed: int = 0

    def __post_init__(self) -> None:
        kernels_of(self.to)
        one_of("rows", self.rows, ROWS)
        one_of("train", self.train, TRAIN)
        at_least(0, steps=self.steps, seed=self.seed)
        at_least(SHORTEST, length=self.length)
        require(
            not (self.keep_table and self.steps),
            "with the table kept the model gives what it gave before, so there is nothing to tune: "
            "leave out steps, or drop the table.",
        )


@dataclass(eq=False)
class Student:
    """A copy of the original on its way to the distilled model."""

    handle: Attached
    curves: tuple[HeadCurve, ...] = ()
    fits: tuple[HeadFits, ...] = ()


def distill(
    model: str | Path,
    out: Path,
    plan: Plan,
    *,
    text: str | None = None,
    source: str = "the text",
    task: Pairs | None = None,
    task_name: str | None = None,
    force: bool = False,
    progress: Progress | None = None,
) -> Distillation:
    """Distill the model of a folder or of a name on the hub into a folder, whole or not at all.

    `text` has one sequence in each line; without it a built-in text is read. Some lines are for
    fitting and tuning, and closeness is measured on the others. The folder loads with
    `whence.hf.from_pretrained`, and has what is returned here as distill.json.

        >>> plan, text = Plan(to="tisa:kernels=1", length=16), "the value of a list or set\\n" * 6
        >>> found = distill("tiny-bert", Path("bert-with-tisa"), plan, text=text)
        >>> found.position, [stage.name for stage in found.stages]
        ('tisa:kernels=1,start=zero', ['original', 'deleted', 'rows', 'fitted'])
    """
    say = progress or (lambda what, share: None)
    check_out(out, force=force)
    clock = _Clock()
    say("the model", 0.0)
    with clock.measure("load"):
        original = load_original(str(model))
    length = min(plan.length, original.n_positions)
    sequences = read_sequences(
        original,
        text,
        source="a built-in text" if text is None else source,
        length=length,
        most=max(LINES, plan.steps * BATCH),
        seed=plan.seed,
    )
    require(
        task is None or original.tokenizer is not None,
        f"{model} has no tokenizer, so it cannot read the sentences of a task.",
    )

    cut = min(LENGTH, original.n_positions)

    def stage(name: str, of: Any, share: float) -> Stage:
        say(f"how close: {name}", share)
        with clock.measure("measure"):
            score = None
            if task is not None:
                score = spearman(of, original.tokenizer, task, length=cut)
            return Stage(name, closeness(original.model, of, sequences.held_out), score)

    def bare(rows: str) -> Any:
        return stripped(original, sequences, rows=rows, position="nope").model

    stages = [stage("original", original.model, 0.05)]
    if not plan.keep_table:
        stages.append(stage("deleted", bare("none"), 0.1))
        if plan.rows != "none":
            stages.append(stage("rows", bare(plan.rows), 0.15))
    fit_until = 0.3 if plan.steps else 0.8
    with clock.measure("fit"):
        student = fitted(
            original,
            sequences,
            plan,
            progress=lambda done, of: say("fitting", 0.2 + (fit_until - 0.2) * done / of),
        )
    stages.append(stage("fitted", student.handle.model, fit_until))
    if plan.steps:
        with clock.measure("tune"):
            tune(
                original.model,
                student.handle,
                sequences,
                steps=plan.steps,
                train=plan.train,
                seed=plan.seed,
                progress=lambda done, of: say("tuning", 0.35 + 0.5 * done / of),
            )
        stages.append(stage("tuned", student.handle.model, 0.85))
    say("writing", 0.95)
    result = Distillation(
        model=str(model),
        family=str(original.checkpoint.config["model_type"]),
        sha256=original.checkpoint.sha256(),
        position=str(student.handle.position),
        n_parameters=student.handle.n_parameters(),
        n_positions=original.n_positions,
        options=dict(vars(plan)),
        text=facts(sequences),
        stages=tuple(stages),
        task=task_name if task is not None else None,
        curves=student.curves,
        fits=student.fits,
        notes=tuple(_noted(original, sequences, plan, length)),
        seconds=clock.seconds,
        versions=versions(),
    )
    write_model_folder(student.handle.model, original, result, out, force=force)
    return result


def stripped(original: Original, text: Sequences, *, rows: str, position: str) -> Attached:
    """A copy of the original with a method in place of its table."""
    model = copy.deepcopy(original.model)
    move_rows(original, model, text, rows=rows)
    with torch.random.fork_rng():  # what a method starts from is not kept
        return attach(model, position, keep_positions=False)


def fitted(
    original: Original,
    text: Sequences,
    plan: Plan,
    *,
    progress: Callable[[int, int], None] | None = None,
) -> Student:
    """A copy of the original with TISA fitted, in place of its table or silent beside it."""
    handle = stripped(original, text, rows=plan.rows, position=plan.to)
    silence(handle)
    curves, fits = fit_layers(original.model, handle, text, progress=progress)
    if plan.keep_table:
        with torch.random.fork_rng():
            handle = attach(copy.deepcopy(original.model), plan.to)
        put_fits(handle, fits)
        silence(handle)
    return Student(handle, curves, fits)


def versions() -> dict[str, str]:
    """What a result was made with."""
    found = {name: metadata.version(name) for name in PACKAGES}
    return {"whence": whence.__version__, "python": platform.python_version(), **found}


def facts(text: Sequences) -> TextFacts:
    """The sizes of a text."""
    return TextFacts(
        source=text.source,
        fitted=len(text.fit),
        fitted_tokens=sum(map(len, text.fit)),
        tuned=len(text.train),
        held_out=len(text.held_out),
        held_out_tokens=sum(map(len, text.held_out)),
        longest=text.longest,
    )


def _noted(original: Original, text: Sequences, plan: Plan, length: int) -> list[str]:
    """What a reader of the numbers must know."""
    notes = []
    if plan.length > length:
        notes.append(f"the table has {length} rows, so sequences are that long, not {plan.length}")
    if text.longest < length:
        notes.append(
            f"the longest sequence of the text has {text.longest} tokens: beyond that lag the "
            "kernels are what the fit happens to give. Give a text as long as the model will read"
        )
    config: Any = original.model.config
    tied = original.model.get_output_embeddings() is not None and config.tie_word_embeddings
    if tied and plan.rows == "special" and text.special and not plan.keep_table:
        notes.append(
            "the output weights are the word embeddings, so the logits of special tokens move with "
            "the rows that these tokens took over; those of words keep their differences"
        )
    return notes


class _Clock:
    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def measure(self, what: str) -> Iterator[None]:
        """Add the time of a block to what it is."""
        start = time.perf_counter()
        yield
        self.seconds[what] = self.seconds.get(what, 0.0) + time.perf_counter() - start
