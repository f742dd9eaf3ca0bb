"""Leaves out a model's own position embeddings, and adds a method's input term."""

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from whence.hf.changes import Change, Frozen, Hooked, OwnForward, SetAside
from whence.hf.model_parts import ModelParts
from whence.hf.positions import ModelReference, positions_of
from whence.method import PositionMethod


def argument_names(module: nn.Module) -> tuple[str, ...]:
    """The names of the arguments of a module's forward, in order."""
    return tuple(inspect.signature(type(module).forward).parameters)[1:]


def zero_forward(table: nn.Embedding, *args: Any, **kwargs: Any) -> Tensor:
    """The forward of a table that is left out: zeros that broadcast to any length."""
    return table.weight.new_zeros(1, 1, table.weight.shape[1])


class FirstPosition:
    """Forward pre-hook of an embedding: position_ids of 0, as many as there are tokens.

    BERT and its relatives index token types by position_ids, in a buffer as long as their table.
    """

    def __init__(self, names: tuple[str, ...]) -> None:
        self.names = names  # of the positional arguments

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """All arguments by name, with position_ids replaced."""
        given = dict(zip(self.names, args, strict=False)) | kwargs
        ids = given.get("input_ids")
        tokens: Tensor = given["inputs_embeds"] if ids is None else ids
        given["position_ids"] = tokens.new_zeros(1, tokens.shape[1], dtype=torch.long)
        return (), given


def drop(parts: ModelParts) -> list[Change]:
    """Leave out all of a model's own positions.

    The weights stay in the model, untrained, so that `undo` and checkpoints have them.
    """
    base = parts.base
    changes: list[Change] = []
    for name in parts.position_tables():
        parent, _, last = name.rpartition(".")
        owner = base.get_submodule(parent)
        table: Any = getattr(owner, last)
        if isinstance(table, nn.Embedding):
            weight: Any = table.weight
            changes += [OwnForward(table, zero_forward), Frozen(weight)]
        else:
            changes.append(SetAside(base, owner, last))
    if parts.attach.embeddings:
        embeddings = base.get_submodule(parts.attach.embeddings)
        hook = FirstPosition(argument_names(embeddings))
        changes.append(Hooked(embeddings.register_forward_pre_hook(hook, with_kwargs=True)))
    return changes


class InputTermHook:
    """Hook at which a forward pass begins: adds the input term, and calls the method's `begin`."""

    def __init__(self, model: ModelReference, *, by_ids: bool) -> None:
        self.model, self.by_ids = model, by_ids

    def before(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Forward pre-hook: add the term to the input."""
        x, *rest = args
        return (self._added(x, torch.arange(x.shape[1], device=x.device)), *rest)

    def after(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Tensor
    ) -> Tensor:
        """Forward hook: add the term to the output. GPT-2 and OPT give their tables positions."""
        if not self.by_ids:
            return self._added(out, torch.arange(out.shape[1], device=out.device))
        ids = kwargs["position_ids"] if "position_ids" in kwargs else args[0]
        return self._added(out, ids.clamp(min=0))  # OPT gives -1 to padding

    def _added(self, x: Tensor, pos: Tensor) -> Tensor:
        whole = positions_of(self.model.base).whole
        whole.begin(pos.shape[-1])
        term = whole.input_term(pos)
        return x if term is None else x + term.to(x.dtype)


def add_input_term(parts: ModelParts, whole: PositionMethod) -> list[Change]:
    """Add the method's input term in every pass, where the family adds its own table."""
    if "input" not in whole.sites():
        return []
    module, side = parts.input_site()
    hook = InputTermHook(ModelReference(parts.base), by_ids=parts.stack.causal)
    if side == "input":
        return [Hooked(module.register_forward_pre_hook(hook.before))]
    return [Hooked(module.register_forward_hook(hook.after, with_kwargs=True))]
