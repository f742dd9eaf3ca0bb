"""Converts LLaMA, GPT-2, BERT or T5's encoder of `transformers` to a native model."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from whence.checks import require, unknown
from whence.models.causal import WhenceForCausalLM
from whence.models.classification import WhenceForSequenceClassification
from whence.models.config import WhenceConfig
from whence.models.conversion_rules import (
    Weights,
    bert_base,
    bert_options,
    gpt2_base,
    gpt2_options,
    llama_base,
    llama_options,
    pair,
    t5_base,
    t5_options,
)
from whence.models.masked import WhenceForMaskedLM
from whence.models.model import WhenceModel
from whence.models.pretrained import WhencePreTrainedModel


@dataclass(frozen=True)
class Import:
    """How a family is converted: its options, its base weights, and its heads by class name."""

    options: Callable[[Any], dict[str, Any]]
    base: Callable[[Any, dict[str, Tensor]], Weights]  # config, state dict of the base model
    heads: dict[str, tuple[type[WhencePreTrainedModel], Callable[[dict[str, Tensor]], Weights]]]


@torch.no_grad()
def from_transformers(model: Any) -> WhencePreTrainedModel:
    """The native model with this one's weights, in its dtype, on its device and in its mode.

    Logits are the same; what is random in training is not: T5 has one dropout more, at its end. The
    position is a method of this library with the model's own parameters (`native.config.position`),
    so that it runs through `whence.attend`, can be looked at, or be added to.

        native = from_transformers(LlamaForCausalLM.from_pretrained(...))

        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
        >>> llama = LlamaForCausalLM(LlamaConfig(vocab_size=9, num_hidden_layers=1, **sizes))
        >>> from_transformers(llama).config.position
        'rope:base=10000.0'
    """
    if not isinstance(model, PreTrainedModel):
        raise TypeError(
            f"from_transformers needs a model of transformers, got {type(model).__name__}."
        )
    config, kind = model.config, type(model).__name__
    require(
        not str(config.model_type).startswith("whence-"),
        "this model has a method attached, which a native model would be without. Take it off "
        "with whence.hf.attached(model).undo(), and give the native model's config the position.",
    )
    require(
        config.model_type in IMPORTS,
        unknown("model type for from_transformers", config.model_type, IMPORTS),
    )
    rules = IMPORTS[config.model_type]
    require(kind in rules.heads, unknown("class for from_transformers", kind, rules.heads))
    cls, head = rules.heads[kind]
    state = model.state_dict()
    prefix = "" if model.base_model is model else f"{model.base_model_prefix}."
    base = {k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)}
    special = {name: getattr(config, name, None) for name in _SPECIAL}
    labels = {"id2label": config.id2label, "label2id": config.label2id}
    options = rules.options(config)
    options["pooler"] = "pooler.dense.weight" in base
    native = cls(
        WhenceConfig(
            **options,
            **special,
            **labels,
            problem_type=config.problem_type,
            tie_word_embeddings=bool(config.tie_word_embeddings),
            initializer_range=getattr(config, "initializer_range", 0.02),
        )
    )
    own = "" if cls is WhenceModel else "model."
    weights = {own + name: value for name, value in rules.base(config, base)}
    weights |= dict(head(state))
    native.to(device=model.device, dtype=model.dtype)
    native.load_state_dict(weights)
    native.train(model.training)
    return native


_SPECIAL = ("pad_token_id", "bos_token_id", "eos_token_id", "use_cache")


def _no_head(state: dict[str, Tensor]) -> Weights:
    return iter(())


def _lm_head(state: dict[str, Tensor]) -> Weights:
    return pair("lm_head", "lm_head", state)


def _classifier(state: dict[str, Tensor]) -> Weights:
    return pair("classifier", "classifier", state)


def _bert_lm_head(state: dict[str, Tensor]) -> Weights:
    at = "cls.predictions"
    yield from pair("head.dense", f"{at}.transform.dense", state)
    yield from pair("head.norm", f"{at}.transform.LayerNorm", state)
    yield from pair("lm_head", f"{at}.decoder", state)


IMPORTS = {
    "llama": Import(
        llama_options,
        llama_base,
        {
            "LlamaModel": (WhenceModel, _no_head),
            "LlamaForCausalLM": (WhenceForCausalLM, _lm_head),
        },
    ),
    "gpt2": Import(
        gpt2_options,
        gpt2_base,
        {
            "GPT2Model": (WhenceModel, _no_head),
            "GPT2LMHeadModel": (WhenceForCausalLM, _lm_head),
        },
    ),
    "bert": Import(
        bert_options,
        bert_base,
        {
            "BertModel": (WhenceModel, _no_head),
            "BertForMaskedLM": (WhenceForMaskedLM, _bert_lm_head),
            "BertForSequenceClassification": (WhenceForSequenceClassification, _classifier),
        },
    ),
    "t5": Import(t5_options, t5_base, {"T5EncoderModel": (WhenceModel, _no_head)}),
}
