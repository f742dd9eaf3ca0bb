"""A tokenized corpus in a file: the same experiment as its texts, fast, and refused if broken."""

import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from typer.testing import CliRunner

import lm_corpus
from error_lines import fails_with
from lm_settings import assert_same_numbers, flags, text_file, tiny
from whence.analysis.lm_results import Language
from whence.cli.root import app
from whence.experiments import load_corpus, run_lm, save_corpus
from whence.experiments.lm.data import prepared
from whence.experiments.lm.text import Text
from whence.experiments.lm.tokens import Corpus


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """text.txt and corpus.safetensors, which is made of it; not to be changed."""
    found = tmp_path_factory.mktemp("corpus")
    text = text_file(found)
    lm_corpus.main(
        ["--data", str(text), "--vocab-size", "300", "--out", str(found / "corpus.safetensors")]
    )
    return found


def test_a_corpus_is_the_same_experiment_as_its_text_with_the_same_numbers(
    folder: Path, tmp_path: Path
) -> None:
    corpus = folder / "corpus.safetensors"
    config = tiny(corpus, steps=4, vocab_size=None)
    command = ["lm", *flags(config), "--out", str(tmp_path / "out")]
    assert CliRunner().invoke(app, command).exit_code == 0
    ours = Language.load(tmp_path / "out" / "lm.json")
    text = run_lm(tiny(folder / "text.txt", steps=4), tmp_path / "text")
    assert_same_numbers(ours.jobs[0], text.jobs[0])
    assert ours.data == text.data
    same = replace(config, vocab_size=300)  # its own size may be named
    assert run_lm(same, tmp_path / "out").jobs[0].to_json() == ours.jobs[0].to_json()


def test_a_corpus_needs_no_datasets_and_goes_on_with_no_other(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    config = tiny(folder / "corpus.safetensors", vocab_size=None)
    prepared(config, tmp_path / "out")
    found, tokenizer = load_corpus(folder / "corpus.safetensors")
    other = save_corpus(replace(found, sha256="0" * 64), tokenizer, tmp_path / "other.safetensors")
    with pytest.raises(ValueError, match="holds another experiment: its data has SHA-256"):
        prepared(replace(config, data=str(other)), tmp_path / "out")
    spaced = save_corpus(found, f"{tokenizer} ", tmp_path / "spaced.safetensors")
    with pytest.raises(ValueError, match="is another tokenizer than that of"):
        prepared(replace(config, data=str(spaced)), tmp_path / "out")


@pytest.mark.parametrize(("vocab_size", "width"), [(300, np.uint16), (1 << 17, np.int32)])
def test_ids_are_as_narrow_as_the_vocabulary_allows_and_come_back_as_they_were(
    vocab_size: int, width: Any, folder: Path, tmp_path: Path
) -> None:
    found, tokenizer = load_corpus(folder / "corpus.safetensors")
    path = save_corpus(replace(found, vocab_size=vocab_size), tokenizer, tmp_path / "c.safetensors")
    again, same = load_corpus(path)
    assert again.train.dtype == again.valid.dtype == width
    np.testing.assert_array_equal(again.train, found.train)
    np.testing.assert_array_equal(again.valid, found.valid)
    assert same == tokenizer
    assert (again.mask, again.characters, again.sha256) == (
        found.mask,
        found.characters,
        found.sha256,
    )
    source = Text(again, train_length=16, longest=32, masked=True, eval_tokens=64)
    assert source.train.data_ptr() == again.train.ctypes.data  # nothing was copied
    example = source.example(0, 0)
    assert example["input_ids"].dtype == example["labels"].dtype == torch.int64
    assert [path.name for path in tmp_path.iterdir()] == ["c.safetensors"]


def test_thirty_million_tokens_are_ready_in_a_second(folder: Path, tmp_path: Path) -> None:
    found, tokenizer = load_corpus(folder / "corpus.safetensors")
    many = np.resize(found.train, 30_000_000)
    path = save_corpus(replace(found, train=many), tokenizer, tmp_path / "c.safetensors")
    start = time.perf_counter()
    corpus, _ = load_corpus(path)
    source = Text(corpus, train_length=512, longest=1024, masked=False, eval_tokens=1024)
    assert time.perf_counter() - start < 1
    assert source.n_blocks == 30_000_000 // 512


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"valid": "valid.txt"}, "leave out --valid and --tokenizer"),
        ({"tokenizer": "tokenizer.json"}, "leave out --valid and --tokenizer"),
        ({"vocab_size": 301}, "has a vocabulary of 300 tokens, not of 301: leave out --vocab-size"),
    ],
)
def test_options_of_a_text_beside_a_corpus_are_refused(
    more: dict[str, Any], message: str, folder: Path, tmp_path: Path
) -> None:
    given = {"vocab_size": None, **more}
    with pytest.raises(ValueError, match=message):
        prepared(tiny(folder / "corpus.safetensors", **given), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def broken(folder: Path) -> dict[str, Any]:
    """The parts of a good file, to be spoiled."""
    found, tokenizer = load_corpus(folder / "corpus.safetensors")
    metadata = {
        "whence_corpus": "1",
        "tokenizer": tokenizer,
        "sha256": found.sha256,
        "characters": str(found.characters),
        "vocab_size": "300",
    }
    return {"tensors": {"train": found.train, "valid": found.valid}, "metadata": metadata}


@pytest.mark.parametrize(
    ("tensors", "metadata", "message"),
    [
        ({}, None, "is not a tokenized corpus .* the metadata none"),
        ({}, {"whence_corpus": "2"}, "is not a tokenized corpus"),
        ({}, {"sha256": None}, "is not a tokenized corpus"),
        ({}, {"vocab_size": "many"}, "the metadata of .* cannot be read"),
        ({}, {"tokenizer": "{}"}, "the metadata of .* cannot be read"),
        ({}, {"vocab_size": "20"}, r"has ids up to \d+ in 'train', beyond its vocabulary of 20"),
        ({"test": np.zeros(3, np.uint16)}, {}, "it has the tensors test, train, valid"),
        ({"valid": None}, {}, "it has the tensors train and the metadata"),
        ({"valid": np.zeros(0, np.uint16)}, {}, "has no tokens in 'valid'"),
        ({"valid": np.zeros(40, np.float32)}, {}, "unsigned 16- or 32-bit ids, got float32"),
        ({"valid": np.zeros((4, 10), np.uint16)}, {}, r"got uint16 of shape \(4, 10\)"),
    ],
)
def test_a_file_that_is_no_corpus_is_one_sentence(
    tensors: dict[str, Any],
    metadata: dict[str, Any] | None,
    message: str,
    folder: Path,
    tmp_path: Path,
) -> None:
    parts = broken(folder)
    arrays = {name: x for name, x in (parts["tensors"] | tensors).items() if x is not None}
    said = None if metadata is None else parts["metadata"] | metadata
    said = None if said is None else {name: x for name, x in said.items() if x is not None}
    path = tmp_path / "broken.safetensors"
    save_file(arrays, path, said)
    with pytest.raises(ValueError, match=message):
        load_corpus(path)


def test_a_file_that_is_cut_short_or_missing_is_one_line(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "cut.safetensors"
    path.write_bytes((folder / "corpus.safetensors").read_bytes()[:-10])
    for name, message in (
        (path, "is not a whole safetensors file"),
        ("none.safetensors", "no tok"),
    ):
        config = tiny(Path(name), vocab_size=None)
        result = CliRunner().invoke(app, ["lm", *flags(config), "--out", str(tmp_path / "out")])
        fails_with(result, 2, message)
    assert not (tmp_path / "out").exists()


def test_a_tokenizer_without_a_mask_is_for_the_causal_objective_alone() -> None:
    ids = np.arange(200, dtype=np.uint16)
    corpus = Corpus(ids, ids, 200, None, 400, "x")
    with pytest.raises(ValueError, match="which the masked objective needs"):
        Text(corpus, train_length=16, longest=16, masked=True, eval_tokens=16)
    Text(corpus, train_length=16, longest=16, masked=False, eval_tokens=16)
