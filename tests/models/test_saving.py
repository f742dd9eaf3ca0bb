"""Native models saved and loaded like any other, and the values that they begin with."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM

from models import SIZES, VOCAB, shaken
from processes import run
from whence.methods import METHODS
from whence.models import (
    WhenceConfig,
    WhenceForCausalLM,
    WhenceForConditionalGeneration,
    WhenceForMaskedLM,
    WhenceForSequenceClassification,
    WhenceModel,
    WhenceSeq2SeqConfig,
    WhenceSeq2SeqModel,
)

CLASSES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "AutoModel": (WhenceModel, WhenceConfig, {"position": "tisa:kernels=2", "pooler": True}),
    "AutoModelForCausalLM": (WhenceForCausalLM, WhenceConfig, {"position": "t5+alibi+rope"}),
    "AutoModelForMaskedLM": (
        WhenceForMaskedLM,
        WhenceConfig,
        {"position": "learned+shaw", "head_transform": True, "head_bias": True},
    ),
    "AutoModelForSequenceClassification": (
        WhenceForSequenceClassification,
        WhenceConfig,
        {"position": "floater", "num_labels": 3},
    ),
    "AutoModelForSeq2SeqLM": (
        WhenceForConditionalGeneration,
        WhenceSeq2SeqConfig,
        {"position": "tisa+t5"},
    ),
    "seq2seq AutoModel": (WhenceSeq2SeqModel, WhenceSeq2SeqConfig, {"position": "kerple"}),
}

LOAD = """
import json, sys, torch, transformers, whence.models
folder, names = sys.argv[1], json.loads(sys.argv[2])
for name in names:
    model = getattr(transformers, name.split()[-1]).from_pretrained(f"{folder}/{name}")
    model.eval()
    inputs = torch.load(f"{folder}/{name}/inputs.pt")
    torch.testing.assert_close(model(**inputs)[0], torch.load(f"{folder}/{name}/wanted.pt"))
    print(type(model).__name__)
"""


def test_every_head_comes_back_through_the_auto_classes_in_another_process(tmp_path: Path) -> None:
    ids = torch.randint(2, VOCAB, (2, 9))
    for name, (cls, config, options) in CLASSES.items():
        model = shaken(cls(config(**SIZES, **options)), by=0.1)
        inputs = {"input_ids": ids}
        if config is WhenceSeq2SeqConfig:
            inputs["decoder_input_ids"] = ids[:, :4]
        folder = tmp_path / name
        model.save_pretrained(folder)
        torch.save(inputs, folder / "inputs.pt")
        torch.save(model(**inputs)[0].detach(), folder / "wanted.pt")
        assert not list(folder.glob("*.bin"))
    done = run("-c", LOAD, str(tmp_path), json.dumps([*CLASSES]), folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [cls.__name__ for cls, _, _ in CLASSES.values()]


@pytest.mark.parametrize("name", [*METHODS, "tisa+tisa:kernels=2+t5"])
def test_every_method_comes_back(name: str, tmp_path: Path) -> None:
    model = shaken(WhenceForCausalLM(WhenceConfig(position=name, **SIZES)), by=0.1)
    model.save_pretrained(tmp_path)
    loaded = WhenceForCausalLM.from_pretrained(tmp_path)
    assert loaded.config.position == name
    assert loaded.config.causal is True
    ids = torch.randint(2, VOCAB, (2, 9))
    torch.testing.assert_close(loaded(ids).logits, model(ids).logits)
    before, after = (dict(m.named_buffers()) for m in (model, loaded))
    assert before.keys() == after.keys()
    for key, value in before.items():  # those that are not saved are written anew
        torch.testing.assert_close(after[key], value)


def test_tied_weights_are_saved_once_and_stay_tied(tmp_path: Path) -> None:
    for tied in (True, False):
        config = WhenceConfig(position="t5", tie_word_embeddings=tied, **SIZES)
        model = WhenceForCausalLM(config)
        model.save_pretrained(tmp_path)
        with safe_open(tmp_path / "model.safetensors", "pt") as file:
            keys = set(file.keys())
        assert ("lm_head.weight" in keys) == (not tied)
        assert sum("t5" in key for key in keys) == 1
        loaded = WhenceForCausalLM.from_pretrained(tmp_path)
        assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) == tied


def test_loading_in_half_precision_keeps_frequencies_and_logits_exact(tmp_path: Path) -> None:
    WhenceForCausalLM(WhenceConfig(position="rope+sinusoidal+tisa", **SIZES)).save_pretrained(
        tmp_path
    )
    loaded = WhenceForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    position = loaded.model.stack.position
    assert position.layers[0]["tisa"].raw_offset.dtype == torch.float32
    rope = position.layers[1]["rope"]
    torch.testing.assert_close(rope.frequency, torch.tensor(rope.exact))
    assert loaded(torch.randint(2, VOCAB, (1, 9))).logits.dtype == torch.bfloat16


@pytest.mark.parametrize("name", METHODS)
def test_a_methods_own_initial_values_are_not_overwritten(name: str) -> None:
    """In a fresh model: it holds what the method drew, whose Linears would otherwise be N(0, 0.02)."""
    drawn: list[tuple[str, torch.Tensor]] = []
    from whence.models import positions

    built = positions.build_layers

    def watched(*arguments: Any, **named: Any) -> Any:
        whole, layers = built(*arguments, **named)
        for part in (whole, *layers):
            drawn.extend((key, p.detach().clone()) for key, p in part.named_parameters())
        return whole, layers

    positions.build_layers = watched
    try:
        model = WhenceForCausalLM(WhenceConfig(position=name, **SIZES))
    finally:
        positions.build_layers = built
    now = [p.detach() for p in model.model.stack.position.parameters()]
    for value in now:
        assert any(value.shape == p.shape and torch.equal(value, p) for _, p in drawn)


def test_a_method_that_a_checkpoint_lacks_begins_with_its_own_values(tmp_path: Path) -> None:
    WhenceForCausalLM(WhenceConfig(position="rope", **SIZES)).save_pretrained(tmp_path)
    more = "rope+tisa:kernels=4,start=released+fire+alibi+kerple"
    loaded, info = WhenceForCausalLM.from_pretrained(
        tmp_path, position=more, output_loading_info=True
    )
    assert all("position" in key for key in info["missing_keys"])
    layer = loaded.model.stack.position.layers[1]
    torch.testing.assert_close(layer["tisa"].amplitude.mean().item(), 0.1, atol=0.02, rtol=0)
    assert layer["tisa"].offset.std() > 1
    assert layer["fire"].c.item() == pytest.approx(0.1)
    assert layer["fire"].mlp[0].weight.abs().max() > 0.2  # U(-1, 1), not N(0, 0.02)
    torch.testing.assert_close(layer["alibi"].slope, torch.tensor([0.25, 2**-4, 2**-6, 2**-8]))
    assert torch.isfinite(loaded(torch.randint(2, VOCAB, (1, 9))).logits).all()


def test_initial_weights_follow_the_seed_and_the_depth() -> None:
    def fresh(**more: Any) -> WhenceForCausalLM:
        torch.manual_seed(3)
        return WhenceForCausalLM(WhenceConfig(**{**SIZES, "hidden_size": 64, **more}))

    one, two = fresh(), fresh()
    for a, b in zip(one.parameters(), two.parameters(), strict=True):
        torch.testing.assert_close(a, b)
    layer = one.model.stack.layers[0]
    torch.testing.assert_close(layer.self_attn.q_proj.weight.std().item(), 0.02, atol=2e-3, rtol=0)
    torch.testing.assert_close(layer.self_attn.o_proj.weight.std().item(), 0.01, atol=2e-3, rtol=0)
    flat = fresh(residual_scale=False).model.stack.layers[0]
    torch.testing.assert_close(flat.mlp.down_proj.weight.std().item(), 0.02, atol=2e-3, rtol=0)
    assert layer.attention_norm.weight.eq(1).all()
    ids = torch.randint(2, VOCAB, (4, 16))
    assert abs(one(ids, labels=ids).loss.item() - torch.tensor(VOCAB).log().item()) < 0.2


def test_the_config_survives_and_says_what_is_wrong(tmp_path: Path) -> None:
    config = WhenceConfig(position="tisa:kernels=5+rope", sliding_window=7, **SIZES)
    config.save_pretrained(tmp_path)
    loaded = AutoConfig.from_pretrained(tmp_path)
    assert {**loaded.to_dict(), "_name_or_path": ""} == config.to_dict()
    model = AutoModelForCausalLM.from_config(config)
    assert isinstance(model, WhenceForCausalLM)
    for options, message in [
        ({"hidden_size": 30, "num_attention_heads": 4}, "hidden_size must be a multiple"),
        ({"position": 5}, "position must be a text such as 'tisa:kernels=5', got 5"),
        ({"num_attention_heads": 4, "num_key_value_heads": 3}, "must be a multiple of num_key"),
        ({"norm": "batchnorm"}, "Unknown norm 'batchnorm'"),
        ({"positon": "tisa"}, "has no option 'positon'. Did you mean 'position'?"),
        ({"dropout": 0.1}, "has no option 'dropout'. Did you mean 'hidden_dropout'?"),
        ({"n_heads": 4}, r"has no option 'n_heads'. help\(WhenceConfig\) has them all."),
        ({"hidden_act": "sillu"}, "Unknown hidden_act 'sillu'. Did you mean 'silu'?"),
        ({"backend": "fussed"}, "Unknown backend 'fussed'. Did you mean 'fused'?"),
        ({"sliding_window": 0}, "sliding_window must be at least 1"),
        ({"classifier_pooling": "max"}, "Unknown classifier_pooling 'max'"),
    ]:
        with pytest.raises(ValueError, match=message):
            WhenceConfig(**options)
    with pytest.raises(ValueError, match=r"Unknown method 'tisaa'. Did you mean 'tisa'"):
        WhenceModel(WhenceConfig(position="tisaa", **SIZES))
    with pytest.raises(ValueError, match="leave causal=None"):
        WhenceSeq2SeqConfig(causal=True)


def test_a_stored_config_may_hold_names_of_others_but_none_that_is_nearly_ours(
    tmp_path: Path,
) -> None:
    config = WhenceConfig(position="t5", **SIZES)
    config.note = "of mine"
    config.save_pretrained(tmp_path)
    again = AutoConfig.from_pretrained(tmp_path)
    assert (again.note, again.position) == ("of mine", "t5")
    assert "_stored" not in again.to_dict()
    assert WhenceConfig(**WhenceConfig(**SIZES).to_dict()).hidden_size == config.hidden_size
    path = tmp_path / "config.json"
    path.write_text(path.read_text().replace('"position"', '"positon"'))
    with pytest.raises(ValueError, match=r"has no option 'positon'\. Did you mean 'position'\?"):
        AutoConfig.from_pretrained(tmp_path)
