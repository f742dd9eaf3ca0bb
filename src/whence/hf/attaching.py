"""`attach`: any positional method added to a pretrained model, on that instance alone."""

import sys
from collections.abc import Sequence
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from whence.checks import at_least, one_of, require
from whence.hf import attention, mpnet
from whence.hf.building import cast_like, completed, image_sizes, patch_of, positions_for
from whence.hf.changes import TABLE, Change, Frozen, Hooked, OwnAttention, OwnConfig, OwnForward
from whence.hf.classes import FORMAT
from whence.hf.layer_hooks import AttentionHook, ImageShape, count_layers, tell_of_weights
from whence.hf.model_parts import ModelParts, parts_of
from whence.hf.position_table import add_input_term, drop
from whence.hf.positions import ModelReference, Positions, positions_of
from whence.kernels.attend import BACKENDS
from whence.method import PositionMethod

HANDLE = "_whence"  # the attribute of a base model that holds its Attached


class Attached:
    """The handle of a method that is attached to a model; `attached(model)` returns it again.

    `methods` has one entry for each layer, None for a layer without the method. `whole` is the
    instance that the layers share, or else the first of them. Where PEFT trains copies of them,
    they are those of the active adapter.

        >>> from transformers import BertConfig, BertModel
        >>> config = BertConfig(hidden_size=32, num_attention_heads=4, num_hidden_layers=2)
        >>> model = BertModel(config)
        >>> handle = attach(model, "tisa:kernels=5")
        >>> handle.position, len(handle.methods)
        ('tisa:kernels=5,start=zero', 2)
    """

    def __init__(self, model: PreTrainedModel, options: dict[str, Any]) -> None:
        self.model, self.options = model, options
        self.changes: list[Change] = []

    @property
    def methods(self) -> tuple[PositionMethod | None, ...]:
        """The method of each layer."""
        return positions_of(self.model.base_model).layers

    @property
    def whole(self) -> PositionMethod:
        """What the methods of the layers share, or the first of them."""
        return positions_of(self.model.base_model).whole

    @property
    def position(self) -> str | None:
        """The text of the method, as in the config; None for one that was given as an object."""
        position = self.options["position"]
        assert position is None or isinstance(position, str)
        return position

    def n_parameters(self) -> int:
        """The parameters that the method brought, all layers together."""
        named = positions_of(self.model.base_model).named_parameters()
        return sum(p.numel() for name, p in named if name != TABLE)

    def undo(self) -> None:
        """Take the method off: the model is what it was, its weights those it has now."""
        _refuse_running(self.model, "undo")
        base = self.model.base_model
        require(
            getattr(base, HANDLE, None) is self,
            "this method is no longer on the model: it was taken off before.",
        )
        require(
            isinstance(base.whence, Positions),
            "PEFT trains a copy of this method: take its adapters off the model first, with "
            "merge_and_unload() or unload().",
        )
        self._take_off()

    def _take_off(self) -> None:
        base = self.model.base_model
        while self.changes:
            self.changes.pop().undo()
        del base.whence
        delattr(base, HANDLE)

    def __repr__(self) -> str:
        used = [i for i, method in enumerate(self.methods) if method is not None]
        name = self.position or type(self.whole).__name__
        layers = "all" if len(used) == len(self.methods) else str(used)
        kept = "kept" if self.options["keep_positions"] else "left out"
        return (
            f"{name} on {type(self.model).__name__}: layers {layers} of {len(self.methods)}, "
            f"{self.n_parameters():,} parameters, its own position embeddings {kept}, "
            f"backend {self.options['backend']!r}"
        )


def attach(
    model: nn.Module,
    position: str | PositionMethod,
    *,
    keep_positions: bool = True,
    share: bool = False,
    layers: Sequence[int] | None = None,
    train: str = "all",
    backend: str = "auto",
) -> Attached:
    """Add a positional method to the attention of a pretrained model; `undo()` takes it off.

    position        a text such as "tisa:kernels=5" or "tisa+rope", or a method, which all layers
                    then share and no checkpoint can name
    keep_positions  True is the slides' form (a): q, k and v see the model's own position embeddings
                    as before. False is form (b): they are left out, and input may be longer
    share           one set of parameters for all layers, not one a layer; what a method always
                    shares (T5's table) is shared in any case
    layers          which layers, counted from 0; all unless given
    train           "all" leaves what is trained as it is, "position" freezes everything else
    backend         "auto": the model's own attention function while the bias is zero, so that no
                    bit changes, then `whence.attend`, in linear memory; in a model loaded with
                    attn_implementation="eager" always its own function, whose weights are n x n.
                    "original": always the model's own function, with the position in its mask,
                    which is n x n. "fused", "sdpa", "reference": always this backend of `attend`

        >>> from transformers import BertConfig, BertModel
        >>> config = BertConfig(hidden_size=32, num_attention_heads=4, num_hidden_layers=2)
        >>> model = BertModel(config)
        >>> handle = attach(model, "tisa:kernels=5")
        >>> handle.n_parameters()  # 2 layers of 4 heads of 5 kernels of 3 numbers
        120
        >>> handle.undo()
    """
    whole = _checked(model)
    base = whole.base_model
    parts = parts_of(base)
    one_of("train", train, ("all", "position"))
    one_of("backend", backend, ("original", "auto", *BACKENDS))
    chosen = _layers(layers, parts.n_layers())
    text = completed(position, base) if isinstance(position, str) else None
    positions = positions_for(parts, text or position, share=share, layers=chosen)
    options = {
        "format": FORMAT,
        "position": text,
        "keep_positions": keep_positions,
        "share": share,
        "layers": None if layers is None else chosen,
        "backend": backend,
    }
    implementation = _implementation(parts, backend)
    cast_like(positions, _references(parts))
    handle = Attached(whole, options)
    base.add_module("whence", positions)
    setattr(base, HANDLE, handle)
    try:
        handle.changes.append(OwnConfig(whole, options))
        attention.register()
        if implementation is not None:
            whole.set_attn_implementation(implementation)
        if not keep_positions:
            handle.changes += drop(parts)
        handle.changes += add_input_term(parts, positions.whole)
        sizes = image_sizes(positions)
        if sizes and hasattr(base.config, "patch_size"):
            hook = ImageShape(base, patch_of(base.config), sizes)
            handle.changes.append(Hooked(base.register_forward_pre_hook(hook, with_kwargs=True)))
        handle.changes += _at_attentions(parts, backend)
        if train == "position":
            own = set(map(id, positions.parameters()))
            rest = (p for p in whole.parameters() if id(p) not in own and p.requires_grad)
            handle.changes += [Frozen(p) for p in rest]
    except BaseException:
        handle._take_off()
        raise
    return handle


def attached(model: nn.Module) -> Attached | None:
    """The handle of the method that is on this model, or None; it may be wrapped (PEFT, DDP).

    >>> from transformers import BertConfig, BertModel
    >>> config = BertConfig(hidden_size=32, num_attention_heads=4, num_hidden_layers=1)
    >>> model = BertModel(config)
    >>> handle = attach(model, "alibi")
    >>> attached(model) is handle
    True
    """
    for module in model.modules():
        handle = module.__dict__.get(HANDLE)
        if isinstance(handle, Attached):
            return handle
    return None


def _checked(model: nn.Module) -> PreTrainedModel:
    if not isinstance(model, PreTrainedModel):
        raise TypeError(
            f"attach needs a model of transformers, got {type(model).__name__}. Attach before "
            "compiling or wrapping it (torch.compile, DDP, FSDP, PEFT)."
        )
    require(
        getattr(model.base_model, HANDLE, None) is None,
        "this model has a method attached already. Take it off with undo(), or attach both at once "
        "as a sum: 'tisa+rope'.",
    )
    require(
        not getattr(model, "is_quantized", False) and not getattr(model, "hf_quantizer", None),
        "this model is quantized, and a method trains beside weights that cannot be trained. Load "
        "it without quantization_config.",
    )
    _refuse_running(model, "attach")
    return model


def _refuse_running(model: nn.Module, what: str) -> None:
    """A model in use: one of its modules is on the call stack of a thread."""
    modules = set(map(id, model.modules()))
    for frame in sys._current_frames().values():
        walk: Any = frame
        while walk is not None:
            if walk.f_code.co_name in ("_call_impl", "_wrapped_call_impl"):
                inside = id(walk.f_locals.get("self")) in modules
                require(
                    not inside,
                    f"this model is in the middle of a forward pass: {what} before or after it, "
                    "not from a hook or another thread.",
                )
            walk = walk.f_back


def _layers(layers: Sequence[int] | None, n_layers: int) -> list[int]:
    if layers is None:
        return list(range(n_layers))
    chosen = list(layers)
    for index in chosen:
        at_least(0, layer=index)
        require(
            index < n_layers,
            f"this model has layers 0..{n_layers - 1}, got layer {index}.",
        )
    require(
        len(set(chosen)) == len(chosen) > 0,
        f"layers must name at least one layer, and each once, got {chosen}.",
    )
    return sorted(chosen)


def _implementation(parts: ModelParts, backend: str) -> str | None:
    """The attention implementation that the config must have, None where it stays as it is."""
    if parts.attach.own_forward:
        return None
    config: Any = parts.base.config
    attention.check_implementation(config)
    if backend not in ("auto", "original"):
        return attention.NAMES["attend"]
    before = attention.plain_name(str(config._attn_implementation))
    return None if before == config._attn_implementation else before


def _references(parts: ModelParts) -> list[nn.Module]:
    """The attention of every layer, one that is shared as often as it is used."""
    modules = parts.attentions()
    return modules[:1] * parts.n_layers() if parts.attach.repeats else modules


def _at_attentions(parts: ModelParts, backend: str) -> list[Change]:
    changes: list[Change] = []
    reference, shared = ModelReference(parts.base), bool(parts.attach.repeats)
    if parts.stack.causal:
        hook = parts.base.register_forward_pre_hook(tell_of_weights, with_kwargs=True)
        changes.append(Hooked(hook))
    if shared:
        stack = parts.base.get_submodule(parts.attach.repeats)
        changes.append(Hooked(stack.register_forward_pre_hook(count_layers, with_kwargs=True)))
    for index, module in enumerate(parts.attentions()):
        attention_hook = AttentionHook(
            reference,
            module,
            None if shared else index,
            backend=backend,
            by_interface=not parts.attach.own_forward,
        )
        changes.append(Hooked(module.register_forward_pre_hook(attention_hook, with_kwargs=True)))
        own_forward = parts.attach.own_forward
        changes.append(
            OwnForward(module, mpnet.forward) if own_forward else OwnAttention(module, backend)
        )
    return changes
