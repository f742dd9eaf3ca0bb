"""`distill`: planted kernels are found again, the folder loads as it was written, errors are clear."""

import copy
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.testing import assert_close
from transformers import AutoModel, AutoModelForMaskedLM, BertConfig, BertModel
from transformers.utils import logging

from hf_models import CONFIGS, hidden, tiny
from processes import run
from whence.analysis.fit import fitted as sum_of_gaussians
from whence.distill import Distillation, distill, sequences
from whence.distill.curves import logits_of, missing_curves
from whence.distill.distilling import Plan, fitted, stripped
from whence.distill.original import load_original
from whence.distill.sequences import Sequences, read_sequences
from whence.distill.table_mean import move_rows
from whence.distill.tuning import Apart, tune
from whence.hf import attached, from_pretrained
from words import TEXT, WORDS, with_tokenizer

ONE = Plan(to="tisa:kernels=1")
FEW = "\n".join(TEXT.splitlines()[:9])  # where it does not matter how good a fit is


@pytest.fixture(autouse=True)
def _quiet() -> None:
    logging.disable_progress_bar()
    logging.set_verbosity_error()


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bert")
    tiny("bert").save_pretrained(folder)
    return with_tokenizer(folder)


@pytest.fixture(scope="module")
def done(bert: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Distillation]:
    out = tmp_path_factory.mktemp("out") / "new" / "bert-tisa"
    plan = Plan(to="tisa:kernels=2", steps=20)
    return out, distill(bert, out, plan, text=TEXT, source="some text")


def planted(folder: Path, curves: list[np.ndarray]) -> Path:
    """A BERT of one layer whose heads have exactly these curves f(j - i) as positional attention.

    Words and positions have dimensions of their own and norms that LayerNorm scales alike. The
    head's product of positions is factored so that (p_i W_Q)(p_j W_K) / sqrt(d) = f(j - i).
    """
    n, size, d_head = 24, 0.1, 32
    config = BertConfig(
        vocab_size=40,
        hidden_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=8,
        max_position_embeddings=n,
    )
    model = BertModel(config, add_pooling_layer=False).eval()
    signs = torch.rand(40, 16).argsort(dim=1) % 2 * 2.0 - 1
    unit = 1 / ((16 + 2 * size**2) / 64) ** 0.5  # what LayerNorm multiplies with
    attention = model.encoder.layer[0].attention.self
    lag = np.arange(n)[None] - np.arange(n)[:, None]
    with torch.no_grad():
        for part in (attention.query, attention.key):
            part.weight.zero_()
            part.bias.zero_()
        words, table = model.embeddings.word_embeddings.weight, model.embeddings.position_embeddings
        words.zero_()
        words[:, :16] = signs
        model.embeddings.token_type_embeddings.weight.zero_()
        table.weight.zero_()
        table.weight[:, 16 : 16 + n] = size * torch.eye(n)
        table.weight[:, 16 + n :] = -size * torch.eye(n)
        for head, curve in enumerate(curves):
            left, strength, right = np.linalg.svd(curve[lag + n - 1] * d_head**0.5)
            rows = slice(head * d_head, head * d_head + n)
            halves = (left * np.sqrt(strength), right.T * np.sqrt(strength))
            for part, half in zip((attention.query, attention.key), halves, strict=True):
                part.weight[rows, 16 : 16 + n] = torch.tensor(half.T / (size * unit)).float()
                content = slice(head * d_head + n, (head + 1) * d_head)
                part.weight[content, :16] = torch.randn(d_head - n, 16) * 0.3
    model.save_pretrained(folder)
    return folder


def test_a_positional_attention_of_planted_gaussians_is_recovered(tmp_path):
    lag = np.arange(-23, 24)
    kernels = [(2.0, 0.05, 3.0), (-1.5, 0.1, -2.0)]
    curves = [a * np.exp(-b * (lag - c) ** 2) for a, b, c in kernels]
    folder = planted(tmp_path / "planted", curves)
    result = distill(folder, tmp_path / "out", ONE)
    found = [
        (*fit.amplitude, *fit.sharpness, *fit.offset)
        for fit in (entry.fits[0] for entry in result.fits)
    ]
    assert_close(torch.tensor(found), torch.tensor(kernels), rtol=0.02, atol=0.02)
    model = from_pretrained(tmp_path / "out", attn_implementation="eager").eval()
    plain = BertModel.from_pretrained(folder, attn_implementation="eager").eval()
    ids = torch.randint(1, 40, (24,))
    weights = [logits_of(one, ids, layer=0).softmax(dim=-1) for one in (model, plain)]
    assert_close(*weights, rtol=0, atol=0.01)
    method = attached(model).methods[0]
    assert_close(
        torch.cat([method.amplitude, method.sharpness, method.offset], dim=1),
        torch.tensor(found),
        rtol=1e-6,
        atol=0,
    )


def test_a_curve_is_the_weighted_least_squares_solution_up_to_a_constant(bert):
    original = load_original(str(bert))
    text = read_sequences(original, TEXT, source="text", length=12, most=9, seed=0)
    student = stripped(original, text, rows="none", position="nope").model
    found = missing_curves(original.model, student, text.train, layer=1, special=text.special)
    longest = max(map(len, text.train))
    lags = 2 * longest - 1
    for head in (0, 3):
        design, right = [], []
        for ids in text.train:
            wanted, have = (
                logits_of(model.base_model, ids, layer=1)[head]
                for model in (original.model, student)
            )
            weight = wanted.softmax(dim=-1)
            words = [i for i in range(len(ids)) if int(ids[i]) not in text.special]
            for i in words:
                block = torch.zeros(len(words), lags, dtype=torch.float64)
                for place, j in enumerate(words):
                    block[place, j - i + longest - 1] = 1
                w = weight[i, words]
                target = (wanted - have)[i, words]
                centred = block - (w @ block) / w.sum(), target - (w @ target) / w.sum()
                design.append(centred[0] * w.sqrt()[:, None])
                right.append(centred[1] * w.sqrt())
        design, right = torch.cat(design), torch.cat(right)
        places = torch.tensor(found[head].lag).long() + longest - 1
        solved = torch.linalg.lstsq(design[:, places], right[:, None]).solution[:, 0]
        weight = torch.tensor(found[head].weight).double()
        error = torch.tensor(found[head].curve).double() - (solved - weight @ solved)
        often = weight > 0.02  # the ridge draws a rare lag to the mean
        assert_close(error[often], torch.zeros(int(often.sum())).double(), rtol=0, atol=0.02)


def test_words_take_the_mean_row_of_their_places_and_special_tokens_their_own(bert):
    original = load_original(str(bert))
    text = read_sequences(original, TEXT, source="text", length=24, most=99, seed=0)
    table = original.model.embeddings.position_embeddings.weight
    before = original.model.embeddings.word_embeddings.weight
    rows: dict[str, list[int]] = {"word": [], "end": []}
    for ids in text.train:
        rows["word"] += range(1, len(ids) - 1)
        rows["end"].append(len(ids) - 1)
    mean, end = (table[rows[name]].mean(dim=0) for name in ("word", "end"))
    model = tiny("bert")
    move_rows(original, model, text, rows="special")
    moved = model.embeddings.word_embeddings.weight - before
    assert_close(moved[7], mean)
    assert_close(moved[2], table[0])  # [CLS]
    assert_close(moved[3], end)  # [SEP]
    model = tiny("bert")
    move_rows(original, model, text, rows="mean")
    every = table[[i for ids in text.train for i in range(len(ids))]].mean(dim=0)
    assert_close(model.embeddings.word_embeddings.weight - before, every.expand_as(before))


@pytest.mark.parametrize("pad", [0, 1, 3])
def test_robertas_rows_begin_after_its_padding_tokens(pad, tmp_path):
    tiny("roberta", pad_token_id=pad).save_pretrained(tmp_path)
    original = load_original(str(tmp_path))
    assert original.n_positions == 26 - (pad + 1)
    text = read_sequences(original, None, source="", length=22, most=99, seed=0)
    table = original.model.embeddings.position_embeddings.weight
    model = copy.deepcopy(original.model)
    move_rows(original, model, text, rows="mean")
    mean = table[[pad + 1 + i for ids in text.train for i in range(len(ids))]].mean(dim=0)
    words = (m.embeddings.word_embeddings.weight for m in (model, original.model))
    assert_close(next(words) - next(words), mean.expand(50, -1))


def test_fitting_and_tuning_each_bring_a_model_closer(done):
    _, result = done
    errors = [result.stage(name).closeness.error[-1] for name in ("rows", "fitted", "tuned")]
    assert errors == sorted(errors, reverse=True)
    assert result.stage("original").closeness.error == (0.0, 0.0, 0.0)
    assert result.text.held_out > 0
    assert result.position == "tisa:kernels=2,start=zero"
    assert result.n_parameters == 2 * 4 * 3 * 2
    assert json.loads(result.to_json())["options"]["steps"] == 20


def test_tuning_all_weights_moves_more_than_kernels_and_position_alone_nothing_else(bert):
    original = load_original(str(bert))
    text = read_sequences(original, FEW, source="text", length=24, most=99, seed=0)
    before = {name: p.clone() for name, p in original.model.named_parameters()}
    for train, same in (("position", True), ("all", False)):
        student = fitted(original, text, Plan(to="tisa:kernels=1", rows="none"))
        tune(original.model, student.handle, text, steps=2, train=train)
        weights = dict(student.handle.model.named_parameters())
        kept = [torch.equal(p, weights[name]) for name, p in before.items()]
        assert all(kept) == same
        assert weights["encoder.layer.0.attention.self.query.weight"].requires_grad
        assert {name for name in weights if name.startswith("whence")} == {
            f"whence.layer{i}_tisa.{part}"
            for i in (0, 1)
            for part in ("raw_amplitude", "raw_deviation", "raw_offset")
        }


def test_the_loss_is_zero_for_equal_models_and_padding_does_not_count():
    model, other = tiny("bert"), tiny("bert")
    ids = torch.randint(4, 50, (2, 9))
    mask = torch.ones_like(ids)
    assert_close(Apart(model, other)(ids, mask)["loss"], torch.tensor(0.0))
    with torch.no_grad():
        other.embeddings.LayerNorm.weight += 0.1
    loss = Apart(model, other)(ids, mask)["loss"]
    padded = torch.cat([ids, torch.zeros(2, 3, dtype=torch.long)], dim=1)
    longer = torch.cat([mask, torch.zeros(2, 3, dtype=torch.long)], dim=1)
    assert_close(Apart(model, other)(padded, longer)["loss"], loss)


LOAD = """
import sys, torch, whence
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoTokenizer
from pathlib import Path
folder = Path(sys.argv[1])
model = AutoModel.from_pretrained(folder, attn_implementation="eager").eval()
with torch.no_grad():
    out = model(**load_file(folder / "given.st"))[0]
save_file({"out": out.contiguous()}, folder / "again.st")
print(AutoTokenizer.from_pretrained(folder).model_max_length > 10**6)
"""


def test_the_folder_loads_equal_in_another_process_and_takes_input_longer_than_the_table(done):
    out, result = done
    model = from_pretrained(out, attn_implementation="eager").eval()
    given = {"input_ids": torch.randint(4, 20, (1, 2000))}
    assert result.n_positions == 24
    states = hidden(model, given)
    assert states.shape == (1, 2000, 32)
    assert bool(states.isfinite().all())
    save_file(given, out / "given.st")
    done = run("-c", LOAD, str(out), folder=out.parent)
    assert done.returncode == 0, done.stderr
    assert_close(load_file(out / "again.st")["out"], states, rtol=0, atol=0)
    assert done.stdout.strip() == "True"
    for name in ("given.st", "again.st"):
        (out / name).unlink()


def test_the_result_beside_the_model_is_what_was_returned(done):
    out, result = done
    assert Distillation.load(out / "distill.json").to_json() == result.to_json()
    assert [path.name for path in out.parent.iterdir()] == [out.name]  # nothing left aside


def test_the_same_seed_gives_the_same_kernels(done, bert, tmp_path):
    out, _ = done
    torch.manual_seed(99)
    state = torch.get_rng_state()
    distill(bert, tmp_path / "again", Plan(to="tisa:kernels=2", steps=20), text=TEXT)
    assert_close(torch.get_rng_state(), state)
    first, again = (load_file(folder / "model.safetensors") for folder in (out, tmp_path / "again"))
    assert_close(first, again, rtol=0, atol=0)


def test_with_the_table_kept_no_output_changes_and_kernels_wait_where_the_fit_has_them(
    bert, tmp_path
):
    plan = Plan(to="tisa:kernels=1", keep_table=True)
    result = distill(bert, tmp_path / "kept", plan, text=FEW)
    given = {"input_ids": torch.randint(4, 50, (2, 12))}
    plain = AutoModel.from_pretrained(bert).eval()
    model = from_pretrained(tmp_path / "kept").eval()
    assert_close(hidden(model, given), hidden(plain, given), rtol=0, atol=0)
    method = attached(model).methods[1]
    wanted = [entry.fits[0].offset for entry in result.fits if entry.layer == 1]
    assert_close(method.offset, torch.tensor(wanted))
    assert_close(method.amplitude, torch.zeros(4, 1))
    assert [stage.name for stage in result.stages] == ["original", "fitted"]


ALIKE = ("roberta", "electra", "opt")  # tables and embeddings as in tests above, or as albert's


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] if name in ALIKE else [])
        for name in CONFIGS
        if name not in ("vit", "bert")
    ],
)
def test_every_family_that_reads_tokens_can_be_distilled(name, tmp_path, monkeypatch):
    monkeypatch.setattr(sequences, "RANDOM", 24)
    tiny(name).save_pretrained(tmp_path / "model")
    result = distill(tmp_path / "model", tmp_path / "out", Plan(to="tisa:kernels=1", steps=1))
    model = from_pretrained(tmp_path / "out").eval()
    assert hidden(model, {"input_ids": torch.randint(4, 50, (1, 60))}).shape == (1, 60, 32)
    layers = len(result.stages[0].closeness.cosine) - 1
    assert len(result.fits) == 4 * layers
    assert result.text.source == "random tokens"
    deleted, after = (result.stage(stage).closeness.error[1] for stage in ("deleted", "fitted"))
    assert after < deleted


def test_a_model_with_a_head_keeps_it_and_a_tied_head_is_noted(tmp_path):
    tiny("bert", AutoModelForMaskedLM).save_pretrained(tmp_path / "model")
    with_tokenizer(tmp_path / "model")
    result = distill(tmp_path / "model", tmp_path / "out", ONE, text=FEW)
    model = from_pretrained(tmp_path / "out")
    assert type(model).__name__ == "BertForMaskedLM"
    assert any("output weights are the word embeddings" in note for note in result.notes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"to": "t5"}, "distill fits tisa with any number of kernels"),
        ({"to": "tisa+rope"}, "distill fits tisa with any number of kernels"),
        ({"to": "tisa:reach=5"}, "distill fits tisa with any number of kernels"),
        ({"to": "tisa:kernels=0"}, "kernels must be at least 1"),
        ({"rows": "all"}, "Unknown rows 'all'"),
        ({"train": "words"}, "Unknown train 'words'"),
        ({"steps": -1}, "steps must be at least 0"),
        ({"keep_table": True, "steps": 1}, "nothing to tune"),
    ],
)
def test_a_bad_plan_is_refused_before_any_work(changes, message):
    with pytest.raises(ValueError, match=message):
        Plan(**changes)


def test_bad_models_texts_and_folders_are_refused_and_nothing_is_written(bert, done, tmp_path):
    def refused(message: str, model: Path | str, out: Path = tmp_path / "out", **options) -> None:
        with pytest.raises(ValueError, match=message):
            distill(model, out, ONE, **options)

    refused("has a method of whence attached already, so there is no table", done[0])
    tiny("vit").save_pretrained(tmp_path / "vit")
    refused("'vit', which has no position table that distill can drop", tmp_path / "vit")
    refused("there is no folder", tmp_path / "nothing")
    refused("some file is empty", bert, text="\n \n", source="some file")
    refused("gives 1 sequences of at least 4 tokens", bert, text="the name of a list")
    tiny("gpt2").save_pretrained(tmp_path / "gpt2")
    refused("has no tokenizer, so it cannot read", tmp_path / "gpt2", text=TEXT)
    refused("exists already. Give another folder, or --force", bert, out=done[0])
    assert not (tmp_path / "out").exists()


def test_force_replaces_what_distill_wrote_and_nothing_else(bert, tmp_path):
    out = tmp_path / "out"
    out.mkdir()  # an empty folder may be filled
    distill(bert, out, ONE, text=FEW)
    (out / "stale").touch()
    distill(bert, out, ONE, text=FEW, force=True)
    assert not (out / "stale").exists()
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "thesis.txt").touch()
    with pytest.raises(ValueError, match="distill did not write it"):
        distill(bert, mine, ONE, text=TEXT, force=True)
    assert (mine / "thesis.txt").exists()


def test_a_failed_write_leaves_the_earlier_folder(bert, done, tmp_path, monkeypatch):
    out = shutil.copytree(done[0], tmp_path / "out")
    before = (out / "distill.json").read_text()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Distillation, "save", full)
    with pytest.raises(OSError, match="No space"):
        distill(bert, out, ONE, text=FEW, force=True)
    assert (out / "distill.json").read_text() == before
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_failed_move_puts_the_earlier_folder_back(bert, done, tmp_path, monkeypatch):
    out = shutil.copytree(done[0], tmp_path / "out")
    before = (out / "distill.json").read_text()
    rename = Path.rename

    def refuse(self: Path, target: Path) -> Path:
        if self.name == "new":
            raise OSError(1, "Operation not permitted")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", refuse)
    with pytest.raises(OSError, match="not permitted"):
        distill(bert, out, ONE, text=FEW, force=True)
    assert (out / "distill.json").read_text() == before
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_what_sentence_transformers_reads_beside_a_model_comes_along_whole(bert, tmp_path):
    model = tmp_path / "model"
    shutil.copytree(bert, model)
    names = ["modules.json", "1_Pooling/config.json", "2_Dense/config.json"]
    for name in [*names, "2_Dense/model.safetensors"]:
        (model / name).parent.mkdir(exist_ok=True)
        (model / name).write_text(name)
    distill(model, tmp_path / "out", ONE, text=FEW)
    for name in [*names, "2_Dense/model.safetensors"]:
        assert (tmp_path / "out" / name).read_text() == name


def test_sequences_held_out_are_in_no_fit(bert):
    original = load_original(str(bert))
    lines = "\n".join(" ".join(WORDS.split()[i : i + 6]) for i in range(12))
    text: Sequences = read_sequences(original, lines, source="t", length=24, most=99, seed=0)
    rows = [tuple(ids.tolist()) for ids in (*text.train, *text.held_out)]
    assert len(rows) == len(set(rows)) == 12
    assert len(text.held_out) == 1
    assert set(text.special) == {0, 1, 2, 3}


def test_the_curve_of_a_fit_is_what_the_model_adds(done):
    _, result = done
    entry = result.fits[0]
    lag = result.curves[0].lag
    residual = result.curves[0].curve - sum_of_gaussians(entry.fits[0], lag) - entry.fits[0].level
    left = np.sqrt((result.curves[0].weight * residual**2).sum())
    assert_close(float(left), entry.fits[0].residual, rtol=1e-3, atol=1e-5)
