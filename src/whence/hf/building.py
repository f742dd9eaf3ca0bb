"""The methods for a model's layers, from a text or an object, each checked against the model."""

import inspect
from collections.abc import Sequence
from typing import Any, get_args

import torch
from torch import nn

from whence.checks import require
from whence.hf.model_parts import ModelParts
from whence.hf.positions import Positions
from whence.method import PositionMethod
from whence.methods import build, build_layers
from whence.methods.registry import named
from whence.methods.sum import Sum


def positions_for(
    parts: ModelParts,
    position: str | PositionMethod,
    *,
    share: bool,
    layers: Sequence[int],
) -> Positions:
    """Methods on the CPU in float32, for the chosen layers of a model.

    On the CPU also where a model is built without memory, as transformers does to load one: what a
    method computes when it is built (slopes, say) is in no checkpoint.
    """
    config: Any = parts.base.config
    n_heads = int(config.num_attention_heads)
    shape = {
        "n_heads": n_heads,
        "d_head": int(config.hidden_size) // n_heads,
        "d_model": int(config.hidden_size),
        "max_length": parts.max_length(),
        "causal": parts.is_causal(),
    }
    with torch.device("cpu"), _DefaultDtype(torch.float32):
        if isinstance(position, PositionMethod):
            whole, chosen = position, [position] * len(layers)
        elif share:
            whole = build(position, **shape)  # type: ignore[arg-type]
            chosen = [whole] * len(layers)
        else:
            whole, chosen = build_layers(position, len(layers), **shape)  # type: ignore[arg-type]
    for part in _parts(whole):
        _check(part, parts, shape)
    at = dict(zip(layers, chosen, strict=True))
    return Positions(whole, [at.get(index) for index in range(parts.n_layers())])


def completed(position: str, base: nn.Module) -> str:
    """The text with what is known of a pretrained model filled in.

    A method that can begin without an effect does so unless told otherwise. An image model knows
    the patches in a row, and its [CLS].

    >>> from transformers import ViTConfig, ViTModel
    >>> sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
    >>> completed("tisa2d:kernels=3", ViTModel(ViTConfig(num_hidden_layers=1, **sizes)))
    'tisa2d:width=14,prefix=1,kernels=3,start=zero'
    """
    config: Any = base.config
    known: dict[str, int] = {}
    if hasattr(config, "patch_size"):
        image, patch = _pair(config.image_size), patch_of(config)
        known = {"height": image[0] // patch[0], "width": image[1] // patch[1], "prefix": 1}
    texts = []
    for name, cls, options in named(position):
        wanted = inspect.signature(cls).parameters
        more = {key: str(value) for key, value in known.items() if key in wanted}
        filled = {**more, **options}
        if "start" in wanted and "zero" in get_args(wanted["start"].annotation):
            filled.setdefault("start", "zero")
        texts.append(":".join([name, *[",".join(f"{k}={v}" for k, v in filled.items())]]))
    return "+".join(text.removesuffix(":") for text in texts)


def patch_of(config: Any) -> tuple[int, int]:
    """The height and width of a patch, in pixels."""
    return _pair(config.patch_size)


def image_sizes(positions: Positions) -> dict[str, int]:
    """The sizes of an image, in patches, that the methods for images were built for."""
    parts = list(_parts(positions.whole))
    return {name: getattr(part, name) for part in parts for name in part.image_sizes}


def cast_like(positions: Positions, references: Sequence[nn.Module]) -> None:
    """Each method to the device and precision of its layer.

    Buffers keep their precision, and so do numbers of a logit's size.
    """
    for layer, module in zip(positions.layers, references, strict=True):
        parameter = next(module.parameters())
        for owner in () if layer is None else (layer, positions.whole):
            if not parameter.is_meta:
                owner.to(parameter.device)
            methods = [
                m for m in owner.modules() if isinstance(m, PositionMethod) and m.logit_sized
            ]
            kept = {id(p) for method in methods for p in method.parameters()}
            for p in owner.parameters():
                if id(p) not in kept:
                    p.data = p.data.to(parameter.dtype)


def _check(part: PositionMethod, parts: ModelParts, shape: dict[str, Any]) -> None:
    name = type(part).__name__
    for size in ("n_heads", "d_head"):
        own = getattr(part, size, shape[size])
        require(
            own == shape[size],
            f"{name} was built for {size} = {own}, this model has {shape[size]}. Give attach a "
            f"text, such as 'tisa:kernels=5', or build the method with {size} = {shape[size]}.",
        )
    require(
        not part.causal_only or shape["causal"],
        f"{name} is for attention that looks back only, and this model's looks both ways. "
        "Take another method, such as 'tisa' or 't5'.",
    )
    length = getattr(part, "max_length", shape["max_length"])
    require(
        not part.fixed_length or length >= shape["max_length"],
        f"{name} knows {length} positions, this model takes {shape['max_length']}. Leave out "
        "max_length, or take a method without a fixed length, such as 'tisa' or 't5'.",
    )
    require(
        "input" not in part.sites() or parts.stack.causal or not shape["causal"],
        f"{name} adds to the embedding, and a {type(parts.base).__name__} that is a decoder does "
        "not tell it where a cached sequence goes on. Take a method of the lag, such as 'tisa'.",
    )


def _parts(method: PositionMethod) -> list[PositionMethod]:
    if not isinstance(method, Sum):
        return [method]
    return [leaf for part in method.parts for leaf in _parts(part)]  # type: ignore[arg-type]


def _pair(size: Any) -> tuple[int, int]:
    return (int(size), int(size)) if isinstance(size, int) else (int(size[0]), int(size[1]))


class _DefaultDtype:
    """A default dtype for a while; transformers sets one of its own while it loads a model."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def __enter__(self) -> None:
        self.before = torch.get_default_dtype()
        torch.set_default_dtype(self.dtype)

    def __exit__(self, *_: object) -> None:
        torch.set_default_dtype(self.before)
