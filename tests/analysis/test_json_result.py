"""Result files that a hand or another program changed: refused in one line, whatever is wrong."""

import copy
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from inspections import inspection, without_table
from lm_jobs import job, results
from whence.analysis.comparison import compare
from whence.analysis.json_result import read_json
from whence.analysis.results import Fit, HeadFits, Inspection, LagProfile, Toeplitzness
from whence.cli.root import app

WRONG: list[Any] = [
    *(None, True, -1, 0, 10**30, 1e308, "x", "", "9" * 50, [], {}, [[]], [1, "a"], {"a": 1}),
    {"shape": [2], "float32": "AAAA"},
    {"shape": [-1], "float32": ""},
    {"shape": [0], "float32": ""},
    {"shape": [3, 3], "float32": "A" * 48},
]


def places(data: Any, here: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    keys = data if isinstance(data, dict) else range(len(data)) if isinstance(data, list) else ()
    for key in keys:
        yield (*here, key)
        yield from places(data[key], (*here, key))


def damaged(data: Any, draw: random.Random) -> Any:
    """A copy with one value replaced or removed."""
    data = copy.deepcopy(data)
    *way, last = draw.choice(list(places(data)))
    at = data
    for key in way:
        at = at[key]
    if draw.random() < 0.2:
        del at[last]
    else:
        at[last] = draw.choice(WRONG)
    return data


def valid() -> dict[str, Any]:
    one, two = inspection(n_heads=2, n=16), inspection("b/checkpoint-5", n_heads=2, n=16, r2=0.5)
    compared = compare([one, two], {"base": 1.0, "checkpoint-5": 2.0})
    language = results(job("tisa", 0, {32: 1.0, 64: 2.0}), job("alibi", 0, {32: 1.0, 64: None}))
    found = {"a": one, "stated": without_table(relative=True), "comparison": compared}
    return {name: json.loads(x.to_json()) for name, x in {**found, "lm": language}.items()}


@pytest.mark.parametrize("seed", range(4))
def test_a_folder_of_damaged_results_is_one_line_or_a_page(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A few of them, without figures; more seeds may be run by hand."""
    monkeypatch.setattr("whence.report.folder._drawings", lambda results, own: ())
    draw, data = random.Random(seed), valid()
    for turn, name in enumerate(data):
        folder = tmp_path / str(turn)
        folder.mkdir()
        if name != "lm":
            (folder / "a.json").write_text(json.dumps(data["a"]))
        (folder / f"{name}.json").write_text(json.dumps(damaged(data[name], draw)))
        before = sorted(path.name for path in folder.iterdir())
        result = CliRunner().invoke(app, ["report", str(folder)])
        assert result.exit_code in (0, 2), result.exception
        if result.exit_code == 2:
            assert result.stderr.count("\n") == 1
            assert sorted(path.name for path in folder.iterdir()) == before


def test_damaged_data_is_a_result_or_a_value_error() -> None:
    draw, data = random.Random(0), valid()["a"]
    outcomes = set()
    for _ in range(300):
        try:
            Inspection.from_data(damaged(data, draw))
            outcomes.add("read")
        except ValueError as error:
            assert "\n" not in str(error)
            outcomes.add("refused")
    assert outcomes == {"read", "refused"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"r2": "0.5"}, r"Toeplitzness\.r2 must be a finite number, got '0\.5'"),
        ({"r2": True}, r"Toeplitzness\.r2 must be a finite number, got True"),
        ({"r2": float("nan")}, r"Toeplitzness\.r2 must be a finite number, got nan"),
        ({"r2": 10**400}, r"Toeplitzness\.r2 must be a finite number, got 1000"),
        ({"stop": 10**30}, r"Toeplitzness\.stop must be a whole number of 64 bits"),
        ({"stop": 8.0}, r"Toeplitzness\.stop must be a whole number of 64 bits, got 8\.0"),
        ({"stop": [8]}, r"Toeplitzness\.stop must be a whole number of 64 bits, got a list"),
        ({"stop": 0}, r"positions start\.\.stop - 1, got 0 and 0"),
    ],
)
def test_a_number_of_the_wrong_type_is_named(change: dict[str, Any], message: str) -> None:
    data = {**json.loads(Toeplitzness(0, 8, 0.5, None, None, None).to_json()), **change}
    with pytest.raises(ValueError, match=message):
        Toeplitzness.from_data(data)


def test_no_number_that_is_none_is_written() -> None:
    with pytest.raises(ValueError, match=r"Toeplitzness\.null_r2 is nan"):
        Toeplitzness(0, 8, 0.5, 0.5, float("nan"), None).to_json()


def test_parts_that_do_not_fit_together_are_refused() -> None:
    short, long = np.zeros(2, np.float32), np.zeros(3, np.float32)
    with pytest.raises(ValueError, match=r"vectors of one length: .*mean has the shape \[3\]"):
        LagProfile(0, 0, short, long, short, short, 0.5, 10)
    with pytest.raises(ValueError, match="a Fit of 2 kernels needs as many"):
        Fit(2, (1.0,), (1.0,), (0.0,), 0.0, 0.0, 1.0, 0.0)
    fit = Fit(1, (1.0,), (1.0,), (0.0,), 0.0, 0.0, 1.0, 0.0)
    with pytest.raises(ValueError, match=r"no fit with the chosen S = 3: \[1\]"):
        HeadFits(0, 0, (fit,), 3)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"[" * 100_000, "nested too deeply"),
        (b'{"a": ' * 100_000, "nested too deeply"),
        (b'{"kind": ', "not a whole result file"),
        (b"\xff\xfe", "not text in UTF-8"),
        (b"9" * 5000, "not a whole result file"),
        (b"", "not a whole result file"),
    ],
)
def test_a_file_that_is_no_json_is_one_line(content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_bytes(content)
    for read in (read_json, Inspection.load):
        with pytest.raises(ValueError, match=message) as refused:
            read(tmp_path / "a.json")
        assert "\n" not in str(refused.value)
    result = CliRunner().invoke(app, ["report", str(tmp_path)])
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)


def test_a_folder_in_place_of_a_file_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "a.json").mkdir()
    result = CliRunner().invoke(app, ["report", str(tmp_path)])
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert "cannot read" in result.stderr
