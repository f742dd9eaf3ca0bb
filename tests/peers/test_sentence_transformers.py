"""sentence-transformers on a model with a method: embed, train, save and load."""

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.testing import assert_close
from transformers import PreTrainedTokenizerFast

from hf_models import awake, tiny
from whence.hf import attach, attached

reason = "needs pip install sentence-transformers"
sentence_transformers = pytest.importorskip("sentence_transformers", reason=reason)
TEXTS = ["lag is key minus query", "query minus key", "key"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    words = ["[PAD]", "[UNK]", *sorted({word for text in TEXTS for word in text.split()})]
    vocabulary = {word: i for i, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]")
    fast.save_pretrained(tmp_path / "model")
    model = tiny("bert")
    awake(attach(model, "tisa:kernels=2"), 0.5)
    model.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_embeddings_are_those_of_the_model_and_are_saved_with_the_method(folder, tmp_path):
    encoder = sentence_transformers.SentenceTransformer(str(folder), device="cpu")
    assert attached(encoder).position == "tisa:kernels=2,start=zero"
    together = encoder.encode(TEXTS, convert_to_tensor=True)
    for text, embedding in zip(TEXTS, together, strict=True):
        alone = encoder.encode([text], convert_to_tensor=True)[0]
        assert_close(embedding, alone, rtol=1e-4, atol=1e-5)
    attached(encoder).methods[0].amplitude = 0.0
    assert (encoder.encode(TEXTS, convert_to_tensor=True) - together).abs().max() > 1e-3
    encoder = sentence_transformers.SentenceTransformer(str(folder), device="cpu")
    encoder.save(str(tmp_path / "saved"))
    again = sentence_transformers.SentenceTransformer(str(tmp_path / "saved"), device="cpu")
    assert_close(again.encode(TEXTS, convert_to_tensor=True), together, rtol=0, atol=0)


def test_a_loss_trains_the_method(folder):
    encoder = sentence_transformers.SentenceTransformer(str(folder), device="cpu")
    features = encoder.tokenize(TEXTS)
    out = encoder(features)["sentence_embedding"]
    (out[0] @ out[1] - out[0] @ out[2]).backward()
    for method in attached(encoder).methods:
        assert method.raw_amplitude.grad.abs().max() > 0
    assert torch.isfinite(out).all()
