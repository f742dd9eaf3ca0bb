"""What a row of FAMILIES can say of a checkpoint: names of tensors, and what its config decides."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

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


def after_padding(config: Config) -> int:
    """RoBERTa counts positions from pad_token_id + 1: the rows before it are not positions."""
    pad = config.get("pad_token_id", 1)
    return int(1 if pad is None else pad) + 1


def albert_place(config: Config, layer: int) -> dict[str, int]:
    """ALBERT's layers share weights by groups; a group may hold several layers in a row."""
    inner = int(config.get("inner_group_num", 1))
    block, within = divmod(layer, inner)
    groups = int(config.get("num_hidden_groups", 1))
    return {"group": block * groups // int(config["num_hidden_layers"]), "inner": within}


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
    """Whether DeBERTa adds a table to its input besides."""
    return bool(config.get("position_biased_input", True))


def unscaled(config: Config, d_head: int, layer: int) -> float:
    """No 1/sqrt(d): T5 and GPT-Neo."""
    return 1.0
