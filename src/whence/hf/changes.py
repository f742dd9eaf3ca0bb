"""What `attach` does to a model: objects that undo it, so that a copied model has its own."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from whence.hf.attention import AttentionConfig, plain_name
from whence.hf.classes import config_class, plain_config_class, register_models

TABLE = "table"  # the name below `whence` of a table that was set aside


@runtime_checkable
class Change(Protocol):
    """Something done to a model that can be taken back."""

    def undo(self) -> None:
        """As it was before."""


@dataclass(eq=False)
class OwnForward:
    """A module with another forward, that gets the module first: its class is not touched."""

    module: nn.Module
    forward: Callable[..., Any]

    def __post_init__(self) -> None:
        self.module.forward = partial(self.forward, self.module)

    def undo(self) -> None:
        """The forward of its class again."""
        del self.module.__dict__["forward"]


@dataclass(eq=False)
class Frozen:
    """A parameter that is not trained."""

    weight: nn.Parameter

    def __post_init__(self) -> None:
        self.before = self.weight.requires_grad
        self.weight.requires_grad_(False)

    def undo(self) -> None:
        """Trained again, if it was."""
        self.weight.requires_grad_(self.before)


@dataclass(eq=False)
class SetAside:
    """A parameter moved to `base.whence.table`, with a buffer of zeros in its place (ViT)."""

    base: nn.Module
    owner: nn.Module
    name: str

    def __post_init__(self) -> None:
        self.order = list(self.owner._parameters)
        table = self.owner._parameters.pop(self.name)
        assert table is not None
        self.base.get_submodule("whence").register_parameter(TABLE, table)
        self.owner.register_buffer(self.name, torch.zeros_like(table), persistent=False)
        self.frozen = Frozen(table)

    def zeros(self) -> Tensor:
        """What stands in its place."""
        return self.owner.get_buffer(self.name)

    def undo(self) -> None:
        """The parameter in its old place, also in the order of a state dict."""
        delattr(self.owner, self.name)
        table = self.base.get_submodule("whence")._parameters.pop(TABLE)
        parameters = {**self.owner._parameters, self.name: table}
        self.owner._parameters.clear()
        self.owner._parameters.update({name: parameters[name] for name in self.order})
        assert table is not None
        table.requires_grad_(self.frozen.before)


@dataclass(eq=False)
class Hooked:
    """A hook, by the handle that torch gave for it."""

    handle: RemovableHandle

    def undo(self) -> None:
        """Without the hook."""
        self.handle.remove()


class OwnConfig:
    """A config of the model's own that carries the method, in place of one it may share."""

    def __init__(self, model: PreTrainedModel, options: dict[str, Any]) -> None:
        before: Any = model.config
        self.before = before
        self.holders = [m for m in model.modules() if m.__dict__.get("config") is before]
        config = copy.deepcopy(before)
        model_type = before.model_type.removeprefix("whence-")
        config.__class__ = config_class(model_type)
        register_models(model_type)
        config.whence = options
        for holder in self.holders:
            holder.config = config

    def undo(self) -> None:
        """The config that was there; one that was loaded with the method becomes a plain one."""
        before = self.before
        if before.model_type.startswith("whence-"):
            before = copy.deepcopy(before)
            before.__class__ = plain_config_class(before)
            before._attn_implementation = plain_name(str(before._attn_implementation))
            del before.whence
        for holder in self.holders:
            holder.config = before


@dataclass(eq=False)
class OwnAttention:
    """An attention that asks for whence's functions, whatever the model's config has."""

    module: nn.Module
    backend: str

    def __post_init__(self) -> None:
        config: Any = AttentionConfig(self.module.config, self.backend)
        self.module.config = config

    def undo(self) -> None:
        """The model's config again."""
        config: Any = self.module.config
        self.module.config = config.config
