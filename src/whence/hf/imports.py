"""Other models' positions as methods: released TISA weights, T5 and MPNet tables, RoPE settings."""

import math
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from whence.checks import require, unknown
from whence.methods.t5 import T5
from whence.methods.tisa import Tisa

# The scaling of `rope` for each rope_type, and its options by the names that a config has.
ROPE_TYPES: dict[str, tuple[str, dict[str, str]]] = {
    "default": ("none", {}),
    "linear": ("linear", {"factor": "factor"}),
    "dynamic": ("dynamic", {"factor": "factor"}),
    "yarn": (
        "yarn",
        {
            "factor": "factor",
            "original_max_position_embeddings": "original_length",
            "beta_fast": "beta_fast",
            "beta_slow": "beta_slow",
            "attention_factor": "attention_factor",
        },
    ),
    "llama3": (
        "llama3",
        {
            "factor": "factor",
            "original_max_position_embeddings": "original_length",
            "high_freq_factor": "beta_fast",
            "low_freq_factor": "beta_slow",
        },
    ),
}
INTERLEAVED = ("codegen", "gptj", "roformer")  # the families here whose pairs are neighbours


def tisa_from_released(
    state: Mapping[str, Tensor], *, prefix: str = "", heads_first: bool = False
) -> Tisa:
    """A layer with the weights of the authors' module, sign and shift of its offsets converted.

    The three tensors are known by the words amplitude, sharpness and offset in their names, after
    the prefix. They are [kernels, heads], or [heads, kernels] with heads_first=True.
    """
    found = {}
    for word in ("amplitude", "sharpness", "offset"):
        names = [name for name in state if name.startswith(prefix) and word in name]
        require(
            len(names) == 1,
            f"expected one tensor with {word!r} in its name after {prefix!r}, got "
            f"{names or 'none'}. Give the prefix of one layer's module.",
        )
        tensor = state[names[0]]
        found[word] = tensor if heads_first else tensor.T
    return Tisa.from_released(**found)


def t5_from(model: PreTrainedModel, *, stack: Literal["encoder", "decoder"] = "encoder") -> T5:
    """The relative table of T5 and its kin, or of MPNet, as a method.

    T5 does not scale q.k by 1/sqrt(d): an attention that is to give its results needs scale=1.0.
    UMT5 has a table a layer, and only the first is read.
    """
    found = {
        name: module
        for name, module in model.named_modules()
        if name.split(".")[-1] == "relative_attention_bias" and stack in name.split(".")
    }
    require(
        bool(found),
        f"{type(model).__name__} has no relative_attention_bias in its {stack}. It is found in T5, "
        "mT5, UMT5 and MPNet.",
    )
    table: Tensor = next(iter(found.values())).weight
    distance = int(getattr(model.config, "relative_attention_max_distance", 128))
    method = T5(
        table.shape[1],
        buckets=table.shape[0],
        max_distance=distance,
        causal=stack == "decoder",
    )
    method.to(device=table.device, dtype=table.dtype)
    with torch.no_grad():
        method.table.copy_(table)
    return method


def rope_from(
    config: PreTrainedConfig,
    *,
    layout: Literal["half", "interleaved"] | None = None,
    layer_type: str | None = None,
) -> str:
    """The text of `rope` with the settings of a config, for `build` or `attach`.

    Which columns make a pair is in a family's code and not in its config: give `layout` for one
    that is neither LLaMA's kin ("half") nor CodeGen, GPT-J or RoFormer. `layer_type` names one of
    several settings (Gemma 3: "sliding_attention").

        >>> rope_from(LlamaConfig(rope_theta=5e5))  # doctest: +SKIP
        'rope:base=500000.0'
    """
    if layout is None:
        layout = "interleaved" if config.model_type in INTERLEAVED else "half"
    settings = _settings(config, layer_type)
    kind = settings.get("rope_type", "default")
    require(kind in ROPE_TYPES, unknown("rope_type", kind, ROPE_TYPES))
    require(
        settings.get("truncate", True),
        "truncate=False of yarn is not what `rope` computes: it rounds the ends as published.",
    )
    scaling, names = ROPE_TYPES[kind]
    options = {"base": settings["rope_theta"]}
    if settings.get("partial_rotary_factor", 1.0) != 1.0:
        options["fraction"] = settings["partial_rotary_factor"]
    if layout != "half":
        options["layout"] = layout
    if scaling != "none":
        options["scaling"] = scaling
    for theirs, ours in names.items():
        if settings.get(theirs) is not None:
            options[ours] = settings[theirs]
    if kind == "dynamic":
        options["original_length"] = config.max_position_embeddings
    if kind == "yarn":
        options |= _yarn(config, settings)
    return "rope:" + ",".join(f"{name}={value}" for name, value in options.items())


def _settings(config: Any, layer_type: str | None) -> dict[str, Any]:
    settings: dict[str, Any] | None = getattr(config, "rope_parameters", None)
    if settings is None and hasattr(config, "rotary_dim"):  # GPT-J and CodeGen, before them
        width = config.hidden_size // config.num_attention_heads
        fraction = (config.rotary_dim or width) / width
        return {"rope_theta": 10000.0, "partial_rotary_factor": fraction}
    if settings is None and config.model_type == "roformer":
        return {"rope_theta": 10000.0}
    require(
        settings is not None,
        f"{type(config).__name__} has no rope_parameters: this family does not turn its heads.",
    )
    assert settings is not None
    if "rope_theta" in settings:
        return settings
    require(
        layer_type in settings,
        unknown("layer_type", str(layer_type), settings),
    )
    chosen: dict[str, Any] = settings[str(layer_type)]
    return chosen


def _yarn(config: Any, settings: dict[str, Any]) -> dict[str, float]:
    """What a config may leave to be worked out: the factor, and DeepSeek's attention factor."""
    factor = settings.get("factor")
    if factor is None:
        factor = config.max_position_embeddings / settings["original_max_position_embeddings"]
    out = {"factor": factor}
    above, below = settings.get("mscale"), settings.get("mscale_all_dim")
    if settings.get("attention_factor") is None and above and below:
        growth = 0.1 * math.log(max(factor, 1.0))
        out["attention_factor"] = (growth * above + 1.0) / (growth * below + 1.0)
    return out
