"""Lag curves that a model's weights state, as T5's table and ALiBi's slopes do."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from jaxtyping import Float

from whence.analysis.heads import sensitive, stated
from whence.analysis.results import HeadReport
from whence.analysis.stack_reader import StackReader
from whence.checks import require
from whence.families import AlibiBias, DebertaBias, RopeBias, T5Bias, deberta_terms
from whence.methods.alibi import alibi_slopes
from whence.methods.deberta import Deberta
from whence.methods.rope import Rope
from whence.methods.t5 import t5_bucket

REACH = 128  # where the rule itself has no end


def relative_reports(reader: StackReader, *, layer: int = 0) -> tuple[HeadReport, ...]:
    """One curve for each head of a layer, or none where the weights state none.

    T5, MPNet: the bucket table. BLOOM: ALiBi's slopes. RoPE and DeBERTa turn content, so what is
    stated without any is what the biases b_Q and b_K make: of RoPE b_Q . R(lag) b_K * scale, of
    DeBERTa (b_Q . K[lag] + b_K . Q[lag]) * scale. A constant over lags is left in. Of a model with
    a method of this library it is what that method adds, if content has no say in it.
    """
    reader.check_layer(layer)
    rule, of_biases = reader.stack.relative, False
    if reader.own is not None:
        added = reader.own.curves(
            layer,
            n_heads=reader.n_heads,
            d_head=reader.d_head,
            causal=reader.causal,
            reach=REACH,
        )
        if added is None:
            return ()
        curves, lag = added
        return sensitive(
            [stated(curve, lag, layer, head, False) for head, curve in enumerate(curves)]
        )
    if isinstance(rule, T5Bias):
        curves, lag = _t5(reader, rule, layer)
    elif isinstance(rule, AlibiBias):
        lag = np.arange(-REACH, 1.0)
        curves = alibi_slopes(reader.n_heads).double().numpy()[:, None] * lag
    elif isinstance(rule, DebertaBias):
        if not reader.checkpoint.config.get("relative_attention", False):
            return ()
        (curves, lag), of_biases = _deberta(reader, rule, layer), True
    elif isinstance(rule, RopeBias):
        found = _rope(reader, rule, layer)
        if found is None:
            return ()
        (curves, lag), of_biases = found, True
    else:
        return ()
    return sensitive(
        [stated(curve, lag, layer, head, of_biases) for head, curve in enumerate(curves)]
    )


def _t5(
    reader: StackReader, rule: T5Bias, layer: int
) -> tuple[Float[np.ndarray, "h l"], Float[np.ndarray, " l"]]:
    config = reader.checkpoint.config
    buckets, distance = 32, 128
    if not rule.fixed:
        buckets = int(config.get("relative_attention_num_buckets", buckets))
        distance = int(config.get("relative_attention_max_distance", distance))
    name = f"{rule.table}.weight"
    table = reader.needed(name, layer)
    require(
        table.shape == (buckets, reader.n_heads),
        f"{name} of {reader.checkpoint.name} has the shape {list(table.shape)}, but its "
        f"code reads {buckets} buckets for {reader.n_heads} heads.",
    )
    lag = torch.arange(-distance, 1 if rule.causal else distance + 1)
    bucket = t5_bucket(lag, buckets, distance, causal=rule.causal)
    return table[bucket.numpy()].T, lag.double().numpy()


def _deberta(
    reader: StackReader, rule: DebertaBias, layer: int
) -> tuple[Float[np.ndarray, "h l"], Float[np.ndarray, " l"]]:
    config, terms = reader.checkpoint.config, deberta_terms(reader.checkpoint.config)
    distance = int(config.get("max_relative_positions", -1))
    if distance < 1:
        distance = int(config["max_position_embeddings"])
    buckets = max(0, int(config.get("position_buckets", -1)))
    with torch.device("meta"):  # for its rule of slots alone
        method = Deberta(1, 1, 1, max_distance=distance, position_buckets=buckets)
    table = reader.needed(rule.table + ".weight", layer)[: 2 * method.span]
    if rule.norm and "layer_norm" in str(config.get("norm_rel_ebd", "none")):
        table = table - table.mean(axis=1, keepdims=True)
        table = table / np.sqrt((table**2).mean(axis=1, keepdims=True) + _epsilon(config))
        table = table * reader.needed(rule.norm + ".weight", layer)
        table = table + reader.needed(rule.norm + ".bias", layer)
    parts = reader.projections(layer)
    by_slot = np.zeros((reader.n_heads, len(table)))
    for term, names, bias in (
        ("c2p", rule.key, parts.query_bias),
        ("p2c", rule.query, parts.key_bias),
    ):
        if term in terms:
            rows = _projected(reader, table, names, layer)
            by_slot += np.einsum("hd,nhd->hn", bias, rows) * reader.scale(layer)
    lag = torch.arange(-distance, distance + 1)
    return by_slot[:, method.slot(-lag).numpy()], lag.double().numpy()


def _epsilon(config: Mapping[str, Any]) -> float:
    return float(config.get("layer_norm_eps", 1e-7))


def _projected(
    reader: StackReader, table: Float[np.ndarray, "n m"], names: tuple[str, ...], layer: int
) -> Float[np.ndarray, "n h d"]:
    """The table through the first of these projections that is stored."""
    names = tuple(f"{reader.stack.attention}.{name}" for name in names)
    stored = [name for name in names if reader.named(name + ".weight", layer) is not None]
    name = (stored or list(names))[0]
    rows = table @ reader.needed(name + ".weight", layer).T
    bias = reader.named(name + ".bias", layer)
    if bias is not None:
        rows = rows + bias
    return rows.reshape(len(table), reader.n_heads, reader.d_head)


def _rope(
    reader: StackReader, rule: RopeBias, layer: int
) -> tuple[Float[np.ndarray, "h l"], Float[np.ndarray, " l"]] | None:
    """b_Q . R(lag) b_K * scale; None without biases, or with a rotation that is not the plain one.

    A norm of queries and keys (Qwen3) also leaves nothing to state: it mixes bias and content.
    """
    config = reader.checkpoint.config
    parameters = config.get("rope_parameters") or config.get("rope_scaling") or {}
    plain = parameters.get("rope_type", parameters.get("type", "default")) == "default"
    layered = any(isinstance(value, dict) for value in parameters.values())
    norm = f"{reader.stack.attention}.{rule.norm}.weight"
    normed = rule.norm != "" and reader.named(norm, layer) is not None
    parts = reader.projections(layer)
    if not plain or layered or normed or not parts.has_biases:
        return None
    base = parameters.get("rope_theta", config.get("rope_theta", config.get("rotary_emb_base")))
    fraction = parameters.get(
        "partial_rotary_factor", config.get("partial_rotary_factor", config.get("rotary_pct", 1.0))
    )
    rope = Rope(reader.d_head, base=float(base or 10000.0), fraction=float(fraction)).double()
    pos = torch.arange(REACH + 1)
    query = torch.from_numpy(parts.query_bias)[None, :, None]
    key = torch.from_numpy(parts.key_bias)[None, :, None].expand(-1, -1, len(pos), -1)
    turned = rope.query_heads(query, pos[-1:]) @ rope.key_heads(key, pos).transpose(-1, -2)
    return turned[0, :, 0].numpy() * reader.scale(layer), np.arange(-REACH, 1.0)
