"""The classes that load a model with its method: "whence-bert" is BERT whose config names one.

They are made when asked for, from transformers' own, and have their names, so that what is loaded
is saved again as it was. The Auto classes learn a family's models when one of its configs is made.
"""

import functools
from typing import Any

import transformers
from huggingface_hub.dataclasses import strict
from transformers import AutoConfig, PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from whence.checks import require
from whence.families import ATTACHABLE

FORMAT = 1  # of what a config says; higher where an older whence would read it wrongly
OPTION_KINDS = {
    "position": str,
    "backend": str,
    "layers": list,
    "share": bool,
    "keep_positions": bool,
}


class PositionedConfig:
    """What a config of "whence-..." has beside its family's: `whence`, the options of `attach`."""

    whence: dict[str, Any] | None = None
    model_type: str

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)  # type: ignore[misc]
        register_models(self.model_type.removeprefix("whence-"))


class PositionedModel:
    """A model of the family, to which its config's method is attached as it is built."""

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        from whence.hf.attaching import attach

        super().__init__(config, *args, **kwargs)  # type: ignore[call-arg]
        options = read_options(getattr(config, "whence", None))
        position = options.pop("position")
        model: Any = self
        attach(model, position, **options)

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
        """transformers' own, and then: all of the method's weights must have been there.

        Pickled weights are read where use_safetensors=False or None says so, and else refused.
        """
        from whence.hf.loading import checked, refuse_pickles
        from whence.old_checkpoints import HUB, convert_former

        wanted = bool(kwargs.pop("output_loading_info", False))
        path = args[0] if args else kwargs.get("pretrained_model_name_or_path")
        hub = {key: kwargs.get(key) for key in HUB}
        if kwargs.setdefault("use_safetensors", True) and path is not None:
            refuse_pickles(path, hub)
        loading: Any = super()
        model, info = loading.from_pretrained(*args, output_loading_info=True, **kwargs)
        if path is not None:
            convert_former(model, info, path, **hub)
        checked(model, info)
        return (model, info) if wanted else model


def read_options(options: Any) -> dict[str, Any]:
    """The options of `attach` in a config, or an error where they cannot be read."""
    require(
        options is not None,
        "this config names no method: its entry `whence` is missing. Load the model with the class "
        "of its family and call whence.hf.attach.",
    )
    require(
        isinstance(options, dict),
        f"the entry `whence` of this config is {options!r}, no JSON object.",
    )
    made = options.get("format")
    require(
        isinstance(made, int) and made <= FORMAT,
        f"this checkpoint has format {made} of whence, and the whence installed here reads up to "
        f"{FORMAT}. Install a newer one: pip install -U whence.",
    )
    require(
        options.get("position") is not None,
        "the method of this checkpoint was given to attach as an object, which a config cannot "
        "name. Load the model with the class of its family, attach such an object, and load the "
        "state dict.",
    )
    for name, kinds in OPTION_KINDS.items():
        value = options.get(name)
        require(
            value is None or isinstance(value, kinds),
            f"the entry `whence` of this config has {name} = {value!r}, which attach does not "
            "take. Save the model again.",
        )
    return {key: value for key, value in options.items() if key != "format"}


@functools.cache
def config_class(model_type: str) -> type:
    """The config of "whence-" + model_type."""
    plain = CONFIG_MAPPING[model_type]
    entries = {"model_type": f"whence-{model_type}", "__module__": __name__}
    made: type = strict(type(f"Whence{plain.__name__}", (PositionedConfig, plain), entries))
    AutoConfig.register(f"whence-{model_type}", made, exist_ok=True)
    return made


@functools.cache
def model_class(plain: type, model_type: str) -> type:
    """A class of a family, such as BertForMaskedLM, that attaches what its config says."""
    entries = {"config_class": config_class(model_type), "__module__": __name__}
    return type(plain.__name__, (PositionedModel, plain), entries)


def plain_config_class(config: Any) -> type:
    """The family's own class of a config of "whence-..."."""
    plain: type = CONFIG_MAPPING[config.model_type.removeprefix("whence-")]
    return plain


def register_configs() -> None:
    """Make "whence-bert" and the others known to AutoConfig, without their families' code.

    This runs while transformers is being imported, when none of its families can be. So each is a
    stand-in, that the class it stands for replaces as soon as there is a config to read.
    """
    for model_type in ATTACHABLE:
        AutoConfig.register(f"whence-{model_type}", _stand_in(model_type), exist_ok=True)


def _stand_in(model_type: str) -> type:
    def from_dict(config_dict: dict[str, Any], **kwargs: Any) -> Any:
        made: Any = config_class(model_type)
        return made.from_dict(config_dict, **kwargs)

    entries = {"model_type": f"whence-{model_type}", "from_dict": staticmethod(from_dict)}
    return type("StandIn", (PreTrainedConfig,), {**entries, "__module__": __name__})


@functools.cache
def register_models(model_type: str) -> None:
    """Make every model of a family known to the Auto classes that know the family's own.

    And to what renames a family's weights in checkpoints, ViT's for one: it passes over a type of
    model that was not registered with it.
    """
    from transformers.conversion_mapping import (
        get_checkpoint_conversion_mapping,
        register_checkpoint_conversion_mapping,
    )
    from transformers.models.auto import modeling_auto

    names = get_checkpoint_conversion_mapping(model_type) or []
    register_checkpoint_conversion_mapping(f"whence-{model_type}", names, overwrite=True)
    plain = CONFIG_MAPPING[model_type]
    for name in modeling_auto.__all__:
        auto: Any = getattr(modeling_auto, name)
        mapping = getattr(auto, "_model_mapping", None)
        if mapping is None or plain not in mapping:
            continue
        found = mapping[plain]
        cls = found[0] if isinstance(found, tuple) else found
        auto.register(config_class(model_type), model_class(cls, model_type), exist_ok=True)


def __getattr__(name: str) -> Any:
    """A class by its name, for pickle: each is made when first asked for."""
    for model_type in ATTACHABLE:
        if name == f"Whence{CONFIG_MAPPING[model_type].__name__}":
            return config_class(model_type)
    plain: Any = getattr(transformers, name, None)
    config = getattr(plain, "config_class", None)
    found = getattr(config, "model_type", None)
    if found not in ATTACHABLE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return model_class(plain, found)


register_configs()  # here and not by who imports this: that may be the import of transformers above
