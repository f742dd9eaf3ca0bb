"""LoRA by PEFT beside a method: `modules_to_save=["whence"]` trains a copy that attention reads."""

import copy

import pytest
import torch
from torch.testing import assert_close
from transformers import AutoModelForSequenceClassification, PreTrainedModel

from hf_models import awake, hidden, inputs, spec, tiny
from shaking import draw
from whence.hf import attach, attached, from_pretrained
from whence.models import WhenceConfig, WhenceForCausalLM

peft = pytest.importorskip("peft", reason="needs pip install peft")
TARGETS = {
    "bert": ["query", "value"],
    "albert": ["query", "value"],
    "mpnet": ["q", "v"],
    "gpt2": ["c_attn"],
    "vit": ["q_proj", "v_proj"],
}
GIVEN = inputs("bert", pad="right")


def lora(model: PreTrainedModel, name: str = "bert", **options: object) -> torch.nn.Module:
    settings = {"r": 2, "target_modules": TARGETS[name], "modules_to_save": ["whence"]}
    if name == "gpt2":
        settings["fan_in_fan_out"] = True
    return peft.get_peft_model(model, peft.LoraConfig(**settings | options))


def with_tisa(name: str = "bert", **options: object) -> PreTrainedModel:
    model = tiny(name)
    attach(model, spec(name), **options)
    return model


def shaken(model: torch.nn.Module) -> torch.nn.Module:
    """Adapters with an effect: of the low-rank matrices, and of the copies of methods."""
    trained = [p for p in model.parameters() if p.requires_grad]
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for parameter in trained:
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return model


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize("backend", ["auto", "original", "sdpa"])
def test_the_copy_of_the_methods_gets_gradients_and_changes_the_output(name, backend):
    model = lora(with_tisa(name, backend=backend), name)
    given = inputs(name)
    before = hidden(model, given)
    model(**given)[0].square().mean().backward()
    trained = {key: p.grad for key, p in model.named_parameters() if p.requires_grad}
    methods = {key: grad for key, grad in trained.items() if ".whence." in key}
    assert len(methods) == len(attached(model).methods) * (4 if name == "vit" else 3)
    for key, grad in trained.items():
        assert grad is not None, key
    assert all(grad.abs().max() > 0 for key, grad in methods.items() if "amplitude" in key)
    draw(model.get_submodule("base_model.model.whence.modules_to_save"), 1.0, torch.Generator())
    assert not torch.allclose(hidden(model, given), before, atol=1e-3)


def test_without_modules_to_save_peft_freezes_the_methods():
    model = lora(with_tisa(), modules_to_save=None)
    trained = [key for key, p in model.named_parameters() if p.requires_grad]
    assert trained
    assert not [key for key in trained if "whence" in key]


@pytest.mark.parametrize(
    "method", ["tisa:kernels=2+rope", "t5", "shaw:clip=3", "floater", "learned"]
)
def test_every_kind_of_method_is_trained_in_its_copy(method):
    plain = tiny("bert")
    awake(attach(plain, method), 0.3)
    model = lora(copy.deepcopy(plain))
    want, given = hidden(plain, GIVEN), {**GIVEN}
    assert_close(hidden(model, given), want, rtol=1e-5, atol=1e-6)
    model(**given)[0].square().mean().backward()
    copies = model.base_model.model.whence.modules_to_save.default
    grads = [p.grad for p in copies.parameters()]
    assert all(grad is not None and grad.abs().max() > 0 for grad in grads)
    assert all(p.grad is None for p in model.base_model.model.whence.original_module.parameters())


def test_disabled_adapters_give_the_very_bits_of_the_model_before():
    before = hidden(tiny("bert"), GIVEN)
    model = shaken(lora(with_tisa()))
    after = hidden(model, GIVEN)
    assert not torch.allclose(after, before, atol=1e-3)
    with model.disable_adapter():
        assert_close(hidden(model, GIVEN), before, rtol=0, atol=0)
    assert_close(hidden(model, GIVEN), after, rtol=0, atol=0)


def test_two_adapters_have_a_method_each():
    model = shaken(lora(with_tisa()))
    first = hidden(model, GIVEN)
    model.add_adapter("other", model.peft_config["default"])
    model.set_adapter("other")
    assert_close(hidden(model, GIVEN), hidden(tiny("bert"), GIVEN), rtol=0, atol=0)
    model.set_adapter("default")
    assert_close(hidden(model, GIVEN), first, rtol=0, atol=0)


def test_an_adapter_is_saved_and_loaded_on_a_model_with_the_same_method(tmp_path):
    model = shaken(lora(with_tisa()))
    want = hidden(model, GIVEN)
    model.save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(with_tisa(), tmp_path)
    assert_close(hidden(again, GIVEN), want, rtol=0, atol=0)


def test_an_adapter_finds_a_base_model_that_was_saved_with_its_method(tmp_path):
    model = tiny("bert", AutoModelForSequenceClassification)
    attach(model, "tisa:kernels=2")
    model.save_pretrained(tmp_path / "base")
    base = from_pretrained(tmp_path / "base")
    wrapped = shaken(lora(base, task_type="SEQ_CLS"))
    want = hidden(wrapped, GIVEN)
    wrapped.save_pretrained(tmp_path / "adapter")
    again = peft.AutoPeftModelForSequenceClassification.from_pretrained(tmp_path / "adapter")
    assert_close(hidden(again, GIVEN), want, rtol=0, atol=0)


@pytest.mark.parametrize("name", ["bert", "vit"])
def test_a_merged_model_is_a_model_with_a_method_that_is_saved_and_comes_off(name, tmp_path):
    given = inputs(name)
    model = shaken(lora(with_tisa(name, keep_positions=False), name))
    want = hidden(model, given)
    with pytest.raises(ValueError, match=r"PEFT trains a copy.*merge_and_unload\(\)"):
        attached(model).undo()
    merged = model.merge_and_unload()
    assert_close(hidden(merged, given), want, rtol=1e-4, atol=1e-5)
    merged.save_pretrained(tmp_path)
    again = from_pretrained(tmp_path)
    assert_close(hidden(again, given), hidden(merged, given), rtol=0, atol=0)
    attached(merged).undo()
    attached(again).undo()
    assert_close(hidden(again, given), hidden(merged, given), rtol=0, atol=0)


def test_adapters_of_transformers_itself_do_the_same():
    model = with_tisa()
    config = peft.LoraConfig(r=2, target_modules=["query"], modules_to_save=["whence"])
    model.add_adapter(config)
    model.train()
    model(**GIVEN)[0].square().mean().backward()
    grads = [p.grad for key, p in model.named_parameters() if "whence.modules_to_save" in key]
    assert grads
    assert all(grad is not None for grad in grads)


def test_a_method_that_is_wrapped_on_its_own_is_refused():
    model = lora(with_tisa(), modules_to_save=["layer0_tisa"])
    with pytest.raises(ValueError, match=r"layer0_tisa: .*modules_to_save=\['whence'\]"):
        model(**GIVEN)


def test_a_copied_attention_reads_the_methods_of_the_model():
    model = lora(with_tisa(), target_modules=["dense"], modules_to_save=["whence", "self"])
    draw(model.get_submodule("base_model.model.whence.modules_to_save"), 1.0, torch.Generator())
    model(**GIVEN)[0].square().mean().backward()
    copies = model.base_model.model.whence.modules_to_save.default
    assert all(p.grad is not None for p in copies.parameters())


def test_a_layer_that_is_computed_again_in_backward_reads_the_same_copy():
    model = lora(with_tisa()).train()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    shaken(model)

    def gradients() -> dict[str, torch.Tensor]:
        model.zero_grad()
        model(**GIVEN)[0].square().mean().backward()
        return {key: p.grad.clone() for key, p in model.named_parameters() if p.requires_grad}

    want = gradients()
    model.base_model.model.gradient_checkpointing_enable()
    for key, grad in gradients().items():
        assert_close(grad, want[key], rtol=1e-4, atol=1e-6)


def native(position: str) -> PreTrainedModel:
    torch.manual_seed(2)
    sizes = {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = WhenceConfig(position=position, max_position_embeddings=32, **sizes)
    return WhenceForCausalLM(config).eval()


def test_a_method_of_a_native_model_that_is_wrapped_on_its_own_is_refused():
    ids = torch.arange(9)[None]
    for saved in ("tisa", "layers.0.tisa"):
        model = lora(native("tisa"), target_modules=["q_proj"], modules_to_save=[saved])
        with pytest.raises(ValueError, match=r"tisa: a method was wrapped.*\['position'\]"):
            model(ids)
    model = lora(native("tisa"), target_modules=["q_proj"], modules_to_save=["position"])
    model(ids, labels=ids).loss.backward()
    trained = [p.grad for key, p in model.named_parameters() if "modules_to_save" in key]
    assert len(trained) == 6
    assert all(grad is not None for grad in trained)


def test_an_adapter_around_a_layer_of_a_method_acts_or_is_refused():
    ids = torch.arange(9)[None]
    model = native("content_band")
    shaken(model)
    settings = {"target_modules": ["mix"], "modules_to_save": None, "init_lora_weights": False}
    adapted = lora(model, **settings)
    with torch.no_grad():
        want = adapted(ids).logits
        assert_close(adapted.merge_and_unload()(ids).logits, want, rtol=1e-4, atol=1e-5)
        assert (native("content_band")(ids).logits - want).abs().max() > 1e-3
    adapted = lora(native("floater"), **settings | {"target_modules": ["inner", "outer"]})
    with pytest.raises(ValueError, match="an adapter around them would do nothing"):
        adapted(ids)
