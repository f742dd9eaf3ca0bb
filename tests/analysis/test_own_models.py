"""`inspect` of models of this library: attached, distilled and native ones."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers as hf

import whence.hf
from whence.analysis import stack_reader
from whence.analysis.inspect import inspect
from whence.analysis.profile import lag_profiles
from whence.analysis.results import Inspection
from whence.models import (
    WhenceConfig,
    WhenceForCausalLM,
    WhenceForMaskedLM,
    WhenceSeq2SeqConfig,
    WhenceSeq2SeqModel,
)

SIZES = {
    "vocab_size": 40,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 8,
    "max_position_embeddings": 24,
}


def attached(folder: Path, position: str, **options) -> hf.PreTrainedModel:
    torch.manual_seed(0)
    model = hf.BertForMaskedLM(hf.BertConfig(**SIZES))
    whence.hf.attach(model, position, **options)
    shaken(model)
    model.save_pretrained(folder)
    return model


def native(folder: Path, position: str, cls=WhenceForCausalLM, **options):
    torch.manual_seed(0)
    model = shaken(cls(WhenceConfig(position=position, **SIZES, **options)))
    model.save_pretrained(folder)
    return model


def shaken(model):
    """Methods that start at zero, or alike in all layers, are told apart."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "whence" in name or "position." in name:
                parameter.add_(torch.randn_like(parameter), alpha=0.3)
    return model


def weights_only(folder: Path, **options) -> Inspection:
    return inspect(folder, fit=False, profiles=False, **options)


def curve(method, lag: np.ndarray) -> torch.Tensor:
    """What a method of the model adds, by the method itself."""
    pos = torch.arange(len(lag) if lag[-1] == 0 else (len(lag) + 1) // 2)
    q = torch.zeros(1, 2, len(pos), 8)
    bias = method.score_term(q, pos, pos).to_dense(pos, pos)[0].expand(2, -1, -1)
    left = bias[:, -1, :]
    return left if lag[-1] == 0 else torch.cat([left, bias[:, 0, 1:]], dim=1)


@pytest.mark.parametrize("position", ["tisa:kernels=3", "t5", "tisa:kernels=2+alibi"])
@pytest.mark.parametrize("share", [False, True])
def test_an_attached_method_is_stated_beside_the_table(tmp_path, position, share):
    model = attached(tmp_path, position, share=share)
    handle = whence.hf.attached(model)
    for layer in (0, 1):
        found = weights_only(tmp_path, layer=layer)
        assert (found.model.family, found.model.position.split(" ")[0]) == ("bert", "table")
        assert len(found.heads) == 2
        for head in found.relative:
            wanted = curve(handle.methods[layer], head.lag)[head.head].detach()
            torch.testing.assert_close(torch.tensor(head.curve), wanted, atol=1e-5, rtol=1e-5)


def test_a_model_whose_table_was_dropped_has_the_method_alone(tmp_path):
    attached(tmp_path, "tisa:kernels=3", keep_positions=False)
    found = weights_only(tmp_path)
    assert (found.table, found.heads, len(found.relative)) == (None, (), 2)
    assert found.model.position.startswith("tisa:kernels=3")


def test_layers_without_the_method_state_nothing(tmp_path):
    attached(tmp_path, "tisa:kernels=3", layers=[1])
    assert weights_only(tmp_path).relative == ()
    assert len(weights_only(tmp_path, layer=1).relative) == 2


@pytest.mark.parametrize("position", ["tisa:kernels=3", "t5", "alibi"])
def test_a_native_model_states_its_curves_at_the_lags_that_it_sees(tmp_path, position):
    for cls, last in ((WhenceForCausalLM, 0.0), (WhenceForMaskedLM, 128.0)):
        model = native(tmp_path / cls.__name__, position, cls)
        for layer in (0, 1):
            found = weights_only(tmp_path / cls.__name__, layer=layer)
            assert (found.model.family, found.model.position) == ("whence", position)
            method = model.model.stack.position.layer(layer)
            for head in found.relative:
                assert head.lag[-1] == last
                wanted = curve(method, head.lag)[head.head].detach()
                torch.testing.assert_close(torch.tensor(head.curve), wanted, atol=1e-5, rtol=1e-5)
            assert len(found.relative) == 2


def test_computed_positions_of_an_enormous_length_are_read_up_to_a_bound(tmp_path, monkeypatch):
    native(tmp_path / "model", "sinusoidal")
    path = tmp_path / "model" / "config.json"
    path.write_text(path.read_text().replace(": 24", f": {10**9}"))
    monkeypatch.setattr(stack_reader, "MOST_COMPUTED", 16)
    found = weights_only(tmp_path / "model")
    assert found.table.gram.shape == (16, 16)
    assert "positions are computed and have no end: the first 16 are read" in found.notes


def test_a_native_table_is_read_with_its_heads(tmp_path):
    model = native(tmp_path, "learned")
    found = weights_only(tmp_path)
    table = model.model.stack.position.whole.input_term(torch.arange(24)).detach()
    torch.testing.assert_close(torch.tensor(found.table.gram), table @ table.T)
    part = model.model.stack.layers[0].self_attn
    q, k = (
        torch.stack((table @ project.weight.T).chunk(2, dim=1)).detach()
        for project in (part.q_proj, part.k_proj)
    )
    for head in found.heads:
        torch.testing.assert_close(
            torch.tensor(head.matrix), q[head.head] @ k[head.head].T / 8**0.5, atol=1e-5, rtol=1e-4
        )
    assert found.model.position == "learned"


def test_shared_layers_and_missing_scales_are_read_as_the_model_has_them(tmp_path):
    native(tmp_path / "a", "learned", shared_layers=True, scale_attention=False)
    native(tmp_path / "b", "learned", shared_layers=True)
    first, second = (weights_only(tmp_path / name, layer=1).heads for name in "ab")
    for one, two in zip(first, second, strict=True):
        torch.testing.assert_close(torch.tensor(one.matrix), torch.tensor(two.matrix) * 8**0.5)


def test_a_method_that_turns_content_says_that_a_profile_measures_it(tmp_path):
    native(tmp_path, "rope")
    found = weights_only(tmp_path)
    assert (found.table, found.relative) == (None, ())
    assert any("rope adds depends on the content" in note for note in found.notes)


def test_the_logits_of_native_and_attached_models_are_measured(tmp_path):
    native(tmp_path / "native", "alibi")
    attached(tmp_path / "attached", "tisa:kernels=2")
    for name, last in (("native", 0), ("attached", 11)):
        found = lag_profiles(tmp_path / name, layers=[1], length=12, pieces=2)
        assert [profile.head for profile in found] == [0, 1]
        assert found[0].lag[-1] == last


def test_both_stacks_of_an_encoder_decoder_are_read(tmp_path):
    sizes = {**SIZES, "num_encoder_layers": 1}
    shaken(WhenceSeq2SeqModel(WhenceSeq2SeqConfig(position="t5", **sizes))).save_pretrained(
        tmp_path
    )
    encoder, decoder = (weights_only(tmp_path, stack=name) for name in ("encoder", "decoder"))
    assert (encoder.model.n_layers, decoder.model.n_layers) == (1, 2)
    assert (encoder.relative[0].lag[-1], decoder.relative[0].lag[-1]) == (128, 0)
    assert not np.array_equal(encoder.relative[0].curve[:129], decoder.relative[0].curve)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"position": 5}, r"must name its method in whence\.position .* got 5\."),
        ({"position": None}, r"must name its method in whence\.position .* got None\."),
        ({"position": "nothing"}, "Unknown method 'nothing'"),
        ({"position": "tisa:kernels=4,start=zero"}, "has other sizes than its config"),
        ({"position": "kerple"}, "lacks weights of the method that its config names"),
        ({"layers": "all"}, r"must list layers of 0\.\.1 in whence\.layers, got 'all'"),
        ({"layers": [7]}, r"must list layers of 0\.\.1"),
    ],
)
def test_a_config_that_names_no_such_method_is_one_line(tmp_path, change, message):
    attached(tmp_path, "tisa:kernels=3")
    path = tmp_path / "config.json"
    data = json.loads(path.read_text())
    path.write_text(json.dumps({**data, "whence": {**data["whence"], **change}}))
    with pytest.raises(ValueError, match=message) as refused:
        weights_only(tmp_path)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("entry", [5, None, "tisa", []])
def test_an_entry_that_is_no_object_is_one_line(tmp_path, entry):
    attached(tmp_path, "tisa:kernels=3")
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "whence": entry}))
    with pytest.raises(ValueError, match=r"must name its method in whence\.position"):
        weights_only(tmp_path)
