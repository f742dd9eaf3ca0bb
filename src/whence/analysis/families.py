"""Where each family of models keeps its positions and its queries and keys: one row a family."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from whence.analysis.checkpoint import Checkpoint
from whence.checks import require

Config = Mapping[str, Any]


@dataclass(frozen=True)
class T5Bias:
    """A table [buckets, heads] of T5, with the config's number of buckets and its distance."""

    table: str  # "{layer}" in it where every layer has its own
    causal: bool = False
    fixed: bool = False  # 32 buckets to 128 whatever the config says (MPNet)


@dataclass(frozen=True)
class AlibiBias:
    """ALiBi's fixed slopes: nothing is stored."""


@dataclass(frozen=True)
class DebertaBias:
    """Content and relative positions look at each other; biases make a curve without content."""

    table: str
    key: tuple[str, ...]  # of the table; the first one stored counts, v2 may take the content's
    query: tuple[str, ...]
    norm: str = ""  # of the table, where the config asks for it


@dataclass(frozen=True)
class RopeBias:
    """Rotated queries and keys: the biases of the two projections make a curve without content."""

    norm: str = ""  # of the queries of a head, in models that have one


@dataclass(frozen=True)
class Stack:
    """One stack of layers. Names are without the model's prefix; {layer} stands for the number.

    `layers`, `heads`, `width` and `head_size` are keys of config.json, the first one found counts.
    `fused` says how one tensor holds queries, keys and values: "blocks" one after the other,
    "heads" head by head. `transposed` is GPT-2's [in, out].
    """

    query: str
    key: str = ""
    table: str = ""
    name: str = ""  # where a model has two
    layers: tuple[str, ...] = ("num_hidden_layers",)
    heads: tuple[str, ...] = ("num_attention_heads",)
    width: tuple[str, ...] = ("hidden_size",)
    head_size: tuple[str, ...] = ()
    fused: Literal["no", "blocks", "heads"] = "no"
    transposed: bool = False
    query_bias: str = ""  # where it is not query + ".bias"
    projected_by: str = ""  # ALBERT, ELECTRA: from the table's dimensions to the model's
    first_row: Callable[[Config], int] = lambda config: 0
    has_table: Callable[[Config], bool] = lambda config: True
    scale: Callable[[Config, int, int], float] = lambda config, d_head, layer: d_head**-0.5
    place: Callable[[Config, int], dict[str, int]] = lambda config, layer: {"layer": layer}
    copies: Callable[[Config], int] = lambda config: 1  # layers to each one that the config counts
    causal: bool = False
    relative: T5Bias | AlibiBias | DebertaBias | RopeBias | None = None


@dataclass(frozen=True)
class Family:
    """A row: which `model_type`s of config.json it covers, how to name it, and its stacks."""

    name: str
    types: tuple[str, ...]
    stacks: tuple[Stack, ...]


def _after_padding(config: Config) -> int:
    """RoBERTa counts positions from pad_token_id + 1: the rows before it are not positions."""
    pad = config.get("pad_token_id", 1)
    return int(1 if pad is None else pad) + 1


def _albert_place(config: Config, layer: int) -> dict[str, int]:
    """ALBERT's layers share weights by groups; a group may hold several layers in a row."""
    inner = int(config.get("inner_group_num", 1))
    block, within = divmod(layer, inner)
    groups = int(config.get("num_hidden_groups", 1))
    return {"group": block * groups // int(config["num_hidden_layers"]), "inner": within}


def _gpt2_scale(config: Config, d_head: int, layer: int) -> float:
    scale = d_head**-0.5 if config.get("scale_attn_weights", True) else 1.0
    return scale / (layer + 1) if config.get("scale_attn_by_inverse_layer_idx", False) else scale


def deberta_terms(config: Config) -> tuple[str, ...]:
    """Which of c2p and p2c are on; "c2p|p2c" is the older way to write it."""
    kinds = config.get("pos_att_type") or ()
    return tuple(kinds.split("|") if isinstance(kinds, str) else kinds)


def _deberta_scale(config: Config, d_head: int, layer: int) -> float:
    return float((d_head * (1 + len(deberta_terms(config)))) ** -0.5)


def _position_biased(config: Config) -> bool:
    return bool(config.get("position_biased_input", True))


def _unscaled(config: Config, d_head: int, layer: int) -> float:
    return 1.0


_BERT = Stack(
    table="embeddings.position_embeddings.weight",
    query="encoder.layer.{layer}.attention.self.query",
    key="encoder.layer.{layer}.attention.self.key",
)
_DEBERTA = Stack(
    table="embeddings.position_embeddings.weight",
    has_table=_position_biased,
    projected_by="embeddings.embed_proj",
    scale=_deberta_scale,
    query="encoder.layer.{layer}.attention.self.in_proj",
    query_bias="encoder.layer.{layer}.attention.self.q_bias",
    fused="heads",
    relative=DebertaBias(
        table="encoder.rel_embeddings.weight",
        key=("encoder.layer.{layer}.attention.self.pos_proj",),
        query=("encoder.layer.{layer}.attention.self.pos_q_proj",),
    ),
)
_WHISPER = Stack(
    name="encoder",
    table="encoder.embed_positions.weight",
    query="encoder.layers.{layer}.self_attn.q_proj",
    key="encoder.layers.{layer}.self_attn.k_proj",
    layers=("encoder_layers",),
    heads=("encoder_attention_heads",),
    width=("d_model",),
)
_T5 = Stack(
    name="encoder",
    query="encoder.block.{layer}.layer.0.SelfAttention.q",
    key="encoder.block.{layer}.layer.0.SelfAttention.k",
    layers=("num_layers",),
    heads=("num_heads",),
    width=("d_model",),
    head_size=("d_kv",),
    scale=_unscaled,
    relative=T5Bias("encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"),
)
_T5_DECODER = replace(
    _T5,
    name="decoder",
    query="decoder.block.{layer}.layer.0.SelfAttention.q",
    key="decoder.block.{layer}.layer.0.SelfAttention.k",
    layers=("num_decoder_layers", "num_layers"),
    causal=True,
    relative=T5Bias(
        "decoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight", causal=True
    ),
)

FAMILIES: tuple[Family, ...] = (
    Family("bert", ("bert", "ernie"), (_BERT,)),
    Family(
        "roberta",
        ("roberta", "xlm-roberta", "xlm-roberta-xl", "camembert", "data2vec-text"),
        (replace(_BERT, first_row=_after_padding),),
    ),
    Family(
        "albert",
        ("albert",),
        (
            Stack(
                table="embeddings.position_embeddings.weight",
                projected_by="encoder.embedding_hidden_mapping_in",
                query="encoder.albert_layer_groups.{group}.albert_layers.{inner}.attention.query",
                key="encoder.albert_layer_groups.{group}.albert_layers.{inner}.attention.key",
                place=_albert_place,
                copies=lambda config: int(config.get("inner_group_num", 1)),
            ),
        ),
    ),
    Family("electra", ("electra",), (replace(_BERT, projected_by="embeddings_project"),)),
    Family(
        "distilbert",
        ("distilbert",),
        (
            Stack(
                table="embeddings.position_embeddings.weight",
                query="transformer.layer.{layer}.attention.q_lin",
                key="transformer.layer.{layer}.attention.k_lin",
                layers=("n_layers",),
                heads=("n_heads",),
                width=("dim",),
            ),
        ),
    ),
    Family(
        "mpnet",
        ("mpnet",),
        (
            Stack(
                table="embeddings.position_embeddings.weight",
                first_row=lambda config: 2,
                query="encoder.layer.{layer}.attention.attn.q",
                key="encoder.layer.{layer}.attention.attn.k",
                relative=T5Bias("encoder.relative_attention_bias.weight", fixed=True),
            ),
        ),
    ),
    Family("deberta", ("deberta",), (_DEBERTA,)),
    Family(
        "deberta-v2",
        ("deberta-v2",),
        (
            replace(
                _DEBERTA,
                query="encoder.layer.{layer}.attention.self.query_proj",
                query_bias="",
                key="encoder.layer.{layer}.attention.self.key_proj",
                fused="no",
                relative=DebertaBias(
                    table="encoder.rel_embeddings.weight",
                    norm="encoder.LayerNorm",
                    key=(
                        "encoder.layer.{layer}.attention.self.pos_key_proj",
                        "encoder.layer.{layer}.attention.self.key_proj",
                    ),
                    query=(
                        "encoder.layer.{layer}.attention.self.pos_query_proj",
                        "encoder.layer.{layer}.attention.self.query_proj",
                    ),
                ),
            ),
        ),
    ),
    Family(
        "gpt2",
        ("gpt2",),
        (
            Stack(
                table="wpe.weight",
                query="h.{layer}.attn.c_attn",
                fused="blocks",
                transposed=True,
                layers=("n_layer",),
                heads=("n_head",),
                width=("n_embd",),
                scale=_gpt2_scale,
                causal=True,
            ),
        ),
    ),
    Family(
        "opt",
        ("opt",),
        (
            Stack(
                table="decoder.embed_positions.weight",
                first_row=lambda config: 2,
                query="decoder.layers.{layer}.self_attn.q_proj",
                key="decoder.layers.{layer}.self_attn.k_proj",
                causal=True,
            ),
        ),
    ),
    Family(
        "whisper",
        ("whisper",),
        (
            _WHISPER,
            replace(
                _WHISPER,
                name="decoder",
                table="decoder.embed_positions.weight",
                query="decoder.layers.{layer}.self_attn.q_proj",
                key="decoder.layers.{layer}.self_attn.k_proj",
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
        (
            replace(
                _T5,
                relative=T5Bias(
                    "encoder.block.{layer}.layer.0.SelfAttention.relative_attention_bias.weight"
                ),
            ),
            replace(
                _T5_DECODER,
                relative=T5Bias(
                    "decoder.block.{layer}.layer.0.SelfAttention.relative_attention_bias.weight",
                    causal=True,
                ),
            ),
        ),
    ),
    Family(
        "bloom",
        ("bloom",),
        (
            Stack(
                query="h.{layer}.self_attention.query_key_value",
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
                query="layers.{layer}.attention.query_key_value",
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
                query="layers.{layer}.self_attn.q_proj",
                key="layers.{layer}.self_attn.k_proj",
                head_size=("head_dim",),
                causal=True,
                relative=RopeBias(norm="layers.{layer}.self_attn.q_norm.weight"),
            ),
        ),
    ),
)


def family_of(checkpoint: Checkpoint) -> Family:
    """The row for a checkpoint; an unknown one says what was found and how to add a row."""
    kind = checkpoint.config.get("model_type")
    for family in FAMILIES:
        if kind in family.types:
            return family
    names = sorted(checkpoint.names)
    require(
        any(_looks_like(name, _ATTENTION) for name in names),
        f"{checkpoint.name} is a model without attention, as far as its names tell (model_type "
        f"{kind!r}, no tensor of {len(names)} is named like queries and keys), so there is no "
        "positional attention to inspect.",
    )
    tables = [name for name in names if _looks_like(name, _POSITION)]
    known = ", ".join(sorted(kind for family in FAMILIES for kind in family.types))
    raise ValueError(
        f"{checkpoint.name} is of no known family: its model_type is {kind!r}. Tensors that look "
        f"like positions: {', '.join(tables[:6]) or 'none'}. To add it, write a row with its "
        f"tensors' names in FAMILIES (whence/analysis/families.py). Known: {known}."
    )


_ATTENTION = ("attn", "attention", "query", "q_proj", "q_lin")
_POSITION = ("position", "pos_emb", "wpe", "relative", "rel_emb", "rotary")


def _looks_like(name: str, words: tuple[str, ...]) -> bool:
    return any(word in name.lower() for word in words)
