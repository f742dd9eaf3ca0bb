"""The rules of conversion: options and weights of four families, by a native model's names."""

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from whence.checks import require
from whence.families import INSPECTABLE, Stack, T5Bias
from whence.methods.rope_settings import rope_from

Weights = Iterator[tuple[str, Tensor]]
STACK = "stack"
LLAMA, GPT2, BERT, T5 = (INSPECTABLE[name].stacks[0] for name in ("llama", "gpt2", "bert", "t5"))


def pair(ours: str, theirs: str, state: dict[str, Tensor]) -> Weights:
    """Weight and bias, as far as they are there."""
    for name in ("weight", "bias"):
        if f"{theirs}.{name}" in state:
            yield f"{ours}.{name}", state[f"{theirs}.{name}"]


def projections(stack: Stack, value: str, out: str) -> dict[str, str]:
    """The four projections of a layer: our names, and theirs with {layer} in them."""
    theirs = (f"{stack.attention}.{name}" for name in (stack.query, stack.key, value))
    return dict(zip((f"self_attn.{x}_proj" for x in "qkvo"), (*theirs, out), strict=True))


def layers(names: dict[str, str], n: int, state: dict[str, Tensor]) -> Weights:
    """Every layer's weights, from our names and theirs with {layer} in them."""
    for i in range(n):
        for ours, theirs in names.items():
            yield from pair(f"{STACK}.layers.{i}.{ours}", theirs.format(layer=i), state)


def llama_options(config: Any) -> dict[str, Any]:
    """LLaMA: the defaults of a native model, with RoPE."""
    require(
        config.rope_parameters.get("partial_rotary_factor", 1.0) == 1.0,
        "LLaMA turns whole heads, whatever its partial_rotary_factor says, "
        f"{config.rope_parameters.get('partial_rotary_factor')} here: take it out of the config.",
    )
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.intermediate_size,
        "max_position_embeddings": config.max_position_embeddings,
        "position": rope_from(config),
        "causal": True,
        "norm_eps": config.rms_norm_eps,
        "hidden_act": config.hidden_act,
        "attention_bias": config.attention_bias,
        "mlp_bias": config.mlp_bias,
        "attention_dropout": config.attention_dropout,
    }


def llama_base(config: Any, state: dict[str, Tensor]) -> Weights:
    """LLaMA's names."""
    yield "embed_tokens.weight", state["embed_tokens.weight"]
    yield from pair(f"{STACK}.norm", "norm", state)
    names = projections(LLAMA, "v_proj", f"{LLAMA.attention}.o_proj")
    names |= {f"mlp.{x}_proj": f"layers.{{layer}}.mlp.{x}_proj" for x in ("gate", "up", "down")}
    names |= {
        "attention_norm": "layers.{layer}.input_layernorm",
        "mlp_norm": "layers.{layer}.post_attention_layernorm",
    }
    yield from layers(names, config.num_hidden_layers, state)


def gpt2_options(config: Any) -> dict[str, Any]:
    """GPT-2: LayerNorm, biases, learned positions."""
    require(
        not config.scale_attn_by_inverse_layer_idx and not config.add_cross_attention,
        "GPT-2 with scale_attn_by_inverse_layer_idx or add_cross_attention has no native form.",
    )
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.n_embd,
        "num_hidden_layers": config.n_layer,
        "num_attention_heads": config.n_head,
        "intermediate_size": config.n_inner or 4 * config.n_embd,
        "max_position_embeddings": config.n_positions,
        "position": "learned",
        "causal": True,
        "scale_attention": config.scale_attn_weights,
        "norm": "layernorm",
        "norm_eps": config.layer_norm_epsilon,
        "hidden_act": config.activation_function,
        "gated_mlp": False,
        "attention_bias": True,
        "mlp_bias": True,
        "embedding_dropout": config.embd_pdrop,
        "hidden_dropout": config.resid_pdrop,
        "attention_dropout": config.attn_pdrop,
    }


def gpt2_base(config: Any, state: dict[str, Tensor]) -> Weights:
    """Its Conv1D holds a matrix the other way round, and q, k and v in one."""
    yield "embed_tokens.weight", state["wte.weight"]
    yield f"{STACK}.position.shared.learned.table", state[f"{GPT2.table}.weight"]
    yield from pair(f"{STACK}.norm", "ln_f", state)
    for i in range(config.n_layer):
        ours, theirs = f"{STACK}.layers.{i}", f"h.{i}"
        attention = GPT2.attention.format(layer=i)
        yield from pair(f"{ours}.attention_norm", f"{theirs}.ln_1", state)
        yield from pair(f"{ours}.mlp_norm", f"{theirs}.ln_2", state)
        weights = state[f"{attention}.{GPT2.query}.weight"].T.chunk(3)
        biases = state[f"{attention}.{GPT2.query}.bias"].chunk(3)
        for x, weight, bias in zip("qkv", weights, biases, strict=True):
            yield f"{ours}.self_attn.{x}_proj.weight", weight
            yield f"{ours}.self_attn.{x}_proj.bias", bias
        for name, conv in (
            ("self_attn.o_proj", f"{attention}.c_proj"),
            ("mlp.up_proj", f"{theirs}.mlp.c_fc"),
            ("mlp.down_proj", f"{theirs}.mlp.c_proj"),
        ):
            yield f"{ours}.{name}.weight", state[f"{conv}.weight"].T
            yield f"{ours}.{name}.bias", state[f"{conv}.bias"]


def bert_options(config: Any) -> dict[str, Any]:
    """BERT: post-norm, token types, learned positions."""
    require(
        not config.is_decoder,
        "BERT as a decoder (is_decoder=True) has no native form here: take an encoder.",
    )
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "intermediate_size": config.intermediate_size,
        "max_position_embeddings": config.max_position_embeddings,
        "position": "learned",
        "causal": False,
        "norm": "layernorm",
        "norm_eps": config.layer_norm_eps,
        "norm_first": False,
        "embedding_norm": True,
        "hidden_act": config.hidden_act,
        "gated_mlp": False,
        "attention_bias": True,
        "mlp_bias": True,
        "type_vocab_size": config.type_vocab_size,
        "head_transform": True,
        "head_bias": True,
        "embedding_dropout": config.hidden_dropout_prob,
        "hidden_dropout": config.hidden_dropout_prob,
        "attention_dropout": config.attention_probs_dropout_prob,
        "classifier_dropout": (
            config.hidden_dropout_prob
            if config.classifier_dropout is None
            else config.classifier_dropout
        ),
    }


def bert_base(config: Any, state: dict[str, Tensor]) -> Weights:
    """BERT's names."""
    yield "embed_tokens.weight", state["embeddings.word_embeddings.weight"]
    yield "embed_types.weight", state["embeddings.token_type_embeddings.weight"]
    yield f"{STACK}.position.shared.learned.table", state[f"{BERT.table}.weight"]
    yield from pair(f"{STACK}.embed_norm", "embeddings.LayerNorm", state)
    yield from pair("pooler", "pooler.dense", state)
    names = projections(BERT, "value", "encoder.layer.{layer}.attention.output.dense")
    names |= {
        "attention_norm": "encoder.layer.{layer}.attention.output.LayerNorm",
        "mlp.up_proj": "encoder.layer.{layer}.intermediate.dense",
        "mlp.down_proj": "encoder.layer.{layer}.output.dense",
        "mlp_norm": "encoder.layer.{layer}.output.LayerNorm",
    }
    yield from layers(names, config.num_hidden_layers, state)


def t5_options(config: Any) -> dict[str, Any]:
    """T5's encoder: unscaled, one table of buckets, heads of any size."""
    rate = config.dropout_rate
    buckets, distance = (
        config.relative_attention_num_buckets,
        config.relative_attention_max_distance,
    )
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.d_model,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "head_dim": config.d_kv,
        "intermediate_size": config.d_ff,
        "position": f"t5:buckets={buckets},max_distance={distance}",
        "causal": False,
        "scale_attention": False,
        "norm_eps": config.layer_norm_epsilon,
        "hidden_act": config.dense_act_fn,
        "gated_mlp": config.is_gated_act,
        "embedding_dropout": rate,
        "hidden_dropout": rate,
        "activation_dropout": rate,
        "attention_dropout": rate,
    }


def t5_base(config: Any, state: dict[str, Tensor]) -> Weights:
    """T5's names."""
    yield "embed_tokens.weight", state["shared.weight"]
    assert isinstance(T5.relative, T5Bias)
    yield f"{STACK}.position.shared.t5.table", state[f"{T5.relative.table}.weight"]
    yield from pair(f"{STACK}.norm", "encoder.final_layer_norm", state)
    block = "encoder.block.{layer}.layer"
    mlp = f"{block}.1.DenseReluDense"
    names = projections(T5, "v", f"{T5.attention}.o")
    names |= {"attention_norm": f"{block}.0.layer_norm", "mlp_norm": f"{block}.1.layer_norm"}
    names |= {"mlp.down_proj": f"{mlp}.wo"}
    gated = {"mlp.gate_proj": f"{mlp}.wi_0", "mlp.up_proj": f"{mlp}.wi_1"}
    names |= gated if config.is_gated_act else {"mlp.up_proj": f"{mlp}.wi"}
    yield from layers(names, config.num_layers, state)
