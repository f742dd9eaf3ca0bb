"""Result files of the wrong shape: refused in a sentence, or drawn; never another error."""

import copy
import json
import math
import random
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from hostile_results import fine_tuned, inspected, trained, translated
from whence.analysis.glue_results import Glue
from whence.analysis.json_result import Array, Result
from whence.cli.root import app
from whence.report.checked import check_parts
from whence.report.folder import _drawings, read_folder
from whence.report.glue_report import GLUE_REPORT
from whence.report.lm_report import LM_REPORT
from whence.report.page import make_page
from whence.report.translation_report import TRANSLATION_REPORT

WRONG: tuple[Any, ...] = (
    *(
        None,
        True,
        -1,
        0,
        7,
        10**40,
        2.5,
        math.nan,
        math.inf,
        "",
        "x",
        [],
        {},
        [[]],
        ["x"],
        [1, None],
    ),
    {"shape": [0], "float32": ""},
    {"shape": [1, 2, 1], "float32": "AAAAAAAAAAA="},
    {"shape": [2], "float32": "AADAfwAAwH8="},
)


def places(data: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The path of every value inside of JSON."""
    keys = data if isinstance(data, dict) else range(len(data)) if isinstance(data, list) else ()
    return [found for key in keys for found in [(*path, key), *places(data[key], (*path, key))]]


def damaged(data: Any, rng: random.Random) -> Any:
    """A copy with one value or two replaced, removed, doubled, or taken from elsewhere."""
    data = copy.deepcopy(data)
    for _ in range(rng.choice((1, 1, 2))):
        *path, last = rng.choice([path for path in places(data) if path != ("kind",)])
        holder = data
        for key in path:
            holder = holder[key]
        what = rng.choice(("wrong", "wrong", "remove", "double", "other"))
        if what == "wrong":
            holder[last] = copy.deepcopy(rng.choice(WRONG))
        elif what == "remove":
            del holder[last]
        elif what == "double" and isinstance(holder, list):
            holder.append(copy.deepcopy(holder[last]))
        else:
            *other, end = rng.choice(places(data))
            source = data
            for key in other:
                source = source[key]
            holder[last] = copy.deepcopy(source[end])
    return data


def drawn(folder: Path, *, figures: bool) -> None:
    """All that `whence report` makes of a folder, without writing."""
    reports = (LM_REPORT, GLUE_REPORT, TRANSLATION_REPORT)
    experiment = next((one for one in reports if one.is_in(folder)), None)
    if experiment is not None:
        results = experiment.read(folder)
        experiment.page(results)
        experiment.formatted(results, "latex")
        drawings = list(experiment.figures(results))
    else:
        found = read_folder(folder)
        if not found.inspections:
            return
        make_page(found.inspections, comparison=found.comparison, criteria=found.criteria)
        drawings = list(_drawings(found, found.inspections))
    for _, draw in drawings if figures else ():
        draw().draw_without_rendering()


def files() -> dict[str, dict[str, Any]]:
    models, comparison, criteria = inspected()
    named = {"a.json": models[0], "b.json": models[1], "c.json": comparison, "d.json": criteria}
    return {name: json.loads(result.to_json()) for name, result in named.items()}


FILES = files()
SWEEPS = {"lm.json": trained(), "glue.json": fine_tuned(), "translation.json": translated()}


def attempt(seed: int, folder: Path, *, figures: bool) -> str | None:
    """The message of the refusal of one damaged folder; None if it was drawn."""
    rng = random.Random(seed)
    if seed % 2:
        name = rng.choice(list(SWEEPS))
        data = json.loads(SWEEPS[name].to_json())
        (folder / name).write_text(json.dumps(damaged(data, rng)))
    else:
        hit = rng.choice(list(FILES))
        for name, data in FILES.items():
            (folder / name).write_text(json.dumps(damaged(data, rng) if name == hit else data))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # matplotlib's, of numbers that it leaves out
        try:
            drawn(folder, figures=figures)
        except ValueError as error:
            return str(error)
    return None


@pytest.mark.parametrize(
    ("seeds", "figures"),
    [(range(60), False), pytest.param(range(1000, 1080), True, marks=pytest.mark.slow)],
)
def test_damaged_results_are_refused_in_a_sentence_or_drawn(
    seeds: range, figures: bool, tmp_path: Path
) -> None:
    refused = []
    for seed in seeds:
        folder = tmp_path / str(seed)
        folder.mkdir()
        message = attempt(seed, folder, figures=figures)
        refused += [] if message is None else [message]
    assert len(refused) > 25
    assert all(".json" in message for message in refused)


def ones(*shape: int) -> Array:
    return np.ones(shape, np.float32)


def glue_with(**changes: Any) -> Glue:
    found = fine_tuned()
    return replace(found, config=found.config | changes)


MODELS, COMPARISON, CRITERIA = inspected()
MODEL, LANGUAGE = MODELS[0], trained()
HEAD, FITS, TABLE, JOB = MODEL.heads[0], MODEL.fits[0], MODEL.table, LANGUAGE.jobs[0]
assert TABLE is not None
FEWER = replace(JOB.losses[0], position=ones(2), by_position=ones(2))
SHORTER = replace(JOB.attention[0], lag=ones(1), before=ones(2, 1), after=ones(2, 1))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: replace(HEAD, curve=ones(3)), r"HeadReport needs .* curve has the shape \[3\]"),
        (lambda: replace(HEAD, matrix=ones(2, 3)), "HeadReport.matrix"),
        (lambda: replace(HEAD, lag=ones(2, 2)), r"lag has the shape \[2, 2\]"),
        (lambda: replace(HEAD, matrix=ones(0, 0)), r"HeadReport.matrix .* \[0, 0\]"),
        (
            lambda: replace(HEAD, matrix=np.nan * ones(2, 2)),
            "HeadReport.matrix has no finite number",
        ),
        (lambda: replace(HEAD, layer=10**40), "HeadReport.layer is a number of 41 digits"),
        (
            lambda: replace(TABLE, whole=replace(TABLE.whole, stop=0)),
            "positions start..stop - 1, got 0 and 0",
        ),
        (lambda: replace(FITS, chosen=9), r"chosen S = 9: \[1, 2\]"),
        (lambda: replace(FITS.fits[1], offset=(1.0,)), "a Fit of 2 kernels needs as many"),
        (lambda: replace(FITS.fits[0], sharpness=(-1.0,)), "negative sharpness"),
        (lambda: replace(COMPARISON, points=()), "two models or more"),
        (
            lambda: replace(COMPARISON, points=(replace(COMPARISON.points[0], score=None),) * 2),
            "needs a score",
        ),
        (lambda: replace(CRITERIA, rules={}), "'tisa' has 1 criteria of 0 rules"),
        (
            lambda: replace(LANGUAGE, config={**LANGUAGE.config, "steps": "many"}),
            "config.steps must be a whole number above 0, got 'many'",
        ),
        (
            lambda: replace(LANGUAGE, config={**LANGUAGE.config, "train_length": 17}),
            r"train_length, 17, is not among config.eval_lengths",
        ),
        (
            lambda: replace(LANGUAGE, config={**LANGUAGE.config, "eval_lengths": 16}),
            "eval_lengths must be a list of whole numbers",
        ),
        (
            lambda: replace(LANGUAGE, data={"train_tokens": "1e3"}),
            "train_tokens must be a whole number",
        ),
        (
            lambda: replace(LANGUAGE, jobs=(JOB, replace(JOB, steps=ones(3)))),
            "Job.train_loss has 2",
        ),
        (
            lambda: replace(LANGUAGE, jobs=(JOB, replace(JOB, seed=1, losses=(FEWER,)))),
            "seeds of 'a' have losses at different numbers of positions",
        ),
        (
            lambda: replace(LANGUAGE, jobs=(replace(JOB, attention=(JOB.attention[0], SHORTER)),)),
            "layers of 'a' have attention at different numbers of lags",
        ),
        (lambda: glue_with(kernels=[0, [1]]), "config.kernels must be a list"),
        (lambda: glue_with(forms=["a", "c"]), "config.forms must be a list"),
        (lambda: glue_with(tasks=["rte", "rte"]), "config.tasks names one of them twice"),
        (lambda: glue_with(model=7), "config.model must be a word"),
    ],
)
def test_each_part_that_does_not_fit_is_named(make: Callable[[], Result], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_parts(make())


def test_whole_results_fit(tmp_path: Path) -> None:
    for result in (*MODELS, COMPARISON, CRITERIA, *SWEEPS.values()):
        check_parts(result)
    for path in sorted(Path("results/lm").glob("*/lm.json")):
        LM_REPORT.read(path.parent)
    if GLUE_REPORT.is_in(Path("results/glue")):
        GLUE_REPORT.read(Path("results/glue"))


@pytest.mark.parametrize(
    "content", [b"\xff\xfe", b"[" * 100_000, b'{"kind": ["Inspection"]}', b'{"kind": "Inspection"}']
)
def test_a_file_that_is_no_result_is_one_line_and_leaves_nothing(
    content: bytes, tmp_path: Path
) -> None:
    folder = tmp_path / "results"
    folder.mkdir()
    for name in ("lm.json", "a.json"):
        (folder / name).write_bytes(content)
        found = CliRunner().invoke(app, ["report", str(folder), "--out", str(tmp_path / "out")])
        assert found.exit_code == 2
        assert found.stderr.startswith("whence: ")
        assert found.stderr.count("\n") == 1
        assert sorted(path.name for path in tmp_path.rglob("*")) == [name, "results"]
        (folder / name).unlink()
