"""The examples run as they stand, without a network, and learn something."""

import re
from pathlib import Path

import pytest

import processes
from whence.hf import attached, from_pretrained

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def run(script: str, folder: Path, *arguments: str) -> str:
    done = processes.run(str(EXAMPLES / script), *arguments, folder=folder)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.mark.slow
def test_bert_with_tisa_is_fine_tuned_with_trainer_in_under_40_lines(tmp_path):
    assert len((EXAMPLES / "bert_tisa_trainer.py").read_text().splitlines()) < 40
    said = run("bert_tisa_trainer.py", tmp_path)
    assert "tisa:kernels=5,start=zero on BertForSequenceClassification: layers all of 2" in said
    loss = float(re.search(r"mean loss (\d\.\d+)", said).group(1))
    assert loss < 0.6  # chance is 0.693
    model = from_pretrained(tmp_path / "out" / "bert-tisa")
    assert attached(model).position == "tisa:kernels=5,start=zero"


@pytest.mark.slow  # tests/hf/test_peft.py finds more
def test_lora_and_tisa_are_trained_together(tmp_path):
    pytest.importorskip("peft", reason="needs pip install peft")
    said = run("bert_tisa_lora.py", tmp_path)
    assert float(re.search(r"mean loss (\d\.\d+)", said).group(1)) < 0.6  # chance is 0.693
    assert float(re.search(r"largest amplitude (\d+\.\d+)", said).group(1)) > 0.1
    assert (tmp_path / "out" / "lora" / "adapter_model.safetensors").is_file()
    merged = from_pretrained(tmp_path / "out" / "bert-tisa-lora")
    assert attached(merged).position == "tisa:kernels=5,start=zero"


def test_bert_with_tisa_takes_a_model_and_a_table_by_path(tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import BertConfig, BertForSequenceClassification, PreTrainedTokenizerFast

    words = {word: i for i, word in enumerate(["[PAD]", "[UNK]", "good", "bad", "film", '"'])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]")
    fast.save_pretrained(tmp_path / "model")
    size = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = BertConfig(vocab_size=6, intermediate_size=16, **size)
    BertForSequenceClassification(config).save_pretrained(tmp_path / "model")
    (tmp_path / "train.tsv").write_text('sentence\tlabel\ngood " film\t1\nbad film\t0\n')
    said = run(
        "bert_tisa_trainer.py", tmp_path, str(tmp_path / "model"), str(tmp_path / "train.tsv")
    )
    assert "mean loss" in said
