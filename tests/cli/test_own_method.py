"""A method of one's own at the command line, from a file in the current folder."""

import io
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner, Result

from lm_settings import flags, text_file, tiny
from own_method import own_module
from whence.cli.progress import line
from whence.cli.root import app


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current folder, which an installed command does not search for modules."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [part for part in sys.path if part not in ("", str(tmp_path))])
    with own_module(tmp_path):
        yield tmp_path


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_every_command_that_takes_a_method_takes_it() -> None:
    spec = "my_waves:Wave:period=3"
    found = json.loads(run("methods", "my_waves:Wave", "--json").stdout)
    assert (found["name"], found["summary"], found["parameters"]) == (
        "my_waves:Wave",
        "Waves of the lag.",
        12,
    )
    assert json.loads(run("explain", spec, "--json").stdout)["parameters"] == 12
    (row,) = json.loads(run("params", "--methods", spec, "--json").stdout)["rows"]
    assert (row["method"], row["count"]) == (spec, 12 * 12)
    (row,) = json.loads(run("criteria", "--methods", spec, "--json").stdout)["rows"]
    verdicts = {cell["name"]: cell["verdict"] for cell in row["criteria"]}
    assert row["method"] == spec
    assert verdicts["translation invariant"] is verdicts["data-driven"] is True


def test_its_name_is_printed_as_it_is() -> None:
    # rich would write a waving hand for :Wave:
    assert "my_waves:Wave:period=3" in run("params", "--methods", "my_waves:Wave:period=3").stdout


def test_progress_names_it_as_it_is() -> None:
    written = io.StringIO()
    line(Console(file=written), "50% my_waves:Wave:period=3: training")
    assert written.getvalue() == "50% my_waves:Wave:period=3: training\n"


def test_the_current_folder_is_searched_last_and_only_where_it_is_asked_for(folder: Path) -> None:
    (folder / "json").mkdir()
    (folder / "json" / "__init__.py").write_text("raise RuntimeError('taken for the real one')")
    before = list(sys.path)
    assert run("explain", "tisa").exit_code == 0
    assert sys.path == before
    assert run("explain", "my_waves:Wave").exit_code == 0
    assert sys.path == [*before, str(folder)]


@pytest.mark.parametrize(
    ("spec", "phrase"),
    [
        ("no_waves:Wave", "there is no module 'no_waves'"),
        ("my_waves:Waves", "the module 'my_waves' has no class 'Waves'"),
    ],
)
@pytest.mark.parametrize("command", ["criteria", "lm"])
def test_a_mistake_is_one_line(command: str, spec: str, phrase: str) -> None:
    result = run(command, "--methods", f"tisa,{spec}")
    assert (result.exit_code, result.stdout) == (2, "")
    assert phrase in result.stderr
    assert result.stderr.count("\n") == 1


def test_lm_trains_it_and_its_model_can_be_loaded(folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    config = tiny(text_file(folder), ("my_waves:Wave:period=3",), keep_models=True, steps=4)
    result = run("lm", *flags(config), "--out", "out", "--json")
    assert result.exit_code == 0, result.output
    (row,) = json.loads(result.stdout)["rows"]
    assert row["method"] == "my_waves:Wave:period=3"
    (model,) = Path("out/jobs").glob("*/model")
    loaded = AutoModelForCausalLM.from_pretrained(model)
    weights = [p for name, p in loaded.named_parameters() if name.endswith("Wave.weight")]
    assert len(weights) == config.n_layers
    assert all(bool((w != 1).any()) and bool(torch.isfinite(w).all()) for w in weights)
