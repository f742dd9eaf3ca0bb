"""The families of `transformers` that a method can be attached to: one row each."""

from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor, nn

from whence.checks import require, unknown


@dataclass(frozen=True)
class Family:
    """Where a family keeps what `attach` has to reach, as names below its base model.

    attention   the self-attention of a layer, with {layer} in the name
    table       the position embeddings: a module, or in ViT a parameter
    bottom      the module at which a method's input term is added to its input or its output
    first_row   the rows of the table that stand for no position; None: up to the padding token's
    repeats     the module that runs one attention for several layers, as ALBERT does
    other       further positions of its own, dropped with the table
    own_forward whether its attention is not called through transformers' attention interface
    """

    model_types: tuple[str, ...]
    attention: str
    table: str
    bottom: tuple[str, Literal["input", "output"]]
    embeddings: str | None = None  # the module that asks for position_ids, if one does
    causal: bool = False
    first_row: int | None = 0
    repeats: str | None = None
    other: tuple[str, ...] = ()
    own_forward: bool = False

    def attentions(self, base: nn.Module) -> list[nn.Module]:
        """The attention modules, in the order in which a pass runs them first."""
        path = self.attention.split(".")
        found: list[nn.Module] = [base]
        for name in path:
            if name.startswith("{"):
                found = [child for module in found for child in module.children()]
            else:
                found = [module.get_submodule(name) for module in found]
        return found

    def n_layers(self, base: nn.Module) -> int:
        """How often a pass runs an attention."""
        config: Any = base.config
        if self.repeats is None:
            return len(self.attentions(base))
        return int(config.num_hidden_layers * config.inner_group_num)

    def max_length(self, base: nn.Module) -> int:
        """The number of positions in the table."""
        return int(self.table_rows(base)) - self.first_position(base)

    def first_position(self, base: nn.Module) -> int:
        """The row of position 0: RoBERTa counts from the row after its padding token's."""
        config: Any = base.config
        return int(config.pad_token_id) + 1 if self.first_row is None else self.first_row

    def table_rows(self, base: nn.Module) -> int:
        """The number of rows in the table, also of those that stand for no position."""
        parent, _, name = self.table.rpartition(".")
        table: Any = getattr(base.get_submodule(parent), name)
        return int(table.shape[1] if isinstance(table, Tensor) else table.weight.shape[0])

    def is_causal(self, base: nn.Module) -> bool:
        """Whether its attention looks back only: always, or as its config says."""
        return self.causal or bool(getattr(base.config, "is_decoder", False))

    def bottom_of(self, base: nn.Module) -> tuple[nn.Module, str]:
        """The module of the input term, and the side: ELECTRA projects narrow embeddings first."""
        name, side = self.bottom
        if name == "embeddings_project" and not hasattr(base, name):
            return base.get_submodule("embeddings.LayerNorm"), "input"
        return base.get_submodule(name), side


_AFTER_EMBEDDING: tuple[str, Literal["input"]] = ("embeddings.LayerNorm", "input")
_BERT_ATTENTION = "encoder.layer.{layer}.attention.self"
_BERT_TABLE = "embeddings.position_embeddings"

FAMILIES: tuple[Family, ...] = (
    Family(("bert",), _BERT_ATTENTION, _BERT_TABLE, _AFTER_EMBEDDING, "embeddings"),
    Family(
        ("roberta", "xlm-roberta", "camembert"),
        _BERT_ATTENTION,
        _BERT_TABLE,
        _AFTER_EMBEDDING,
        "embeddings",
        first_row=None,
    ),
    Family(
        ("electra",),
        _BERT_ATTENTION,
        _BERT_TABLE,
        ("embeddings_project", "output"),
        "embeddings",
    ),
    Family(
        ("albert",),
        "encoder.albert_layer_groups.{group}.albert_layers.{layer}.attention",
        _BERT_TABLE,
        ("encoder.embedding_hidden_mapping_in", "output"),
        "embeddings",
        repeats="encoder",
    ),
    Family(
        ("distilbert",),
        "transformer.layer.{layer}.attention",
        _BERT_TABLE,
        _AFTER_EMBEDDING,
        "embeddings",
    ),
    Family(
        ("mpnet",),
        "encoder.layer.{layer}.attention.attn",
        _BERT_TABLE,
        _AFTER_EMBEDDING,
        "embeddings",
        first_row=2,
        other=("encoder.relative_attention_bias",),
        own_forward=True,
    ),
    Family(("gpt2",), "h.{layer}.attn", "wpe", ("wpe", "output"), causal=True),
    Family(
        ("opt",),
        "decoder.layers.{layer}.self_attn",
        "decoder.embed_positions",
        ("decoder.embed_positions", "output"),
        causal=True,
        first_row=2,
    ),
    Family(
        ("vit",),
        "layers.{layer}.attention",
        "embeddings.position_embeddings",
        ("embeddings.dropout", "input"),
    ),
)


def model_types() -> tuple[str, ...]:
    """Every model_type that has a row."""
    return tuple(name for family in FAMILIES for name in family.model_types)


def family_of(model_type: str) -> Family:
    """The row of a model_type, or an error that names those there are."""
    model_type = model_type.removeprefix("whence-")
    require(
        model_type in model_types(),
        unknown("family of model", model_type, model_types())
        + " Add a row to whence.hf.families, or build it anew from whence.models.",
    )
    return next(family for family in FAMILIES if model_type in family.model_types)
