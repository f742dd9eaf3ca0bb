"""Bare tables: in files, and in memory."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

from whence.analysis.inspect import inspect, inspect_layers
from whence.analysis.results import Inspection
from whence.analysis.toeplitz import table_report
from whence.cli.root import app
from whence.report import draw_table

TABLE = torch.randn(40, 6, generator=torch.Generator().manual_seed(0))


def saved(folder: Path, name: str, table: torch.Tensor = TABLE) -> Path:
    path = folder / name
    if path.suffix == ".npy":
        np.save(path, table.numpy())
    else:
        save_file({"weight": table}, path)
    return path


@pytest.mark.parametrize("name", ["table.npy", "table.safetensors"])
def test_a_table_in_a_file_is_measured_as_in_memory(name: str, tmp_path: Path) -> None:
    found = inspect(saved(tmp_path, name))
    assert found.table is not None
    assert found.table.to_json() == table_report(TABLE).to_json()
    assert (found.model.family, found.model.n_layers, found.model.n_positions) == (
        "bare table",
        0,
        40,
    )
    assert inspect_layers(saved(tmp_path, name)).to_json() == found.to_json()
    assert Inspection.from_json(found.to_json()).to_json() == found.to_json()


def test_half_precision_and_whole_numbers_are_tables_too(tmp_path: Path) -> None:
    for dtype in (torch.bfloat16, torch.float16, torch.int64):
        found = inspect(saved(tmp_path, "a.safetensors", TABLE.to(dtype)))
        assert found.table is not None
        assert found.table.to_json() == table_report(TABLE.to(dtype).double()).to_json()


def test_the_command_prints_the_numbers_and_writes_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("whence.report.folder._drawings", lambda results, own: ())
    path = saved(tmp_path, "table.npy")
    result = CliRunner().invoke(app, ["inspect", str(path), "--out", str(tmp_path / "out")])
    assert result.exit_code == 0, result.output
    assert f"{path}: bare table, position by table, 40 positions, width 6" in result.stdout
    assert "40 positions, width 6" in (tmp_path / "out" / "page.html").read_text()


def test_a_report_has_defaults_a_short_repr_and_a_figure() -> None:
    found = table_report(TABLE.requires_grad_())
    assert (found.space, found.rows) == ("6 dimensions", "rows 0..39")
    assert repr(found).startswith("TableReport(40 positions in 6 dimensions: R^2 0.")
    assert len(repr(found)) < 160
    figure = draw_table(found, name="mine")
    assert figure.axes[0].get_title(loc="left") == "mine"


def bad(folder: Path) -> dict[str, tuple[Path, str]]:
    np.save(folder / "three.npy", np.zeros((3, 4, 5)))
    np.save(folder / "words.npy", np.array([["a", "b"]]))
    np.save(folder / "objects.npy", np.array([{}, []], dtype=object), allow_pickle=True)
    np.save(folder / "short.npy", np.zeros((2, 3)))
    np.save(folder / "nan.npy", np.full((8, 3), np.nan))
    (folder / "two.npy").write_bytes(b"ab")
    (folder / "empty.npy").write_bytes(b"")
    (folder / "two.safetensors").write_bytes(b"ab")
    save_file({"a": TABLE, "b": TABLE.clone()}, folder / "pair.safetensors")
    return {
        "none.npy": (folder / "none.npy", "there is no file"),
        "three.npy": (folder / "three.npy", "one row for each position, got the shape [3, 4, 5]"),
        "words.npy": (folder / "words.npy", "must hold a table of numbers"),
        "objects.npy": (folder / "objects.npy", "not a whole .npy file of plain numbers"),
        "short.npy": (folder / "short.npy", "has 2 positions"),
        "nan.npy": (folder / "nan.npy", "NaN or infinity in 24 of 24 numbers"),
        "two.npy": (folder / "two.npy", "not a whole .npy file"),
        "empty.npy": (folder / "empty.npy", "not a whole .npy file"),
        "two.safetensors": (folder / "two.safetensors", "not a whole safetensors file"),
        "pair.safetensors": (folder / "pair.safetensors", "has 2 tensors"),
    }


def test_a_file_that_holds_no_table_is_one_line(tmp_path: Path) -> None:
    for path, phrase in bad(tmp_path).values():
        result = CliRunner().invoke(app, ["inspect", str(path), "--out", str(tmp_path / "out")])
        assert (result.exit_code, result.stderr.count("\n")) == (2, 1), (path, result.exception)
        assert phrase in result.stderr
    assert not (tmp_path / "out").exists()
