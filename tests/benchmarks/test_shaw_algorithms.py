"""The three algorithms of Shaw's attention, measured on tiny sizes: what is written and drawn."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import shaw_algorithms
from tables.results_folder import ResultsFolder
from tables.shaw_algorithms import shaw_cpu, shaw_gpu
from whence.bench import peak_memory, timing
from whence.report import figure_files


def test_every_algorithm_is_measured_in_both_modes_and_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ticks = iter(range(1, 100))
    monkeypatch.setattr(timing, "timed", lambda *_, **__: timing.quantiles([float(next(ticks))]))
    monkeypatch.setattr(peak_memory, "peak_of", lambda point, threads: 1_000_000 * point.n)
    drawn: dict[str, Any] = {}

    def save(figure: Any, path: Path, *, dpi: int) -> Path:
        drawn["axes"] = figure.axes
        path.touch()
        return path

    monkeypatch.setattr(figure_files, "save_png", save)
    given = ["--device", "cpu", "--lengths", "8,16", "--tokens", "16", "--out"]
    assert shaw_algorithms.main([*given, str(tmp_path / "results")]) == 0
    results = json.loads((tmp_path / "results" / "cpu" / "shaw_algorithms.json").read_text())
    found = {(r["contender"], r["mode"], r["n"]): r for r in results["records"]}
    assert len(found) == 4 * 2 * 2
    assert all(r["skipped"] is None and r["error"] <= 2 for r in found.values())
    lines = [axes.get_lines() for axes in drawn["axes"]]
    assert [len(each) for each in lines] == [4, 4, 4, 4]
    assert lines[0][1].get_label() == "the equations as they read"
    naive = [found["naive", "both", n]["ms"]["median"] for n in (8, 16)]
    assert list(lines[2][1].get_ydata()) == naive
    shown = shaw_cpu(ResultsFolder(tmp_path))
    assert "| | n = 8 | n = 16 |\n" in shown
    assert f"| the equations as they read | {naive[0]:.2f} ms, 8 MB | " in shown
    assert "](../results/cpu/shaw_algorithms.png)" in shown
    assert shaw_gpu(ResultsFolder(tmp_path)).startswith("Not measured yet")


def test_what_cannot_be_done_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["--out", str(tmp_path / "results")]
    assert shaw_algorithms.main([*given, "--device", "cpu", "--figure-only"]) == 2
    assert "there is no " in capsys.readouterr().err
    if not torch.cuda.is_available():
        assert shaw_algorithms.main([*given, "--device", "cuda"]) == 2
        assert "give --device cpu" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
