"""Where each family of models keeps its positions and its queries and keys: one row a family."""

from dataclasses import replace

from whence.analysis.checkpoint import Checkpoint
from whence.analysis.family import (
    AlibiBias,
    DebertaBias,
    Family,
    RopeBias,
    Stack,
    T5Bias,
    after_padding,
    albert_place,
    deberta_scale,
    gpt2_scale,
    position_biased,
    unscaled,
)
from whence.checks import require

_BERT = Stack(
    table="embeddings.position_embeddings.weight",
    query="encoder.layer.{layer}.attention.self.query",
    key="encoder.layer.{layer}.attention.self.key",
)
_DEBERTA = Stack(
    table="embeddings.position_embeddings.weight",
    has_table=position_biased,
    projected_by="embeddings.embed_proj",
    scale=deberta_scale,
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
    scale=unscaled,
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
        (replace(_BERT, first_row=after_padding),),
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
                place=albert_place,
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
                scale=gpt2_scale,
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
