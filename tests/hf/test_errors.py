"""Everything that `attach` refuses, each in one clear sentence with the way out."""

import pytest
import torch
from transformers import AutoModel, T5Config, T5EncoderModel

from hf_models import inputs, spec, tiny
from whence.hf import attach, attached, from_pretrained
from whence.methods.rope import Rope
from whence.methods.tisa import Tisa


def test_attaching_twice():
    model = tiny("bert")
    handle = attach(model, "tisa")
    with pytest.raises(ValueError, match=r"attached already.*undo\(\).*'tisa\+rope'"):
        attach(model, "t5")
    handle.undo()
    attach(model, "t5")
    with pytest.raises(ValueError, match="no longer on the model"):
        handle.undo()


@pytest.mark.parametrize("what", ["attach", "undo"])
def test_a_model_in_the_middle_of_a_pass(what):
    model = tiny("bert")
    handle = attach(model, "tisa") if what == "undo" else None
    raised = []

    def hook(*_):
        with pytest.raises(ValueError, match=f"middle of a forward pass: {what}") as error:
            handle.undo() if handle else attach(model, "tisa")
        raised.append(error)

    model.encoder.layer[0].register_forward_hook(hook)
    model(**inputs("bert"))
    assert len(raised) == 1


def test_a_model_that_another_one_calls_is_not_in_use():
    inner, outer = tiny("bert"), tiny("gpt2")
    outer.h[0].register_forward_hook(lambda *_: attach(inner, "tisa") and None)
    outer(**inputs("gpt2"))
    assert inner.whence is not None


def test_an_unknown_family():
    model = T5EncoderModel(T5Config(d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=2))
    with pytest.raises(
        ValueError, match=r"Unknown family of model 't5'.*albert, bert.*whence\.families"
    ):
        attach(model, "tisa")


@pytest.mark.parametrize(
    ("method", "message"),
    [
        (Tisa(5), "built for n_heads = 5, this model has 4.*'tisa:kernels=5'"),
        (Rope(16), "built for d_head = 16, this model has 8"),
        ("tisa:n_heads=3", "built for n_heads = 3, this model has 4"),
        ("learned:max_length=8", "knows 8 positions, this model takes 24.*Leave out max_length"),
        ("cope", "looks back only, and this model's looks both ways"),
        ("tiza", "Unknown method 'tiza'. Did you mean 'tisa'"),
        ("tisa:kernel=5", "Unknown option of method 'tisa': 'kernel'. Did you mean 'kernels'"),
    ],
)
def test_a_method_that_does_not_fit(method, message):
    model = tiny("bert")
    before = list(model.state_dict())
    with pytest.raises(ValueError, match=message):
        attach(model, method)
    assert list(model.state_dict()) == before
    assert model.config.model_type == "bert"


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ([2], r"layers 0\.\.1, got layer 2"),
        ([-1], "layer must be at least 0, got -1"),
        ([0, 0], "each once"),
        ([], "at least one"),
    ],
)
def test_layers_that_are_not_there(layers, message):
    with pytest.raises(ValueError, match=message):
        attach(tiny("bert"), "tisa", layers=layers)


def test_a_quantized_model():
    model = tiny("bert")
    model.is_quantized = True
    with pytest.raises(ValueError, match=r"quantized.*without quantization_config"):
        attach(model, "tisa")


def test_something_that_is_not_a_model_of_transformers():
    with pytest.raises(TypeError, match=r"got Linear. Attach before compiling or wrapping"):
        attach(torch.nn.Linear(2, 2), "tisa")
    with pytest.raises(TypeError, match="got OptimizedModule"):
        attach(torch.compile(tiny("bert"), backend="eager"), "tisa")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"train": "head"}, "Unknown train 'head'.*all, position"),
        ({"backend": "fast"}, "Unknown backend 'fast'.*auto.*original"),
    ],
)
def test_options_that_are_not_there(options, message):
    with pytest.raises(ValueError, match=message):
        attach(tiny("bert"), "tisa", **options)


def test_an_attention_implementation_that_no_method_can_enter():
    model = AutoModel.from_config(tiny("bert").config, attn_implementation="flex_attention")
    with pytest.raises(ValueError, match=r"'flex_attention'.*attn_implementation='sdpa'"):
        attach(model, "tisa")
    model = tiny("gpt2", attn="eager", reorder_and_upcast_attn=True)
    with pytest.raises(ValueError, match=r"reorder_and_upcast_attn.*attn_implementation='sdpa'"):
        attach(model, "tisa")


def test_an_input_term_in_a_bert_that_decodes():
    with pytest.raises(ValueError, match=r"adds to the embedding.*where a cached sequence goes on"):
        attach(tiny("bert", is_decoder=True), "sinusoidal")


def test_input_beyond_a_method_with_a_fixed_length():
    model = tiny("bert")
    attach(model, "learned", keep_positions=False)
    with pytest.raises(ValueError, match=r"knows positions 0\.\.23"):
        model(**inputs("bert", 30))


def test_an_image_of_another_width_is_refused_by_the_model_itself():
    model = tiny("vit")
    attach(model, spec("vit"))
    with pytest.raises(ValueError, match="doesn't match model"):
        model(pixel_values=torch.randn(1, 3, 16, 16))


def test_patches_that_form_another_grid_are_refused_by_a_method_for_images():
    for method, wrong in (("tisa2d", (24, 24)), ("table2d", (4, 20)), ("table2d", (100, 20))):
        model = tiny("vit")
        before = model(torch.randn(1, 3, *wrong), interpolate_pos_encoding=True)
        handle = attach(model, method)
        with pytest.raises(ValueError, match=r"was attached for images of .*width=5 in patches"):
            model(torch.randn(1, 3, *wrong), interpolate_pos_encoding=True)
        model(torch.randn(1, 3, 20, 20))
        handle.undo()
        after = model(torch.randn(1, 3, *wrong), interpolate_pos_encoding=True)
        assert after[0].shape == before[0].shape


def test_a_class_with_a_method_and_a_config_without_one(tmp_path):
    model = tiny("bert")
    attach(model, "tisa")
    model.save_pretrained(tmp_path)
    loaded = from_pretrained(tmp_path)
    attached(loaded).undo()
    with pytest.raises(ValueError, match="this config names no method"):
        type(loaded)(loaded.config)


def test_a_layer_on_another_device_than_its_method():
    model = tiny("bert")
    attach(model, "tisa")
    model.whence.to("meta")  # stands for a second GPU
    with pytest.raises(ValueError, match=r"is on meta, its layer's input on cpu.*torchrun"):
        model(**inputs("bert"))


def test_a_model_is_as_it_was_when_attaching_fails_half_way(monkeypatch):
    model, given = tiny("bert"), inputs("bert")
    before, config, keys = model(**given)[0], model.config, list(model.state_dict())

    def stop(*_):
        raise RuntimeError("stop")

    monkeypatch.setattr("whence.hf.attaching.add_input_term", stop)
    with pytest.raises(RuntimeError, match="stop"):
        attach(model, "tisa", keep_positions=False)
    assert model.config is config
    assert list(model.state_dict()) == keys
    torch.testing.assert_close(model(**given)[0], before, rtol=0, atol=0)
    monkeypatch.undo()
    attach(model, "tisa")
