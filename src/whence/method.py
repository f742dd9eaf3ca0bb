"""What a positional method is: a module with an optional hook for each site of position."""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from whence.checks import is_symbolic, larger, require
from whence.lag import Bias, LagValues
from whence.rotation import Rotation
from whence.units import keeping_float32

SITES = {
    "input": ("input_term",),
    "heads": ("query_heads", "key_heads", "value_heads"),
    "score": ("score_term",),
    "value": ("value_term",),
    "replace": ("logits",),
}


@dataclass(frozen=True, eq=False)
class Content:
    """The tensors of a layer, besides its queries, for the few methods that look at content.

    x_q and x_k are the layer's inputs at the queries and at the keys, k the projected keys.
    `counted` stands in for q_pos and k_pos in those parts of a sum that have `lengths_only`, where
    the whole sum has not: as many positions as bound the lags (`longest_lag`).

        >>> import torch
        >>> from whence import build
        >>> cope, pos = build("cope", n_heads=2, d_head=8), torch.arange(4)
        >>> q = k = torch.randn(1, 2, 4, 8)
        >>> cope.score_term(q, pos, pos, content=Content(k=k)).to_dense(pos, pos).shape
        torch.Size([1, 2, 4, 4])
    """

    x_q: Float[Tensor, "b q d_model"] | None = None
    x_k: Float[Tensor, "b k d_model"] | None = None
    k: Float[Tensor, "b h_kv k d_head"] | None = None
    counted: tuple[Int[Tensor, " q"], Int[Tensor, " n"]] | None = None


class PositionMethod(nn.Module):
    """A method describes and never computes attention. Override the hooks of the sites it uses.

    Convention: lag = key position - query position. q is [b, h, q, d_head] as projected (before
    `query_heads`); q_pos and k_pos are whole-number positions, in order and without gaps.
    `sites()` follows from the hooks: a site whose hooks are not overridden is not used.

        >>> import torch
        >>> from whence import LagBias
        >>> class Recency(PositionMethod):
        ...     def score_term(self, q, q_pos, k_pos, *, content=None):
        ...         return LagBias.line(torch.tensor([-1.0]))
        >>> Recency().sites()
        ('score',)
    """

    paper: ClassVar[str] = ""
    formula: ClassVar[str] = "0"  # parameters of one instance, in names of its attributes
    causal_only: bool = False
    shared_by_layers: ClassVar[bool] = False  # one instance serves every layer of a stack
    fixed_length: bool = False  # True where no length beyond `max_length` can be had
    image_sizes: ClassVar[tuple[str, ...]] = ()  # attributes: sizes an image must have, in patches
    # True where the parameters are scalars that make up a logit, and no vectors that meet content.
    # Such numbers stay in float32 in a model of half precision, and want no weight decay.
    logit_sized: ClassVar[bool] = False
    # Names in checkpoints of earlier versions, each an attribute that can be assigned, and the
    # parameters that hold these numbers now, in other units (whence.units).
    former_names: Mapping[str, str] = {}
    # What a model must know to pad, pack and cache; each holds for the sites of attention alone.
    anchored: bool = False  # True where a shift of all positions changes attention
    grows: bool = False  # True where a longer sequence changes what earlier tokens get
    reads_key_inputs: bool = False  # True where Content.x_k is read: a cache has to keep it
    # True where the hooks that attention calls ask q_pos and k_pos for their lengths alone, so that
    # on a GPU nobody has to fill them in; with a `rotation` it does not call query_heads and
    # key_heads. A subclass with hooks of its own has to say so again.
    lengths_only: bool = False

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        hooks = {hook for each in SITES.values() for hook in each}
        if hooks & vars(cls).keys() and "lengths_only" not in vars(cls):
            cls.lengths_only = False
        if {"query_heads", "key_heads"} & vars(cls).keys() and "rotation" not in vars(cls):
            # An inherited rotation would be executed in place of these hooks.
            cls.rotation = PositionMethod.rotation  # type: ignore[method-assign]

    def __setattr__(self, name: str, value: Any) -> None:
        """As a module's; a number in the units of the formula may be given as a parameter too."""
        if isinstance(value, nn.Parameter) and name in self.former_names:
            value = value.detach()
        super().__setattr__(name, value)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "PositionMethod":
        """As a module's, but that numbers of a logit's size are not cast to half precision."""
        kept = keeping_float32(fn) if self.logit_sized else fn
        super()._apply(kept, recurse)  # type: ignore[no-untyped-call]
        return self

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        """As a module's. Weights in the units of the formula, as once saved, are converted."""
        stored: dict[str, Any] = {x: state_dict.get(prefix + x) for x in self.former_names}
        if stored and all(prefix + name in state_dict for name in stored):
            held = copy.deepcopy(self)
            if any(p.is_meta for p in self.parameters()):  # to be filled with assign=True
                held = held.to_empty(device=next(iter(stored.values())).device)
            for name, value in stored.items():
                setattr(held, name, value.detach())
                del state_dict[prefix + name]
            for name in self.former_names.values():
                state_dict[prefix + name] = held.get_parameter(name).detach()
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def input_term(self, pos: Int[Tensor, "*b n"]) -> Float[Tensor, "*b n d_model"] | None:
        """Site input: what is added to the token embedding."""
        return None

    def query_heads(self, q: Tensor, q_pos: Int[Tensor, "*b q"]) -> Tensor:
        """Site heads: the queries as the dot product sees them."""
        return q

    def key_heads(self, k: Tensor, k_pos: Int[Tensor, "*b k"]) -> Tensor:
        """Site heads: the keys as the dot product sees them."""
        return k

    def rotation(self) -> Rotation | None:
        """Site heads: what `query_heads` and `key_heads` do, where that is one rotation for both.

        Attention then executes it in place of these two hooks, on a GPU with one kernel. A subclass
        that overrides either of them without this has no rotation.
        """
        return None

    def value_heads(self, v: Tensor, k_pos: Int[Tensor, "*b k"]) -> Tensor:
        """Site heads: the values as the sum sees them."""
        return v

    def score_term(
        self,
        q: Float[Tensor, "b h q d_head"],
        q_pos: Int[Tensor, " q"],
        k_pos: Int[Tensor, " k"],
        *,
        content: Content | None = None,
    ) -> Bias | None:
        """Site score: a term of the logit, added after the scaling."""
        return None

    def value_term(self, q_pos: Int[Tensor, " q"], k_pos: Int[Tensor, " k"]) -> LagValues | None:
        """Site value: a term of the output, weighted like the values."""
        return None

    def logits(
        self,
        q: Float[Tensor, "b h q d_head"],
        q_pos: Int[Tensor, " q"],
        k_pos: Int[Tensor, " k"],
        *,
        content: Content | None = None,
    ) -> Bias | None:
        """Site replace: the logits themselves, in place of the q.k product."""
        return None

    def begin(self, length: int) -> None:
        """Called by the owner at the start of a forward pass over positions below `length`.

        A method may compute here, once, what its layers share. No result may depend on the call.
        """

    def layer(self, index: int) -> "PositionMethod":
        """The method as layer `index` of a stack sees it: itself, unless its layers differ.

        A method built with `n_layers` keeps the parameters of all layers and gives each a view.
        The owner of the stack registers the method itself: a view has no parameters of its own.
        """
        return self

    @classmethod
    def sites(cls) -> tuple[str, ...]:
        """The sites this method uses: those whose hooks it overrides."""
        return tuple(
            site
            for site, hooks in SITES.items()
            if any(getattr(cls, hook) is not getattr(PositionMethod, hook) for hook in hooks)
        )

    def n_parameters(self) -> int:
        """The number of parameters, counted."""
        return sum(p.numel() for p in self.parameters())

    def n_parameters_by_formula(self) -> int:
        """The number of parameters, from `formula`; a test holds it against the count."""
        names = {
            name: getattr(self, name) for name in compile(self.formula, "formula", "eval").co_names
        }
        return int(eval(self.formula, {"__builtins__": {}}, names))

    def validate(self) -> None:
        """Raise if a parameter or buffer is not finite; unchecked, NaN flows on unhidden."""
        for name, tensor in [*self.named_parameters(), *self.named_buffers()]:
            require(
                not tensor.is_floating_point() or bool(torch.isfinite(tensor).all()),
                f"{type(self).__name__}.{name} holds NaN or infinity. "
                "Load a sound checkpoint, or build the method anew.",
            )


def longest_lag(q_pos: Tensor, k_pos: Tensor, *, at_most: int | None = None) -> int:
    """A bound on |lag| from the shapes alone, so without reading the device; or `at_most`.

    It holds where the queries lie among the keys or start with them, as in a Transformer they do;
    positions on the CPU are read, so there it holds for any. Elsewhere attention gives a method
    with `lengths_only` as many positions as make it hold. Where a compiler holds the lengths open
    it is `at_most`, if that is given: which of the two is smaller would be a guard.

        >>> queries, keys = torch.arange(3), torch.arange(10)
        >>> longest_lag(queries, keys), longest_lag(queries, keys, at_most=4)
        (9, 4)
    """
    n_q, n_k = q_pos.shape[0], k_pos.shape[0]  # len() would make a symbolic length a constant
    if is_symbolic(n_q, n_k):
        if at_most is not None:
            return at_most
        return larger(larger(n_q, n_k), 1) - 1
    bound = max(n_q, n_k, 1) - 1
    on_cpu = type(q_pos) is type(k_pos) is Tensor and q_pos.is_cpu and k_pos.is_cpu
    if n_q and n_k and on_cpu and not torch.compiler.is_compiling():
        bound = max(bound, int(k_pos[-1] - q_pos[0]), int(q_pos[-1] - k_pos[0]))
    return bound if at_most is None else min(bound, at_most)


def span(pos: Int[Tensor, "*b n"]) -> tuple[int, int]:
    """The smallest and the largest position, where they can be read without waiting for a device.

    Elsewhere (0, n - 1), what n positions span at least; without any, (0, -1).
    """
    n = pos.shape[-1] if pos.numel() else 0
    readable = type(pos) is Tensor and pos.device.type == "cpu" and n > 0
    if not readable or torch.compiler.is_compiling():
        return 0, n - 1
    return int(pos.min()), int(pos.max())


def need(content: Content | None, part: str, method: PositionMethod) -> Tensor:
    """The part of the content that a method cannot do without, or an error that says so."""
    found = None if content is None else getattr(content, part)
    if found is None:
        raise ValueError(
            f"{type(method).__name__} looks at content and needs {part}: pass "
            f"content=Content({part}=...) to the hook, as whence.nn.MultiheadAttention does."
        )
    assert isinstance(found, Tensor)
    return found
