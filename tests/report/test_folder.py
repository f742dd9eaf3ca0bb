"""A folder of results: read, drawn again, written as one."""

import dataclasses
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from inspections import inspection, without_table
from whence.analysis.comparison import compare
from whence.files import write_bytes
from whence.report import Results, read_folder, write_folder

BASE = inspection()


@pytest.fixture
def _no_ink(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests of which figures are there and which are not."""
    monkeypatch.setattr("whence.report.folder.save_figure", lambda _, path: write_bytes(path, b""))


@pytest.mark.usefixtures("_no_ink")
def test_a_folder_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    models = tuple(inspection(f"run/checkpoint-{step}", n_heads=1, n=16) for step in (10, 9))
    comparison = compare(models)
    page = write_folder(
        tmp_path / "out", Results(models, comparison), formats=("svg",), keep=models
    )
    assert page.is_file()
    back = read_folder(tmp_path / "out")
    assert [entry.model.name for entry in back.inspections] == [
        "run/checkpoint-9",
        "run/checkpoint-10",
    ]
    assert back.comparison is not None
    assert back.comparison.to_json() == comparison.to_json()
    assert back.inspections[1].to_json() == models[0].to_json()
    names = {path.name for path in (tmp_path / "out" / "figures").iterdir()}
    assert {"heat_maps.svg", "windows.svg", "steps.svg", "run--checkpoint-9.curves-0.svg"} <= names
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.usefixtures("_no_ink")
def test_figures_of_results_that_are_no_longer_there_go(tmp_path: Path) -> None:
    first, other = inspection("a", n_heads=1, n=16, layers=(0, 1)), without_table("b")
    write_folder(tmp_path, Results((first, other)), formats=("png", "svg"), keep=(first, other))
    figures = tmp_path / "figures"
    (figures / "mine.png").write_bytes(b"")
    again = dataclasses.replace(inspection("a", n_heads=1, n=16), fits=())
    results = Results((again,)).with_earlier(read_folder(tmp_path))
    write_folder(tmp_path, results, figures_of=(again,), keep=(again,))
    assert sorted(path.name for path in figures.iterdir()) == [
        "a.components.png",
        "a.curves-0.png",
        "a.matrices-0.png",
        "a.profiles-0.png",
        "b.profiles-0.png",
        "b.profiles-0.svg",
        "heat_maps.png",
        "mine.png",
        "windows.png",
    ]
    (tmp_path / "b.json").unlink()
    write_folder(tmp_path, read_folder(tmp_path))
    assert not list(figures.glob("b.*"))


def test_a_model_under_another_spelling_replaces_itself_and_two_models_share_no_file(
    tmp_path: Path,
) -> None:
    first, again = inspection("runs/a", n_heads=1, n=16), inspection("./runs/a/", n_heads=1, n=16)
    assert Results((again,)).with_earlier(Results((first,))).inspections == (again,)
    one, two = (inspection(f"{place}/x/y/z", n_heads=1, n=16) for place in "pq")
    with pytest.raises(ValueError, match=r"p/x/y/z and q/x/y/z would both .* x--y--z\.json"):
        write_folder(tmp_path / "out", Results((one, two)), keep=(one, two))
    assert not list(tmp_path.iterdir())


def test_nothing_is_written_where_a_figure_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "page.html").write_text("old")

    def broken(*_: object, **__: object) -> Figure:
        raise RuntimeError("no ink")

    monkeypatch.setattr("whence.report.folder.draw_windows", broken)
    with pytest.raises(RuntimeError, match="no ink"):
        write_folder(out, Results((BASE,)), keep=[BASE])
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "page.html"]
    assert (out / "page.html").read_text() == "old"


def test_a_broken_result_is_named_and_other_json_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text('[{"kind": "Inspection"}]')
    assert read_folder(tmp_path).inspections == ()
    (tmp_path / "half.json").write_text(inspection(n_heads=1).to_json()[:1000])
    with pytest.raises(ValueError, match=r"half\.json is not JSON"):
        read_folder(tmp_path)
    (tmp_path / "half.json").write_text('{"kind": "Inspection", "model": {}}')
    with pytest.raises(ValueError, match=r"half\.json: .*another version"):
        read_folder(tmp_path)
