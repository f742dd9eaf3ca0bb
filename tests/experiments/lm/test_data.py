"""What `whence lm` trains on: data sets through `datasets`, and the order in which a run sees them."""

import json
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

from error_lines import fails_with
from lm_settings import flags, text_file, tiny
from whence.analysis.lm_results import Language
from whence.cli.root import app
from whence.experiments import LMConfig, run_lm
from whence.experiments.lm.data import prepared
from whence.experiments.lm.tokens import read_texts
from whence.experiments.progress import OutOfTimeError
from whence.models import WhenceForCausalLM

datasets = pytest.importorskip("datasets", reason="needs datasets: pip install 'whence[hf]'")


@pytest.fixture(autouse=True)
def _here_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache of its own, and no network."""
    torch.set_num_threads(1)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)


LINES = ["a key and a query\n", "", "where they are", None, " two\nlines "]
TEXT = "a key and a query\n\nwhere they are\n\n two\nlines \n"  # an end of line where there is none


def parquet(folder: Path, split: str, rows: dict[str, list[Any]]) -> None:
    folder.mkdir(exist_ok=True)
    datasets.Dataset.from_dict(rows).to_parquet(folder / f"{split}.parquet")


def as_json(folder: Path, split: str, rows: dict[str, list[Any]]) -> None:
    folder.mkdir(exist_ok=True)
    names = list(rows)
    lines = [
        json.dumps(dict(zip(names, row, strict=True))) for row in zip(*rows.values(), strict=True)
    ]
    (folder / f"{split}.jsonl").write_text("\n".join(lines), encoding="utf-8")


@pytest.mark.parametrize("write", [parquet, as_json])
def test_a_data_set_is_its_rows_in_order_with_its_own_split_for_validation(
    write: Callable[..., None], tmp_path: Path
) -> None:
    folder = tmp_path / "data"
    write(folder, "train", {"text": LINES, "other": [1, 2, 3, 4, 5]})
    write(folder, "validation", {"text": ["to test on"], "other": [1]})
    write(folder, "test", {"text": ["never read"], "other": [1]})
    texts = read_texts(str(folder), None)
    assert (texts.train, texts.valid) == (TEXT, "to test on\n")
    plain = tmp_path / "plain.txt"
    plain.write_text(TEXT, encoding="utf-8")
    test = tmp_path / "test.txt"
    test.write_text("to test on\n", encoding="utf-8")
    assert texts == read_texts(str(plain), str(test))  # the same fingerprint, whatever the form
    assert read_texts(str(plain), str(folder)) == texts
    assert read_texts(str(folder), str(plain)).valid == TEXT  # what is asked for comes first


def test_a_data_set_without_validation_gives_its_last_tenth(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    text = text_file(tmp_path, 3000).read_text(encoding="utf-8").rstrip("\n") + "\n"
    (folder / "anything.txt").write_text(text, encoding="utf-8")
    texts = read_texts(str(folder), None)
    assert texts.train + texts.valid == text
    assert len(texts.valid) == len(text) // 10


def test_a_comparison_runs_on_a_data_set_and_goes_on_with_no_other(tmp_path: Path) -> None:
    text = text_file(tmp_path).read_text(encoding="utf-8")
    rows, folder = text[:18_000].splitlines(), tmp_path / "data"
    parquet(folder, "train", {"words": rows})
    parquet(folder, "validation", {"words": text[18_000:].splitlines()})
    config = tiny(folder, text_column="words", steps=4)
    command = ["lm", *flags(config), "--out", str(tmp_path / "out")]
    result = CliRunner().invoke(app, [*command, "--seconds", "0.000001"])
    assert result.exit_code == 3, result.output
    parquet(folder, "train", {"words": [*rows, "one row more"]})
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 2
    assert "holds another experiment: its data has SHA-256" in result.stderr
    parquet(folder, "train", {"words": rows})
    assert CliRunner().invoke(app, command).exit_code == 0
    found = Language.load(tmp_path / "out" / "lm.json")
    assert found.config["data"] == str(folder)
    plain = tmp_path / "plain.txt"
    plain.write_text("".join(f"{row}\n" for row in rows), encoding="utf-8")
    valid = tmp_path / "valid.txt"
    valid.write_text("".join(f"{row}\n" for row in text[18_000:].splitlines()), encoding="utf-8")
    again = run_lm(replace(config, data=str(plain), valid=str(valid)), tmp_path / "out")
    assert again.jobs[0].to_json() == found.jobs[0].to_json()  # the same data, so the same job


def test_the_hub_is_asked_by_name_and_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, ...]] = []

    def load(*names: str) -> Any:
        asked.append(names)
        return datasets.DatasetDict({"train": datasets.Dataset.from_dict({"text": ["word " * 9]})})

    monkeypatch.setattr(datasets, "load_dataset", load)
    read_texts("hub:Salesforce/wikitext:wikitext-2-raw-v1", None)
    read_texts("hub:imdb", None)
    assert asked == [("Salesforce/wikitext", "wikitext-2-raw-v1"), ("imdb",)]


@pytest.mark.parametrize("name", ["hub:", "hub:a::b", "hub:a:b:c", "hub::b"])
def test_a_name_of_another_form_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"names no data set. It is hub:NAME or hub:NAME:CONFIG"):
        read_texts(name, None)


def test_a_file_comes_before_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("hub:imdb").write_text("a text of this name\n" * 5, encoding="utf-8")
    assert read_texts("hub:imdb", None).train.startswith("a text of this name")


def test_what_a_data_set_lacks_is_one_sentence(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    parquet(folder, "train", {"body": ["a"], "n": [1], "words": [["a", "b"]]})
    with pytest.raises(ValueError, match=r"no column 'text', it has body, n, words.*--text-column"):
        read_texts(str(folder), None)
    with pytest.raises(ValueError, match=r"the column 'n' of .* holds int64, not text"):
        read_texts(str(folder), None, column="n")
    with pytest.raises(ValueError, match=r"the column 'words' of .* not text"):
        read_texts(str(folder), None, column="words")
    parquet(folder, "train", {"text": [" ", None]})
    with pytest.raises(ValueError, match=r"the data set .* is empty"):
        read_texts(str(folder), None)
    parquet(folder, "test", {"text": ["a"]})
    with pytest.raises(ValueError, match=r"no split 'validation', it has train, test"):
        read_texts(str(text_file(tmp_path)), str(folder))
    (folder / "train.parquet").rename(folder / "validation.parquet")
    with pytest.raises(ValueError, match=r"no split 'train', it has validation, test"):
        read_texts(str(folder), None)
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(ValueError, match=r"datasets cannot load .*empty"):
        read_texts(str(empty), None)
    (empty / "broken.parquet").write_bytes(b"no parquet")
    with pytest.raises(ValueError, match=r"datasets cannot load .*empty"):
        read_texts(str(empty), None)
    with pytest.raises(ValueError, match=r"no text file wikitext. A data set of the hub is hub:"):
        read_texts("wikitext", None)


def test_the_hub_out_of_reach_or_without_the_name_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def result() -> Result:
        command = ["lm", "--methods", "tisa", "--data", "hub:nobody/nothing"]
        return CliRunner().invoke(app, [*command, "--out", str(tmp_path / "out")])

    fails_with(result(), 1, "the hub cannot be reached for nobody/nothing")

    def missing(*names: str) -> None:
        raise datasets.exceptions.DatasetNotFoundError("Dataset doesn't exist on the Hub")

    monkeypatch.setattr(datasets, "load_dataset", missing)
    words = "there is no data set nobody/nothing on the hub, or it is not public"
    fails_with(result(), 2, words)
    monkeypatch.setitem(sys.modules, "datasets", None)
    fails_with(result(), 1, "is a data set, which needs datasets: pip install 'whence[hf,plot]'")
    assert not (tmp_path / "out").exists()


# Order


def seen(config: LMConfig, out: Path, patch: pytest.MonkeyPatch, *, sliced: bool) -> Any:
    """The sequences that the model is trained on, in order, and the seed that dropout draws from."""
    forward, rows, drawn = WhenceForCausalLM.forward, [], set()

    def watched(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.training:
            rows.append(kwargs["input_ids"].clone())
            drawn.add(torch.initial_seed())
        return forward(self, *args, **kwargs)

    with patch.context() as one:
        one.setattr(WhenceForCausalLM, "forward", watched)
        while True:
            try:
                run_lm(config, out, deadline=time.monotonic() if sliced else None)
                break
            except OutOfTimeError:
                continue
    return torch.cat(rows), drawn


@pytest.mark.parametrize("sliced", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_run_sees_the_sequences_of_its_seed_in_their_order_also_when_it_goes_on(
    sliced: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The text is short, so that a second turn through it begins within the run."""
    often = {"steps": 24, "log_every": 8, "save_every": 8}
    config = tiny(text_file(tmp_path, 2000), seeds=2, accumulate=2, **often)
    source = prepared(config, tmp_path / "out")
    n = config.steps * config.batch
    assert config.batch < source.n_blocks < n  # type: ignore[attr-defined]
    rows, drawn = seen(config, tmp_path / "out", monkeypatch, sliced=sliced)
    expected = [source.example(seed, i)["input_ids"] for seed in (0, 1) for i in range(n)]
    torch.testing.assert_close(rows, torch.stack(expected))
    assert not torch.equal(rows[:n], rows[n:])
    assert drawn == {0, 1}
