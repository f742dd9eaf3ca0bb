"""The methods of a whole stack: each parameter registered once, each layer's method at hand."""

from typing import Any

import torch
from torch import nn

from whence.checks import require
from whence.method import PositionMethod
from whence.methods import Sum, build_layers, counts_once
from whence.methods.registry import named


class Positions(nn.Module):
    """What `build_layers` makes of a text, as one module without a parameter in two places.

    Parameters are `layers.{i}.{method}.…`, or `shared.{method}.…` where one instance serves all
    layers (T5, TUPE, FLOATER, an input term). They stand beside the layers and not in them: layers
    may be shared while their positions are not, and a shared table belongs to no layer.
    """

    def __init__(
        self,
        spec: str,
        n_layers: int,
        *,
        shared: bool,
        n_heads: int,
        d_head: int,
        d_model: int,
        max_length: int,
        causal: bool,
    ) -> None:
        super().__init__()
        self.arguments: dict[str, Any] = {
            "spec": spec,
            "n_layers": n_layers,
            "shared": shared,
            "n_heads": n_heads,
            "d_head": d_head,
            "d_model": d_model,
            "max_length": max_length,
            "causal": causal,
        }
        whole, layers = build_layers(
            spec,
            1 if shared else n_layers,
            n_heads=n_heads,
            d_head=d_head,
            d_model=d_model,
            max_length=max_length,
            causal=causal,
        )
        # In tuples, which nn.Module does not look into: the parts are registered below, once.
        self._whole = (whole,)
        self._layers = tuple(layers)
        names = _names(spec)
        once = [counts_once(part.cls) for part in named(spec)]
        self.shared = nn.ModuleDict(
            {n: part for n, part, o in zip(names, _parts(whole), once, strict=True) if o}
        )
        self.layers = nn.ModuleList(
            nn.ModuleDict(
                {n: part for n, part, o in zip(names, _parts(layer), once, strict=True) if not o}
            )
            for layer in layers
        )
        # Where each part is registered, by name: others may replace it there.
        self._registered = tuple(
            (group, name, part)
            for group in (self.shared, *self.layers)
            for name, part in group.items()
        )
        tensors = (*self.parameters(), *self.buffers())
        self._undrawn = any(tensor.is_meta for tensor in tensors)
        for module in self.modules():  # transformers would give a Linear in a method its own values
            module._is_hf_initialized = True  # type: ignore[assignment]

    @property
    def whole(self) -> PositionMethod:
        """The method that begins a pass, or an error where a wrapped part would be left out."""
        wrapped = [name for group, name, part in self._registered if group[name] is not part]
        require(
            not wrapped,
            lambda: (
                f"{', '.join(wrapped)}: a method was wrapped on its own, and attention would not "
                "see what is trained there. Let PEFT train all positions of the model: "
                "modules_to_save=['position']."
            ),
        )
        return self._whole[0]

    def layer(self, index: int) -> PositionMethod:
        """What layer `index` of the stack sees."""
        return self._layers[index if len(self._layers) > 1 else 0]

    def max_length(self) -> int | None:
        """The most positions that every part has, or None where there is no limit."""
        limits = [
            int(part.max_length)  # type: ignore[arg-type]
            for part in _parts(self.whole)
            if part.fixed_length
        ]
        return min(limits, default=None)

    @torch.no_grad()
    def draw(self) -> None:
        """The methods' own initial values for what was built without memory and not loaded since.

        `from_pretrained` builds a model on the meta device and marks what the checkpoint filled; a
        method that the checkpoint does not have, and every buffer that is not saved, is left.
        """
        if not self._undrawn:
            return
        with torch.device("cpu"):
            fresh = Positions(**self.arguments)
        values = {**dict(fresh.named_parameters()), **dict(fresh.named_buffers())}
        for name, tensor in (*self.named_parameters(), *self.named_buffers()):
            if not tensor.is_meta and not getattr(tensor, "_is_hf_initialized", False):
                tensor.copy_(values[name])
        self._undrawn = False


def _parts(method: PositionMethod) -> list[PositionMethod]:
    return list(method._each()) if isinstance(method, Sum) else [method]


def _names(spec: str) -> list[str]:
    """The names of a sum's parts, a second one of a kind with its place: tisa, tisa_1.

    Of "my_package.waves:Wave" it is the class: a module's name cannot have a dot.
    """
    found: list[str] = []
    for index, part in enumerate(named(spec)):
        name = part.name.rpartition(":")[2].replace(".", "_")
        found.append(f"{name}_{index}" if name in found else name)
    return found
