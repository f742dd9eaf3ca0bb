"""`whence glue` at the command line: what it prints, writes, refuses, and leaves as it was."""

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner, Result

from glue_files import write_glue, write_model
from undrawn import undrawn
from whence.analysis.glue_results import Glue
from whence.cli.root import app


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def fails_with(result: Result, *phrases: str) -> None:
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    last = result.stderr.splitlines()[-1]
    assert last.startswith("whence: ")
    for phrase in phrases:
        assert phrase in last


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows, a model and a finished run in both forms, not to be changed."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("glue")
    write_glue(folder / "data", "rte", "stsb")
    write_model(folder / "albert-base-v2", "albert", num_hidden_layers=2)
    with undrawn():
        result = run("glue", *options(folder), "--out", folder / "out")
    assert result.exit_code == 0, result.output
    return folder


def options(files: Path) -> list[object]:
    fixed = "--forms a,b --kernels 0,1 --tasks rte,stsb --seeds 1 --epochs 1,stsb=0.5 --batch 6"
    given = [*fixed.split(), "--max-length", 16, "--device", "cpu", "--learning-rate", 0.001]
    return [*given, "--model", files / "albert-base-v2", "--data", files / "data"]


def test_the_command_writes_tables_page_figures_and_json(files: Path) -> None:
    out = files / "out"
    result = run("glue", *options(files), "--out", out)  # all jobs are done: nothing is trained
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines()[-1] == f"wrote {out / 'page.html'}"
    for words in ("(a) with position embeddings", "(b) how sure", "win back", "slides' own"):
        assert words in result.stdout
    for name in ("glue.json", "table.md", "table.tex", "figures/scores.png"):
        assert (out / name).stat().st_size > 0
    for form in "ab":
        assert (out / "figures" / f"curves-{form}.png").stat().st_size > 0
    found = Glue.load(out / "glue.json")
    assert [(j.task, j.form, j.kernels, j.seed) for j in found.jobs if j.task == "stsb"] == [
        ("stsb", form, kernels, 0) for form in "ab" for kernels in (0, 1)
    ]
    steps = {job.task: int(job.steps[-1]) for job in found.jobs}
    assert steps == {"rte": 2, "stsb": 1}
    with undrawn():
        said = json.loads(run("glue", *options(files), "--out", out, "--json").stdout)
    assert said["kind"] == "Glue"


@pytest.mark.usefixtures("_undrawn")
def test_the_tables_are_in_the_slides_layout(files: Path) -> None:
    table = (files / "out" / "table.md").read_text()
    assert "| task | baseline | S = 1 | Δ | Δ% | seeds |" in table
    assert "| RTE | 72.9 | 71.1 | 73.6 | 73.6 | +0.7 | 2.7% |" in table  # the slides' own
    latex = run("glue", *options(files), "--out", files / "out", "--format", "latex").stdout
    assert r"task & baseline & S = 1 & $\Delta$ & $\Delta$\% & seeds \\" in latex
    assert "%" not in latex.replace(r"\%", "")


@pytest.mark.usefixtures("_undrawn")
def test_the_page_is_drawn_again_from_the_results(files: Path, tmp_path: Path) -> None:
    result = run("report", files / "out", "--out", tmp_path)
    assert result.exit_code == 0, result.output
    assert (tmp_path / "page.html").read_text() == (files / "out" / "page.html").read_text()


@pytest.mark.parametrize(
    ("changes", "phrase"),
    [
        (["--tasks", "rte,sst"], "Unknown task 'sst'. Did you mean 'sst2'?"),
        (["--kernels", "1,3"], "kernels must hold 0, the baseline"),
        (["--kernels", "0,x"], "--kernels takes whole numbers such as 0,1,3,5"),
        (["--forms", "c"], "Unknown form 'c'"),
        (["--position", "alibi"], "takes a method with kernels, such as tisa"),
        (["--start", "warm"], "Unknown start 'warm'"),
        (["--epochs", "3,rte=many"], "--epochs takes a number"),
        (["--epochs", "0"], "epochs must be above 0"),
        (["--seeds", "1,foo=2"], "Unknown task 'foo'"),
        (["--data", "nowhere"], "there is no nowhere/RTE/train.tsv"),
        (["--model", "./nowhere"], "there is no folder ./nowhere"),
        (["--drop-position-embeddings"], "--drop-position-embeddings is --forms b"),
        (["--start", "distilled", "--share"], "gives each layer kernels of its own"),
        (["--config", "no.toml"], "no.toml"),
    ],
)
def test_wrong_use_is_one_line_and_writes_nothing(
    files: Path, tmp_path: Path, changes: list[str], phrase: str
) -> None:
    out = tmp_path / "out"
    fails_with(run("glue", *options(files), *changes, "--out", out), phrase)
    assert not out.exists()


def test_a_broken_row_is_named_and_nothing_is_written(files: Path, tmp_path: Path) -> None:
    data = write_glue(tmp_path / "data", "rte", "stsb")
    path = data / "STS-B" / "dev.tsv"
    path.write_text(path.read_text() + "0\tg\tf\ty\t0\tn\tn\ta\tb\t5.5\n")
    result = run("glue", *options(files), "--data", data, "--out", tmp_path / "out")
    fails_with(result, f"{path}, line 8: the score 5.5 is not between 0 and 5")
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("_undrawn")
def test_options_may_stand_in_toml(files: Path, tmp_path: Path) -> None:
    path = tmp_path / "glue.toml"
    path.write_text(
        f'model = "{files / "albert-base-v2"}"\ndata = "{files / "data"}"\ntasks = ["rte", "stsb"]\n'
        'kernels = [0, 1]\nforms = ["a", "b"]\nseeds = 1\nepochs = 1\nbatch = 6\nmax_length = 16\n'
        'device = "cpu"\nlearning_rate = 1e-3\n[exceptions.stsb]\nepochs = 0.5\n'
    )
    result = run("glue", "--config", path, "--out", files / "out")  # the same experiment: done
    assert result.exit_code == 0, result.output
    path.write_text('model = "x"\n[exceptions.rte]\nlayers = 2\n')
    fails_with(
        run("glue", "--config", path, "--out", tmp_path / "out"), "exception of rte 'layers'"
    )


def test_without_a_model_the_command_asks_for_one(tmp_path: Path) -> None:
    fails_with(run("glue", "--out", tmp_path / "out"), "name the pretrained model: --model")
