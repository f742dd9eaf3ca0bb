"""The rotary settings in a config of `transformers`, as the text of `rope`."""

import math
from typing import Any, Literal

from whence.checks import require, unknown

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


def rope_from(
    config: Any,
    *,
    layout: Literal["half", "interleaved"] | None = None,
    layer_type: str | None = None,
) -> str:
    """The text of `rope` with the settings of a config of transformers, for `build` or `attach`.

    Which columns make a pair is in a family's code and not in its config: give `layout` for one
    that is neither LLaMA's kin ("half") nor CodeGen, GPT-J or RoFormer. `layer_type` names one of
    several settings (Gemma 3: "sliding_attention").

        >>> from transformers import LlamaConfig
        >>> rope_from(LlamaConfig(rope_parameters={"rope_type": "default", "rope_theta": 5e5}))
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
    if kind == "dynamic":  # whatever original_max_position_embeddings says: nobody reads it there
        options["original_length"] = config.max_position_embeddings
    if kind == "yarn":
        options |= _yarn(config, settings)
    return "rope:" + ",".join(f"{name}={value}" for name, value in options.items())


def _settings(config: Any, layer_type: str | None) -> dict[str, Any]:
    settings: dict[str, Any] | None = getattr(config, "rope_parameters", None)
    if settings is None and hasattr(config, "rotary_dim"):  # GPT-J and CodeGen, before them
        width = config.hidden_size // config.num_attention_heads
        fraction = (config.rotary_dim or width) / width
        settings = {"rope_theta": 10000.0, "partial_rotary_factor": fraction}
    if settings is None and config.model_type == "roformer":
        settings = {"rope_theta": 10000.0}
    require(
        settings is not None,
        f"{type(config).__name__} has no rope_parameters: this family does not turn its heads.",
    )
    assert settings is not None
    if "rope_theta" in settings:
        require(
            layer_type is None,
            f"{type(config).__name__} has one setting for all layers: leave out layer_type, got "
            f"{layer_type!r}.",
        )
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
