"""`whence translate` at the command line: what it prints, writes, refuses, and translates."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

from parallel_text import write_parallel
from undrawn import undrawn
from whence.analysis.translation_results import Translation
from whence.cli.root import app
from whence.cli.translate import _read
from whence.experiments.config import read_options, typed_config
from whence.experiments.translation.config import TranslationConfig

ROOT = Path(__file__).resolve().parents[2]
SMALL = (
    "--source en --target de --vocab-size 290 --layers 1 --heads 2 --d-model 16 --d-ff 16 "
    "--max-length 40 --tokens 999 --steps 2 --warmup 1 --average 1 --beams 2 --device cpu "
    "--test-joined 3"
)
NAMES = ("sinusoidal", "Shaw: clip = 16", "shaw:clip=16,values=false", "shaw:clip=16/nope")
POSITIONS = [word for name in NAMES for word in ("--position", name)]


def run(*arguments: object, given: str | None = None) -> Result:
    return CliRunner().invoke(app, ["translate", *map(str, arguments)], input=given)


def fails_with(result: Result, *phrases: str) -> None:
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    (last,) = result.stderr.splitlines()[-1:]
    assert last.startswith("whence: ")
    for phrase in phrases:
        assert phrase in last


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text and a finished run, not to be changed."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("translate")
    write_parallel(folder / "data")
    (folder / "short.toml").write_text("more_tokens = 2\nseeds = 9\n", encoding="utf-8")
    with undrawn():
        result = run(*options(folder), *POSITIONS, "--out", folder / "out")
    assert result.exit_code == 0, result.output
    return folder


def options(files: Path) -> list[object]:
    given = [*SMALL.split(), "--seeds", 1]  # a flag wins over the file
    return ["--data", files / "data", "--config", files / "short.toml", *given]


def test_the_command_writes_tables_page_figures_and_json(files: Path, tmp_path: Path) -> None:
    out = files / "out"
    again = (*options(files), *POSITIONS, "--out", out)
    result = run(*again)  # all jobs are done: nothing is trained
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines()[-1] == f"wrote {out / 'page.html'}"
    for words in (
        "BLEU of each position",
        "how sure",
        "Table 3",
        "none in the decoder",
        "in a row",
    ):
        assert words in result.stdout
    for name in ("translation.json", "table.md", "table.tex", "tokenizer.json"):
        assert (out / name).stat().st_size > 0
    for name in ("bleu", "lengths", "curves"):
        assert (out / "figures" / f"{name}.png").stat().st_size > 0
    found = Translation.load(out / "translation.json")
    assert found.positions == ("sinusoidal", "shaw:clip=16", *NAMES[2:])
    assert len(found.jobs) == 4
    page = (out / "page.html").read_text()
    with undrawn():
        drawn = CliRunner().invoke(app, ["report", str(out), "--out", str(tmp_path)])
        said = run(*again, "--json").stdout
    assert drawn.exit_code == 0, drawn.output
    assert (tmp_path / "page.html").read_text() == page
    table = (out / "table.md").read_text()
    assert "| keys | values | test | the paper |" in table
    assert "recalled, not compared with the paper" in table
    assert "length at 3 | loss at 3 |" in table
    assert r"\texttt{sinusoidal}" in (out / "table.tex").read_text()
    assert json.loads(said)["kind"] == "Translation"


def test_a_sweep_adds_the_positions_of_the_papers_tables() -> None:
    flags = {"data": "x", "source": "en", "target": "de"}
    clip = _read(None, flags, ["sinusoidal", "shaw:clip=2"], "clip").positions
    assert clip[:3] == ("sinusoidal", "shaw:clip=2", "shaw:clip=0")
    assert sorted(int(x.rpartition("=")[2]) for x in clip[1:]) == [0, 1, 2, 4, 16, 64, 256]
    parts = _read(None, flags, None, "parts").positions
    assert parts[:4] == ("shaw:clip=16", *NAMES[2:3], "shaw:clip=16,keys=false", "nope")


def test_a_trained_model_translates_arguments_and_lines(files: Path) -> None:
    folder = files / "out" / "jobs" / "sinusoidal.rate-0.002.seed-0"
    found = run("--predict", folder, "One two.", "", "Three.", "--device", "cpu")
    assert found.exit_code == 0, found.output
    first, empty, third = found.stdout.split("\n")[:3]
    assert empty == ""
    lines = run("--predict", folder / "model", "--json", given="\ufeffThree.\r\nOne two.\n")
    rows = json.loads(lines.stdout)
    assert [row["source"] for row in rows] == ["Three.", "One two."]
    assert [row["translation"] for row in rows] == [third, first]


@pytest.mark.parametrize(
    ("arguments", "phrases"),
    [
        (("--source", "en"), ("--data is needed", "--target de")),
        (("--data", "DATA", "--source", "en", "--target", "en"), ("two languages",)),
        (("--data", "DATA", "--source", "en", "--target", "fr"), ("has no train.fr", "it has")),
        (("--data", "DATA", "--source", "en", "--target", "de", "--sweep", "x"), ("clip", "parts")),
        (("--data", "DATA", "--source", "en", "--target", "de", "--position", "tissa"), ("tisa",)),
        (("--data", "DATA", "--source", "en", "--target", "de", "--position", "a/b/c"), ("",)),
        (("--data", "DATA", *SMALL.split(), "--max-length", "2"), ("no pair has at most",)),
        (("--data", "DATA", *SMALL.split(), "--test-joined", "99"), ("at most the 9 sentences",)),
        (("One.",), ("--predict FOLDER",)),
        (("--predict", "nowhere"), ("there is no folder nowhere",)),
        (("--predict", "DATA", "One."), ("no trained model", "--no-keep-models")),
        (("--predict", "OUT", "One."), ("4 models", "Name one of them")),
    ],
)
def test_wrong_use_is_one_line_and_nothing_is_written(
    files: Path, tmp_path: Path, arguments: tuple[str, ...], phrases: tuple[str, ...]
) -> None:
    places = {"DATA": files / "data", "OUT": files / "out"}
    given = [places.get(x, x) for x in arguments]
    fails_with(run(*given, "--out", tmp_path / "out", "--device", "cpu"), *phrases)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "phrase"),
    [
        (("--beams", 0), "beams must be at least 1, got 0"),
        (("--beams", 10**9), "beams must be at most 290, got 1000000000"),  # the vocabulary's size
        (("--length-penalty", "nan"), "length_penalty must be a finite number"),
        (("--length-penalty", -1), "length_penalty must be 0 or more"),
        (("--device", "gpu"), "Unknown device 'gpu'"),
        (("\udcff",), r"this sentence is not UTF-8: '\udcff'"),
    ],
)
def test_what_a_model_cannot_translate_with_is_one_line(
    files: Path, arguments: tuple[object, ...], phrase: str
) -> None:
    folder = files / "out" / "jobs" / "sinusoidal.rate-0.002.seed-0"
    fails_with(run("--predict", folder, "One.", "--device", "cpu", *arguments), phrase)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("model.safetensors", b""),
        ("config.json", b"{"),
        ("config.json", b'{"vocab_size": 5}'),
        ("tokenizer.json", b"{}"),
    ],
)
def test_a_damaged_model_is_named(files: Path, tmp_path: Path, name: str, content: bytes) -> None:
    model = files / "out" / "jobs" / "sinusoidal.rate-0.002.seed-0" / "model"
    shutil.copytree(model, tmp_path / "model")
    (tmp_path / "model" / name).write_bytes(content)
    result = run("--predict", tmp_path / "model", "One.", "--device", "cpu")
    fails_with(result, f"{tmp_path / 'model'}", "cannot be read")


def test_a_bad_line_is_named_and_nothing_is_written(tmp_path: Path) -> None:
    data = write_parallel(tmp_path / "data")
    lines = (data / "train.de").read_bytes().split(b"\n")
    lines[6] = b"\xff"
    (data / "train.de").write_bytes(b"\n".join(lines))
    result = run("--data", data, *SMALL.split(), "--out", tmp_path / "out")
    fails_with(result, "train.de, line 7: this is not UTF-8.")
    assert not (tmp_path / "out").exists()


def test_another_experiment_is_refused(files: Path) -> None:
    given = (*options(files), "--out", files / "out", "--d-ff", 8)
    fails_with(run(*given), "holds another experiment: d_ff is 16 there and 8 here")


def test_the_papers_configurations_and_those_of_the_results_are_whole() -> None:
    paths = [*ROOT.glob("examples/wmt14*.toml"), *ROOT.glob("results/translation/*.toml")]
    assert len(paths) >= 5
    for path in paths:
        options = {"data": "somewhere"} | read_options(path, {})
        config = typed_config(TranslationConfig, options, where=str(path))
        assert config.source == "en"


def test_a_data_set_of_the_hub_has_a_column_of_translations(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from whence.experiments.translation import text

    class Rows(dict[str, Any]):
        @property
        def column_names(self) -> list[str]:
            return list(self)

    pairs = [{"en": "One.", "de": "Eins."}, {"en": "", "de": "Zwei."}, {"en": "A ", "de": "B"}]
    found = {name: Rows(translation=pairs) for name in ("train", "validation")}
    found["test"] = Rows(en=["One."], de=["Eins."])
    monkeypatch.setattr(text, "load_splits", lambda name: found)
    splits: dict[str, Any] = {"train": "train", "valid": "validation", "tests": ("test",)}
    read = text.read_parallel("hub:wmt/wmt14:de-en", "en", "de", **splits)
    assert read.train == text.Pairs(("One.", "A"), ("Eins.", "B"))
    assert read.tests["test"] == text.Pairs(("One.",), ("Eins.",))
    with pytest.raises(ValueError, match="no column 'translation' or 'fr', there are en, de"):
        text.read_parallel("hub:x", "en", "fr", **(splits | {"train": "test"}))
    with pytest.raises(ValueError, match="has no split dev, it has train, validation, test"):
        text.read_parallel("hub:x", "en", "de", **(splits | {"valid": "dev"}))
