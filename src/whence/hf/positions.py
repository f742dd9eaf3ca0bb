"""The module under which a model keeps the methods attached to it: its part of the state dict."""

from collections.abc import Iterable, Iterator

from torch import nn

from whence.method import PositionMethod
from whence.methods import METHODS
from whence.methods.sum import Sum


class Positions(nn.Module):
    """Every method once, by a name that says whose it is: `all_t5`, `layer3_tisa`.

    `whole` and `layers` are what `build_layers` gives, an entry a layer of the model, None where
    one was left out. They are no submodules: a method that layers share would then have several
    names, and a checkpoint may hold a tensor under one only.
    """

    whole: PositionMethod
    layers: tuple[PositionMethod | None, ...]

    def __init__(self, whole: PositionMethod, layers: Iterable[PositionMethod | None]) -> None:
        super().__init__()
        self.layers = tuple(layers)
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

    def extra_repr(self) -> str:
        """Which layers there are."""
        return f"layers={[i for i, layer in enumerate(self.layers) if layer is not None]}"


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
