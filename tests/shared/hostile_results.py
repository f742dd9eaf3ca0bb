"""Small results in which every kind of part is there, to be made hostile or damaged."""

import dataclasses

import numpy as np

from inspections import inspection, series, without_table
from lm_jobs import job, results
from whence.analysis.comparison import Comparison
from whence.analysis.criteria import CriteriaReport, Criterion, MethodCriteria
from whence.analysis.glue_results import Glue, GlueJob, SplitScores
from whence.analysis.lm_results import SCRATCH, SLIDING, LagView, Language, LengthLoss, Trace
from whence.analysis.results import Inspection, Toeplitzness
from whence.analysis.translation_results import (
    Difference,
    TestScores,
    Translation,
    TranslationJob,
)


def inspected() -> tuple[list[Inspection], Comparison, CriteriaReport]:
    """Two models, a series with scores, and a table of criteria."""
    cell = Criterion("inductive", 1.0, "4", True, False, "because")
    row = MethodCriteria("tisa", (cell,), 1.0)
    criteria = CriteriaReport((row,), {"inductive": "a rule"}, {}, {})
    small = inspection(n_heads=2, n=16, layers=(0, 1))
    return [small, without_table(relative=True)], series(), criteria


def trained() -> Language:
    """Two methods, one with a learned table, one that ended early."""
    gram = np.eye(16, dtype=np.float32)
    place = np.arange(16, dtype=np.float32)
    losses = tuple(
        LengthLoss(n, how, 2.0, 0.5, 10, place, place, "a reason")
        for n in (16, 32)
        for how in (SCRATCH, SLIDING)
    )
    traces = tuple(Trace(step, Toeplitzness(0, 16, 0.5, 0.4, 0.3, 0.2)) for step in (0, 1))
    full = job("a", 0, {}, toeplitz=traces, gram_before=gram, gram_after=gram)
    full = dataclasses.replace(full, losses=losses)
    return results(full, job("b", 0, {16: 1.0, 32: None}, stopped="a reason"))


def fine_tuned() -> Glue:
    """Two tasks in both forms, with and without a kernel, two seeds; one job ended early."""
    lag, steps = np.arange(-3, 4, dtype=np.float32), np.arange(2, dtype=np.float32)
    curve = LagView(0, "bias", lag, np.zeros((2, 7), np.float32), np.ones((2, 7), np.float32))
    jobs = [
        GlueJob(
            task=task,
            form=form,
            kernels=kernels,
            seed=seed,
            fingerprint="f",
            data_sha256="d",
            stopped="",
            score=score,
            scores=(SplitScores("", {"accuracy": score}, steps),),
            steps=steps,
            train_loss=steps,
            seconds=1.0,
            parameters=100,
            positional=6 * kernels,
            curves=(curve,) if kernels and seed == 0 else (),
        )
        for task in ("rte", "stsb")
        for form in ("a", "b")
        for kernels in (0, 1)
        for seed, score in enumerate((60.0 + kernels, 70.0 - (form == "b") + 3 * kernels))
    ]
    jobs[-1] = dataclasses.replace(jobs[-1], score=None, scores=(), stopped="a reason")
    config = {"model": "a/bert", "position": "tisa", "tasks": ["rte", "stsb"], "forms": ["a", "b"]}
    return Glue(config | {"kernels": [0, 1]}, {"tasks": {}}, {"gpu": "one"}, tuple(jobs))


def translated() -> Translation:
    """Three positions, two seeds, one test text as it is and joined; one job ended early."""
    steps, none = np.arange(2, dtype=np.float32), np.zeros((0, 10), np.float32)

    def scores(bleu: float) -> tuple[TestScores, ...]:
        return tuple(
            TestScores(
                "t", joined, 9.0 * joined, bleu / joined, 50.0, 1.0, ("b", "c"), none, ("x",)
            )
            for joined in (1, 2)
        )

    jobs = [
        TranslationJob(
            position=position,
            seed=seed,
            learning_rate=0.001,
            fingerprint="f",
            stopped="",
            scores=scores(30.0 + seed),
            valid_loss=2.0,
            steps=steps,
            train_loss=steps,
            steps_a_second=9.0,
            side_by_side=2,
            peak_bytes=10,
            seconds=1.0,
            parameters=100,
            positional=6,
        )
        for position in ("sinusoidal", "shaw:clip=16", "shaw:clip=16,values=false")
        for seed in (0, 1)
    ]
    jobs[-1] = dataclasses.replace(jobs[-1], valid_loss=None, scores=(), stopped="a reason")
    differences = (Difference("shaw:clip=16", "t", 1, 1.0, 0.5, 1.5, 0.01, 2),)
    positions = list(dict.fromkeys(job.position for job in jobs))
    config = {"source": "en", "target": "de", "positions": positions, "tests": ["t"]}
    data = {"longest_row": 12}
    return Translation(
        config | {"test_joined": [2]}, data, {"gpu": "one"}, tuple(jobs), differences
    )
