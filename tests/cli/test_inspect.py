"""`whence inspect`, `compare-checkpoints`, `report` and the demo: what they print, write and refuse."""

import dataclasses
import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner, Result

from inspections import inspection
from whence.analysis import minilm
from whence.analysis.comparison import Comparison
from whence.analysis.fit import load_tisa
from whence.analysis.results import Inspection
from whence.cli import demo as demo_command
from whence.cli.compare import series
from whence.cli.root import app

SIZE = {
    "vocab_size": 32,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 8,
    "max_position_embeddings": 32,
}


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture
def no_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing them is most of the time, and tests of the page do not need them."""
    monkeypatch.setattr("whence.report.folder._drawings", lambda results, own: ())


def refused(result: Result, *phrases: str) -> None:
    """One line on stderr with these phrases, nothing on stdout, exit code 2."""
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1
    assert result.stderr.startswith("whence: ")
    for phrase in phrases:
        assert phrase in result.stderr


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("models") / "tiny"
    hf.BertModel(hf.BertConfig(**SIZE), add_pooling_layer=False).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def inspected(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Result, Path]:
    out = tmp_path_factory.mktemp("work") / "new" / "out"
    return run("inspect", tiny, "--out", out, "--fit", out.parent / "fit.safetensors"), out


def copied(tiny: Path, target: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> Path:
    shutil.copytree(tiny, target)
    weights = load_file(target / "model.safetensors")
    change(weights)
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    return target


def test_inspect_prints_the_numbers_and_writes_results_figures_and_page(
    inspected: tuple[Result, Path],
) -> None:
    result, out = inspected
    assert result.exit_code == 0, result.output
    assert "Toeplitzness of P, 0..31" in result.stdout
    assert f"wrote {out / 'page.html'}" in result.stdout
    (path,) = out.glob("*.json")
    found = Inspection.load(path)
    assert found.table is not None
    assert f"{found.table.whole.r2:.3f}" in result.stdout
    assert (len(found.heads), len(found.fits)) == (2, 2)
    names = sorted(
        figure.name.removeprefix(path.stem + ".") for figure in (out / "figures").iterdir()
    )
    assert names == [
        "components.png",
        "curves-0.png",
        "fits-0.png",
        "heat_maps.png",
        "matrices-0.png",
        "windows.png",
    ]
    assert sorted(part.name for part in out.parent.iterdir()) == ["fit.safetensors", "out"]


def test_the_exported_fit_is_a_tisa_method_of_as_many_heads(inspected: tuple[Result, Path]) -> None:
    method = load_tisa(inspected[1].parent / "fit.safetensors")
    assert method.amplitude.shape[0] == 2


@pytest.mark.slow
def test_all_layers_biases_and_formats_are_there_on_request(tiny: Path, tmp_path: Path) -> None:
    arguments = ("--layer", "all", "--biases", "--no-profile", "--json", "--figures", "svg")
    result = run("inspect", tiny, "--out", tmp_path / "o", "--fit", tmp_path / "fits", *arguments)
    assert result.exit_code == 0, result.output
    answer = json.loads(result.stdout)
    assert answer["page"] == str(tmp_path / "o" / "page.html")
    (model,) = answer["models"]
    assert [(head["layer"], head["head"]) for head in model["heads"]] == [
        (0, 0),
        (0, 1),
        (1, 0),
        (1, 1),
    ]
    assert all(head["with_biases"] for head in model["heads"])
    assert "float32" not in result.stdout
    assert len(list((tmp_path / "o" / "figures").glob("*.svg"))) == 9
    assert len(list((tmp_path / "fits").iterdir())) == 2


@pytest.mark.usefixtures("no_figures")
def test_models_are_shown_side_by_side_with_those_of_earlier_runs(
    tiny: Path, inspected: tuple[Result, Path], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    shutil.copytree(inspected[1], out)
    other = copied(tiny, tmp_path / "other", lambda weights: None)
    result = run("inspect", other, "--no-fit", "--out", out)
    assert result.exit_code == 0, result.output
    assert "(with 1 from earlier runs in this folder)" in result.stdout
    page = (out / "page.html").read_text()
    assert "other" in page
    assert "tiny" in page
    assert len(list(out.glob("*.json"))) == 2


def test_a_table_of_zeros_has_no_r2_in_words_json_and_page(tiny: Path, tmp_path: Path) -> None:
    """And its figures are drawn, though to matplotlib a dollar sign in a name begins a formula."""

    def empty(weights: dict[str, torch.Tensor]) -> None:
        (name,) = (name for name in weights if "position_embeddings" in name)
        weights[name].zero_()

    flat = copied(tiny, tmp_path / "a$x_{$b", empty)
    result = run("inspect", flat, "--out", tmp_path / "out")
    assert result.exit_code == 0, result.output
    said = " ".join(result.stdout.split())
    assert "undefined Toeplitzness of P, 0..31" in said
    assert "all its vectors are the same" in said
    assert "0 of 2 heads of layer 0 sense position" in said
    assert "Gaussians" not in said
    assert "undefined" in (tmp_path / "out" / "page.html").read_text()
    assert len(list((tmp_path / "out" / "figures").iterdir())) == 5
    (path,) = (tmp_path / "out").glob("*.json")
    data = json.loads(path.read_text())
    assert data["table"]["whole"]["r2"] is None
    assert [fit["r2"] for fit in data["fits"][0]["fits"]] == [None] * len(data["fits"][0]["fits"])


def without_attention(weights: dict[str, torch.Tensor]) -> None:
    for name in [name for name in weights if "attention.self" in name]:
        del weights[name]


def table_of(rows: int, fill: float | None = None) -> Callable[[dict[str, torch.Tensor]], object]:
    def change(weights: dict[str, torch.Tensor]) -> None:
        (name,) = (name for name in weights if "position_embeddings" in name)
        weights[name] = weights[name][:rows].clone()
        if fill is not None:
            weights[name][0, 0] = fill

    return change


def half(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


BROKEN: dict[str, tuple[Callable[[Path, Path], object], str]] = {
    "missing folder": (lambda tiny, to: None, "there is no folder"),
    "no weights": (
        lambda tiny, to: (shutil.copytree(tiny, to), (to / "model.safetensors").unlink()),
        "has no weights",
    ),
    "corrupt": (lambda tiny, to: (shutil.copytree(tiny, to), half(to)), "not a whole safetensors"),
    "NaN": (lambda tiny, to: copied(tiny, to, table_of(32, float("nan"))), "NaN"),
    "2 rows": (lambda tiny, to: copied(tiny, to, table_of(2)), "2 "),
    "no attention": (lambda tiny, to: copied(tiny, to, without_attention), "attention"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_model_that_cannot_be_read_is_one_line_and_leaves_nothing(
    name: str, tiny: Path, tmp_path: Path
) -> None:
    make, phrase = BROKEN[name]
    make(tiny, tmp_path / "bad")
    out = tmp_path / "o" / "out"
    refused(run("inspect", tiny, tmp_path / "bad", "--no-fit", "--out", out), phrase)
    assert not out.parent.exists()


@pytest.mark.parametrize(
    ("arguments", "phrase"),
    [
        (("--layer", "99"), "there is no layer 99"),
        (("--layer", "first"), "--layer must be a number or all, got 'first'"),
        (("--layer", "²"), "--layer must be a number or all"),
        (("--layer", "9" * 30), "--layer must be a number or all"),
        (("--figures", "jpg"), "Unknown format of the figures 'jpg'"),
        (("--no-fit", "--fit", "a.safetensors"), "give one of them"),
        (("--text", "/no/such/text"), "cannot read /no/such/text"),
        (
            ("--layer", "all", "--no-profile", "--fit", "/tmp/whence-no/a.safetensors"),
            "give a folder",
        ),
    ],
)
def test_wrong_use_of_inspect_is_one_line(
    arguments: tuple[str, ...], phrase: str, tiny: Path, tmp_path: Path
) -> None:
    refused(run("inspect", tiny, "--out", tmp_path / "out", *arguments), phrase)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("no_figures")
def test_results_of_another_version_are_replaced_by_running_the_command_again(
    tiny: Path, tmp_path: Path
) -> None:
    command = ("inspect", tiny, "--no-fit", "--out", tmp_path)
    assert run(*command).exit_code == 0
    (path,) = tmp_path.glob("*.json")
    data = json.loads(path.read_text())
    del data["table"]["symmetry"]
    path.write_text(json.dumps(data))
    refused(run("report", tmp_path), "has no symmetry", "again, or delete it")
    assert run(*command).exit_code == 0
    assert run("report", tmp_path).exit_code == 0


def test_a_model_listed_twice_and_a_file_for_a_folder_are_refused(
    tiny: Path, tmp_path: Path
) -> None:
    refused(
        run("inspect", tiny, f"{tiny}/", "--no-fit", "--out", tmp_path / "a"), "both be written"
    )
    refused(run("inspect", tiny, tiny, "--out", tmp_path / "out"), "listed twice")
    (tmp_path / "file").write_text("")
    result = run("inspect", tiny, "--out", tmp_path / "file")
    assert result.exit_code == 1
    assert result.stderr.startswith("whence: cannot write")


@pytest.fixture(scope="module")
def checkpoints(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose table turns from noise to sinusoids: ever more Toeplitz."""
    run_folder = tmp_path_factory.mktemp("run")
    place = torch.arange(32)[:, None] / 10 ** (torch.arange(8) / 4)
    smooth = torch.cat([place.sin(), place.cos()], dim=1)
    for step, share in ((1000, 1.0), (200, 0.7), (30, 0.4), (4, 0.0)):

        def mix(weights: dict[str, torch.Tensor], share: float = share) -> None:
            (name,) = (name for name in weights if "position_embeddings" in name)
            noise = torch.randn(32, 16, generator=torch.Generator().manual_seed(1))
            weights[name] = share * smooth + (1 - share) * noise

        copied(tiny, run_folder / f"checkpoint-{step}", mix)
    return run_folder


def test_a_series_is_compared_in_order_with_scores(checkpoints: Path, tmp_path: Path) -> None:
    scores = tmp_path / "scores.csv"
    rows = "".join(
        f"checkpoint-{step},{score}\n" for step, score in ((4, 1), (30, 2), (200, 4), (1000, 9))
    )
    scores.write_text("model,score\n" + rows)
    result = run("compare-checkpoints", checkpoints, "--scores", scores, "--out", tmp_path / "out")
    assert result.exit_code == 0, result.output
    found = Comparison.load(tmp_path / "out" / "comparison.json")
    assert [point.step for point in found.points] == [4, 30, 200, 1000]
    r2 = [point.whole.r2_off_diagonal for point in found.points]
    assert r2 == sorted(r2)
    assert r2[-1] == pytest.approx(1.0)
    assert "Spearman +1.00" in result.stdout
    assert {"steps.png", "scores.png", "heat_maps.png"} <= {
        path.name for path in (tmp_path / "out" / "figures").iterdir()
    }
    assert "Through the series" in (tmp_path / "out" / "page.html").read_text()


def test_checkpoints_are_sorted_by_number(checkpoints: Path) -> None:
    names = [Path(name).name for name in series([str(checkpoints)])]
    assert names == ["checkpoint-4", "checkpoint-30", "checkpoint-200", "checkpoint-1000"]


def test_wrong_use_of_compare_checkpoints_is_one_line(
    checkpoints: Path, tiny: Path, tmp_path: Path
) -> None:
    out = ("--out", tmp_path / "out")
    refused(run("compare-checkpoints", tmp_path / "none", *out), "there is no folder")
    refused(run("compare-checkpoints", tiny / "config.json", *out), "config.json is a file")
    refused(run("compare-checkpoints", tiny, *out), "holds 0 checkpoints")
    refused(
        run("compare-checkpoints", checkpoints, "--scores", tmp_path / "no.csv", *out), "no.csv"
    )
    (tmp_path / "scores.csv").write_text("model,score\nanother,1\n")
    refused(
        run("compare-checkpoints", checkpoints, "--scores", tmp_path / "scores.csv", *out),
        "Unknown model",
    )
    assert [path.name for path in tmp_path.iterdir()] == ["scores.csv"]


def test_report_rebuilds_the_same_page_without_measuring(
    inspected: tuple[Result, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: object, **__: object) -> None:
        raise AssertionError("it measured again")

    for name in (
        "inspect.inspect",
        "inspect.inspect_layers",
        "comparison.compare",
        "fit.fit_heads",
    ):
        monkeypatch.setattr(f"whence.analysis.{name}", never)
    out = tmp_path / "out"
    out.mkdir()
    for path in inspected[1].glob("*.json"):
        shutil.copy(path, out)
    result = run("report", out)
    assert result.exit_code == 0, result.output
    for path in inspected[1].rglob("*"):
        if path.is_file():
            assert (out / path.relative_to(inspected[1])).read_bytes() == path.read_bytes()


@pytest.mark.usefixtures("no_figures")
def test_report_takes_the_criteria_that_lie_beside(tmp_path: Path) -> None:
    inspection(n_heads=1, n=16).save(tmp_path / "a.json")
    assert (
        run("criteria", "--methods", "tisa,nope", "--out", tmp_path / "criteria.json").exit_code
        == 0
    )
    assert run("report", tmp_path).exit_code == 0
    page = (tmp_path / "page.html").read_text()
    assert 'id="criteria"' in page
    assert "<td>tisa</td>" in page


def test_wrong_use_of_report_is_one_line(tmp_path: Path) -> None:
    refused(run("report", tmp_path / "none"), "there is no folder")
    refused(run("report", tmp_path), "has no results of whence inspect")
    (tmp_path / "a.json").write_text('{"kind": "Inspection"')
    refused(run("report", tmp_path), "a.json is not JSON")


@pytest.mark.usefixtures("no_figures")
def test_the_demo_inspects_the_model_and_ends_with_the_page(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = inspection(n_heads=2, n=16)
    asked = []

    def stand_in(models: list[str], **_: object) -> list[Inspection]:
        asked.append(models)
        return [dataclasses.replace(found)]

    monkeypatch.setattr(demo_command, "METHODS", ("tisa", "alibi"))
    monkeypatch.setattr(demo_command, "inspect_all", stand_in)
    monkeypatch.setattr(minilm, "_cached", lambda: None)
    monkeypatch.setattr(minilm, "_packaged", lambda: tiny)
    result = run("demo", "--no-train", "--out", tmp_path)
    assert result.exit_code == 2
    assert "are not those of sentence-transformers/all-MiniLM-L6-v2" in result.stderr
    assert asked == []
    digest = hashlib.sha256((tiny / "model.safetensors").read_bytes()).hexdigest()
    monkeypatch.setattr(minilm, "SHA256", digest)
    result = run("demo", "--no-train", "--out", tmp_path)
    assert result.exit_code == 0, result.output
    assert asked == [[str(tiny)]]
    assert "sentence-transformers/all-MiniLM-L6-v2" in result.stdout
    *_, last = result.stdout.strip().splitlines()
    assert last == f"wrote {tmp_path / 'demo' / 'page.html'}"
    assert (tmp_path / "demo" / "page.html").is_file()
