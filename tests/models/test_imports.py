"""Native models with the weights of the library's own: the same logits, padding included."""

from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor

from whence.hf import attach
from whence.models import WhenceModel, from_transformers

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 61}


def llama(**more: Any) -> hf.PreTrainedModel:
    config = hf.LlamaConfig(
        **SIZES, num_key_value_heads=2, intermediate_size=48, max_position_embeddings=64, **more
    )
    return hf.LlamaForCausalLM(config)


def gpt2(**more: Any) -> hf.PreTrainedModel:
    config = hf.GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=61, n_positions=64, **more)
    return hf.GPT2LMHeadModel(config)


def bert(cls: type = hf.BertForMaskedLM, **more: Any) -> hf.PreTrainedModel:
    config = hf.BertConfig(**SIZES, intermediate_size=48, max_position_embeddings=64, **more)
    return cls(config)


def t5(**more: Any) -> hf.PreTrainedModel:
    config = hf.T5Config(
        d_model=32, d_kv=12, num_layers=2, num_heads=4, d_ff=48, vocab_size=61, **more
    )
    return hf.T5EncoderModel(config)


def shaken(model: hf.PreTrainedModel) -> hf.PreTrainedModel:
    """Every parameter moved, in evaluation: zeros and ones of a fresh model would hide mistakes."""
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return model.eval()


def batch(side: str) -> tuple[Tensor, Tensor]:
    ids = torch.randint(2, 61, (3, 40))
    mask = torch.ones_like(ids)
    if side == "left":
        mask[1, :7], mask[2, :31] = 0, 0
    else:
        mask[1, -7:], mask[2, -31:] = 0, 0
    return ids, mask


def places(mask: Tensor) -> Tensor:
    return (mask.cumsum(-1) - 1).clamp(min=0)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize(
    "model",
    [
        llama(),
        llama(tie_word_embeddings=True, attention_bias=True, mlp_bias=True, head_dim=12),
        llama(rope_parameters={"rope_type": "default", "rope_theta": 500.0}),
        llama(
            rope_parameters={
                "rope_type": "llama3",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 16,
            }
        ),
        llama(rope_parameters={"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}),
        llama(
            rope_parameters={
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 16,
            }
        ),
        llama(
            rope_parameters={
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 16,
                "mscale": 0.707,
                "mscale_all_dim": 0.5,
            }
        ),
        gpt2(),
        gpt2(n_inner=40, scale_attn_weights=False),
    ],
    ids=[
        "llama",
        "llama-biases",
        "theta",
        "llama3",
        "linear",
        "yarn",
        "yarn-of-DeepSeek",
        "gpt2",
        "gpt2-unscaled",
    ],
)
def test_a_causal_model_gives_the_same_logits(model: hf.PreTrainedModel, side: str) -> None:
    model = shaken(model)
    ids, mask = batch(side)
    theirs = model(ids, attention_mask=mask, position_ids=places(mask))
    native = from_transformers(model)
    ours = native(ids, attention_mask=mask)
    at = mask.bool()
    torch.testing.assert_close(ours.logits[at], theirs.logits[at], rtol=1e-5, atol=1e-5)
    both = [m(ids[:1], labels=ids[:1]).loss for m in (native, model)]
    torch.testing.assert_close(both[0], both[1])


@pytest.mark.parametrize("more", [{}, {"original_max_position_embeddings": 16}])
def test_a_rotation_that_grows_is_the_librarys_beyond_its_length(more: dict[str, Any]) -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0, **more}
    model = shaken(llama(rope_parameters=rope))
    ids = torch.randint(2, 61, (2, 90))  # max_position_embeddings is 64
    native = from_transformers(model)
    ours, theirs = (m(ids, use_cache=False).logits for m in (native, model))
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("feed_forward", ["relu", "gated-gelu"])
def test_t5s_encoder_gives_the_same_states(feed_forward: str) -> None:
    model = shaken(t5(feed_forward_proj=feed_forward))
    ids, mask = batch("right")
    native = from_transformers(model)
    ours = native(ids, attention_mask=mask).last_hidden_state
    theirs = model(ids, attention_mask=mask).last_hidden_state
    torch.testing.assert_close(ours[mask.bool()], theirs[mask.bool()], rtol=1e-5, atol=1e-5)


def test_bert_gives_the_same_logits_states_and_pooled_state() -> None:
    ids, mask = batch("right")
    types = torch.randint(0, 2, ids.shape)
    arguments = {"attention_mask": mask, "token_type_ids": types}
    lm = shaken(bert())
    ours, theirs = from_transformers(lm)(ids, **arguments), lm(ids, **arguments)
    at = mask.bool()
    torch.testing.assert_close(ours.logits[at], theirs.logits[at], rtol=1e-5, atol=1e-5)

    base = shaken(bert(hf.BertModel))
    found, wanted = from_transformers(base)(ids, **arguments), base(ids, **arguments)
    torch.testing.assert_close(
        found.last_hidden_state[at], wanted.last_hidden_state[at], rtol=1e-5, atol=1e-5
    )
    torch.testing.assert_close(found.pooler_output, wanted.pooler_output, rtol=1e-5, atol=1e-5)

    classifier = shaken(bert(hf.BertForSequenceClassification, num_labels=3))
    labels = torch.tensor([0, 2, 1])
    ours, theirs = (
        m(ids, **arguments, labels=labels) for m in (from_transformers(classifier), classifier)
    )
    torch.testing.assert_close(ours.logits, theirs.logits, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ours.loss, theirs.loss)


def test_gradients_are_the_librarys() -> None:
    model = shaken(llama())
    native = from_transformers(model)
    ids, _ = batch("left")
    for m in (model, native):
        m(ids, labels=ids).loss.backward()
    torch.testing.assert_close(
        native.model.embed_tokens.weight.grad, model.model.embed_tokens.weight.grad
    )
    torch.testing.assert_close(
        native.model.stack.layers[1].self_attn.k_proj.weight.grad,
        model.model.layers[1].self_attn.k_proj.weight.grad,
    )


def test_hidden_states_and_attention_weights_are_the_librarys() -> None:
    model = shaken(llama())
    model.set_attn_implementation("eager")
    ids, _ = batch("left")
    wanted = {"output_hidden_states": True, "output_attentions": True}
    ours, theirs = (m(ids, **wanted) for m in (from_transformers(model), model))
    assert len(ours.hidden_states) == len(theirs.hidden_states) == 3
    for a, b in zip(
        ours.hidden_states + ours.attentions, theirs.hidden_states + theirs.attentions, strict=True
    ):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_the_native_model_generates_what_the_original_does() -> None:
    model = shaken(llama())
    ids, mask = batch("left")
    arguments = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    ours, theirs = (
        m.generate(ids, attention_mask=mask, **arguments) for m in (from_transformers(model), model)
    )
    torch.testing.assert_close(ours, theirs)


def test_dtype_mode_and_special_tokens_come_along() -> None:
    model = llama(pad_token_id=3).to(torch.bfloat16).train()
    native = from_transformers(model)
    assert native.dtype == torch.bfloat16
    assert native.training
    assert native.config.pad_token_id == 3
    assert native.config.position == "rope:base=10000.0"
    assert isinstance(from_transformers(model.model), WhenceModel)


def test_what_has_no_native_form_is_refused() -> None:
    opt = hf.OPTModel(hf.OPTConfig(hidden_size=16, num_attention_heads=2, num_hidden_layers=1))
    with pytest.raises(ValueError, match="Unknown model type for from_transformers 'opt'"):
        from_transformers(opt)
    with pytest.raises(ValueError, match="Unknown class for from_transformers 'BertForTokenClass"):
        from_transformers(bert(hf.BertForTokenClassification))
    with pytest.raises(ValueError, match="scale_attn_by_inverse_layer_idx"):
        from_transformers(gpt2(scale_attn_by_inverse_layer_idx=True))
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    with pytest.raises(ValueError, match=r"LLaMA turns whole heads.* 0\.5 here"):
        from_transformers(llama(rope_parameters=rope))
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "truncate": False}
    with pytest.raises(ValueError, match="truncate=False of yarn"):
        from_transformers(llama(rope_parameters=yarn | {"original_max_position_embeddings": 16}))
    attached = bert(hf.BertModel)
    attach(attached, "tisa")
    with pytest.raises(ValueError, match=r"has a method attached.*undo\(\)"):
        from_transformers(attached)
    with pytest.raises(TypeError, match="needs a model of transformers, got str"):
        from_transformers("llama")


def test_numbers_that_a_fresh_model_hides_come_along() -> None:
    ids, _ = batch("right")
    large_eps = [llama(rms_norm_eps=0.5), gpt2(layer_norm_epsilon=0.5), bert(layer_norm_eps=0.5)]
    for model in map(shaken, large_eps):
        ours, theirs = (m(ids).logits for m in (from_transformers(model), model))
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    rates = {"hidden_dropout_prob": 0.3, "attention_probs_dropout_prob": 0.2}
    kind = {"num_labels": 3, "problem_type": "multi_label_classification"}
    found = from_transformers(bert(hf.BertForSequenceClassification, **rates, **kind)).config
    assert (found.embedding_dropout, found.hidden_dropout, found.attention_dropout) == (
        0.3,
        0.3,
        0.2,
    )
    assert (found.classifier_dropout, found.problem_type) == (0.3, "multi_label_classification")
    found = from_transformers(gpt2(embd_pdrop=0.1, resid_pdrop=0.2, attn_pdrop=0.3)).config
    assert (found.embedding_dropout, found.hidden_dropout, found.attention_dropout) == (
        0.1,
        0.2,
        0.3,
    )
    assert from_transformers(llama(attention_dropout=0.4)).config.attention_dropout == 0.4
