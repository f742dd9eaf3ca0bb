"""The forward pre-hooks that pass a method and the queries' positions to a layer's attention."""

from typing import Any

from torch import Tensor, nn

from whence.checks import require
from whence.hf.attention import check_implementation
from whence.hf.layer_context import FIXED_CACHE, LayerContext
from whence.hf.position_table import argument_names
from whence.hf.positions import ModelReference, positions_of
from whence.method import PositionMethod

COUNT = "whence_layers"  # the keyword that passes the counter on to a shared attention
WEIGHTS = "whence_weights"  # the keyword that tells an attention that its weights are asked for


class LayerCounter:
    """The number of the next layer. Each forward pass has a counter of its own."""

    def __init__(self) -> None:
        self.next = 0


def count_layers(
    module: nn.Module, args: Any, kwargs: dict[str, Any]
) -> tuple[Any, dict[str, Any]]:
    """Forward pre-hook of a stack that runs one attention for several layers (ALBERT)."""
    return args, {**kwargs, COUNT: LayerCounter()}


def tell_of_weights(
    module: nn.Module, args: Any, kwargs: dict[str, Any]
) -> tuple[Any, dict[str, Any]]:
    """Forward pre-hook of a base model that keeps `output_attentions` to itself (GPT-2, OPT)."""
    return args, {**kwargs, WEIGHTS: kwargs.get("output_attentions")}


class ImageShape:
    """Forward pre-hook of an image model: its patches must form the grid of a method for images.

    The model itself takes images of another size with interpolate_pos_encoding=True.
    """

    def __init__(self, module: nn.Module, patch: tuple[int, int], grid: dict[str, int]) -> None:
        self.names, self.patch, self.grid = argument_names(module), patch, grid

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Refuse an image with another number of patches in a row, or a column where it counts."""
        given = dict(zip(self.names, args, strict=False)) | kwargs
        image = given.get("pixel_values")
        if not given.get("interpolate_pos_encoding") or not isinstance(image, Tensor):
            return  # the model takes one size alone, and says so
        height, width = (n // p for n, p in zip(image.shape[-2:], self.patch, strict=True))
        found = {name: {"height": height, "width": width}[name] for name in self.grid}
        require(
            found == self.grid,
            lambda: (
                f"this model's method was attached for images of {_sizes(self.grid)} in patches, "
                f"got one of {_sizes(found)}. Attach it anew with {_sizes(found)} in its text, or "
                "resize the image."
            ),
        )


def _sizes(grid: dict[str, int]) -> str:
    return ",".join(f"{name}={size}" for name, size in grid.items())


class AttentionHook:
    """Forward pre-hook of one attention: adds the argument `whence=LayerContext(...)`.

    `layer` is its number, None where all layers share the attention. Everything that a call needs
    is in its arguments, so a layer that is computed again in backward gets the same.
    """

    def __init__(
        self,
        model: ModelReference,
        module: nn.Module,
        layer: int | None,
        *,
        backend: str,
        by_interface: bool,
    ) -> None:
        self.model, self.layer, self.backend = model, layer, backend
        self.by_interface = by_interface
        self.names = argument_names(module)

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Add `whence` to the arguments, unless this layer was left out."""
        if self.by_interface:
            check_implementation(self.model.base.config)
        kwargs = dict(kwargs)
        weights = kwargs.pop(WEIGHTS, kwargs.get("output_attentions"))
        if weights is None:
            weights = self.model.base.config.output_attentions  # type: ignore[union-attr]
        positions, index = positions_of(self.model.base), self.layer
        if index is None:
            index = self._counted(kwargs.pop(COUNT, None), len(positions.layers))
        method = positions.layer(index)
        if method is None:
            return args, kwargs
        given = dict(zip(self.names, args, strict=False)) | kwargs
        x = given["hidden_states"]
        start = self._start(module, method, given.get("past_key_values"))
        self._check_device(method, x)
        context = LayerContext(
            method, x, start, self.backend, bool(weights), positions.zero_bias[index]
        )
        return args, {**kwargs, "whence": context}

    def _counted(self, counter: LayerCounter | None, n_layers: int) -> int:
        if counter is None or counter.next >= n_layers:
            raise ValueError(
                f"an attention that {n_layers} layers share ran outside of its encoder's pass, so "
                "which layer it is cannot be known. Checkpoint or call the encoder as a whole."
            )
        counter.next += 1
        return counter.next - 1

    def _start(self, module: nn.Module, method: PositionMethod, cache: Any) -> int:
        """How many tokens the cache holds, which is the position of the first query."""
        if cache is None:
            return 0
        start = cache.get_seq_length(module.layer_idx)
        if not isinstance(start, int):
            raise ValueError(FIXED_CACHE)
        name = type(method).__name__
        require(
            not start or not method.reads_key_inputs,
            f"{name} reads the inputs of all keys, which a cache does not hold: pass "
            "use_cache=False.",
        )
        require(
            not start or not method.grows,
            f"{name} changes earlier tokens as the sequence grows, so cached ones are out of "
            "date: pass use_cache=False.",
        )
        return start

    def _check_device(self, method: PositionMethod, x: Tensor) -> None:
        parameter = next(method.parameters(), None)
        if parameter is not None and parameter.device != x.device:
            raise ValueError(
                f"{type(method).__name__} is on {parameter.device}, its layer's input on "
                f"{x.device}. Move the whole model to one device; for several GPUs start one "
                "process each (torchrun), not torch.nn.DataParallel."
            )
