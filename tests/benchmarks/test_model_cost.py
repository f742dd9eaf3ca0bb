"""What position costs a whole model: how it is measured, on sizes that any machine can run."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import model_cost
import training_turns
import translation_cost
from tables.model_cost import cost_findings as findings
from tables.model_cost import model_cost as table
from tables.model_cost import translation_cost as translation_table
from tables.results_folder import ResultsFolder

SIZES = {"layers": 1, "width": 32, "hidden": 64, "heads": 2, "vocabulary": 64, "tokens": 32}
SMALL = ["--device", "cpu", *(part for name, n in SIZES.items() for part in (f"--{name}", str(n)))]


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str | None]:
    """The modes of torch.compile, which compiles nothing and fails for T5."""
    modes: list[str | None] = []

    def compile_nothing(model: Any, *, mode: str | None, dynamic: bool) -> Any:
        modes.append(mode)
        if model.config.position == "t5":
            raise RuntimeError("it cannot be compiled")
        return model

    monkeypatch.setattr(torch, "compile", compile_nothing)
    monkeypatch.setattr(torch.compiler, "cudagraph_mark_step_begin", lambda: None)
    monkeypatch.setattr(torch._dynamo.config, "recompile_limit", 8)  # which the benchmark changes
    return modes


def measured(folder: Path, *arguments: str) -> dict[str, Any]:
    out = folder / "results" / "gpu"
    assert model_cost.main(["--out", str(out), *SMALL, *arguments]) == 0
    found: dict[str, Any] = json.loads((out / "model_cost.json").read_text())
    return found


@pytest.mark.slow
def test_a_method_that_fails_says_why_and_the_others_are_measured(
    tmp_path: Path,
    compiled: list[str | None],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(training_turns, "ROUNDS", 2)
    monkeypatch.setattr(training_turns, "TURN", 1)
    methods = "nope,tisa:kernels=2,start=zero,t5,nonsense"
    modes = "called,compiled,reduce-overhead"
    found = measured(tmp_path, "--lengths", "8,16", "--methods", methods, "--modes", modes)
    assert compiled.count("reduce-overhead") == compiled.count(None) == 2 * 3
    records = {(r["n"], r["mode"], r["method"]): r for r in found["records"]}
    assert len(records) == 2 * 3 * 4
    for (n, mode, method), record in records.items():
        if method == "nonsense":
            assert "Unknown method 'nonsense'" in record["skipped"]
        elif method == "t5" and mode != "called":
            assert record["skipped"] == "it cannot be compiled"
        else:
            assert record["skipped"] is None
            assert len(record["turns"]) == training_turns.ROUNDS
            nope = records[n, mode, "nope"]["ms"]["median"]
            cost = None if method == "nope" else record["ms"]["median"] / nope - 1
            assert record["cost"] == cost
            assert record["held"] in ((None,) if method == "nope" else (True, False))
    assert found["config"] | SIZES == found["config"]
    assert capsys.readouterr().out.splitlines()[-1].endswith("missed")
    shown = table(ResultsFolder(tmp_path))
    assert "| mode | | n = 8 | n = 16 |" in shown
    assert "- compiled, `t5`, n = 8: it cannot be compiled" in shown


@pytest.mark.slow
def test_models_in_processes_of_their_own_take_turns_too(tmp_path: Path) -> None:
    given = ("--lengths", "8,16", "--methods", "nope,t5,nonsense", "--modes", "called", "--apart")
    records = measured(tmp_path, *given, "--processes", "2")["records"]
    assert [(r["method"], r["n"]) for r in records[::2]] == [
        ("nope", 8),
        ("nonsense", 8),
        ("t5", 16),
    ]
    for record in records:
        if record["method"] == "nonsense":
            assert "Unknown method 'nonsense'" in record["skipped"]
        else:
            assert record["skipped"] is None
            assert len(record["turns"]) == training_turns.ROUNDS


def test_what_there_is_no_time_for_is_said(tmp_path: Path) -> None:
    given = ("--lengths", "8", "--methods", "nope", "--modes", "called", "--seconds", "0")
    (record,) = measured(tmp_path, *given)["records"]
    assert record["skipped"] == training_turns.SPENT


@pytest.mark.parametrize(
    ("method", "n", "mode", "limit"),
    [
        ("tisa:kernels=5", 128, "compiled", 0.03),
        ("t5", 2048, "called", 0.04),
        ("alibi", 512, "called", 0.04),
        ("shaw:clip=16", 512, "compiled", 0.09),
        ("shaw:clip=16", 2048, "compiled", 0.07),
        ("rope", 512, "called", 0.05),
        ("rope", 512, "compiled", None),
        ("nope", 512, "called", None),
    ],
)
def test_the_bars(method: str, n: int, mode: str, limit: float | None) -> None:
    assert model_cost.limit_of(method, n, mode) == limit


def test_a_translation_model_is_trained_on_padded_batches_against_sinusoids(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training_turns, "ROUNDS", 1)
    monkeypatch.setattr(training_turns, "TURN", 1)
    out = tmp_path / "results" / "gpu"
    given = ["--lengths", "8", "--methods", "sinusoidal,shaw:clip=2", "--modes", "called"]
    assert translation_cost.main([*SMALL, "--out", str(out), *given]) == 0
    plain, shaw = json.loads((out / "translation_cost.json").read_text())["records"]
    assert shaw["cost"] == shaw["ms"]["median"] / plain["ms"]["median"] - 1
    assert (plain["limit"], shaw["limit"], plain["held"]) == (None, 0.07, None)
    assert shaw["steps_a_second"] == 1e3 / shaw["ms"]["median"]
    shown = translation_table(ResultsFolder(tmp_path))
    assert f"| called | `shaw:clip=2` | {shaw['ms']['median']:.1f} ms (" in shown

    size = translation_cost.Size(vocabulary=9, tokens=320)
    batch = translation_cost.batch(8, size, "cpu")
    lengths = batch["attention_mask"].sum(dim=1)
    assert set(lengths.tolist()) == {6, 7, 8}
    assert batch["labels"].shape == batch["input_ids"].shape == (40, 8)
    assert (batch["input_ids"][batch["attention_mask"] == 0] == 0).all()


def test_a_cost_is_shown_with_its_promise_and_verdict(tmp_path: Path) -> None:
    assert table(ResultsFolder(tmp_path)).startswith("Not measured yet")

    def record(method: str, turns: list[float]) -> dict[str, Any]:
        return {"method": method, "n": 512, "mode": "called", "turns": turns}

    records = {
        "nope": record("nope", [10.0, 11.0, 10.0]),
        "tisa": record("tisa", [10.2, 10.3, 10.2]),
        "t5": record("t5", [10.5, 10.5, 19.0]),
        "rope": record("rope", []) | {"skipped": "no kernel"},
    }
    training_turns.judge(records, model_cost.STUDY)
    config = {**SIZES, "rounds": 3, "turn": 8, "dtype": "bfloat16"}
    machine = {"gpu": "a GPU", "torch": "2", "triton": "3", "commit": "abc"}
    path = ResultsFolder(tmp_path).path("gpu/model_cost.json")
    path.parent.mkdir(parents=True)
    found = {"config": config, "machine": machine, "records": list(records.values())}
    path.write_text(json.dumps(found))
    shown = table(ResultsFolder(tmp_path))
    assert "| called | `nope` | 10.0 ms |\n" in shown
    assert "| called | `tisa` | 10.2 ms, +2.0% (≤ 3% held) |\n" in shown
    assert "| called | `t5` | 10.5 ms, +5.0% (≤ 4% missed) |\n" in shown
    assert "| called | `rope` | - |\n\n<details markdown><summary>1 not measured, and why" in shown
    assert "</summary>\n\n- called, `rope`, n = 512: no kernel\n\n</details>\n" in shown
    assert "The turns of `nope` itself differ by up to 10% (called, n = 512)" in shown
    assert findings(ResultsFolder(tmp_path)).splitlines() == [
        "| | n = 512 |",
        "|---|---:|",
        "| `tisa` | +2.0% |",
        "| `t5` | **+5.0%** |",
        "",
        "Of 2 promised limits (3% to 4%), 1 hold; in bold the costs that are above theirs. "
        "Empty: not measured.",
    ]
    assert "a GPU, torch 2,\nTriton 3, commit abc" in shown
    records["t5"]["cost"] = 0.036  # of a limit of 4%
    path.write_text(json.dumps(found))
    assert findings(ResultsFolder(tmp_path)).splitlines()[-1] == (
        "At its limit: `t5`, n = 512, called, -4.5% to +90.0% in 95 of 100 draws of its turns and "
        "those of `nope`."
    )


def test_a_study_of_no_turns_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        model_cost.main(["--device", "cpu", "--rounds", "0"])
    assert "--rounds is a number of turns, at least 1; got 0" in capsys.readouterr().err
