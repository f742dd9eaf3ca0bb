"""`whence report`: every format for every kind of folder, and several folders on one page."""

from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from hostile_results import fine_tuned, trained
from inspections import inspection
from lm_jobs import job, results
from whence.cli.root import app
from whence.report.lm_report import LM_REPORT

HEADS = {"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF"}


def run(*words: object) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words])


def refused(result: Result, *parts: str) -> None:
    assert result.exit_code == 2, result.output
    assert result.stderr.count("\n") == 1
    for part in parts:
        assert part in result.stderr


@pytest.mark.parametrize("form", HEADS)
def test_figures_of_lm_have_the_format_that_was_asked_for(form: str, tmp_path: Path) -> None:
    trained().save(tmp_path / "lm.json")
    figures = tmp_path / "figures"
    figures.mkdir()
    for other in HEADS:
        (figures / f"length.{other}").write_bytes(b"old")
    (figures / "mine.png").write_bytes(b"mine")
    result = run("report", tmp_path, "--figures", form)
    assert result.exit_code == 0, result.output
    found = {path.name for path in figures.iterdir()}
    assert found == {f"length.{form}", f"attention.{form}", "mine.png"}
    for name in ("length", "attention"):
        assert (figures / f"{name}.{form}").read_bytes().startswith(HEADS[form])


def test_two_comparisons_are_one_page_that_says_how_they_differ(tmp_path: Path) -> None:
    first = results(job("a", 0, {16: 2.0, 32: 3.0}), job("b", 0, {16: 2.5, 32: 3.5}), steps=12)
    second = results(job("b", 0, {16: 1.25, 32: 1.5}), job("c", 0, {16: 9.0, 32: 9.5}), steps=34)
    for name, found in (("one", first), ("two", second)):
        found.save(tmp_path / name / "lm.json")
    out = tmp_path / "out"
    result = run("report", tmp_path / "one", tmp_path / "two", "--out", out)
    assert result.exit_code == 0, result.output
    page = (out / "page.html").read_text()
    assert "<td>steps</td><td>12</td><td>34</td>" in page
    assert "loss against length, all runs" in page  # the same data, so losses can be compared
    for text in ("one: Ranking", "two: Ranking", 'id="ranking-0"', 'id="ranking-1"', "1.250"):
        assert text in page
    assert {path.name for path in (out / "figures").iterdir()} >= {
        "one.length.png",
        "two.length.png",
    }
    assert not list((tmp_path / "one").glob("page*"))


def test_comparisons_on_other_data_are_not_drawn_into_one_plot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "whence.report.lm_report.LM_REPORT", replace(LM_REPORT, figures=lambda results: ())
    )
    for name in ("one", "two"):
        found = results(job("a", 0, {16: 2.0, 32: 3.0}), data=name, objective="causal")
        found.data["sha256"] = name
        found.save(tmp_path / name / "lm.json")
    run("report", tmp_path / "one", tmp_path / "two", "--out", tmp_path / "out")
    page = (tmp_path / "out" / "page.html").read_text()
    assert "not scored on the same tokens" in page
    assert "loss against length, all runs" not in page


def test_models_of_two_folders_are_one_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("whence.report.folder._drawings", lambda results, own: ())
    for name in ("one", "two"):
        inspection(f"models/{name}", n_heads=1, n=16).save(tmp_path / name / "a.json")
    folders = tmp_path / "one", tmp_path / "two"
    assert run("report", *folders, "--out", tmp_path / "out").exit_code == 0
    page = (tmp_path / "out" / "page.html").read_text()
    assert "models/one" in page
    assert "models/two" in page
    (tmp_path / "three").mkdir()
    inspection("models/one", n_heads=1, n=16).save(tmp_path / "three" / "b.json")
    refused(
        run("report", tmp_path / "one", tmp_path / "three", "--out", tmp_path / "new"),
        "models/one is in two of these folders",
    )
    assert not (tmp_path / "new").exists()


def test_folders_that_cannot_share_a_page_are_refused(tmp_path: Path) -> None:
    trained().save(tmp_path / "lm" / "lm.json")
    inspection(n_heads=1, n=16).save(tmp_path / "inspect" / "a.json")
    both = tmp_path / "lm", tmp_path / "inspect"
    refused(run("report", *both), "give it as --out")
    refused(run("report", *both, "--out", tmp_path / "out"), "one kind of results", "whence lm")
    fine_tuned().save(tmp_path / "glue" / "glue.json")
    mixed = tmp_path / "glue", tmp_path / "lm"
    refused(run("report", *mixed, "--out", tmp_path / "out"), "of whence glue", "of whence lm")
    fine_tuned().save(tmp_path / "more" / "glue.json")
    alike = tmp_path / "glue", tmp_path / "more"
    refused(run("report", *alike, "--out", tmp_path / "out"), "one folder of whence glue")
    replace(fine_tuned(), jobs=()).save(tmp_path / "more" / "glue.json")
    refused(run("report", tmp_path / "more"), "the whence glue that began there goes on")
    refused(run("report", both[0], both[0], "--out", tmp_path / "out"), "given twice")
    refused(run("report", both[0], "--figures", "jpg"), "Unknown format of the figures 'jpg'")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["glue", "inspect", "lm", "more"]
