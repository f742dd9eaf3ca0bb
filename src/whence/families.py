"""The families of models of `transformers`: one row each, for all parts of the library.

`whence inspect` reads positions, queries and keys out of a checkpoint by these names, `whence.hf`
finds the modules of a built model by them, and `whence.models` converts weights by them.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

Config = Mapping[str, Any]  # of config.json, or `config.to_dict()` of a built model


@dataclass(frozen=True)
class T5Bias:
    """A table [buckets, heads] of T5, with the config's number of buckets and its distance."""

    table: str  # the name holds "{layer}" where every layer has a table of its own
    causal: bool = False
    fixed: bool = False  # 32 buckets up to a distance of 128, whatever the config says (MPNet)


@dataclass(frozen=True)
class AlibiBias:
    """ALiBi's fixed slopes, which no checkpoint stores."""


@dataclass(frozen=True)
class DebertaBias:
    """Content and relative positions look at each other; biases make a curve without content.

    `key` and `query` are the projections of the table, named below the attention module. The first
    one that the checkpoint has counts: version 2 may share the projection of the content.
    """

    table: str
    key: tuple[str, ...]
    query: tuple[str, ...]
    norm: str = ""  # the LayerNorm of the table, applied where the config asks for it


@dataclass(frozen=True)
class RopeBias:
    """Rotated queries and keys: the biases of the two projections make a curve without content."""

    norm: str = ""  # the norm of a head's queries below the attention module, if there is one


@dataclass(frozen=True)
class Stack:
    """One stack of layers.

    attention       the self-attention of a layer below the base model, with {layer} in its name
    query, key      the projections below `attention`; `query` is empty where the family's
                    checkpoints cannot be inspected
    table           the position embeddings below the base model: a module, or in ViT a parameter
    projected_by    the module that maps embeddings to the model's dimensions (ALBERT, ELECTRA)
    fused           how one tensor holds queries, keys and values: "blocks" one after the other,
                    "heads" head by head
    transposed      weights are [in, out], as in GPT-2
    layers, heads, width, head_size
                    keys of config.json; the first one that is there counts
    """

    attention: str
    query: str = ""
    key: str = ""
    table: str = ""
    name: str = ""  # where a model has two stacks
    layers: tuple[str, ...] = ("num_hidden_layers",)
    heads: tuple[str, ...] = ("num_attention_heads",)
    width: tuple[str, ...] = ("hidden_size",)
    head_size: tuple[str, ...] = ()
    fused: Literal["no", "blocks", "heads"] = "no"
    transposed: bool = False
    query_bias: str = ""  # below `attention`, where it is not query + ".bias"
    projected_by: str = ""
    first_row: Callable[[Config], int] = lambda config: 0  # the table's row of position 0
    has_table: Callable[[Config], bool] = lambda config: True
    scale: Callable[[Config, int, int], float] = lambda config, d_head, layer: d_head**-0.5
    place: Callable[[Config, int], dict[str, int]] = lambda config, layer: {"layer": layer}
    copies: Callable[[Config], int] = lambda config: 1  # layers to each one that the config counts
    causal: bool = False
    relative: T5Bias | AlibiBias | DebertaBias | RopeBias | None = None


@dataclass(frozen=True)
class Attach:
    """What `whence.hf.attach` must know of a family besides its first stack.

    embeddings   the module that asks for position_ids, if one does
    term_before  the module to whose input a method's input term is added. Without it, or where the
                 embeddings are projected, the term is added to the output of the projection or of
                 the table
    repeats      the module that runs one attention for several layers, as ALBERT does
    own_forward  whether its attention is not called through transformers' attention interface
    """

    embeddings: str = ""
    term_before: str = ""
    repeats: str = ""
    own_forward: bool = False


@dataclass(frozen=True)
class Family:
    """A row: the `model_type`s of config.json that it covers, its stacks, and how to attach to it.

    `inspect_only` are further model types, to which `attach` has not been tested.
    """

    name: str
    model_types: tuple[str, ...]
    stacks: tuple[Stack, ...]
    attach: Attach | None = None
    inspect_only: tuple[str, ...] = ()


def after_padding(config: Config) -> int:
    """RoBERTa counts positions from pad_token_id + 1: the rows before it are not positions."""
    pad = config.get("pad_token_id", 1)
    return int(1 if pad is None else pad) + 1


def albert_place(config: Config, layer: int) -> dict[str, int]:
    """ALBERT's layers share weights by groups; a group may hold several layers in a row."""
    block, within = divmod(layer, albert_copies(config))
    groups = int(config.get("num_hidden_groups", 1))
    return {"group": block * groups // int(config["num_hidden_layers"]), "inner": within}


def albert_copies(config: Config) -> int:
    """A layer in ALBERT's count is a whole group."""
    return int(config.get("inner_group_num", 1))


def gpt2_scale(config: Config, d_head: int, layer: int) -> float:
    """GPT-2 may leave the scale out, or divide it by the number of the layer."""
    scale = d_head**-0.5 if config.get("scale_attn_weights", True) else 1.0
    return scale / (layer + 1) if config.get("scale_attn_by_inverse_layer_idx", False) else scale


def deberta_terms(config: Config) -> tuple[str, ...]:
    """Which of c2p and p2c are on; "c2p|p2c" is the older way to write it."""
    kinds = config.get("pos_att_type") or ()
    return tuple(kinds.split("|") if isinstance(kinds, str) else kinds)


def deberta_scale(config: Config, d_head: int, layer: int) -> float:
    """1/sqrt(d) over as many terms as the logit has."""
    return float((d_head * (1 + len(deberta_terms(config)))) ** -0.5)


def position_biased(config: Config) -> bool:
    """Whether DeBERTa also adds a table of absolute positions to its input."""
    return bool(config.get("position_biased_input", True))


def unscaled(config: Config, d_head: int, layer: int) -> float:
    """No 1/sqrt(d): T5 and GPT-Neo."""
    return 1.0


_BERT = Stack(
    attention="encoder.layer.{layer}.attention.self",
    query="query",
    key="key",
    table="embeddings.position_embeddings",
)
_BERT_ATTACH = Attach(embeddings="embeddings", term_before="embeddings.LayerNorm")
_DEBERTA = Stack(
    attention="encoder.layer.{layer}.attention.self",
    query="in_proj",
    query_bias="q_bias",
    fused="heads",
    table="embeddings.position_embeddings",
    has_table=position_biased,
    projected_by="embeddings.embed_proj",
    scale=deberta_scale,
    relative=DebertaBias("encoder.rel_embeddings", key=("pos_proj",), query=("pos_q_proj",)),
)
_WHISPER = Stack(
    name="encoder",
    attention="encoder.layers.{layer}.self_attn",
    query="q_proj",
    key="k_proj",
    table="encoder.embed_positions",
    layers=("encoder_layers",),
    heads=("encoder_attention_heads",),
    width=("d_model",),
)
_T5 = Stack(
    name="encoder",
    attention="encoder.block.{layer}.layer.0.SelfAttention",
    query="q",
    key="k",
    layers=("num_layers",),
    heads=("num_heads",),
    width=("d_model",),
    head_size=("d_kv",),
    scale=unscaled,
    relative=T5Bias("encoder.block.0.layer.0.SelfAttention.relative_attention_bias"),
)
_T5_DECODER = replace(
    _T5,
    name="decoder",
    attention="decoder.block.{layer}.layer.0.SelfAttention",
    layers=("num_decoder_layers", "num_layers"),
    causal=True,
    relative=T5Bias("decoder.block.0.layer.0.SelfAttention.relative_attention_bias", causal=True),
)

FAMILIES: tuple[Family, ...] = (
    Family("bert", ("bert",), (_BERT,), _BERT_ATTACH, inspect_only=("ernie",)),
    Family(
        "roberta",
        ("roberta", "xlm-roberta", "camembert"),
        (replace(_BERT, first_row=after_padding),),
        _BERT_ATTACH,
        inspect_only=("xlm-roberta-xl", "data2vec-text"),
    ),
    Family(
        "albert",
        ("albert",),
        (
            Stack(
                attention="encoder.albert_layer_groups.{group}.albert_layers.{inner}.attention",
                query="query",
                key="key",
                table="embeddings.position_embeddings",
                projected_by="encoder.embedding_hidden_mapping_in",
                place=albert_place,
                copies=albert_copies,
            ),
        ),
        Attach(embeddings="embeddings", repeats="encoder"),
    ),
    Family(
        "electra", ("electra",), (replace(_BERT, projected_by="embeddings_project"),), _BERT_ATTACH
    ),
    Family(
        "distilbert",
        ("distilbert",),
        (
            Stack(
                attention="transformer.layer.{layer}.attention",
                query="q_lin",
                key="k_lin",
                table="embeddings.position_embeddings",
                layers=("n_layers",),
                heads=("n_heads",),
                width=("dim",),
            ),
        ),
        _BERT_ATTACH,
    ),
    Family(
        "mpnet",
        ("mpnet",),
        (
            Stack(
                attention="encoder.layer.{layer}.attention.attn",
                query="q",
                key="k",
                table="embeddings.position_embeddings",
                first_row=lambda config: 2,
                relative=T5Bias("encoder.relative_attention_bias", fixed=True),
            ),
        ),
        replace(_BERT_ATTACH, own_forward=True),
    ),
    Family("deberta", ("deberta",), (_DEBERTA,)),
    Family(
        "deberta-v2",
        ("deberta-v2",),
        (
            replace(
                _DEBERTA,
                query="query_proj",
                query_bias="",
                key="key_proj",
                fused="no",
                relative=DebertaBias(
                    "encoder.rel_embeddings",
                    key=("pos_key_proj", "key_proj"),
                    query=("pos_query_proj", "query_proj"),
                    norm="encoder.LayerNorm",
                ),
            ),
        ),
    ),
    Family(
        "gpt2",
        ("gpt2",),
        (
            Stack(
                attention="h.{layer}.attn",
                query="c_attn",
                fused="blocks",
                transposed=True,
                table="wpe",
                layers=("n_layer",),
                heads=("n_head",),
                width=("n_embd",),
                scale=gpt2_scale,
                causal=True,
            ),
        ),
        Attach(),
    ),
    Family(
        "opt",
        ("opt",),
        (
            Stack(
                attention="decoder.layers.{layer}.self_attn",
                query="q_proj",
                key="k_proj",
                table="decoder.embed_positions",
                first_row=lambda config: 2,
                causal=True,
            ),
        ),
        Attach(),
    ),
    Family(
        "vit",
        ("vit",),
        (Stack(attention="layers.{layer}.attention", table="embeddings.position_embeddings"),),
        Attach(term_before="embeddings.dropout"),
    ),
    Family(
        "whisper",
        ("whisper",),
        (
            _WHISPER,
            replace(
                _WHISPER,
                name="decoder",
                attention="decoder.layers.{layer}.self_attn",
                table="decoder.embed_positions",
                layers=("decoder_layers",),
                heads=("decoder_attention_heads",),
                causal=True,
            ),
        ),
    ),
    Family("t5", ("t5", "mt5"), (_T5, _T5_DECODER)),
    Family(
        "umt5",
        ("umt5",),
        tuple(
            replace(
                stack,
                relative=T5Bias(f"{stack.attention}.relative_attention_bias", causal=stack.causal),
            )
            for stack in (_T5, _T5_DECODER)
        ),
    ),
    Family(
        "bloom",
        ("bloom",),
        (
            Stack(
                attention="h.{layer}.self_attention",
                query="query_key_value",
                fused="heads",
                layers=("n_layer", "num_hidden_layers"),
                heads=("n_head", "num_attention_heads"),
                width=("hidden_size", "n_embed"),
                causal=True,
                relative=AlibiBias(),
            ),
        ),
    ),
    Family(
        "gpt-neox",
        ("gpt_neox",),
        (
            Stack(
                attention="layers.{layer}.attention",
                query="query_key_value",
                fused="heads",
                causal=True,
                relative=RopeBias(),
            ),
        ),
    ),
    Family(
        "llama",
        (
            "llama",
            "mistral",
            "mixtral",
            "qwen2",
            "qwen3",
            "gemma",
            "gemma2",
            "gemma3_text",
            "granite",
            "olmo2",
            "starcoder2",
        ),
        (
            Stack(
                attention="layers.{layer}.self_attn",
                query="q_proj",
                key="k_proj",
                head_size=("head_dim",),
                causal=True,
                relative=RopeBias(norm="q_norm"),
            ),
        ),
    ),
)

INSPECTABLE: Mapping[str, Family] = {
    model_type: family
    for family in FAMILIES
    if family.stacks[0].query
    for model_type in (*family.model_types, *family.inspect_only)
}
ATTACHABLE: Mapping[str, Family] = {
    model_type: family
    for family in FAMILIES
    if family.attach is not None
    for model_type in family.model_types
}
