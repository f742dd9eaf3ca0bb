"""Models of this library: the method that a config names, with the numbers of its checkpoint."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Float

from whence.analysis.checkpoint import Checkpoint
from whence.analysis.lag_curves import curves_of
from whence.checks import require
from whence.families import Config, Family, Stack
from whence.method import PositionMethod

if TYPE_CHECKING:
    from whence.analysis.stack_reader import StackReader

NATIVE, SEQ2SEQ, ATTACHED = "whence", "whence-seq2seq", "whence-"  # `model_type`s, and a prefix


def _scale(config: Config, d_head: int, layer: int) -> float:
    return d_head**-0.5 if config.get("scale_attention", True) else 1.0


def _place(config: Config, layer: int) -> dict[str, int]:
    return {"layer": 0 if config.get("shared_layers", False) else layer}


_STACK = Stack(
    attention="stack.layers.{layer}.self_attn",
    query="q_proj",
    key="k_proj",
    head_size=("head_dim",),
    scale=_scale,
    place=_place,
)
_ENCODER = replace(
    _STACK,
    attention="encoder.stack.layers.{layer}.self_attn",
    name="encoder",
    layers=("num_encoder_layers", "num_hidden_layers"),
)
_DECODER = replace(
    _STACK, attention="decoder.layers.{layer}.self_attn", name="decoder", causal=True
)


def native_family(config: Config) -> Family | None:
    """The row of a model of `whence.models`; whether it is causal is for its config to say."""
    if config.get("model_type") == SEQ2SEQ:
        return Family(SEQ2SEQ, (SEQ2SEQ,), (_ENCODER, _DECODER))
    if config.get("model_type") == NATIVE:
        return Family(NATIVE, (NATIVE,), (replace(_STACK, causal=bool(config.get("causal"))),))
    return None


def attached_to(config: Config) -> str | None:
    """The `model_type` that a model had before `whence.hf.attach`, or None."""
    kind = config.get("model_type")
    attached = isinstance(kind, str) and kind.startswith(ATTACHED) and kind != SEQ2SEQ
    return str(kind).removeprefix(ATTACHED) if attached else None


@dataclass(frozen=True, eq=False)
class OwnPosition:
    """The methods of a stack as trained: `whole` has the input term, `layers` that of each one."""

    spec: str
    whole: PositionMethod
    layers: tuple[PositionMethod | None, ...]
    keeps_table: bool  # the table that the model had before is still added

    def vectors(self, n: int) -> Float[np.ndarray, "n d"] | None:
        """What the method adds to the input at positions 0..n - 1, or None."""
        if "input" not in self.whole.sites():
            return None
        with torch.no_grad():
            self.whole.begin(n)
            term = self.whole.input_term(torch.arange(n))
        return None if term is None else term.double().numpy()

    def curves(
        self, layer: int, *, n_heads: int, d_head: int, causal: bool, reach: int
    ) -> tuple[Float[np.ndarray, "h l"], Float[np.ndarray, " l"]] | None:
        """What a layer adds at each lag to the logits of each head, whatever the content.

        None where it adds nothing to logits, or where content has a say in it.
        """
        method = self.layers[layer]
        if method is None or "score" not in method.sites():
            return None
        longest = getattr(self.whole, "max_length", None)
        if self.whole.fixed_length and isinstance(longest, int):
            reach = min(reach, (longest - 1) // 2)
        with torch.no_grad():
            self.whole.begin(2 * reach + 1)
        found = curves_of(
            method, name=self.spec, n_heads=n_heads, d_head=d_head, reach=reach, causal=causal
        )
        if found.site != "score" or found.spread is not None:
            return None
        seen = found.lag <= (0 if causal else reach)
        lag = found.lag[seen].double().numpy()
        mean = found.mean[:, seen].double().expand(n_heads, -1).numpy()
        return mean, lag


def own_position(reader: "StackReader") -> OwnPosition | None:
    """The method of a model of `whence.models`, or of one that a method is attached to, or None."""
    config = reader.checkpoint.config
    if attached_to(config) is not None:
        return _attached(reader, config.get("whence"))
    if config.get("model_type") in (NATIVE, SEQ2SEQ):
        return _native(reader, config)
    return None


def _attached(reader: "StackReader", options: Any) -> OwnPosition:
    from whence.hf.positions import Positions
    from whence.methods import build, build_layers

    name = reader.checkpoint.name
    require(
        isinstance(options, Mapping) and isinstance(options.get("position"), str),
        f"config.json of {name} must name its method in whence.position as a text such as "
        f"'tisa:kernels=5', got {_entry(options)}.",
    )
    spec, n_layers = options["position"], reader.n_layers
    listed = options.get("layers")
    layers = list(range(n_layers)) if listed is None else listed
    require(
        isinstance(layers, list) and all(type(i) is int and 0 <= i < n_layers for i in layers),
        f"config.json of {name} must list layers of 0..{n_layers - 1} in whence.layers, "
        f"got {listed!r}.",
    )
    shape = _shape(reader, causal=reader.causal)
    if options.get("share"):
        whole = build(spec, **shape)
        chosen = [whole] * len(layers)
    else:
        whole, chosen = build_layers(spec, len(layers), **shape)
    at = dict(zip(layers, chosen, strict=True))
    positions = Positions(whole, [at.get(index) for index in range(n_layers)])
    _load(positions, reader.checkpoint, "whence.")
    return OwnPosition(spec, whole, positions.layers, bool(options.get("keep_positions", True)))


def _native(reader: "StackReader", config: Config) -> OwnPosition:
    from whence.models.positions import Positions

    spec = config.get("position", "tisa:kernels=5")
    require(
        isinstance(spec, str),
        f"config.json of {reader.checkpoint.name} must name its method in position as a text such "
        f"as 'tisa:kernels=5', got {spec!r}.",
    )
    shape = _shape(reader, causal=reader.causal)
    shared = bool(config.get("shared_positions", False))
    positions = Positions(spec, reader.n_layers, shared=shared, **shape)
    prefix = reader.stack.attention.partition("layers.")[0] + "position."
    _load(positions, reader.checkpoint, prefix)
    layers = tuple(positions.layer(index) for index in range(reader.n_layers))
    return OwnPosition(spec, positions.whole, layers, keeps_table=False)


def _shape(reader: "StackReader", *, causal: bool) -> dict[str, Any]:
    config = reader.checkpoint.config
    longest = config.get("max_position_embeddings", 512)
    require(
        type(longest) is int and longest > 0,
        f"config.json of {reader.checkpoint.name} must give max_position_embeddings as a number "
        f"above 0, got {longest!r}.",
    )
    return {
        "n_heads": reader.n_heads,
        "d_head": reader.d_head,
        "d_model": reader.d_model,
        "max_length": longest - reader.stack.first_row(config),
        "causal": causal,
    }


def _load(positions: torch.nn.Module, checkpoint: Checkpoint, prefix: str) -> None:
    """The checkpoint's numbers into the methods; those of earlier versions are converted."""
    stored = {
        key.partition(prefix)[2]: torch.from_numpy(checkpoint.tensor(key)).float()
        for key in checkpoint.names
        if f".{prefix}" in f".{key}"
    }
    try:
        missing, _ = positions.load_state_dict(stored, strict=False)
    except RuntimeError as error:  # a size that does not fit
        reason = " ".join(str(error).split())
        raise ValueError(f"{checkpoint.name} has other sizes than its config: {reason}") from None
    require(
        not missing,
        f"{checkpoint.name} lacks weights of the method that its config names: "
        f"{', '.join(sorted(missing)[:3])}. Save it again with the method attached.",
    )


def _entry(options: Any) -> str:
    return repr(options.get("position")) if isinstance(options, Mapping) else repr(options)
