"""What all native models share with `transformers`: initial weights, and checks before decoding."""

import copy
import re
from typing import Any

import torch.nn.functional as F
from torch import nn
from transformers import EncoderDecoderCache, PreTrainedModel, StaticCache
from transformers import initialization as init

from whence.checks import require
from whence.models.config import WhenceConfig
from whence.models.layer import is_residual, residual_std
from whence.models.positions import Positions
from whence.models.stack import WhenceStack
from whence.old_checkpoints import HUB, convert_former


class WhencePreTrainedModel(PreTrainedModel):  # type: ignore[misc]
    """Loading, saving and initial weights; a method's own initial values are left as they are."""

    config_class = WhenceConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    accepts_loss_kwargs = True
    _no_split_modules = ["WhenceLayer"]  # noqa: RUF012
    _skip_keys_device_placement = ["past_key_values"]  # noqa: RUF012
    # Attention is `whence.attend`'s; these say that no choice of the library's is refused.
    _supports_sdpa = True
    _supports_flash_attn = False
    _supports_attention_backend = False

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> Any:
        """As the library's; numbers of a method that an earlier version saved are converted."""
        wanted = bool(kwargs.pop("output_loading_info", False))
        path, hub = pretrained_model_name_or_path, {key: kwargs.get(key) for key in HUB}
        model, info = super().from_pretrained(path, *args, output_loading_info=True, **kwargs)
        if path is not None:
            convert_former(model, info, path, **hub)
        return (model, info) if wanted else model

    def post_init(self) -> None:
        """As the library's; the tensor-parallel plan then names only modules that are there.

        The plan of a config is for all models that it could build, with a gate or without. And the
        encoder of an encoder-decoder has the config of the whole, whose names are not its own.
        """
        super().post_init()
        names = [name for name, _ in self.named_modules()]
        plan: dict[str, str] = self.tp_plan
        self._tp_plan = {x: plan[x] for x in plan if any(_matches(x, name) for name in names)}

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, nn.Embedding) and self.config.scale_embeddings:
            init.normal_(module.weight, mean=0.0, std=self.config.hidden_size**-0.5)
        if is_residual(module):
            init.normal_(module.weight, mean=0.0, std=residual_std(self.config))

    def initialize_weights(self) -> None:
        """As the library's, then what it leaves to the methods."""
        super().initialize_weights()
        for module in self.modules():
            if isinstance(module, Positions):
                module.draw()


class Decoding:
    """What a model needs to decode, and a refusal before the first token where it cannot."""

    @property
    def _can_compile_fullgraph(self) -> bool:
        """Whether a step of decoding over a static cache is one graph that serves every step.

        Not where attention depends on the place of the first token, for rows are then sorted by
        their padding; nor with a window, whose cache drops keys.
        """
        stack = self.get_decoder_stack()
        whole = stack.position.whole
        return not (whole.anchored or whole.grows or self.config.sliding_window)  # type: ignore[attr-defined]

    def _valid_auto_compile_criteria(self, *arguments: Any, **named: Any) -> bool:
        """As the library's, for a step that can be compiled."""
        valid = super()._valid_auto_compile_criteria(*arguments, **named)  # type: ignore[misc]
        return bool(valid) and self._can_compile_fullgraph

    @staticmethod
    def create_masks_for_generate(
        *, attention_mask: Any, past_key_values: Any = None, **_: Any
    ) -> Any:
        """The padding mask, as long as the cache, so that its shape is the same in every step.

        The library would make one of pairs.
        """
        cache = past_key_values
        if isinstance(cache, EncoderDecoderCache):
            cache = cache.self_attention_cache
        if attention_mask is None or not isinstance(cache, StaticCache):
            return attention_mask
        more = cache.layers[0].max_cache_len - attention_mask.shape[1]
        return F.pad(attention_mask, (0, more)) if more > 0 else attention_mask

    def _validate_generated_length(
        self, generation_config: Any, input_ids_length: int, has_default_max_length: bool
    ) -> None:
        super()._validate_generated_length(  # type: ignore[misc]
            generation_config, input_ids_length, has_default_max_length
        )
        position = self.get_decoder_stack().position
        longest, limit = generation_config.max_length, position.max_length()
        text = position.arguments["spec"]
        require(
            limit is None or longest <= limit,
            f"position {text!r} knows {limit} positions and cannot decode to a length of {longest} "
            "(padding counts). Generate less, or build the model with a larger "
            "max_position_embeddings.",
        )
        require(
            not (position.whole.grows and generation_config.use_cache),
            f"position {text!r} changes what earlier tokens get as the sequence grows, so a cache "
            "cannot be kept. Generate with use_cache=False.",
        )

    def get_decoder_stack(self) -> WhenceStack:
        """The stack that decodes."""
        raise NotImplementedError


def _matches(pattern: str, name: str) -> bool:
    """Whether a name of a plan, in which * is a layer's number, is this module's."""
    return re.fullmatch(re.escape(pattern).replace(r"\*", r"\d+"), name) is not None


def resolved(config: WhenceConfig, wanted: bool) -> WhenceConfig:
    """The config with `causal` filled in: a copy, so that one may serve several classes."""
    if config.causal is None:
        config = copy.deepcopy(config)
        config.causal = wanted
    return config


def only(config: WhenceConfig, wanted: bool, name: str) -> WhenceConfig:
    """The same, for a class that cannot have it otherwise."""
    config = resolved(config, wanted)
    require(
        config.causal == wanted,
        f"{name} needs causal={wanted}, the config says causal={config.causal}. "
        f"Give causal={wanted}, or None.",
    )
    return config
