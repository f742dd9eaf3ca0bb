"""What the page shows, without a browser: plots hold the right numbers, bad input is refused."""

import base64
import io
import json
import re
import shutil
from html import unescape
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib import colormaps
from matplotlib.colors import to_hex
from PIL import Image

from hostile_results import fine_tuned, trained
from own_method import own_module
from whence.analysis.translation_results import TestScores, Translation, TranslationJob
from whence.app import model_view, results_view
from whence.app.cards import problem, table
from whence.app.explorer import Explorer
from whence.app.methods_view import Choice, built, drawn, form, number_controls, written
from whence.app.settings import Settings
from whence.app.svg import Line, draw_lines, draw_matrix, draw_ranking
from whence.app.words import RandomWords
from whence.app.worker import _answer
from whence.colours import INFERNO, VIRIDIS
from whence.methods import METHODS, floater

WORDS = RandomWords(12)
SENTENCE = "I think therefore I am"


def numbers(html: str) -> dict[str, dict[str, Any]]:
    """The table of each plot, by the name of its files."""
    found = re.findall(r"data-name='([^']+)'.*?<template class='numbers'>(.*?)</template>", html)
    return {name: json.loads(unescape(text)) for name, text in found}


def matrix(found: dict[str, Any]) -> np.ndarray:
    return np.asarray([row[1:] for row in found["rows"]], dtype=float)


@pytest.mark.parametrize("name", METHODS)
def test_every_method_is_drawn_with_its_options_and_numbers(name: str) -> None:
    html = drawn(Choice(name, {}, n_heads=2, head=2, n=6), SENTENCE, WORDS)
    found = numbers(html)
    assert list(found) == ["lag-curve", "matrix", "attention-without", "attention-with"]
    assert len(found["matrix"]["rows"]) == 6
    for which in ("attention-without", "attention-with"):
        assert matrix(found[which]).sum(axis=1) == pytest.approx(np.ones(5), abs=1e-3)
    method = form(name)
    chosen = {control.key: control.value for control in method.controls if control.kind != "power"}
    assert written(method.name, chosen, method.defaults) == name


def test_a_number_that_is_moved_moves_the_curve_of_its_head_by_the_formula() -> None:
    moved = {"2:amplitude:0": 3.0, "2:deviation:0": 2.0, "2:offset:0": -5.0}
    choice = Choice("tisa:kernels=1,start=zero", moved, n_heads=3, head=2, n=9)
    rows = numbers(drawn(choice, SENTENCE, WORDS))["lag-curve"]["rows"]
    curve = {lag: y for name, lag, y in rows if name == "head 2"}
    expected = {lag: 3.0 * np.exp(-((lag + 5) ** 2) / 8) for lag in range(-8, 9)}
    assert curve == pytest.approx(expected, abs=1e-4)
    assert {y for name, _, y in rows if name != "head 2"} == {0.0}
    shown = {control.key: control.value for control in number_controls(choice)[1]}
    assert shown == pytest.approx(moved, abs=2e-3)


@pytest.mark.parametrize(
    ("spec", "moved"),
    [
        ("alibi", {"1:slope:0": 0.25}),
        ("kerple", {"1:p:0": 2.0}),
        ("t5:buckets=8,start=zero", {"1:table:3": 1.5}),
        ("tisa2:kernels=2", {"1:offset:1": 4.0}),
        ("fire", {"1:c:0": 0.7}),
    ],
)
def test_numbers_of_other_methods_can_be_moved_too(spec: str, moved: dict[str, float]) -> None:
    before, after = (built(Choice(spec, each, n_heads=2)) for each in ({}, moved))
    ((key, value),) = moved.items()
    _, name, place = key.split(":")
    found = getattr(after, name).detach()
    own = found if found.ndim == 0 else found[:, 0] if name == "table" else found[0]
    assert own.reshape(-1)[int(place)].item() == pytest.approx(value)
    assert not torch.equal(getattr(before, name), found)


def test_the_equation_of_floater_is_solved_once_for_all_plots_with_the_numbers_moved(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    solver, solved = floater._odeint(), []

    def counted(rate: Any, start: Any, times: Any, **options: Any) -> Any:
        solved.append(len(times))
        return solver(rate, start, times, **options)

    monkeypatch.setattr(floater, "_odeint", lambda: counted)
    number_controls(Choice("floater", {}, n=8))
    assert solved == []
    drawn(Choice("floater", {"1:nothing:0": 1.0}, n=8), "a b a", WORDS)
    assert solved == [17]


def test_without_position_a_repeated_word_attends_alike_and_with_tisa_it_does_not() -> None:
    found = numbers(drawn(Choice("tisa", {}, head=3), SENTENCE, WORDS))
    bare, placed = matrix(found["attention-without"]), matrix(found["attention-with"])
    assert bare[0] == pytest.approx(bare[3], abs=1e-6)
    assert np.abs(placed[0] - placed[3]).max() > 0.05


def test_a_causal_picture_has_no_key_after_the_query() -> None:
    found = numbers(drawn(Choice("alibi", {}, n=5, causal=True), SENTENCE, WORDS))
    assert found["matrix"]["rows"][0][2:] == [None] * 4
    assert matrix(found["attention-with"])[0] == pytest.approx([1, 0, 0, 0, 0])
    assert next(row[1] for row in found["lag-curve"]["rows"] if row[2] is None) == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"spec": "tisa:kernels=2000000000"}, "numbers; at most 4,000,000 can be shown"),
        ({"spec": "tisa:kernels=nan"}, "must be a whole number"),
        ({"spec": "rope:base=nan"}, "must be a finite number"),
        ({"spec": "rope:base=0"}, "base"),
        ({"spec": "tissa"}, "tisa"),
        ({"spec": "os:system"}, "no subclass"),
        ({"spec": "antigravity:fly"}, "not imported"),
        ({"spec": "x" * 1000}, "at most 300 letters"),
        ({"spec": ""}, "at most 300 letters"),
        ({"n": 10**9}, "from 1 to 128"),
        ({"n": float("nan")}, "from 1 to 128"),
        ({"n_heads": 1000}, "from 1 to 12"),
        ({"sentence": "word " * 200}, "at most 600"),
        ({"sentence": "a b " * 50}, "at most 48"),
        ({"sentence": "  "}, "write some words"),
        ({"moved": {"1:amplitude:0": float("nan")}}, "at most a million"),
        ({"moved": {"1:amplitude:0": 1e300}}, "at most a million"),
        ({"moved": {"1:deviation:0": -1.0}}, "above 0"),
    ],
)
def test_bad_input_is_one_line_for_the_page(arguments: dict[str, Any], said: str) -> None:
    explorer = Explorer(Settings(Path(), Path("results")), lambda what, share: None)
    explorer.__dict__["words"] = WORDS
    usual = {"spec": "tisa", "sentence": SENTENCE, "n": 8, "n_heads": 2, "head": 1}
    asked = usual | {"causal": False, "moved": {}} | arguments
    kind, text = _answer(explorer, "redrawn", asked)
    assert kind == "refused"
    assert said in text
    assert "\n" not in text
    assert "mistake in whence" not in text


def test_a_method_of_ones_own_is_imported_by_name_from_the_command_line_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with own_module(tmp_path):
        monkeypatch.syspath_prepend(tmp_path)
        name = "my_waves:Wave"
        explorer = Explorer(Settings(tmp_path, tmp_path, methods=(name,)), lambda *said: None)
        assert name in explorer.method_names()
        assert [control.key for control in form(name).controls] == ["period"]
        assert "svg" in drawn(Choice(f"{name}:period=3", {}, n=6), SENTENCE, WORDS)


def test_a_model_is_read_inside_of_the_root_or_by_a_hub_name_and_nowhere_else(
    tmp_path: Path,
) -> None:
    root, outside = tmp_path / "root", tmp_path / "outside"
    (root / "inside").mkdir(parents=True)
    outside.mkdir()
    (root / "link").symlink_to(outside)
    assert model_view.allowed_model("inside", root, "") == str(root / "inside")
    assert model_view.allowed_model(f"{root}/inside/", root, "") == str(root / "inside")
    assert model_view.allowed_model("org/model-2", root, "") == "org/model-2"
    assert model_view.allowed_model(str(outside), root, str(outside)) == str(outside)
    for name in (str(outside), "../outside", "inside/../../outside", "link", "~", "/etc/passwd"):
        with pytest.raises(ValueError, match="outside of"):
            model_view.allowed_model(name, root, "")
    absent = [(name, "there is no") for name in ("./absent", "~nobody-of-this-name/x")]
    for name, said in (*absent, ("", "no model"), ("a\0b", "control")):
        with pytest.raises(ValueError, match=said):
            model_view.allowed_model(name, root, "")


def test_results_are_read_strictly_and_a_missing_folder_says_so(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="there is no folder"):
        results_view.result_names(tmp_path / "absent")
    (tmp_path / "lm").mkdir()
    trained().save(tmp_path / "lm" / "lm.json")
    data = json.loads((tmp_path / "lm" / "lm.json").read_text())
    (tmp_path / "damaged.json").write_text(json.dumps(data | {"jobs": 3}))
    (tmp_path / "list.json").write_text("[1]")
    records = [{"contender": c, "n": n, "ms": {"median": n / 7}} for c in "<b" for n in (8, 16)]
    (tmp_path / "speed.json").write_text(json.dumps({"what": "<i>", "records": records}))
    names = results_view.result_names(tmp_path)
    assert names[0] == "lm/lm.json"
    found = numbers(results_view.shown(tmp_path, "lm/lm.json"))
    assert {"loss-by-length", "training", "methods"} <= found.keys()
    with pytest.raises(ValueError, match="jobs must be a list"):
        results_view.shown(tmp_path, "damaged.json")
    data["config"]["train_length"] = "long"
    (tmp_path / "damaged.json").write_text(json.dumps(data))
    with pytest.raises(ValueError, match="train_length"):
        results_view.shown(tmp_path, "damaged.json")
    assert "holds no object" in results_view.shown(tmp_path, "list.json")
    speed = results_view.shown(tmp_path, "speed.json")
    assert "&lt;i&gt;" in speed
    assert "<i>" not in speed
    assert numbers(speed)["records-1"]["rows"][0] == ["<", 8.0, pytest.approx(8 / 7, rel=1e-4)]
    for name in ("../secret.json", "/etc/hostname", "gone.json", ""):
        with pytest.raises(ValueError, match=r"outside|no longer|no result"):
            results_view.shown(tmp_path, name)


def test_results_of_glue_and_translation_are_tables_and_plots(tmp_path: Path) -> None:
    fine_tuned().save(tmp_path / "glue.json")
    translated().save(tmp_path / "translation.json")
    glue = numbers(results_view.shown(tmp_path, "glue.json"))
    assert any(name.startswith("glue-") for name in glue)
    found = numbers(results_view.shown(tmp_path, "translation.json"))
    assert found["bleu-test"]["rows"] == [["nope", 20.0, None], ["shaw:clip=4", 25.0, None]]
    assert [row[:2] for row in found["training"]["rows"]] == [["nope", 1.0], ["shaw:clip=4", 1.0]]


def translated() -> Translation:
    """Two positions, one seed each."""
    one = np.ones(1, np.float32)
    jobs = []
    for position, bleu in (("nope", 20.0), ("shaw:clip=4", 25.0)):
        scores = TestScores(
            "test", 1, 9.0, bleu, 50.0, 1.0, ("s",), np.zeros((0, 10), np.float32), ("a",)
        )
        job = (position, 0, 1e-3, "f", "", (scores,), 2.0, one, one, 5.0, 1, 100, 60.0, 1000, 10)
        jobs.append(TranslationJob(*job))
    config = {"positions": ["nope", "shaw:clip=4"], "tests": ["test"], "test_joined": []}
    config |= {"source": "en", "target": "de"}
    return Translation(config, {"longest_row": 10}, {}, tuple(jobs), ())


def test_every_result_in_the_repository_is_shown() -> None:
    folder = Path(__file__).parents[2] / "results"
    for name in results_view.result_names(folder):
        assert "<table" in results_view.shown(folder, name), name


def test_text_from_outside_is_text_in_plots_tables_and_errors() -> None:
    bad = "<script>alert(1)</script>'\"&"
    line = Line(bad, [0.0, 1.0], [0.0, 1.0])
    for svg in (
        draw_lines([line, line], title=bad, detail=bad, x_name=bad, y_name=bad).svg,
        draw_matrix(np.eye(2), title=bad, what=bad, names=[bad, bad]).svg,
        draw_ranking([bad], [1.0], title=bad, x_name=bad).svg,
        table([bad], [[bad]], name=bad),
        problem(bad),
    ):
        assert "<script" not in svg


def test_a_heat_map_has_the_colours_of_its_values_and_white_where_there_is_none() -> None:
    values = np.asarray([[0.0, 1.0], [np.nan, 0.5]])
    svg = draw_matrix(values, title="t", what="w", limits=(0.0, 1.0)).svg
    (data,) = re.findall(r"data:image/png;base64,([^']+)", svg)
    pixels = np.asarray(Image.open(io.BytesIO(base64.b64decode(data))).convert("RGB"))
    shown = [[to_hex(pixel / 255) for pixel in row] for row in pixels]
    assert shown[0] == [VIRIDIS[0], VIRIDIS[-1]]
    assert shown[1][0] == "#ffffff"
    assert np.abs(pixels[1, 1] / 255 - colormaps["viridis"](0.5)[:3]).max() < 0.02


@pytest.mark.parametrize(("name", "colours"), [("viridis", VIRIDIS), ("inferno", INFERNO)])
def test_the_colours_are_those_of_the_figures(name: str, colours: list[str]) -> None:
    assert colours == [to_hex(colormaps[name](place / 16)) for place in range(17)]


def test_gaps_and_constants_and_single_points_can_be_drawn() -> None:
    gap = Line("gap", [1.0, 2.0, 3.0, 4.0], [1.0, np.nan, 2.0, 0.0])
    drawing = draw_lines([gap], title="t", x_name="x", y_name="y", log_x=True, log_y=True)
    assert drawing.svg.count("<polyline") == 2  # 0 has no logarithm, and is left out
    assert drawing.rows[1] == ("gap", 2.0, None)
    assert "nan" not in drawing.svg.lower().replace("dominant", "")
    for values in ([], [np.nan], [5.0], [5.0, 5.0]):
        line = Line("a", list(range(len(values))), values)
        assert "NaN" not in draw_lines([line], title="t", x_name="x", y_name="y").svg
    assert "nan" not in draw_matrix(np.full((3, 3), np.nan), title="t", what="w").svg


def test_the_page_needs_no_file_that_a_wheel_would_lack() -> None:
    folder = Path(results_view.__file__).parent
    assert {"page.css", "page.js"} <= {path.name for path in folder.iterdir()}
    assert shutil.which("git") is None or not re.search(r"https?://(?!www\.w3)", _sources(folder))


def _sources(folder: Path) -> str:
    return "\n".join(path.read_text() for path in folder.glob("*.[pcj][ys]*"))
