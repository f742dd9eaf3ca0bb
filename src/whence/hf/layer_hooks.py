"""The forward pre-hooks that pass a method and the queries' positions to a layer's attention."""

from typing import Any

from torch import Tensor, nn

from whence.checks import require
from whence.hf.attention import NAMES
from whence.hf.layer_context import FIXED_CACHE, LayerContext, ZeroBias
from whence.hf.position_table import argument_names
from whence.method import PositionMethod

COUNT = "whence_layers"  # the keyword that passes the counter on to a shared attention


class LayerCounter:
    """The number of the next layer. Each forward pass has a counter of its own."""

    def __init__(self) -> None:
        self.next = 0


def count_layers(
    module: nn.Module, args: Any, kwargs: dict[str, Any]
) -> tuple[Any, dict[str, Any]]:
    """Forward pre-hook of a stack that runs one attention for several layers (ALBERT)."""
    return args, {**kwargs, COUNT: LayerCounter()}


class AttentionHook:
    """Forward pre-hook of one attention: adds the argument `whence=LayerContext(...)`.

    `methods` has one entry, or one for each layer where all layers share the attention; None stands
    for a layer that was left out. Everything that a call needs is in its arguments, so a layer that
    is computed again in backward gets the same.
    """

    def __init__(
        self,
        methods: tuple[PositionMethod | None, ...],
        module: nn.Module,
        *,
        backend: str,
        shared: bool,
        by_interface: bool,
    ) -> None:
        self.methods, self.backend = methods, backend
        self.shared, self.by_interface = shared, by_interface
        self.names = argument_names(module)
        self.zero_bias = tuple(ZeroBias() for _ in methods)

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Add `whence` to the arguments, unless this layer was left out."""
        if self.by_interface:
            self._check_implementation(module)
        index = 0
        if self.shared:
            kwargs = dict(kwargs)
            index = self._layer(kwargs.pop(COUNT, None))
        method = self.methods[index]
        if method is None:
            return args, kwargs
        given = dict(zip(self.names, args, strict=False)) | kwargs
        x = given["hidden_states"]
        start = self._start(module, method, given.get("past_key_values"))
        self._check_device(method, x)
        context = LayerContext(method, x, start, self.backend, self.zero_bias[index])
        return args, {**kwargs, "whence": context}

    def _layer(self, counter: LayerCounter | None) -> int:
        n_layers = len(self.methods)
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

    def _check_implementation(self, module: nn.Module) -> None:
        config: Any = module.config
        if config._attn_implementation not in NAMES.values():
            raise ValueError(
                f"the attention of this model was set to {config._attn_implementation!r} after a "
                "method was attached, so the method would be left out. undo(), set it, and attach "
                "again."
            )

    def _check_device(self, method: PositionMethod, x: Tensor) -> None:
        parameter = next(method.parameters(), None)
        if parameter is not None and parameter.device != x.device:
            raise ValueError(
                f"{type(method).__name__} is on {parameter.device}, its layer's input on "
                f"{x.device}. Move the whole model to one device; for several GPUs start one "
                "process each (torchrun), not torch.nn.DataParallel."
            )
