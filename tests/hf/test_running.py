"""What a model does beside a plain forward pass goes on with a method attached, or says why not."""

from itertools import product

import pytest
import torch
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    AttentionMaskInterface,
    AutoModelForCausalLM,
    BertConfig,
    BertLMHeadModel,
    StaticCache,
)
from transformers.masking_utils import sdpa_mask
from transformers.models.bert import modeling_bert

import hf_models
from hf_models import CAUSAL, FAMILIES, awake, hidden, inputs, spec, tiny
from whence.hf import attach

each_family = pytest.mark.parametrize("name", FAMILIES)
GENERATED = {  # every pair of family and backend, and every method; `make test-all` has all triples
    ("gpt2", "original", "tisa:kernels=3"),
    ("opt", "auto", "tisa:kernels=3"),
    ("opt", "original", "rope"),
    ("gpt2", "auto", "alibi+tisa"),
    ("opt", "original", "t5"),
    ("gpt2", "auto", "shaw:clip=3"),
}
CHECKPOINTED = [name for name in FAMILIES if name not in ("albert", "mpnet")]


def gradients(model: torch.nn.Module, given: dict) -> dict[str, torch.Tensor]:
    model.zero_grad()
    torch.manual_seed(5)
    out = model(**given)[0]
    out.square().mean().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def only_real(x: torch.Tensor, given: dict) -> torch.Tensor:
    mask = given.get("attention_mask")
    return x if mask is None else x[mask.bool()]


@each_family
@pytest.mark.parametrize("attn", ["sdpa", "eager"])
def test_dropout_draws_the_same_numbers_as_before(name, attn):
    model, given = tiny(name, attn=attn).train(), inputs(name, pad="right")
    torch.manual_seed(5)
    before = model(**given)[0].detach()
    torch.manual_seed(5)
    attach(model, spec(name, "kernels=3,start=zero"), backend="original")
    torch.manual_seed(5)
    assert_close(model(**given)[0].detach(), before, rtol=0, atol=0)


@pytest.mark.parametrize("name", CHECKPOINTED)
@pytest.mark.parametrize("backend", ["original", "auto"])
def test_gradient_checkpointing_changes_no_gradient(name, backend):
    changes = {"layerdrop": 0.0} if name == "opt" else {}
    model, given = tiny(name, **changes).train(), inputs(name)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    handle = attach(model, spec(name), backend=backend)
    awake(handle, 0.3)
    options = {"use_cache": False} if name in CAUSAL else {}
    want = gradients(model, given | options)
    model.gradient_checkpointing_enable()
    got = gradients(model, given | options)
    assert want.keys() == got.keys()
    for key, gradient in want.items():
        assert_close(got[key], gradient, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("attn", ["sdpa", "eager"])
@pytest.mark.parametrize("backend", ["auto", "original"])
@pytest.mark.parametrize("position", ["tisa:kernels=3", "t5", "kerple", "deberta"])
def test_training_begins_with_gradient_checkpointing(position, backend, attn):
    # No pass comes before: the layers still look whether the bias is zero.
    model, given = tiny("bert", attn=attn).train(), inputs("bert")
    attach(model, position, backend=backend)
    model.gradient_checkpointing_enable()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        model(**given)[0].square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_a_reentrant_checkpoint_draws_the_same_dropout_beside_a_bias_of_zero():
    model, given = tiny("bert").train(), inputs("bert")
    attach(model, "tisa:kernels=3")
    given["inputs_embeds"] = model.get_input_embeddings()(given.pop("input_ids")).detach()
    given["inputs_embeds"].requires_grad_()  # without, a reentrant checkpoint gives no gradients
    want = gradients(model, given)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    got = gradients(model, given)
    assert want.keys() == got.keys()
    for key, gradient in want.items():
        assert_close(got[key], gradient, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["albert", "mpnet"])
def test_families_without_gradient_checkpointing_can_be_checkpointed_as_a_whole(name):
    model, given = tiny(name), inputs(name)
    with pytest.raises(ValueError, match="does not support gradient checkpointing"):
        model.gradient_checkpointing_enable()
    handle = attach(model, "tisa:kernels=3")
    awake(handle, 0.3)
    want = gradients(model, given)
    model.zero_grad()
    out = torch.utils.checkpoint.checkpoint(model, **given, use_reentrant=False)[0]
    out.square().mean().backward()
    for key, gradient in want.items():
        assert_close(model.get_parameter(key).grad, gradient, rtol=1e-4, atol=1e-6)


@each_family
@pytest.mark.parametrize(
    ("dtype", "attn"),
    [
        (torch.bfloat16, "sdpa"),
        (torch.float16, "eager"),
        pytest.param(torch.bfloat16, "eager", marks=pytest.mark.slow),
        pytest.param(torch.float16, "sdpa", marks=pytest.mark.slow),
    ],
)
def test_half_precision_keeps_its_bits_and_stays_close_to_float32(name, dtype, attn):
    exact, given = tiny(name, attn=attn), inputs(name, pad="left")
    handle = attach(exact, spec(name))
    awake(handle, 0.3)
    want = hidden(exact, given)
    model = tiny(name, attn=attn).to(dtype)
    before = hidden(model, given)
    handle = attach(model, spec(name, "kernels=3,start=zero"))
    assert next(model.base_model.whence.parameters()).dtype == torch.float32
    assert next(model.base_model.parameters()).dtype == dtype
    assert_close(hidden(model, given), before, rtol=0, atol=0)
    model.base_model.whence.load_state_dict(exact.base_model.whence.state_dict())
    got = hidden(model, given).float()
    error = (only_real(got - want, given)).norm() / only_real(want, given).norm()
    assert error < 0.06 if dtype == torch.bfloat16 else error < 0.01


def test_half_precision_masks_far_below_do_not_overflow():
    model = tiny("bert", attn="eager").half()
    handle = attach(model, "tisa:kernels=1")
    for method in handle.methods:
        method.amplitude, method.sharpness = -100.0, 0.0
    given = inputs("bert", pad="left")
    assert hidden(model, given).isfinite().all()


@each_family
def test_output_attentions_gives_weights_where_it_did(name):
    given = inputs(name)
    eager = tiny(name, attn="eager")
    attach(eager, spec(name))
    weights = eager(**given, output_attentions=True).attentions
    assert len(weights) == eager.config.num_hidden_layers
    assert_close(weights[0].sum(-1), torch.ones_like(weights[0][..., 0]))


def test_output_attentions_may_be_set_in_the_config_as_before(tmp_path):
    model = tiny("bert", attn="eager")
    model.config.output_attentions = True
    handle = attach(model, "tisa")
    assert len(model(**inputs("bert")).attentions) == 2
    model.save_pretrained(tmp_path)
    model.config.output_attentions = False
    assert model(**inputs("bert")).attentions is None
    model.config.output_attentions = True
    handle.undo()
    sdpa = tiny("bert")
    attach(sdpa, "tisa")
    with pytest.raises(ValueError, match="Please set it to 'eager' instead"):
        sdpa.config.output_attentions = True


@each_family
@pytest.mark.parametrize(
    ("attn", "backend", "method"),
    [
        ("eager", "auto", "tisa"),
        ("eager", "auto", "shaw:clip=3"),
        ("sdpa", "auto", "tisa"),
        ("sdpa", "sdpa", "tisa"),
        ("sdpa", "original", "shaw:clip=3"),
    ],
)
def test_weights_that_are_asked_for_are_in_the_graph_of_the_output(name, attn, backend, method):
    model, given = tiny(name, attn=attn), inputs(name, pad="right")
    handle = attach(model, spec(name) if method == "tisa" else method, backend=backend)
    awake(handle, 0.3)
    want = hidden(model, given)
    out = model(**given, output_attentions=True)
    assert_close(only_real(out[0], given), only_real(want, given), rtol=1e-4, atol=1e-5)
    assert len(out.attentions) == model.config.num_hidden_layers
    for weights in out.attentions:
        assert weights.shape[:2] == (2, 4)
        weights.retain_grad()
    out[0].square().mean().backward()
    for weights in out.attentions:
        assert weights.grad.abs().max() > 0


def test_weights_are_asked_for_by_the_config_of_a_model_that_attend_runs():
    model = tiny("bert", attn="eager")
    awake(attach(model, "shaw:clip=3"), 0.3)
    model.config.output_attentions = True
    weights = model(**inputs("bert")).attentions
    assert_close(weights[0].sum(-1), torch.ones_like(weights[0][..., 0]))


def test_hidden_states_are_captured_as_before():
    model, given = tiny("albert"), inputs("albert")
    attach(model, "tisa:start=zero")
    states = model(**given, output_hidden_states=True).hidden_states
    assert len(states) == 4
    assert_close(states[-1].detach(), hidden(model, given), rtol=0, atol=0)


@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "vit"])
@pytest.mark.parametrize("pad", ["left", "right"])
def test_padding_changes_nothing_for_the_tokens_beside_it(name, pad):
    model = tiny(name)
    handle = attach(model, "tisa:kernels=3", keep_positions=False)
    awake(handle, 0.5)
    given = inputs(name, pad=pad)
    real = given["attention_mask"][0].bool()
    alone = hidden(model, {"input_ids": given["input_ids"][:1, real]})
    assert_close(hidden(model, given)[:1, real], alone, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "backend", "method"),
    [
        pytest.param(*case, marks=[] if case in GENERATED else [pytest.mark.slow])
        for case in product(
            CAUSAL,
            ("original", "auto"),
            ("tisa:kernels=3", "rope", "alibi+tisa", "t5", "shaw:clip=3"),
        )
    ],
)
def test_cached_generation_equals_uncached_also_left_padded(name, backend, method):
    model = tiny(name, AutoModelForCausalLM, bos_token_id=2, eos_token_id=None, pad_token_id=1)
    handle = attach(model, method, backend=backend)
    awake(handle, 0.5)
    given = inputs(name, 8, pad="left")
    greedy = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 1}
    scores = [
        model.generate(
            **given, **greedy, use_cache=cached, return_dict_in_generate=True, output_logits=True
        )
        for cached in (True, False)
    ]
    assert scores[0].sequences.tolist() == scores[1].sequences.tolist()
    assert_close(torch.stack(scores[0].logits), torch.stack(scores[1].logits), rtol=1e-4, atol=1e-4)
    beams = [
        model.generate(**given, **greedy, use_cache=cached, num_beams=2).tolist()
        for cached in (True, False)
    ]
    assert beams[0] == beams[1]


def test_learned_positions_follow_the_cache():
    model = tiny("gpt2", AutoModelForCausalLM, bos_token_id=2, eos_token_id=None, pad_token_id=1)
    awake(attach(model, "learned", keep_positions=False), 0.5)
    ids = inputs("gpt2", 8)["input_ids"]
    whole = model(ids).logits
    first = model(ids[:, :5], use_cache=True)
    rest = model(ids[:, 5:], past_key_values=first.past_key_values).logits
    assert_close(rest, whole[:, 5:], rtol=1e-4, atol=1e-4)


def test_methods_that_cannot_go_on_from_a_cache_say_so():
    ids = inputs("gpt2", 8)["input_ids"]
    for method in ("forget", "rope:scaling=dynamic,factor=2,original_length=24"):
        model = tiny("gpt2", AutoModelForCausalLM)
        attach(model, method)
        first = model(ids[:, :5], use_cache=True)
        with pytest.raises(ValueError, match="use_cache=False"):
            model(ids[:, 5:], past_key_values=first.past_key_values)


def test_a_cache_of_fixed_size_is_refused():
    model = tiny("gpt2", AutoModelForCausalLM)
    attach(model, "tisa")
    cache = StaticCache(config=model.config, max_cache_len=16)
    with pytest.raises(ValueError, match="dynamic cache"):
        model(**inputs("gpt2", 8), past_key_values=cache)


def test_a_bert_that_is_a_decoder_with_cross_attention_keeps_that_as_it_was():
    config = BertConfig(**hf_models.TEXT, is_decoder=True, add_cross_attention=True)
    model, given = BertLMHeadModel(config).eval(), inputs("bert")
    memory = torch.randn(2, 5, 32)
    before = model(**given, encoder_hidden_states=memory).logits.detach()
    handle = attach(model, "tisa:start=zero")
    after = model(**given, encoder_hidden_states=memory).logits.detach()
    assert_close(after, before, rtol=0, atol=0)
    handle.undo()
    attach(model, "tisa:start=zero", backend="auto")
    after = model(**given, encoder_hidden_states=memory).logits.detach()
    assert_close(after, before, rtol=1e-4, atol=1e-5)


def test_a_mask_of_four_axes_is_taken_as_it_is():
    for attn in ("sdpa", "eager"):
        for backend in ("original", "auto"):
            model, given = tiny("bert", attn=attn), inputs("bert")
            handle = attach(model, "tisa", backend=backend)
            awake(handle, 0.5)
            allowed = torch.ones(12, 12, dtype=torch.bool).tril()
            mask = allowed[None, None].expand(2, 1, 12, 12)
            if attn == "eager":
                mask = torch.where(mask, 0.0, torch.finfo(torch.float32).min)
            whole = hidden(model, given | {"attention_mask": mask})
            part = mask[:, :, :5, :5]
            short = {"input_ids": given["input_ids"][:, :5], "attention_mask": part}
            assert_close(whole[:, :5], hidden(model, short), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "mpnet"])  # has one alone
@pytest.mark.parametrize("backend", ["auto", "original", "sdpa"])
def test_another_attention_that_is_set_after_attaching_is_taken(name, backend):
    model, given = tiny(name), inputs(name, pad="left")
    awake(attach(model, spec(name), backend=backend), 0.5)
    want = hidden(model, given)
    for chosen in ("eager", "sdpa", "eager"):
        model.set_attn_implementation(chosen)
        assert model.config._attn_implementation == chosen
        got = hidden(model, given)
        assert_close(only_real(got, given), only_real(want, given), rtol=1e-4, atol=1e-5)
    model.config._attn_implementation = "sdpa"
    assert_close(only_real(hidden(model, given), given), only_real(want, given))


def test_the_attention_that_was_set_last_is_the_one_that_runs(monkeypatch):
    model, given, ran = tiny("bert"), inputs("bert"), []
    attach(model, "tisa:start=zero")
    eager = modeling_bert.eager_attention_forward
    monkeypatch.setattr(
        modeling_bert, "eager_attention_forward", lambda *a, **k: ran.append(1) or eager(*a, **k)
    )
    hidden(model, given)
    assert not ran
    model.set_attn_implementation("eager")
    hidden(model, given)
    assert len(ran) == 2  # layers
    model.set_attn_implementation("sdpa")
    hidden(model, given)
    assert len(ran) == 2


def test_an_attention_that_no_method_can_enter_is_refused_in_the_next_pass():
    model = tiny("bert")
    attach(model, "tisa")
    AttentionMaskInterface.register("somebody's", sdpa_mask)
    model.config._attn_implementation = "somebody's"
    with pytest.raises(ValueError, match=r"\"somebody's\".*set_attn_implementation\('sdpa'\)"):
        model(**inputs("bert"))
    model.set_attn_implementation("sdpa")
    model(**inputs("bert"))


class Largest(TorchDispatchMode):
    """Remembers how many numbers the largest tensor had."""

    numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                self.numbers = max(self.numbers, tensor.untyped_storage().nbytes() // 4)
        return out


@pytest.mark.parametrize(("backend", "linear"), [("auto", True), ("original", False)])
@pytest.mark.parametrize("start", ["zero", "local"])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_the_default_trains_in_linear_memory_and_original_in_n_x_n(backend, linear, start, dropout):
    n, heads = 1152, 4
    model = tiny("bert", num_hidden_layers=1, attention_probs_dropout_prob=dropout).train()
    attach(model, f"tisa:kernels=2,start={start}", keep_positions=False, backend=backend)
    given = {"input_ids": inputs("bert", n)["input_ids"][:1]}
    with Largest() as largest:
        model(**given)[0].square().mean().backward()
    assert model.whence.layer0_tisa.raw_amplitude.grad.abs().max() > 0
    assert (largest.numbers < heads * n * n / 2) == linear


@pytest.mark.compiled
@pytest.mark.parametrize(
    "name",
    [
        "bert",
        pytest.param("albert", marks=pytest.mark.slow),
        pytest.param("mpnet", marks=pytest.mark.slow),
        pytest.param("gpt2", marks=pytest.mark.slow),
        pytest.param("vit", marks=pytest.mark.slow),
    ],
)
def test_a_compiled_model_gives_the_same_and_trains(name):
    model, given = tiny(name), inputs(name, pad="right")
    handle = attach(model, spec(name))
    awake(handle, 0.3)
    want, wanted = hidden(model, given), gradients(model, given)
    compiled = torch.compile(model, backend="aot_eager")
    assert_close(hidden(compiled, given), want, rtol=1e-4, atol=1e-5)
    got = gradients(compiled, given)
    for key, gradient in wanted.items():
        assert_close(got[f"_orig_mod.{key}"], gradient, rtol=1e-3, atol=1e-5)


@pytest.mark.compiled
@pytest.mark.parametrize(
    "name", ["bert", *(pytest.param(x, marks=pytest.mark.slow) for x in ("albert", "gpt2"))]
)
def test_a_method_brings_no_graph_break(name):
    def graphs(model: torch.nn.Module) -> int:
        torch._dynamo.reset()
        found = torch._dynamo.explain(model)(**given)
        return int(found.graph_break_count)

    model, given = tiny(name), inputs(name)
    before = graphs(model)
    awake(attach(model, "tisa:kernels=3"))
    assert graphs(model) <= before


@pytest.mark.parametrize("kind", ["allowed", "added"])
def test_a_mask_of_each_head_is_that_of_each_head(kind):
    model, given = tiny("bert"), inputs("bert")
    mask = torch.rand(2, 4, 1, 12, generator=torch.Generator().manual_seed(1))
    mask = mask > 0.4 if kind == "allowed" else mask.masked_fill(mask < 0.4, -torch.inf)
    mask[..., 0] = 1
    before = hidden(model, given | {"attention_mask": mask})
    attach(model, "tisa:kernels=2,start=zero", backend="reference")
    after = hidden(model, given | {"attention_mask": mask})
    assert_close(after, before, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("method", ["tisa:kernels=2", "shaw:clip=2"])
def test_a_mask_that_lets_a_causal_model_look_ahead_is_obeyed(method):
    model, given = tiny("gpt2"), inputs("gpt2")
    allowed = torch.ones(12, 12, dtype=torch.bool).tril()
    allowed[:5, :5] = True  # a prefix that sees itself
    mask = allowed.expand(2, 1, -1, -1)
    before = hidden(model, given | {"attention_mask": mask})
    assert (before - hidden(model, given)).abs().max() > 0.01
    handle = attach(model, method, backend="reference")
    with torch.no_grad():
        for parameter in handle.model.base_model.whence.parameters():
            parameter.zero_()
    after = hidden(model, given | {"attention_mask": mask})
    assert_close(after, before, rtol=1e-4, atol=1e-5)


def test_a_method_of_content_sees_the_same_inputs_on_every_backend():
    outs = []
    for backend in ("original", "reference"):
        model = tiny("gpt2")
        awake(attach(model, "forget", backend=backend))
        outs.append(hidden(model, inputs("gpt2")))
    assert_close(outs[0], outs[1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", CAUSAL)
def test_an_input_term_counts_from_the_first_token_after_padding(name):
    model, given = tiny(name), inputs(name, pad="left")
    awake(attach(model, "learned", keep_positions=False))
    mask = given["attention_mask"]
    places = (mask.cumsum(dim=-1) - 1) * mask
    together = hidden(model, given | {"position_ids": places})
    alone = hidden(model, {"input_ids": given["input_ids"][:1, 3:]})
    assert_close(together[:1, 3:], alone, rtol=1e-4, atol=1e-5)
    if name == "opt":  # it counts by its mask itself, and gives -1 to padding
        assert_close(hidden(model, given)[:1, 3:], alone, rtol=1e-4, atol=1e-5)
