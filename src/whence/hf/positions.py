"""The module under which a model keeps the methods attached to it: its part of the state dict."""

from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn

from whence.checks import require
from whence.hf.layer_context import ZeroBias
from whence.method import PositionMethod
from whence.methods import METHODS
from whence.methods.sum import Sum


class Positions(nn.Module):
    """Every method once, by a name that says whose it is: `all_t5`, `layer3_tisa`.

    `whole` and `layers` are what `build_layers` gives, an entry a layer of the model, None where
    one was left out. They are no submodules: a method that layers share would then have several
    names, and a checkpoint may hold a tensor under one only.

    Attention reads its method from the model's module `whence` in every pass (`positions_of`), so
    that who replaces this module by a copy to train (PEFT's modules_to_save) replaces the methods.
    """

    whole: PositionMethod
    layers: tuple[PositionMethod | None, ...]

    def __init__(self, whole: PositionMethod, layers: Iterable[PositionMethod | None]) -> None:
        super().__init__()
        self.layers = tuple(layers)
        self.zero_bias = tuple(ZeroBias() for _ in self.layers)
        object.__setattr__(self, "whole", whole)
        users: dict[PositionMethod, list[int]] = {part: [] for part in _parts(whole)}
        for index, layer in enumerate(self.layers):
            for part in _parts(layer):
                users.setdefault(part, []).append(index)
        for part, where in users.items():
            if not [*part.parameters(), *part.buffers()]:
                continue  # a view of a whole that is here, or a method without numbers
            owner = f"layer{where[0]}" if len(where) == 1 else "all"
            name = f"{owner}_{_name(part)}"
            again = sum(key == name or key.startswith(f"{name}_") for key in self._modules)
            self.add_module(f"{name}_{again + 1}" if again else name, part)
        # What the passes run, by name: not the submodules, which others may have replaced.
        self._parts = tuple(self._modules.items())

    @property
    def itself(self) -> "Positions":
        """This module, also where it is asked for by the attributes of one that wraps it."""
        return self

    def layer(self, index: int) -> PositionMethod | None:
        """The method of a layer, or an error where a wrapper of a part of it would be left out."""
        wrapped = [name for name, part in self._parts if self._modules[name] is not part]
        require(
            not wrapped,
            lambda: (
                f"{', '.join(wrapped)}: a method was wrapped on its own, and attention would not "
                "see what is trained there. Let PEFT train all methods of the model: "
                "modules_to_save=['whence']."
            ),
        )
        return self.layers[index]

    def extra_repr(self) -> str:
        """Which layers there are."""
        return f"layers={[i for i, layer in enumerate(self.layers) if layer is not None]}"


def positions_of(base: nn.Module) -> Positions:
    """The methods of a base model as they are now: those of PEFT's active adapter, for one."""
    module: Any = base.whence
    found = module.itself
    assert isinstance(found, Positions)
    return found


class ModelReference:
    """The base model, for a hook on one of its layers.

    A copy of the model has hooks that read the copy. A copy of a layer alone, as PEFT makes of
    modules_to_save, goes on reading the model that it was copied in.
    """

    def __init__(self, base: nn.Module) -> None:
        self.base = base

    def __deepcopy__(self, memo: dict[int, Any]) -> "ModelReference":
        return ModelReference(memo.get(id(self.base), self.base))


def _parts(method: PositionMethod | None) -> Iterator[PositionMethod]:
    if isinstance(method, Sum):
        for part in method.parts:
            yield from _parts(part)  # type: ignore[arg-type]
    elif method is not None:
        yield method


def _name(part: PositionMethod) -> str:
    for name, cls in METHODS.items():
        if type(part) is cls:
            return name
    return type(part).__name__.lower()
